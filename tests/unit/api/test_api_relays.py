from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator

import pytest

from lull.api.relays import BUFFER_BYTES_MAX, AgentSilent, Part, Relay, RelayClosed, Relays, RelayTimes
from lull.api.topics import Topics
from tests.waiting import wait_until_async

QUICK = RelayTimes(answer_seconds_max=0.05, silence_seconds_max=0.05, stalled_seconds_max=0.05)


async def _all(relay: Relay) -> bytes:
    return b"".join([chunk async for chunk in relay.chunks()])


async def test_bytes_pass_in_order_until_the_end() -> None:
    relay = Relay("n", False, RelayTimes())
    relay.begin(Part(5, 0, False))
    await relay.put(b"one ")
    relay.begin(Part(9, 0, True))
    await relay.put(b"two")
    relay.end()
    assert await relay.first_part(asyncio.Event()) == Part(5, 0, False)
    assert await _all(relay) == b"one two"


async def test_a_gap_in_the_middle_is_told_in_the_text() -> None:
    relay = Relay("n", False, RelayTimes())
    relay.begin(Part(0, 0, False))
    await relay.put(b"head")
    relay.begin(Part(100, 96, True))
    await relay.put(b"tail")
    relay.end()
    assert await _all(relay) == b"head\n[lull: 96 bytes of this log were not kept]\ntail"


async def test_a_full_buffer_stops_the_agent_until_the_client_reads() -> None:
    relay = Relay("n", False, RelayTimes())
    relay.begin(Part(0, 0, True))
    chunk = b"x" * (BUFFER_BYTES_MAX // 2)
    total = 40

    taken = 0

    async def send() -> None:
        nonlocal taken
        for _ in range(total):
            await relay.put(chunk)
            taken += 1
        relay.end()

    sender = asyncio.create_task(send())
    await wait_until_async(lambda: taken == 2, 5, "the buffer to fill")
    for _ in range(20):
        await asyncio.sleep(0)
    assert taken == 2
    received = await _all(relay)
    await sender
    assert len(received) == total * len(chunk)


async def test_a_client_that_never_reads_stops_the_agent_for_good() -> None:
    relay = Relay("n", False, QUICK)
    relay.begin(Part(0, 0, True))
    await relay.put(b"x" * BUFFER_BYTES_MAX)
    with pytest.raises(RelayClosed):
        await relay.put(b"x")


async def test_a_client_that_leaves_wakes_a_waiting_agent() -> None:
    relays = Relays(RelayTimes())
    relay = relays.register("n", follow=True)
    assert relay is not None
    relay.begin(Part(0, 0, True))
    await relay.put(b"x" * BUFFER_BYTES_MAX)
    waiting = asyncio.create_task(relay.put(b"y"))
    await asyncio.sleep(0)
    relays.close(relay)
    with pytest.raises(RelayClosed):
        await waiting
    assert relays.get(relay.request_id) is None
    with pytest.raises(RelayClosed):
        await relay.put(b"z")


async def test_an_agent_that_never_comes_and_one_that_falls_silent() -> None:
    relay = Relay("n", False, QUICK)
    with pytest.raises(AgentSilent, match="nothing came within"):
        await relay.first_part(asyncio.Event())
    relay.begin(Part(0, 0, False))
    with pytest.raises(AgentSilent, match="no sign came for"):
        await _all(relay)


async def test_an_empty_post_is_a_sign_of_life() -> None:
    relay = Relay("n", True, RelayTimes(silence_seconds_max=0.5))
    relay.begin(Part(0, 0, False))
    reading = asyncio.create_task(_all(relay))
    begun = time.monotonic()

    async def signs() -> bool:
        relay.begin(Part(0, 0, False))
        return time.monotonic() - begun > 1

    await wait_until_async(signs, 5, "twice the bound to pass")
    await relay.put(b"late")
    relay.end()
    assert await reading == b"late"


async def test_a_broken_connection_ends_the_stream_after_what_came() -> None:
    relay = Relay("n", True, QUICK)
    relay.begin(Part(0, 0, True))
    await relay.put(b"so far")
    relay.fail("the agent's connection broke")
    chunks = relay.chunks()
    assert await anext(chunks) == b"so far"
    with pytest.raises(AgentSilent, match="broke"):
        await anext(chunks)


async def test_a_stopping_server_waits_for_no_agent() -> None:
    relay = Relay("n", True, RelayTimes())
    stopping = asyncio.Event()
    first = asyncio.create_task(relay.first_part(stopping))
    await asyncio.sleep(0)
    stopping.set()
    assert await first is None


async def test_there_are_at_most_so_many() -> None:
    relays = Relays(RelayTimes(), relays_max=2)
    opened = [relays.register("n", follow=False) for _ in range(3)]
    assert [relay is None for relay in opened] == [False, False, True]
    assert len({relay.request_id for relay in opened if relay}) == 2
    relays.fail_all("stop")
    for relay in opened[:2]:
        assert relay is not None
        with pytest.raises(AgentSilent, match="stop"):
            await _all(relay)
        relays.close(relay)
    assert len(relays) == 0


async def test_a_watch_sees_a_change_between_its_look_and_its_wait() -> None:
    topics = Topics()
    with topics.watch("jobs") as watch:
        watch.clear()
        topics.on_commit(frozenset({"jobs"}))
        assert await watch.wait(5)
        watch.clear()
        topics.on_commit(iter(("nodes",)))
        assert not await watch.wait(0)


async def test_stopping_wakes_every_watch() -> None:
    topics = Topics()

    def waits() -> Iterator[asyncio.Task[bool]]:
        for topic in ("a", "b", "b"):
            yield asyncio.create_task(_wait(topics, topic))

    tasks = list(waits())
    await asyncio.sleep(0)
    topics.stop()
    assert await asyncio.gather(*tasks) == [True] * 3
    assert topics.stopping.is_set()


async def _wait(topics: Topics, topic: str) -> bool:
    with topics.watch(topic) as watch:
        return await watch.wait(5)
