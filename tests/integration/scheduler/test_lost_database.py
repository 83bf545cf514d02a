"""The database is new, restored or has lost its last commits: the nodes have seen more than it. On both databases."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptChanged, AttemptEnd, AttemptState, RestartEngine
from lull.scheduler.errors import InvalidRequest, NotLeader
from lull.scheduler.lifecycle import JobState
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]

MARKS = {"term": 40, "incarnation": 50, "orders_after": 60, "epochs": {"gpu": 70}}


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    """It has been through much with a database that is gone, and refuses what is below its marks."""
    agent = ModelAgent(
        store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB}, policy_version=80)]
    )
    agent.marks, agent.after = MARKS, 60
    return agent


async def test_a_node_with_higher_marks_than_the_database_gets_its_orders(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    answer = await agent.register()
    assert answer.incarnation > 50
    assert answer.orders_after > 60
    assert answer.term > 40
    assert answer.policies[0].version > 80
    job_id = await submit()
    await deciding()
    [opened] = await agent.orders()
    assert (opened.order.kind, opened.order.attempts[0].job_id) == ("open_loan", job_id)
    assert opened.seq > 60
    assert (opened.term, opened.incarnation) == (answer.term, answer.incarnation)
    assert opened.order.epoch > 70
    await agent.lend(opened.order)
    assert (await store.get_job(job_id)).state is JobState.STARTING


async def test_a_policy_reaches_an_engine_that_has_seen_a_higher_version(store: Store, agent: ModelAgent) -> None:
    await agent.register()
    before = (await store.get_policy("alpha")).version
    await store.put_policy("alpha", EnginePolicy(when="manual"), before, "ann", 1.0)
    [order] = await agent.orders()
    assert order.order.kind == "set_policy"
    assert order.order.version > before > 80
    agent.engines = [engine("alpha", {"gpu": GIB}, policy_version=90)]  # the database lost nine changes
    [policy] = (await agent.register()).policies
    assert (policy.version, policy.policy.when) == (91, "manual")


async def test_a_leader_elsewhere_takes_the_raised_term_anew(
    store: Store, database_url: str, agent: ModelAgent
) -> None:
    """The registration came to a server that does not lead."""
    other = Store(database_url)
    await other.start()
    try:
        agent.store = other
        assert (await agent.register()).term > 40
        assert other.term == 0
        with pytest.raises(NotLeader):
            await store.commit([], 1.0)
        assert await store.lead("test", 60.0) == store.term > 41
    finally:
        await other.close()


async def test_a_server_that_does_not_lead_gives_orders_of_the_ruling_term(
    store: Store, database_url: str, agent: ModelAgent
) -> None:
    registered = await agent.register()
    other = Store(database_url)
    await other.start()
    try:
        await other.put_policy("alpha", EnginePolicy(when="manual"), None, "ann", 1.0)
        await other.add_order(agent.node_id, RestartEngine(engine_id="alpha"))
    finally:
        await other.close()
    assert [order.term for order in await agent.orders()] == [registered.term] * 2


async def test_marks_that_no_database_can_count_on_are_refused(agent: ModelAgent) -> None:
    for name, value in {"term": 2**62, "incarnation": 2**62, "epochs": {"gpu": 2**62}}.items():
        agent.marks = {name: value}
        with pytest.raises(InvalidRequest, match="at most"):
            await agent.register()


async def test_a_job_that_ran_to_its_end_is_not_run_again(store: Store, submit: Submit, deciding: Deciding) -> None:
    """The database lost the placing and all after it; the loan is over at the node, the end not acknowledged."""
    job_id = await submit()
    agent = ModelAgent(store, devices=[device("gpu")])
    agent.attempts["a"] = AttemptChanged(
        attempt_id="a", job_id=job_id, loan_id="over", state=AttemptState.ENDED, end=AttemptEnd.EXITED, exit_code=3
    )
    answer = await agent.register()
    assert (answer.stop_attempts, answer.recall_loans) == ([], [])
    job = await store.get_job(job_id)
    assert (job.state, job.exit_code, job.attempts[0].end) == (JobState.FAILED, 3, AttemptEnd.EXITED)
    assert (await store.get_loan("over")).state is LoanState.CLOSED
    assert await deciding() == 0
    await agent.loan("over", None, LoanState.SETTLING)  # its old reports come in after it
    assert await agent.orders() == []
    assert (await agent.register()).stop_attempts == []
