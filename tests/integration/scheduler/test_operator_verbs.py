"""What an operator decides: held jobs, attempts of unknown fate, faulted loans, restarts. On both databases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanEvent, LoanState
from lull.agents.protocol.wire import (
    AttemptChanged,
    AttemptEnd,
    AttemptState,
    GiveUpLoan,
    OpenLoan,
    OrderAnswer,
    Reason,
    RestartEngine,
    StopAttempt,
)
from lull.scheduler.errors import Conflict, IdempotencyMismatch, InvalidRequest, NotFound
from lull.scheduler.lifecycle import JobState
from lull.scheduler.sql.operator_verbs import Outcome
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine, silence

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})])
    await agent.register()
    return agent


async def events(store: Store, type_: str) -> list[Any]:
    return await store.events_after(0, 1000, types=[type_])


# ---- an attempt of unknown fate ----------------------------------------------------------------------------------


async def test_only_an_attempt_of_unknown_fate_is_resolved(store: Store, running: OpenLoan) -> None:
    attempt_id = running.attempts[0].attempt_id
    outcomes: tuple[Outcome, ...] = ("failed", "requeue")
    for outcome in outcomes:  # its state before all else: nothing is to be confirmed about one that is known to run
        with pytest.raises(Conflict, match="not unknown") as refused:
            await store.resolve_attempt(attempt_id, outcome, "ann", time.time())
        assert refused.value.state == "running"
    with pytest.raises(NotFound, match="attempt"):
        await store.resolve_attempt("nope", "failed", "ann", time.time())


async def test_resolved_as_failed_its_job_is_lost_and_no_report_undoes_it(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    spec = running.attempts[0]
    await silence(store)
    for _ in range(2):
        row = await store.resolve_attempt(spec.attempt_id, "failed", "ann", time.time())
        assert (row.state, row.end) == (AttemptState.ENDED, AttemptEnd.LOST)
    [event] = await events(store, "attempt_resolved")
    assert (event.actor, event.from_state, event.data) == ("ann", "running", {"outcome": "failed"})
    with pytest.raises(Conflict, match="ended already"):
        await store.resolve_attempt(spec.attempt_id, "requeue", "ann", time.time())
    await agent.send()  # it speaks again, with the attempt alive
    orders = [envelope.order for envelope in await agent.orders()]
    assert StopAttempt(attempt_id=spec.attempt_id) in orders
    await agent.end(running, spec, AttemptEnd.EXITED, exit_code=0)
    job = await store.get_job(spec.job_id)
    assert (job.state, job.failure_reason, job.exit_code) == (JobState.FAILED, "lost", None)
    assert "exited" in (await events(store, "lost_attempt_reported"))[0].sentence


async def test_resolved_as_requeue_its_job_is_started_a_second_time(
    store: Store, agent: ModelAgent, running: OpenLoan, deciding: Deciding
) -> None:
    spec = running.attempts[0]
    await silence(store)
    with pytest.raises(InvalidRequest, match="a second time"):
        await store.resolve_attempt(spec.attempt_id, "requeue", "ann", time.time())
    for _ in range(2):
        await store.resolve_attempt(spec.attempt_id, "requeue", "ann", time.time(), confirmed=True)
    job = await store.get_job(spec.job_id)
    assert (job.state, job.attempt_no, job.reasons[0].code) == (JobState.QUEUED, 1, "Resolved")
    other = ModelAgent(store, "other", devices=[device("other-gpu")])
    await other.register()
    await deciding(10.0)
    again = await other.one_order()
    assert (again.attempts[0].job_id, again.attempts[0].attempt_no) == (spec.job_id, 2)
    # The first node is back, by a registration that ends all orders: it is told there.
    agent.attempts[spec.attempt_id] = AttemptChanged(
        attempt_id=spec.attempt_id, job_id=spec.job_id, loan_id=running.loan_id, state=AttemptState.RUNNING
    )
    answer = await agent.register()
    assert answer.stop_attempts == [spec.attempt_id]
    assert (await store.get_job(spec.job_id)).attempts[-1].no == 2


async def test_a_job_that_was_to_be_cancelled_is_not_queued_again(store: Store, running: OpenLoan) -> None:
    spec = running.attempts[0]
    await store.cancel_job(spec.job_id, "ann", time.time())
    await silence(store)
    with pytest.raises(Conflict, match="resolve it as failed"):
        await store.resolve_attempt(spec.attempt_id, "requeue", "ann", time.time())
    await store.resolve_attempt(spec.attempt_id, "failed", "ann", time.time())
    assert (await store.get_job(spec.job_id)).failure_reason == "lost"


async def test_the_devices_of_a_loan_that_waited_for_the_attempt_are_free_again(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    """The node lost its directory: it speaks, and neither holds the attempt nor can say what became of it."""
    spec = running.attempts[0]
    agent.loans, agent.attempts, agent.journal_id = {}, {}, "another"
    await agent.register()
    assert (await store.get_attempt(spec.attempt_id)).state is AttemptState.UNKNOWN
    assert (await store.get_loan(running.loan_id)).state is LoanState.LENT
    await store.resolve_attempt(spec.attempt_id, "failed", "ann", time.time())
    assert (await store.get_loan(running.loan_id)).state is LoanState.CLOSED
    assert (await agent.one_order()) == StopAttempt(attempt_id=spec.attempt_id)


# ---- a faulted loan ----------------------------------------------------------------------------------------------


async def faulted(agent: ModelAgent, order: OpenLoan) -> None:
    await agent.end(order, order.attempts[0], AttemptEnd.EXITED, exit_code=0)
    await agent.loan(order.loan_id, LoanEvent.WORK_ENDED, LoanState.RECALLING)
    await agent.loan(order.loan_id, LoanEvent.GROUPS_EMPTY, LoanState.WAKING)
    await agent.loan(order.loan_id, LoanEvent.RESUME_DEADLINE, LoanState.FAULTED)


async def test_a_faulted_loan_is_given_up_once(store: Store, agent: ModelAgent, running: OpenLoan) -> None:
    with pytest.raises(Conflict, match="only a faulted one") as refused:
        await store.give_up_loan(running.loan_id, "ann", time.time())
    assert refused.value.state == "lent"
    await faulted(agent, running)
    for _ in range(2):
        assert (await store.give_up_loan(running.loan_id, "ann", time.time())).state is LoanState.FAULTED
    assert await agent.one_order() == GiveUpLoan(loan_id=running.loan_id)
    assert [event.actor for event in await events(store, "loan_give_up_ordered")] == ["ann"]
    reason = Reason(code="GivenUp", sentence="given up")
    await agent.report(OrderAnswer(seq=agent.after, outcome="accepted"))
    await agent.loan(running.loan_id, LoanEvent.GIVEN_UP, LoanState.CLOSED, reason=reason)
    assert (await store.give_up_loan(running.loan_id, "ann", time.time())).state is LoanState.CLOSED
    assert (await store.get_job(running.attempts[0].job_id)).engine_restore_state == "failed"
    assert await agent.orders() == []


async def test_what_the_node_had_not_taken_is_ordered_anew_when_it_registers(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    await faulted(agent, running)
    await store.give_up_loan(running.loan_id, "ann", time.time())
    for _ in range(2):  # the answer to the first registration was lost
        await store.register(agent.message(), time.time())
    answer = await agent.register(use=False)
    found = await agent.orders()
    assert [envelope.order for envelope in found] == [GiveUpLoan(loan_id=running.loan_id)]
    assert found[0].incarnation == answer.incarnation
    await agent.register(use=False)
    assert await agent.orders() == [], "the node has taken it"


async def test_an_order_that_was_refused_may_be_given_again(store: Store, agent: ModelAgent, running: OpenLoan) -> None:
    await faulted(agent, running)
    await store.give_up_loan(running.loan_id, "ann", time.time())
    await agent.one_order()
    await agent.report(OrderAnswer(seq=agent.after, outcome="refused", detail="processes survive SIGKILL"))
    await store.give_up_loan(running.loan_id, "ann", time.time())
    assert isinstance(await agent.one_order(), GiveUpLoan)


# ---- an engine ---------------------------------------------------------------------------------------------------


async def test_a_free_engine_is_restarted_once(store: Store, agent: ModelAgent) -> None:
    for _ in range(2):
        assert (await store.restart_engine("alpha", "ann", time.time())).name == "alpha"
    assert await agent.one_order() == RestartEngine(engine_id="alpha")
    [event] = await events(store, "engine_restart_ordered")
    assert (event.actor, event.engine_id) == ("ann", "alpha")
    await agent.report(OrderAnswer(seq=agent.after, outcome="accepted"))
    await store.restart_engine("alpha", "ann", time.time())
    assert await agent.one_order() == RestartEngine(engine_id="alpha"), "another time, another restart"


async def test_an_engine_whose_devices_are_lent_is_not_restarted(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    with pytest.raises(Conflict, match=running.loan_id):
        await store.restart_engine("alpha", "ann", time.time())
    assert await agent.orders() == []


async def test_an_engine_that_is_parked_or_another_ones_is_not_restarted(store: Store) -> None:
    engines = [
        engine("parked", {"gpu": GIB}, state="parked", verified=False),
        engine("attached", {"gpu": GIB}, supervised=False),
    ]
    await ModelAgent(store, devices=[device("gpu")], engines=engines).register()
    with pytest.raises(Conflict, match="brought back"):
        await store.restart_engine("parked", "ann", time.time())
    with pytest.raises(Conflict, match="whoever runs it"):
        await store.restart_engine("attached", "ann", time.time())
    with pytest.raises(NotFound):
        await store.restart_engine("nope", "ann", time.time())


# ---- jobs --------------------------------------------------------------------------------------------------------


async def test_a_held_job_waits_until_it_is_released(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    job_id = await submit()
    for _ in range(2):
        job = await store.hold_job(job_id, "ann", time.time())
        assert (job.state, [reason.code for reason in job.reasons]) == (JobState.HELD, ["Held"])
        assert job.reasons[0].data == {"by": "ann"}
    assert await deciding() == 0
    for _ in range(2):
        assert (await store.release_job(job_id, "bob", time.time())).state is JobState.QUEUED
    await deciding()
    assert (await agent.one_order()).attempts[0].job_id == job_id
    for call in (store.hold_job, store.release_job):
        with pytest.raises(Conflict, match="starting"):
            await call(job_id, "ann", time.time())
    changes = [(event.actor, event.to_state) for event in await events(store, "job_changed")][1:3]
    assert changes == [("ann", "held"), ("bob", "queued")]


async def test_an_ended_job_is_retried_as_a_new_one(store: Store, submit: Submit) -> None:
    job_id = await submit(argv=["python", "x.py"], env={"A": "ü"}, priority=3, name="n", time_limit_seconds=5)
    with pytest.raises(Conflict, match="has ended"):
        await store.retry_job(job_id, "ann", None, time.time())
    await store.cancel_job(job_id, "ann", time.time())
    new = await store.retry_job(job_id, "bob", "key", time.time())
    assert await store.retry_job(job_id, "bob", "key", time.time()) == type(new)(new.job_id, replayed=True)
    old, job = await store.get_job(job_id), await store.get_job(new.job_id)
    assert old.state is JobState.CANCELLED
    assert (job.argv, job.env, job.priority, job.name) == (old.argv, old.env, old.priority, old.name)
    assert (job.state, job.submitted_by, job.time_limit_seconds) == (JobState.QUEUED, "bob", 5.0)
    other = await submit()
    await store.cancel_job(other, "ann", time.time())
    with pytest.raises(IdempotencyMismatch):
        await store.retry_job(other, "bob", "key", time.time())


async def test_a_retry_that_is_asked_again_makes_no_second_job(store: Store, submit: Submit) -> None:
    job_id = await submit()
    await store.cancel_job(job_id, "ann", time.time())
    new = await store.retry_job(job_id, "ann", None, time.time())
    for key in ("key", None):
        again = await store.retry_job(job_id, "bob", key, time.time())
        assert again == type(new)(new.job_id, replayed=True)
    jobs, _ = await store.list_jobs(states=(), project=None, limit=10, cursor=None)
    assert {job.id for job in jobs} == {job_id, new.job_id}
    await store.cancel_job(new.job_id, "ann", time.time())
    assert (await store.retry_job(job_id, "bob", "key", time.time())).job_id == new.job_id  # this key's answer
    third = await store.retry_job(job_id, "bob", None, time.time())
    assert third.job_id not in (job_id, new.job_id)
    assert (await store.retry_job(job_id, "ann", None, time.time())).job_id == third.job_id


async def test_a_job_that_succeeded_is_not_retried(store: Store, agent: ModelAgent, running: OpenLoan) -> None:
    await agent.end(running, running.attempts[0], AttemptEnd.EXITED, exit_code=0)
    with pytest.raises(Conflict, match="nothing to retry"):
        await store.retry_job(running.attempts[0].job_id, "ann", None, time.time())
