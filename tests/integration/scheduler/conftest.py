"""An open store that leads, on each database."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable

import pytest

from lull.agents.protocol.wire import OpenLoan
from lull.scheduler.decide import decide
from lull.scheduler.requests import JobRequest
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[Store]:
    store = Store(database_url)
    await store.start()
    assert await store.lead("test", 60.0, take_over=True)
    yield store
    await store.close()


@pytest.fixture
def submit(store: Store) -> Callable[..., Awaitable[str]]:
    async def call(**fields: object) -> str:
        request = JobRequest.model_validate({"argv": ["true"], **fields})
        return (await store.submit_job(request, "me", None, "-", time.time())).job_id

    return call


@pytest.fixture
def deciding(store: Store) -> Callable[..., Awaitable[int]]:
    """One pass of the scheduler, as its loop does it; ``later`` seconds from now."""

    async def call(later: float = 0.0) -> int:
        now = time.time() + later
        actions = decide(await store.load_snapshot(now), now)
        return await store.commit(actions, now) if actions else 0

    return call


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    """A node whose one device is filled by an engine; a file that wants another one has its own."""
    agent = ModelAgent(store, devices=[device("gpu", free=GIB // 4)], engines=[engine("alpha", {"gpu": GIB // 2})])
    await agent.register()
    return agent


@pytest.fixture
async def running(
    agent: ModelAgent, submit: Callable[..., Awaitable[str]], deciding: Callable[..., Awaitable[int]]
) -> OpenLoan:
    """A loan in which a job runs, on ``agent``."""
    await submit()
    await deciding()
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    await agent.lend(order)
    await agent.run(order, order.attempts[0])
    return order
