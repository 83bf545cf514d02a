"""Several engines that serve one model: who gets a request, where it waits, what one that is away changes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import pytest

from lull.agents.gates.base import ClosedTerms
from lull.agents.protocol.wire import GateState
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async


@dataclass
class Pair:
    """A gateway with the engines e1 (models m, one) and e2 (models m, two)."""

    world: Any
    other: RecordingEngine

    @property
    def engines(self) -> tuple[RecordingEngine, RecordingEngine]:
        return self.world.engine, self.other

    async def close(self, engine_id: str, mode: Any = "hold", requests_max: int = 100, **more: Any) -> int:
        count: int = await self.world.gate.close(
            engine_id, ClosedTerms(mode, requests_max, more.pop("seconds_max", 60.0), **more)
        )
        return count

    async def seen(self, engine_id: str, name: str, count: int) -> None:
        async def look() -> bool:
            return bool(getattr(await self.world.gate.observe(engine_id), name) == count)

        await wait_until_async(look, 10, f"{name} of {engine_id} == {count}")

    async def view(self, engine_id: str) -> Any:
        return await self.world.gate.observe(engine_id)


@pytest.fixture
async def pair(start: Any) -> AsyncIterator[Pair]:
    world = await start(keepalive_seconds=0.05)
    other = await RecordingEngine().start()
    await world.gate.ensure_route("e1", "one", ["m", "one"], world.engine.url)
    await world.gate.ensure_route("e2", "two", ["m", "two"], other.url)
    await world.gate.open("e2")
    yield Pair(world, other)
    other.go.set()
    await other.stop()


async def test_requests_are_balanced_by_what_is_in_flight(pair: Pair) -> None:
    waiting = [pair.world.ask(do="wait", n=n) for n in range(6)]
    await wait_until_async(lambda: sum(len(engine.arrivals) for engine in pair.engines) == 6, 5, "all are at work")
    assert [len(engine.arrivals) for engine in pair.engines] == [3, 3]
    # One that is busy with requests of a model of its own gets fewer of those that both serve.
    alone = [pair.world.ask(model="two", do="wait") for _ in range(3)]
    await pair.seen("e2", "in_flight", 6)
    more = [pair.world.ask(do="wait") for _ in range(3)]
    await pair.seen("e1", "in_flight", 6)
    assert (await pair.view("e2")).in_flight == 6
    for engine in pair.engines:
        engine.go.set()
    assert {status for status, _, _ in await asyncio.gather(*waiting, *alone, *more)} == {200}


async def test_idle_engines_take_turns(pair: Pair) -> None:
    for n in range(6):
        assert (await pair.world.ask(n=n))[0] == 200
    assert [len(engine.arrivals) for engine in pair.engines] == [3, 3]


async def test_closed_engine_is_passed_over_while_a_sibling_is_open(pair: Pair) -> None:
    """Whatever the closed one's policy says: nobody waits or is refused while another engine serves the model."""
    for mode in ("hold", "refuse"):
        assert await pair.close("e1", mode) == 0
        for n in range(3):
            assert (await pair.world.ask(n=n))[0] == 200
    assert len(pair.other.arrivals) == 6
    assert not pair.world.engine.arrivals
    assert (await pair.view("e1")).held == 0


async def test_in_flight_counts_for_the_engine_that_has_it(pair: Pair) -> None:
    waiting = [pair.world.ask(do="wait") for _ in range(2)]
    for engine_id in ("e1", "e2"):
        await pair.seen(engine_id, "in_flight", 1)
    assert await pair.close("e1") == 1
    pair.world.engine.go.set()
    assert await pair.world.gate.wait_drained("e1", 5) == 0
    assert (await pair.view("e2")).in_flight == 1
    pair.other.go.set()
    assert {status for status, _, _ in await asyncio.gather(*waiting)} == {200}


async def test_what_is_held_goes_to_whichever_opens_first_in_order(pair: Pair) -> None:
    await pair.close("e1")
    await pair.close("e2")
    asking = []
    for n in range(12):
        asking.append(pair.world.ask(n=n))
        await pair.world.requests(n + 1)
    await pair.seen("e1", "held", 12)
    assert (await pair.view("e2")).held == 12, "every sibling is wanted"
    alone = pair.world.ask(model="one", n="alone")
    await pair.seen("e1", "held", 13)
    await pair.world.gate.open("e2")
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert pair.other.bodies("n") == list(range(12))
    assert not pair.world.engine.arrivals
    assert (await pair.view("e1")).held == 1
    await pair.world.gate.open("e1")
    assert (await alone)[0] == 200
    assert pair.world.engine.bodies("n") == ["alone"]
    one, two = await pair.view("e1"), await pair.view("e2")
    assert (one.answered_total, two.answered_total) == (1, 12)


async def test_two_that_open_share_what_waits(pair: Pair) -> None:
    await pair.close("e1")
    await pair.close("e2")
    asking = [pair.world.ask(n=n) for n in range(10)]
    await pair.seen("e1", "held", 10)
    await asyncio.gather(pair.world.gate.open("e1"), pair.world.gate.open("e2"))
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert sorted(n for engine in pair.engines for n in engine.bodies("n")) == list(range(10)), "each went once"


async def test_one_that_holds_holds_for_a_sibling_that_refuses(pair: Pair) -> None:
    """The sibling's policy is not to keep clients waiting; it takes what another keeps, once it is open."""
    await pair.close("e1", "refuse")
    await pair.close("e2", "hold")
    asking = pair.world.ask(n=1)
    await pair.seen("e2", "held", 1)
    assert (await pair.world.ask(model="one"))[0] == 503
    await pair.world.gate.open("e1")
    assert (await asking)[0] == 200
    assert pair.world.engine.bodies("n") == [1]


async def test_both_refuse(pair: Pair) -> None:
    await pair.close("e1", "refuse")
    await pair.close("e2", "refuse")
    status, _, body = await pair.world.ask()
    assert (status, json.loads(body)["code"]) == (503, "gate_refuses")


async def test_each_holds_as_many_as_its_policy_allows(pair: Pair) -> None:
    await pair.close("e1", requests_max=1)
    await pair.close("e2", requests_max=2)
    asking = [pair.world.ask(n=n) for n in range(3)]
    await pair.seen("e1", "held", 3)
    status, _, body = await pair.world.ask()
    assert (status, json.loads(body)["code"]) == (503, "hold_full")
    # One that begins to refuse hands over what fits, and no more.
    await pair.close("e2", "refuse")
    await pair.seen("e1", "held", 1)
    await pair.world.gate.open("e2")
    assert sorted([status for status, _, _ in await asyncio.gather(*asking)]) == [200, 503, 503]


async def test_a_route_that_goes_leaves_its_waiting_requests_to_its_sibling(pair: Pair) -> None:
    await pair.close("e1")
    await pair.close("e2", "refuse")
    asking, alone = pair.world.ask(n=1), pair.world.ask(model="one")
    await pair.seen("e1", "held", 2)
    await pair.close("e2", "hold")
    await pair.world.gate.remove_route("e1")
    assert (await alone)[0] == 503
    await pair.seen("e2", "held", 1)
    await pair.world.gate.open("e2")
    assert (await asking)[0] == 200


async def test_an_engine_that_comes_takes_what_waits_for_its_model(pair: Pair) -> None:
    await pair.close("e1")
    await pair.close("e2")
    asking = [pair.world.ask(model="one", n=n) for n in range(3)]
    await pair.seen("e1", "held", 3)
    await pair.world.gate.ensure_route("e2", "two", ["m", "two", "one"], pair.other.url)
    await pair.seen("e2", "held", 3)
    await pair.world.gate.open("e2")
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert pair.other.bodies("n") == [0, 1, 2]


async def test_what_could_not_be_sent_goes_to_a_sibling(pair: Pair) -> None:
    """An engine that takes no connection is not a hole into which requests fall because it has none in flight."""
    await pair.other.stop()
    for n in range(6):
        assert (await pair.world.ask(n=n))[0] == 200
    assert pair.world.engine.bodies("n") == list(range(6))
    two = await pair.view("e2")
    assert (two.in_flight, two.failed_total) == (0, 0)
    assert (await pair.world.ask(model="two"))[0] == 502


async def test_what_was_sent_does_not(pair: Pair) -> None:
    statuses = sorted([(await pair.world.ask(do="die", where="head"))[0] for _ in range(2)])
    assert statuses == [502, 502]
    assert [len(engine.arrivals) for engine in pair.engines] == [1, 1]


async def test_the_model_is_listed_once(pair: Pair) -> None:
    async with pair.world.client.get(f"{pair.world.url}/v1/models") as answer:
        assert [entry["id"] for entry in (await answer.json())["data"]] == ["m", "one", "two"]
    assert (await pair.view("e2")).state is GateState.OPEN


async def test_a_timer_that_fires_in_the_turn_of_the_opening_sends_nothing_twice(pair: Pair) -> None:
    """Both find the request admitted: the opening, which tells it in the next turn, and the timer of its comments."""
    await pair.close("e1")
    await pair.close("e2")
    asking = [pair.world.ask(n=n) for n in range(3)]
    await pair.seen("e1", "held", 3)
    relay = pair.world.gateway.relay
    waiting = [connection for connection in relay.connections if connection._hold_timer is not None]
    assert len(waiting) == 3
    relay.routes.get("e2").open()
    for connection in waiting:
        connection._hold_timer.cancel()
        connection._on_hold_timer()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert sorted(pair.other.bodies("n")) == [0, 1, 2]


@pytest.mark.parametrize(("one", "two"), [(("refuse", 9), ("refuse", 9)), (("refuse", 9), ("hold", 0))])
async def test_one_that_is_refused_is_told_to_whoever_watches_any_of_them(
    pair: Pair, one: tuple[str, int], two: tuple[str, int]
) -> None:
    await pair.close("e1", *one)
    await pair.close("e2", *two)
    waiting = [asyncio.create_task(pair.world.gate.wait_wanted(engine_id, 30.0)) for engine_id in ("e1", "e2")]
    assert (await pair.world.ask())[0] == 503
    seen = await asyncio.wait_for(asyncio.gather(*waiting), 10)
    assert [(each.asked_since_closed, each.held) for each in seen] == [(1, 0), (1, 0)]
    assert sum(each.requests_total for each in seen) == 1


async def test_a_gateway_that_ends_refuses_also_what_moves_when_a_gate_closes(pair: Pair) -> None:
    """The last of them counts at e2, which is open and still sends the first; it waits at e1 once e2 is closed."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as mute, contextlib.ExitStack() as stack:
        while True:  # until the kernel leaves whoever connects without an answer
            client = stack.enter_context(socket.socket())
            client.settimeout(0.2)
            try:
                client.connect(mute.getsockname())
            except TimeoutError:
                break
        await pair.world.gate.ensure_route("e2", "two", ["m", "two"], f"http://127.0.0.1:{mute.getsockname()[1]}")
        await pair.close("e1", "hold")
        await pair.close("e2", "refuse")
        asking = [pair.world.ask(n=n) for n in range(2)]
        await pair.seen("e1", "held", 2)
        await pair.world.gate.open("e2")
        await pair.seen("e2", "in_flight", 1)
        asking.append(pair.world.ask(n=2))
        await pair.seen("e2", "held", 2)
        await pair.world.gateway.stop(asyncio.Event())
    answers = await asyncio.gather(*asking, return_exceptions=True)
    ends = sorted("cut off" if isinstance(answer, BaseException) else str(answer[0]) for answer in answers)
    assert ends == ["503", "503", "cut off"]
