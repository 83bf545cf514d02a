"""The history of a device whose node falls silent and comes back. On both databases."""

from __future__ import annotations

import time

import pytest

from lull.agents.protocol.wire import OccupancyChanged, OccupancyKind, ReportAgain
from lull.scheduler.actions import MarkSilent
from lull.scheduler.store import Store
from tests.model_agent import ModelAgent, device

K = OccupancyKind


class Watching(ModelAgent):
    """A node that says who holds its device, numbered as a real one's words are."""

    said = 0

    def word(self, kind: OccupancyKind) -> OccupancyChanged:
        self.said += 1
        return OccupancyChanged(device_id="gpu", occupancy=kind, start_id=self.start_id, report_no=self.said)

    async def say(self, *words: tuple[OccupancyKind, float]) -> None:
        await self.send(*(self.envelope(self.word(kind), at) for kind, at in words))

    def begin_anew(self) -> None:
        self.start_id, self.said = f"{self.start_id}+", 0


@pytest.fixture
async def agent(store: Store) -> Watching:
    agent = Watching(store, devices=[device("gpu")])
    await agent.register()
    return agent


async def silence(store: Store) -> float:
    """The leader has not heard the node for its lease; its last sign of life."""
    [node] = (await store.load_snapshot(0.0)).nodes
    seen = (await store.get_node(node.id)).last_seen_at
    assert await store.commit([MarkSilent(node.id, node.heard_count)], time.time()) == 1
    return seen


async def history(store: Store) -> list[tuple[float, float | None, OccupancyKind]]:
    rows = await store.usage("gpu", 1.0, time.time() + 10_000)
    assert [row.started_at for row in rows[1:]] == [row.ended_at for row in rows[:-1]], "disjoint and complete"
    return [(row.started_at, row.ended_at, row.kind) for row in rows]


async def test_what_was_watched_while_nobody_listened_wins(store: Store, agent: Watching) -> None:
    begun = time.time() - 100
    await agent.say((K.IDLE, begun))
    seen = await silence(store)
    assert await history(store) == [(begun, seen, K.IDLE), (seen, None, K.UNKNOWN)]
    await agent.say((K.JOB, seen + 50), (K.IDLE, seen + 80))
    exact = [(begun, seen + 50, K.IDLE), (seen + 50, seen + 80, K.JOB), (seen + 80, None, K.IDLE)]
    assert await history(store) == exact
    assert (await store.get_node("node")).devices[0].occupancy is K.IDLE


async def test_a_node_that_comes_back_without_news_is_asked_who_holds_its_devices(
    store: Store, agent: Watching
) -> None:
    begun = time.time() - 100
    await agent.say((K.IDLE, begun))
    seen = await silence(store)
    await agent.send()  # no more than a sign of life
    assert (await history(store))[-1][2] is K.UNKNOWN
    assert isinstance(await agent.one_order(), ReportAgain)
    await agent.say((K.IDLE, seen + 5))
    assert await history(store) == [(begun, None, K.IDLE)], "nothing else happened meanwhile"


async def test_what_nobody_watched_stays_unknown(store: Store, agent: Watching) -> None:
    """The agent died: its last words come late, those of the next one after them."""
    begun = time.time() - 100
    await agent.say((K.IDLE, begun))
    seen = await silence(store)
    late = agent.envelope(agent.word(K.JOB), seen + 20)
    agent.begin_anew()
    await agent.register()
    await agent.send(late, agent.envelope(agent.word(K.IDLE), seen + 60))
    assert await history(store) == [
        (begun, seen + 20, K.IDLE),
        (seen + 20, seen + 60, K.UNKNOWN),
        (seen + 60, None, K.IDLE),
    ]


async def test_a_silence_that_no_leader_saw_is_one_too(store: Store, agent: Watching) -> None:
    """The server was away as long as the agent."""
    begun = time.time() - 100
    await agent.say((K.IDLE, begun))
    seen = (await store.get_node("node")).last_seen_at
    agent.begin_anew()
    await store.register(agent.message(), seen + 500)
    assert (await history(store))[-1] == (seen, None, K.UNKNOWN)


async def test_a_device_that_its_node_does_not_have_any_more_is_unknown(store: Store, agent: Watching) -> None:
    begun = time.time() - 100
    await agent.say((K.IDLE, begun))
    agent.devices = []
    await agent.register()
    found = await history(store)
    assert [kind for *_, kind in found] == [K.IDLE, K.UNKNOWN]
