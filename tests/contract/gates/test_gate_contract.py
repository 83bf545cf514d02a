"""What the agent relies on with every gate, whatever its kind: closed is closed, unknown is neither open nor drained,
and nothing but an agent that asks for it opens one."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from lull.agents.gate_watch import GateWatch
from lull.agents.gates.base import ClosedTerms, Gate, GateError, GateRefused, GateUnreachable
from lull.agents.gates.counting import Counter
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gates.kept import GateTraits, KeptGate
from lull.agents.gates.kubernetes import KubernetesGate
from lull.agents.gates.webhook import WebhookGate
from lull.agents.protocol.wire import GateState
from tests.gates.rigs import CALL_SECONDS, ENGINE_ID, MODELS, RIGS, GateRig, gate_rig
from tests.waiting import wait_until_async

# Kinds of which another is close enough for every day.
LONG = ("two haproxies", "kubernetes condition", "kubernetes label")


def those(may: Callable[[type[GateRig]], bool]) -> list[Any]:
    """The kinds for which ``may`` is so."""
    names = [name for name, rig in RIGS.items() if may(rig)]
    return [pytest.param(name, marks=pytest.mark.long) if name in LONG else name for name in names]


ALL = those(lambda rig: True)
REMEMBERING = those(lambda rig: rig.can_be_silent)
SILENT = those(lambda rig: rig.can_be_silent)
COUNTED_BY_ENGINE = those(lambda rig: rig.engine_counts)
HANGING = those(lambda rig: rig.hang is not GateRig.hang)
OPENING = those(lambda rig: rig.may_open_by_itself)
WRONG = those(lambda rig: rig.wrong is not GateRig.wrong)


async def close(gate: Gate, mode: Any = "refuse") -> int | None:
    return await gate.close(ENGINE_ID, ClosedTerms(mode, 100, 60.0))


async def state(gate: Gate) -> GateState:
    return (await gate.observe(ENGINE_ID)).state


async def must_not_be_known(gate: Gate) -> None:
    """Of several parts one is seen to be open, and another does not answer: that is no state, and no silence either."""
    if await state(gate) is GateState.UNKNOWN:
        raise GateUnreachable("unknown")


class Alerts:
    def __init__(self, engine_id: str = ENGINE_ID) -> None:
        self._engine_id = engine_id
        self.codes: list[str] = []

    def __call__(self, severity: str, code: str, sentence: str, **about: Any) -> None:
        assert about["engine_id"] == self._engine_id
        self.codes.append(code)


def kept(gate: Gate, alerts: Alerts, *, may_open_by_itself: bool = True) -> KeptGate:
    return KeptGate(gate, GateTraits("haproxy", "gate", may_open_by_itself, None), "alpha", alerts)


@pytest.mark.parametrize("name", ALL)
async def test_it_closes_and_opens_as_often_as_it_is_asked(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        for _ in range(2):
            assert await close(gate) in (0, None)
            assert await state(gate) is GateState.CLOSED
            assert await gate.wait_drained(ENGINE_ID, 5) == 0
            assert await state(gate) is GateState.CLOSED
        for _ in range(2):
            await gate.open(ENGINE_ID)
            assert await state(gate) is GateState.OPEN
        await gate.ensure_route(ENGINE_ID, "alpha", MODELS, rig.engine.url)
        assert await state(gate) is GateState.OPEN  # an existing route keeps its state


@pytest.mark.parametrize("name", REMEMBERING)
async def test_the_next_agent_finds_it_as_the_last_one_left_it(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        await (await rig.routed()).open(ENGINE_ID)
        assert await state(rig.gate()) is GateState.OPEN  # losing the agent closes nothing
        await close(rig.gate())
        assert await state(rig.gate()) is GateState.CLOSED  # and opens nothing
        await rig.gate().open(ENGINE_ID)
        assert await state(rig.gate()) is GateState.OPEN


async def test_an_agent_that_starts_does_not_know_what_no_gate_would_be() -> None:
    async with gate_rig(RIGS["none"]) as rig:
        assert await state(rig.gate()) is GateState.UNKNOWN


@pytest.mark.parametrize("name", ALL)
async def test_it_is_not_drained_while_a_request_is_in_flight(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        request = await rig.begin()
        assert await close(gate) in (1, None)
        assert await gate.wait_drained(ENGINE_ID, 0.3) == 1
        if rig.in_flight_in_looks:
            assert (await gate.observe(ENGINE_ID)).in_flight == 1
        drained = asyncio.create_task(gate.wait_drained(ENGINE_ID, 20))
        rig.engine.go.set()
        assert await request == 200
        assert await drained == 0
        assert await state(gate) is GateState.CLOSED


@pytest.mark.parametrize("name", ALL)
async def test_what_is_in_flight_is_ended_or_that_is_refused(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        await rig.begin()
        await close(gate)
        if rig.can_abort:
            await gate.abort(ENGINE_ID)
            assert await gate.wait_drained(ENGINE_ID, 10) == 0
        else:
            with pytest.raises(GateRefused, match="cannot abort"):
                await gate.abort(ENGINE_ID)


@pytest.mark.parametrize("name", SILENT)
async def test_one_that_is_gone_is_neither_open_nor_drained(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        await close(gate)
        await rig.go_silent()
        for call in (gate.observe(ENGINE_ID), close(gate), gate.wait_drained(ENGINE_ID, 0.2), gate.open(ENGINE_ID)):
            with pytest.raises(GateUnreachable):
                await call
        await rig.come_back()
        await gate.ensure_route(ENGINE_ID, "alpha", MODELS, rig.engine.url)
        await close(gate)
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        await gate.open(ENGINE_ID)
        assert await state(gate) is GateState.OPEN


@pytest.mark.parametrize("name", COUNTED_BY_ENGINE)
async def test_that_of_a_dead_engine_closes_and_is_not_drained(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        await rig.engine.stop()
        assert await close(gate) is None
        assert await state(gate) is GateState.CLOSED
        with pytest.raises(GateUnreachable, match="cannot be told"):
            await gate.wait_drained(ENGINE_ID, 0.2)
        await rig.engine.start()
        assert await close(gate) == 0
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        await gate.open(ENGINE_ID)
        assert await state(gate) is GateState.OPEN


@pytest.mark.parametrize("name", HANGING)
async def test_one_that_hangs_holds_nobody_up(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = await rig.routed()
        await gate.open(ENGINE_ID)
        await rig.hang()
        for call in (must_not_be_known(gate), close(gate), gate.wait_drained(ENGINE_ID, 0.2)):
            began = time.monotonic()
            with pytest.raises(GateUnreachable):
                await call
            assert time.monotonic() - began < 6 * CALL_SECONDS
        await rig.unhang()
        await close(gate)
        assert await state(gate) is GateState.CLOSED


@pytest.mark.parametrize("name", WRONG)
async def test_a_wrong_name_is_refused_and_named(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        wrong = rig.wrong()
        for call in (wrong.ensure_route(ENGINE_ID, "alpha", MODELS, rig.engine.url), close(wrong)):
            with pytest.raises(GateError, match=r"beta|vllm-9"):
                await call


@pytest.mark.parametrize("name", OPENING)
async def test_one_that_opens_by_itself_is_closed_again_and_never_taken_for_closed(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        alerts = Alerts()
        gate = kept(await rig.routed(), alerts)
        await close(gate)
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        await gate.prove_closed(ENGINE_ID)
        await rig.open_by_itself()
        assert await state(gate) is not GateState.CLOSED
        with pytest.raises(GateError, match="was closed and is"):
            await gate.prove_closed(ENGINE_ID)
        seen = await gate.guard(ENGINE_ID)
        assert seen is not None
        assert seen.state is GateState.CLOSED
        with pytest.raises(GateError, match="not drained since it was last closed"):
            await gate.prove_closed(ENGINE_ID)
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        await gate.prove_closed(ENGINE_ID)
        assert alerts.codes == ["gate_opened_by_itself"]
        await gate.guard(ENGINE_ID)
        assert alerts.codes == ["gate_opened_by_itself"]


@pytest.mark.parametrize("name", ALL)
async def test_only_one_that_was_drained_since_it_was_closed_is_proved(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        gate = kept(await rig.routed(), Alerts(), may_open_by_itself=rig.may_open_by_itself)
        terms = ClosedTerms("refuse", 100, 60.0)
        for _ in range(2):
            await gate.close(ENGINE_ID, terms)
            with pytest.raises(GateError, match="not drained since it was last closed"):
                await gate.prove_closed(ENGINE_ID)
            assert await gate.wait_drained(ENGINE_ID, 5) == 0
            await gate.prove_closed(ENGINE_ID)
        await gate.open(ENGINE_ID)
        request = await rig.begin()
        await gate.close(ENGINE_ID, terms)
        assert await gate.wait_drained(ENGINE_ID, 0.2) == 1
        with pytest.raises(GateError, match="not drained since it was last closed"):
            await gate.prove_closed(ENGINE_ID)
        rig.engine.go.set()
        await request


async def test_one_that_counts_a_request_after_it_was_drained_is_not_proved() -> None:
    async with gate_rig(RIGS["webhook"]) as rig:
        gate = kept(await rig.routed(), Alerts())
        await close(gate)
        assert await gate.wait_drained(ENGINE_ID, 5) == 0
        rig.server.in_flight = 2
        with pytest.raises(GateError, match="2 requests are in flight"):
            await gate.prove_closed(ENGINE_ID)
        rig.server.in_flight = None
        await gate.prove_closed(ENGINE_ID)  # it does not count: others did


@asynccontextmanager
async def graceful(name: str, grace_seconds: float) -> AsyncIterator[tuple[Any, Gate]]:
    """A gate for which nobody counts: a time has to pass."""
    async with gate_rig(RIGS[name]) as rig:
        section = rig.section(in_flight_metrics=[], drain_grace_seconds=grace_seconds)
        counter = Counter(rig.engine.url, "ollama", section)
        if name == "webhook":
            rig.server.in_flight = None
            gate: Gate = WebhookGate(section, "alpha", counter)
        else:
            gate = KubernetesGate(section, counter)
        await gate.ensure_route(ENGINE_ID, "alpha", MODELS, rig.engine.url)
        yield rig, gate


async def drain_seconds(gate: Gate) -> float:
    began = time.monotonic()
    assert await gate.wait_drained(ENGINE_ID, 20) == 0
    return time.monotonic() - began


@pytest.mark.parametrize("name", ["webhook", "kubernetes"])
async def test_the_grace_begins_anew_with_every_closing(name: str) -> None:
    async with graceful(name, 0.4) as (rig, gate):
        await close(gate)
        assert await drain_seconds(gate) > 0.35
        assert await drain_seconds(gate) < 0.3  # it passed already
        await rig.open_by_itself()
        await close(gate)
        assert await drain_seconds(gate) > 0.35
        await rig.open_by_itself()
        assert await state(gate) is GateState.OPEN
        await close(gate)
        assert await drain_seconds(gate) > 0.35


async def test_the_grace_begins_anew_after_an_open_whose_answer_was_lost() -> None:
    async with graceful("webhook", 0.4) as (rig, gate):
        await close(gate)
        assert await drain_seconds(gate) > 0.35
        rig.server.answer = b""
        with pytest.raises(GateUnreachable):
            await gate.open(ENGINE_ID)
        rig.server.answer = None
        await close(gate)
        assert await drain_seconds(gate) > 0.35


async def test_the_grace_begins_anew_when_the_gate_opened_in_the_middle_of_it() -> None:
    async with graceful("webhook", 1.0) as (rig, one):
        gate = kept(one, Alerts())
        await close(gate)
        drained = asyncio.create_task(drain_seconds(gate))
        loop = asyncio.get_running_loop()
        middle = loop.time() + 0.6
        await wait_until_async(lambda: loop.time() > middle, 5, "some of the grace is over")
        await rig.open_by_itself()
        assert (await gate.guard(ENGINE_ID)) is not None
        assert await drained > 1.5
        await gate.prove_closed(ENGINE_ID)


@pytest.mark.parametrize("name", OPENING)
async def test_an_agent_that_starts_in_a_loan_keeps_closed_what_the_last_one_closed(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        await close(await rig.routed())
        gate = kept(rig.gate(), Alerts())
        gate.want_closed(ClosedTerms("refuse", 100, 60.0))
        await rig.open_by_itself()
        seen = await gate.guard(ENGINE_ID)
        assert seen is not None
        assert seen.state is GateState.CLOSED


async def test_one_that_is_closed_while_it_is_looked_at_did_not_open_by_itself() -> None:
    async with gate_rig(RIGS["webhook"]) as rig:
        alerts = Alerts()
        gate = kept(WebhookGate(rig.section(call_seconds_max=20), "alpha", None), alerts)
        await gate.open(ENGINE_ID)
        await rig.hang()
        calls = len(rig.server.hosts)
        look = asyncio.create_task(gate.guard(ENGINE_ID))
        await wait_until_async(lambda: len(rig.server.hosts) > calls, 10, "it is asked how it is")
        closing = asyncio.create_task(close(gate))
        await wait_until_async(lambda: gate.is_wanted_closed, 10, "it is to be closed")
        await rig.unhang()
        seen = await look
        assert seen is not None
        assert seen.state is GateState.OPEN
        await closing
        assert await state(gate) is GateState.CLOSED
        assert alerts.codes == []


@dataclass(frozen=True)
class Behind:
    gate: KeptGate


async def test_one_that_takes_long_keeps_the_watch_from_no_other() -> None:
    async with gate_rig(RIGS["webhook"]) as slow, gate_rig(RIGS["webhook"]) as quick:
        long = kept(WebhookGate(slow.section(call_seconds_max=20), "slow", None), Alerts("slow"))
        other = kept(await quick.routed(), Alerts("quick"))
        await close(other)
        watch = GateWatch(GatewayGate(quick.folder / "no.sock"), {"slow": Behind(long), "quick": Behind(other)})
        guard = asyncio.create_task(watch.guard(0.02))
        try:
            await slow.hang()
            closing = asyncio.create_task(close(long))
            await wait_until_async(lambda: len(slow.server.hosts) == 1, 10, "it is told to close")
            await quick.open_by_itself()
            await wait_until_async(lambda: quick.server.state == "closed", 10, "the other is closed again")
            assert "slow" not in await watch.look()
            assert not closing.done()
            await slow.unhang()
            await closing

            await slow.hang()
            hangs_since = len(slow.server.hosts)
            await wait_until_async(lambda: len(slow.server.hosts) > hangs_since, 10, "it is asked how it is")
            await quick.open_by_itself()
            await wait_until_async(lambda: quick.server.state == "closed", 10, "the other is closed again")
            assert "slow" not in await watch.look()
            await slow.unhang()
        finally:
            guard.cancel()
            await asyncio.gather(guard, return_exceptions=True)


@pytest.mark.parametrize("name", OPENING)
async def test_a_look_opens_nothing(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        alerts = Alerts()
        await close(await rig.routed())
        gate = kept(rig.gate(), alerts)  # it was not told that anything is to be closed
        seen = await gate.guard(ENGINE_ID)
        assert seen is not None
        assert seen.state is GateState.CLOSED
        assert alerts.codes == []


@pytest.mark.parametrize("name", OPENING)
async def test_that_one_does_not_answer_is_told_once_and_that_it_does_again(name: str) -> None:
    async with gate_rig(RIGS[name]) as rig:
        alerts = Alerts()
        gate = kept(await rig.routed(), alerts)
        await close(gate)
        await rig.go_silent()
        assert await gate.guard(ENGINE_ID) is None
        assert await gate.guard(ENGINE_ID) is None
        assert alerts.codes == ["gate_unreachable"]
        await rig.come_back()

        async def closed_again() -> bool:
            seen = await gate.guard(ENGINE_ID)
            return seen is not None and seen.state is GateState.CLOSED

        await wait_until_async(closed_again, 10, "the gate is closed and answers")
        assert [code for code in alerts.codes if code != "gate_opened_by_itself"] == ["gate_unreachable", "gate_well"]


async def test_a_gate_that_does_not_open_is_told_once() -> None:
    async with gate_rig(RIGS["webhook"]) as rig:
        alerts = Alerts()
        gate = kept(await rig.routed(), alerts)
        rig.server.status = 500
        for _ in range(2):
            with pytest.raises(GateUnreachable):
                await gate.open(ENGINE_ID)
        assert alerts.codes == ["gate_not_opened"]
