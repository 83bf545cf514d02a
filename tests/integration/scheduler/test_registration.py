"""A node registers: what it holds, what it does not hold, and why no job runs twice over it. On both databases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanEvent, LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    Alert,
    AttemptChanged,
    AttemptEnd,
    AttemptState,
    EngineDeclared,
    HeldLoan,
    LoanChanged,
    OpenLoan,
    OrderAnswer,
)
from lull.scheduler.actions import MarkSilent
from lull.scheduler.errors import DuplicateIdentity, InvalidRequest, PolicyLocked, StaleIncarnation, VersionConflict
from lull.scheduler.lifecycle import JobState
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    return agent


@pytest.fixture
async def ordered(agent: ModelAgent, submit: Submit, deciding: Deciding) -> OpenLoan:
    """An order that the node has received and done nothing about."""
    await submit()
    await deciding()
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    return order


async def alerts(store: Store) -> list[str]:
    return [event.data.get("code", "") for event in await store.events_after(0, 1000, types=["alert"])]


async def job_of(store: Store, order: OpenLoan) -> Any:
    return await store.get_job(order.attempts[0].job_id)


async def test_an_order_that_was_never_taken_is_proved_not_started(
    store: Store, agent: ModelAgent, ordered: OpenLoan, deciding: Deciding
) -> None:
    await agent.register(use=False)
    assert (await job_of(store, ordered)).state is JobState.STARTING, "noted, not concluded"
    assert await agent.orders() == []
    job = await job_of(store, ordered)
    assert (job.state, job.attempts[0].end) == (JobState.QUEUED, AttemptEnd.NOT_STARTED)
    assert (await store.get_loan(ordered.loan_id)).state is LoanState.CLOSED
    await deciding(6.0)
    again = await agent.one_order()
    assert (again.attempts[0].job_id, again.attempts[0].attempt_no) == (job.id, 2)


async def test_a_registration_that_was_delayed_on_its_way_proves_nothing(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    """The node gave up on it, registered again, and runs a job by the time it arrives."""
    delayed = agent.message()
    await agent.register()
    await submit()
    await deciding()
    order = await agent.one_order()
    await store.register(delayed, time.time())  # nobody reads its answer
    assert (await job_of(store, order)).state is JobState.STARTING
    with pytest.raises(StaleIncarnation):
        await agent.lend(order)
    with pytest.raises(StaleIncarnation):
        await agent.orders()
    agent.attempts[order.attempts[0].attempt_id] = AttemptChanged(
        attempt_id=order.attempts[0].attempt_id,
        job_id=order.attempts[0].job_id,
        loan_id=order.loan_id,
        state=AttemptState.RUNNING,
    )
    answer = await agent.register()
    assert (answer.stop_attempts, answer.recall_loans) == ([], [])
    assert (await job_of(store, order)).state is JobState.RUNNING
    await deciding()
    assert (await agent.one_order()).kind == "expect_work", "nothing is dispatched a second time"


async def test_an_order_that_was_accepted_and_is_not_held_is_unknown(
    store: Store, agent: ModelAgent, ordered: OpenLoan, deciding: Deciding
) -> None:
    await agent.report(OrderAnswer(seq=agent.after, outcome="accepted"))
    await agent.register()
    job = await job_of(store, ordered)
    assert (job.state, job.attempts[0].state) == (JobState.STARTING, AttemptState.UNKNOWN)
    assert "attempt_unknown" in await alerts(store)
    assert (await store.get_loan(ordered.loan_id)).state is not LoanState.CLOSED, "its devices stay lent"
    assert await deciding(1000.0) == 0


async def test_an_attempt_that_ran_and_is_not_held_is_unknown(
    store: Store, agent: ModelAgent, ordered: OpenLoan
) -> None:
    await agent.lend(ordered)
    await agent.run(ordered, ordered.attempts[0])
    agent.loans.clear()
    agent.attempts.clear()
    await agent.register()
    assert (await job_of(store, ordered)).attempts[0].state is AttemptState.UNKNOWN


async def test_missing_reports_keep_everything_from_being_concluded(
    store: Store, agent: ModelAgent, ordered: OpenLoan
) -> None:
    """This database lost what it had acknowledged: the attempt that seems only placed may have run."""
    agent.report_id += 5
    await agent.report(Alert(severity="info", code="x", sentence="x"))
    assert "reports_missing" in await alerts(store)
    await agent.register()
    assert (await job_of(store, ordered)).attempts[0].state is AttemptState.UNKNOWN


async def test_a_lost_data_directory_leaves_attempts_unknown(
    store: Store, agent: ModelAgent, ordered: OpenLoan, deciding: Deciding
) -> None:
    agent.journal_id = "another"
    answer = await agent.register()
    assert answer.acknowledged == 0
    assert (await job_of(store, ordered)).attempts[0].state is AttemptState.UNKNOWN
    assert {"journal_lost", "attempt_unknown"} <= set(await alerts(store))
    assert await deciding(1000.0) == 0


async def test_the_engines_of_a_node_that_is_gone_hold_up_nothing(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    """Its data directory was lost: it comes as another node with the same devices and new engine ids."""
    before = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("old", {"gpu": GIB})])
    await before.register()
    after = ModelAgent(store, "new", devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})])
    await after.register()
    await submit()
    await deciding()
    assert (await after.one_order()).engine_ids == ["alpha"]
    assert [row.name for row in await store.list_engines()] == ["alpha"]


async def test_a_reboot_ends_what_ran(store: Store, agent: ModelAgent, ordered: OpenLoan) -> None:
    await agent.lend(ordered)
    await agent.run(ordered, ordered.attempts[0])
    agent.loans.clear()
    agent.attempts.clear()
    agent.boot_id, agent.start_id, agent.journal_id = "later", "another", "another"
    [node] = (await store.load_snapshot(0.0)).nodes
    await store.commit([MarkSilent(node.id, node.heard_count)], time.time())
    await agent.register(use=False)
    assert (await job_of(store, ordered)).state is JobState.RUNNING
    await agent.orders()
    job = await job_of(store, ordered)
    assert (job.state, job.failure_reason) == (JobState.FAILED, "node_rebooted")
    assert (await store.get_loan(ordered.loan_id)).state is LoanState.CLOSED


async def test_what_is_held_and_known_is_adopted(store: Store, agent: ModelAgent, ordered: OpenLoan) -> None:
    await agent.accept(ordered)
    late = [  # journalled, not sent yet when the agent died
        agent.envelope(changed)
        for changed in (
            _changed(ordered, LoanEvent.MEMORY_FREE, LoanState.LENT),
            _attempt(ordered, AttemptState.STARTING),
            _attempt(ordered, AttemptState.RUNNING),
        )
    ]
    agent.loans[ordered.loan_id] = agent.loans[ordered.loan_id].model_copy(update={"state": LoanState.LENT})
    agent.attempts["x"] = _attempt(ordered, AttemptState.RUNNING)
    answer = await agent.register()
    assert (answer.recall_loans, answer.stop_attempts, answer.acknowledged) == ([], [], 2)
    assert (await job_of(store, ordered)).state is JobState.RUNNING
    await agent.send(*late)
    assert (await store.get_loan(ordered.loan_id)).state is LoanState.LENT
    adopted = await store.events_after(0, 1000, types=["loan_state_adopted", "attempt_state_adopted"])
    assert len(adopted) == 1, "the late reports say nothing new"
    await agent.end(ordered, ordered.attempts[0], AttemptEnd.EXITED, exit_code=0)
    assert (await job_of(store, ordered)).state is JobState.SUCCEEDED


async def test_an_end_that_is_told_at_registration_counts(store: Store, agent: ModelAgent, ordered: OpenLoan) -> None:
    await agent.lend(ordered)
    agent.attempts["x"] = _attempt(ordered, AttemptState.ENDED, end=AttemptEnd.EXITED, exit_code=7)
    await agent.register()
    assert (await job_of(store, ordered)).exit_code == 7


async def test_a_loan_that_ended_while_the_server_was_away_is_closed_by_its_own_reports(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})])
    await agent.register()
    job_id = await submit()
    await deciding()
    order = await agent.one_order()
    await agent.accept(order)
    ended = _attempt(order, AttemptState.ENDED, end=AttemptEnd.NOT_STARTED)
    late = [
        agent.envelope(_changed(order, LoanEvent.DRAINED, LoanState.PARKING)),
        agent.envelope(_changed(order, LoanEvent.PARKED, LoanState.SETTLING)),
        agent.envelope(_changed(order, LoanEvent.MEMORY_NOT_FREE, LoanState.WAKING)),
        agent.envelope(ended),
        agent.envelope(_changed(order, LoanEvent.RUNNING, LoanState.VERIFYING)),
        agent.envelope(_changed(order, LoanEvent.CANARY_RIGHT, LoanState.CLOSED)),
    ]
    agent.loans.clear()
    agent.attempts["a"] = ended
    agent.marks = {"newest_report": agent.report_id}
    await agent.register()
    assert (await store.get_loan(order.loan_id)).state is LoanState.DRAINING
    assert await deciding() == 0, "nothing is recalled"
    await agent.send(*late[:3])
    await agent.send(*late[3:])
    assert (await store.get_loan(order.loan_id)).state is LoanState.CLOSED
    assert (await store.get_job(job_id)).state is JobState.QUEUED
    assert (await store.get_engine("alpha")).not_before > time.time(), "its park did not work: it is left alone"
    assert len(await store.events_after(0, 1000, types=["park_ineffective"])) == 1
    assert await alerts(store) == []
    assert await agent.orders() == []


async def test_a_loan_of_which_no_report_speaks_is_settled_after_them(
    store: Store, agent: ModelAgent, ordered: OpenLoan
) -> None:
    late = agent.envelope(Alert(severity="info", code="x", sentence="x"))
    agent.marks = {"newest_report": agent.report_id}
    await agent.register()
    assert (await store.get_loan(ordered.loan_id)).state is not LoanState.CLOSED
    await agent.send(late)
    loan = await store.get_loan(ordered.loan_id)
    assert loan.state is LoanState.CLOSED
    assert loan.reason is not None
    assert loan.reason.code == "LoanNotHeld"


async def test_numbers_that_a_power_cut_made_free_are_given_to_new_reports(
    store: Store, agent: ModelAgent, ordered: OpenLoan
) -> None:
    """The node sent reports that were not on its disk yet; the next process numbers its own from before them."""
    await agent.accept(ordered)
    kept = agent.report_id
    await agent.report(*(Alert(severity="info", code="x", sentence="x") for _ in range(9)))
    agent.report_id, agent.start_id = kept, "after the power cut"
    agent.marks = {"reports_at_start": kept}
    end = agent.envelope(_attempt(ordered, AttemptState.ENDED, end=AttemptEnd.NODE_REBOOTED))
    assert (await agent.register()).acknowledged == kept
    await agent.send(end)
    job = await job_of(store, ordered)
    assert (job.state, job.failure_reason) == (JobState.FAILED, "node_rebooted")
    assert (await agent.register()).acknowledged == kept + 1, "the same process: its numbers go on"


async def test_what_is_held_and_closed_here_is_to_be_given_back(
    store: Store, agent: ModelAgent, ordered: OpenLoan
) -> None:
    await agent.lend(ordered)
    held, running = dict(agent.loans), _attempt(ordered, AttemptState.RUNNING)
    await agent.end(ordered, ordered.attempts[0], AttemptEnd.EXITED, exit_code=0)
    await agent.give_back(ordered)
    agent.loans, agent.attempts = held, {"x": running}
    answer = await agent.register()
    assert answer.recall_loans == [ordered.loan_id]
    assert answer.stop_attempts == [ordered.attempts[0].attempt_id]
    assert (await job_of(store, ordered)).state is JobState.SUCCEEDED


async def test_a_loan_that_nobody_knows_blocks_its_devices_until_it_is_over(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    agent.loans["strange"] = HeldLoan(
        loan_id="strange", epoch=41, state=LoanState.LENT, device_ids=["gpu"], engine_ids=[], attempt_ids=[]
    )
    assert (await agent.register()).recall_loans == ["strange"]
    job_id = await submit()
    await deciding()
    assert [reason.code for reason in (await store.get_job(job_id)).reasons] == ["LoanOpen"]
    await agent.loan("strange", LoanEvent.RECALLED, LoanState.RECALLING)
    await agent.loan("strange", LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE, LoanState.CLOSED)
    await deciding()
    assert (await agent.one_order()).epoch == 42, "above what the node has seen"


async def test_an_attempt_whose_placing_was_lost_becomes_its_jobs_attempt(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    """The database was restored from an older copy: the job waits here and runs there."""
    job_id = await submit()
    agent.loans["strange"] = HeldLoan(
        loan_id="strange", epoch=1, state=LoanState.LENT, device_ids=["gpu"], engine_ids=[], attempt_ids=["a"]
    )
    agent.attempts["a"] = AttemptChanged(
        attempt_id="a", job_id=job_id, loan_id="strange", state=AttemptState.RUNNING, started_at=5.0
    )
    answer = await agent.register()
    assert answer.stop_attempts == []
    job = await store.get_job(job_id)
    assert (job.state, job.attempt_no, job.attempts[0].state) == (JobState.RUNNING, 1, AttemptState.RUNNING)
    assert await deciding() == 0
    agent.attempts["b"] = AttemptChanged(attempt_id="b", job_id="no", loan_id="no", state=AttemptState.RUNNING)
    assert (await agent.register()).stop_attempts == ["b"]


async def test_orders_of_the_last_life_are_over(store: Store, agent: ModelAgent, ordered: OpenLoan) -> None:
    before = agent.after
    await agent.register()
    with pytest.raises(StaleIncarnation, match="are over"):
        await store.orders_after(agent.node_id, before - 1)
    assert await agent.orders() == []


async def test_another_machine_with_the_same_id_is_refused(store: Store, agent: ModelAgent) -> None:
    agent.machine_id = "clone"
    with pytest.raises(DuplicateIdentity, match="data directory"):
        await agent.register()
    agent.machine_id = "machine-of-node"
    message = agent.message().model_copy(update={"protocol_version": 9})
    with pytest.raises(InvalidRequest, match="protocol_version"):
        await store.register(message, 1.0)


async def test_a_silent_node_is_left_alone_and_shown_unknown(
    store: Store, agent: ModelAgent, ordered: OpenLoan, submit: Submit, deciding: Deciding
) -> None:
    await agent.lend(ordered)
    await agent.run(ordered, ordered.attempts[0])
    [node] = (await store.load_snapshot(0.0)).nodes
    assert await store.commit([MarkSilent(node.id, node.heard_count - 1)], 5.0) == 0, "it was heard since"
    assert await store.commit([MarkSilent(node.id, node.heard_count)], 5.0) == 1
    job = await job_of(store, ordered)
    assert (job.state, job.attempts[0].state) == (JobState.RUNNING, AttemptState.UNKNOWN)
    assert (await store.get_node("node")).silent_since == 5.0
    waiting = await submit()
    await deciding()
    assert [reason.code for reason in (await store.get_job(waiting)).reasons] == ["NodeUnreachable"]
    assert await agent.orders() == []
    await agent.report(Alert(severity="info", code="x", sentence="here I am"))
    assert (await job_of(store, ordered)).attempts[0].state is AttemptState.RUNNING
    assert (await store.get_node("node")).silent_since is None


async def test_policies_are_seeded_changed_and_locked(store: Store) -> None:
    agent = ModelAgent(store, devices=[device("gpu")], engines=[engine("alpha", {"gpu": GIB})], when="manual")
    assert [each.version for each in (await agent.register()).policies] == [1]
    new = EnginePolicy(when="always", drain_seconds_max=5)
    written = await store.put_policy("alpha", new, 1, "ann", 1.0)
    assert (written.version, written.policy) == (2, new)
    order = await agent.one_order()
    assert (order.kind, order.version, order.policy) == ("set_policy", 2, new)
    with pytest.raises(VersionConflict, match="version 2, not 1"):
        await store.put_policy("alpha", EnginePolicy(), 1, "ann", 1.0)
    for against in (1, None):
        assert (await store.put_policy("alpha", new, against, "ann", 1.0)).version == 2, "no change, no version"
    assert (await agent.register()).policies[0].policy == new, "the file only seeds"
    locked = EngineDeclared(engine=agent.engines[0], policy=EnginePolicy(), policy_locked=True)
    answer = await store.register(agent.message().model_copy(update={"engines": [locked]}), 2.0)
    assert (answer.policies[0].version, answer.policies[0].policy) == (3, EnginePolicy())
    with pytest.raises(PolicyLocked, match="configuration file"):
        await store.put_policy("alpha", new, None, "ann", 1.0)


def _changed(order: OpenLoan, event: LoanEvent, state: LoanState) -> Any:

    return LoanChanged(loan_id=order.loan_id, epoch=1, event=event, state=state)


def _attempt(order: OpenLoan, state: AttemptState, **more: Any) -> AttemptChanged:
    spec = order.attempts[0]
    return AttemptChanged(attempt_id=spec.attempt_id, job_id=spec.job_id, loan_id=order.loan_id, state=state, **more)
