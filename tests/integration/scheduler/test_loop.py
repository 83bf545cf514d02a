"""The loop around decide: it wakes on commits, leads, marks silent nodes, survives its database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path

import pytest

from lull.agents.protocol.wire import AttemptEnd
from lull.scheduler.lifecycle import JobState
from lull.scheduler.loop import SchedulerLoop
from lull.scheduler.requests import JobRequest
from lull.scheduler.settings import ServerSettings
from lull.scheduler.store import Store
from tests.databases import Postgres
from tests.model_agent import GIB, ModelAgent, device, engine
from tests.waiting import wait_until_async

Submit = Callable[..., Awaitable[str]]


def settings(url: str, tmp_path: Path, **more: float) -> ServerSettings:
    return ServerSettings.load(None, environ={}, data_dir=tmp_path, database_url=url, tick_seconds=60, **more)


@pytest.fixture
async def scheduled(store: Store, database_url: str, tmp_path: Path) -> AsyncIterator[SchedulerLoop]:
    await store.resign()
    loop = SchedulerLoop(store, settings(database_url, tmp_path))
    await loop.start()
    assert loop.leads
    yield loop
    await loop.stop()
    assert not loop.leads


@pytest.mark.usefixtures("scheduled")
async def test_commits_wake_it_all_the_way_through_a_loan(store: Store, submit: Submit) -> None:
    """No tick helps here: the first one is a minute away."""
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})])
    await agent.register()
    first = await submit(hbm_bytes=GIB)
    [opened] = await wait_until_async(agent.orders, 20, "an order after the submit")
    await agent.lend(opened.order)
    spec = opened.order.attempts[0]
    await agent.run(opened.order, spec)
    second = await submit(hbm_bytes=GIB)
    [kept] = await wait_until_async(agent.orders, 20, "word that a job waits for the loan")
    assert (kept.order.kind, kept.order.more) == ("expect_work", True)
    await agent.end(opened.order, spec, AttemptEnd.EXITED, exit_code=0)
    started, last = await wait_until_async(agent.orders, 20, "the next job's order after the exit")
    assert started.order.attempt.job_id == second
    assert (last.order.kind, last.order.more) == ("expect_work", False)
    assert [order.term for order in (opened, kept, started, last)] == [store.term] * 4
    assert (await store.get_job(first)).state is JobState.SUCCEEDED


async def test_a_silent_node_is_marked_by_the_leaders_own_clock(
    store: Store, database_url: str, tmp_path: Path
) -> None:
    await store.resign()
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    short = {"lease_seconds": 0.1, "lease_grantor_seconds": 0.2, "new_leader_grace_seconds": 0.4}
    config = settings(database_url, tmp_path, **short).model_copy(update={"tick_seconds": 0.05})
    loop = SchedulerLoop(store, config)
    await loop.start()
    try:

        async def silent() -> bool:
            return (await store.get_node("node")).silent_since is not None

        await wait_until_async(silent, 20, "the node being called silent")
        await agent.report()  # an empty batch says that it lives
        assert not await silent()
        assert [event.type for event in await store.events_after(0, types=["node_silent", "node_back"])][:2] == [
            "node_silent",
            "node_back",
        ]
    finally:
        await loop.stop()


async def test_another_leader_takes_over_at_once_after_a_clean_end(postgres_url: str, tmp_path: Path) -> None:
    one, two = Store(postgres_url), Store(postgres_url)
    await one.start()
    await two.start()
    loops = [SchedulerLoop(each, settings(postgres_url, tmp_path)) for each in (one, two)]
    try:
        await loops[0].start()
        await loops[1].start()
        assert (loops[0].leads, loops[1].leads) == (True, False)
        await loops[0].stop()
        await wait_until_async(lambda: loops[1].leads, 20, "the second server leading")
        assert two.term == 2
    finally:
        for loop in loops:
            await loop.stop()
        await one.close()
        await two.close()


async def test_it_goes_on_once_its_database_is_back(postgres: Postgres, postgres_url: str, tmp_path: Path) -> None:
    store = Store(postgres_url)
    await store.start()
    loop = SchedulerLoop(store, settings(postgres_url, tmp_path).model_copy(update={"tick_seconds": 0.05}))
    await loop.start()
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    postgres.stop("fast")
    try:
        await wait_until_async(lambda: loop._trouble, 20, "the loop noticing that its database is gone")
        assert loop._leases._leases is None, "nobody could be heard: nobody is called silent for that"
    finally:
        postgres.start()
    await wait_until_async(lambda: loop._trouble is None, 20, "the loop going on")
    await store.submit_job(JobRequest(argv=("true",)), "ann", None, "-", time.time())
    assert await wait_until_async(agent.orders, 20, "an order")
    await loop.stop()
    await store.close()
