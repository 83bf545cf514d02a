"""Loans and attempts by report, on both databases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanEvent, LoanState, LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    LOAN_OVER,
    Alert,
    AttemptEnd,
    AttemptState,
    EngineState,
    GateState,
    LoanChanged,
    LoanStepTaken,
    OccupancyChanged,
    OccupancyKind,
    OpenLoan,
    OrderAnswer,
    Reason,
    StartAttempt,
)
from lull.scheduler.decide import decide
from lull.scheduler.errors import InvalidRequest, NotFound, StaleIncarnation
from lull.scheduler.lifecycle import JobState
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]


@pytest.fixture
async def opened(store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding) -> OpenLoan:
    await submit(hbm_bytes=GIB // 2)
    await deciding()
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    return order


async def types(store: Store, type_: str) -> list[Any]:
    return await store.events_after(0, 1000, types=[type_])


async def test_the_order_carries_all_that_the_node_needs(store: Store, opened: OpenLoan) -> None:
    assert (opened.device_ids, opened.engine_ids, opened.need_bytes) == (["gpu"], ["alpha"], GIB // 2)
    assert opened.policies["alpha"].when == "always"
    assert opened.restore_by_seconds == 4 * 3600.0
    spec = opened.attempts[0]
    job = await store.get_job(spec.job_id)
    assert (job.state, job.attempt_no, job.loan_id) == (JobState.STARTING, 1, opened.loan_id)
    assert [reason.code for reason in job.reasons] == ["WaitingForDrain"]
    assert (spec.argv, spec.device_ids, spec.hbm_bytes, spec.attempt_no) == (["true"], ["gpu"], GIB // 2, 1)
    assert (await store.get_engine("alpha")).loan_id == opened.loan_id


async def test_one_loan_from_drain_to_closed(
    store: Store, agent: ModelAgent, opened: OpenLoan, deciding: Deciding
) -> None:
    spec = opened.attempts[0]
    await agent.lend(opened)
    await agent.run(opened, spec)
    assert (await store.get_job(spec.job_id)).state is JobState.RUNNING
    assert not opened.expects_more
    assert await deciding() == 0, "it was told at the start that nothing waits: it need not ask at the end"
    await agent.end(opened, spec, AttemptEnd.EXITED, exit_code=3)
    job = await store.get_job(spec.job_id)
    assert (job.state, job.exit_code, job.failure_reason) == (JobState.FAILED, 3, "exit_code")
    assert await deciding() == 0
    await agent.give_back(opened)
    loan = await store.get_loan(opened.loan_id)
    assert (loan.state, loan.attempt_ids) == (LoanState.CLOSED, (spec.attempt_id,))
    assert (await store.get_job(spec.job_id)).engine_restore_state == "restored"
    assert (await store.get_engine("alpha")).loan_id is None
    assert await types(store, "loan_state_adopted") == []


async def test_reports_are_taken_once_by_rising_id(store: Store, agent: ModelAgent) -> None:
    one, two = (agent.envelope(Alert(severity="info", code="x", sentence=text)) for text in ("one", "two"))
    assert (await agent.send(two, one)).acknowledged == 2
    three = agent.envelope(Alert(severity="info", code="x", sentence="three"))
    assert (await agent.send(one, three, two)).acknowledged == 3
    assert [event.sentence for event in await types(store, "alert")] == ["one", "two", "three"]


async def test_an_unknown_kind_loses_only_itself(store: Store, agent: ModelAgent) -> None:
    good = Alert(severity="info", code="x", sentence="good")
    batch = [agent.envelope(good) for _ in range(4)]
    batch[1]["report"] = {"kind": "from_the_future", "x": 1}
    batch[2]["report"] = {"kind": "alert", "severity": "deafening"}
    answer = await agent.send(*batch)
    assert (answer.acknowledged, answer.unsupported) == (4, [2, 3])
    sentences = [event.sentence for event in await types(store, "alert")]
    assert sentences[0] == sentences[2] == "good"
    assert "report 3 (alert) cannot be read" in sentences[1]


async def test_batches_that_cannot_be_taken_are_refused(store: Store, agent: ModelAgent) -> None:
    with pytest.raises(InvalidRequest, match=r"reports\[0\].id"):
        await agent.send({"at": 1.0, "report": {}})
    with pytest.raises(InvalidRequest, match="at most 500"):
        await agent.send(*[{"id": number} for number in range(1, 502)])
    await agent.register()
    with pytest.raises(StaleIncarnation, match="register again"):
        await agent.send(incarnation=1)
    with pytest.raises(StaleIncarnation):
        await agent.send(incarnation=40)
    assert (await agent.register()).incarnation == 41, "above what the node had been given by a database since lost"
    with pytest.raises(NotFound, match="node"):
        await store.orders_after("stranger", 1)


async def test_memory_that_is_not_freed_sends_the_job_back_and_leaves_the_engine_alone(
    store: Store, agent: ModelAgent, opened: OpenLoan, deciding: Deciding
) -> None:
    why = Reason(code="HBMNotFreed", sentence="256 MiB are missing", data={"have": 1, "need": 2})
    await agent.accept(opened)
    await agent.loan(opened.loan_id, LoanEvent.DRAINED, LoanState.PARKING)
    await agent.loan(opened.loan_id, LoanEvent.PARKED, LoanState.SETTLING)
    await agent.loan(opened.loan_id, LoanEvent.MEMORY_NOT_FREE, LoanState.WAKING, reason=why)
    await agent.loan(opened.loan_id, LoanEvent.RUNNING, LoanState.VERIFYING)
    await agent.loan(opened.loan_id, LoanEvent.CANARY_RIGHT, LoanState.CLOSED)
    job = await store.get_job(opened.attempts[0].job_id)
    assert (job.state, job.attempts[0].end) == (JobState.QUEUED, AttemptEnd.NOT_STARTED)
    assert job.reasons[0].code == "HBMNotFreed"
    assert job.reasons[0].next_check is not None
    assert 4 < job.reasons[0].next_check - time.time() < 6
    assert (await store.get_engine("alpha")).not_before > time.time() + 4
    assert len(await types(store, "park_ineffective")) == 1
    assert await deciding() == 0
    assert [reason.code for reason in (await store.get_job(job.id)).reasons] == ["HBMNotFreed"]
    await deciding(6.0)
    second = await agent.one_order()
    assert second.attempts[0].attempt_no == 2


async def test_a_faulted_loan_never_touches_the_result(store: Store, agent: ModelAgent, opened: OpenLoan) -> None:
    spec = opened.attempts[0]
    await agent.lend(opened)
    await agent.run(opened, spec)
    cleanup = Reason(code="stragglers", sentence="2 processes were killed")
    await agent.end(opened, spec, AttemptEnd.EXITED, exit_code=0, cleanup=cleanup)
    await agent.loan(opened.loan_id, LoanEvent.WORK_ENDED, LoanState.RECALLING)
    await agent.loan(opened.loan_id, LoanEvent.GROUPS_EMPTY, LoanState.WAKING)
    await agent.loan(opened.loan_id, LoanEvent.RUNNING, LoanState.VERIFYING)
    await agent.loan(opened.loan_id, LoanEvent.CANARY_WRONG, LoanState.FAULTED)
    job = await store.get_job(spec.job_id)
    assert (job.state, job.exit_code, job.engine_restore_state) == (JobState.SUCCEEDED, 0, "faulted")
    assert job.cleanup_state == cleanup
    await agent.loan(opened.loan_id, LoanEvent.ENGINE_BACK, LoanState.CLOSED)
    assert (await store.get_job(spec.job_id)).engine_restore_state == "restored"
    assert (await store.get_job(spec.job_id)).state is JobState.SUCCEEDED


async def test_lost_reports_make_the_nodes_fact_win(store: Store, agent: ModelAgent, opened: OpenLoan) -> None:
    await agent.accept(opened)
    await agent.loan(opened.loan_id, LoanEvent.RUNNING, LoanState.VERIFYING)
    assert (await store.get_loan(opened.loan_id)).state is LoanState.VERIFYING
    [event] = await types(store, "loan_state_adopted")
    assert (event.from_state, event.to_state) == ("draining", "verifying")


async def test_a_refused_order_changed_nothing(
    store: Store, agent: ModelAgent, opened: OpenLoan, deciding: Deciding
) -> None:
    await agent.report(OrderAnswer(seq=agent.after, outcome="stale", detail="epoch 9 rules"))
    job = await store.get_job(opened.attempts[0].job_id)
    assert (job.state, job.reasons[0].code) == (JobState.QUEUED, "OrderRefused")
    assert (await store.get_loan(opened.loan_id)).state is LoanState.CLOSED
    await deciding(6.0)
    assert (await agent.one_order()).kind == "open_loan"


async def test_the_next_job_starts_in_the_open_loan(
    store: Store, agent: ModelAgent, opened: OpenLoan, submit: Submit, deciding: Deciding
) -> None:
    await agent.lend(opened)
    await agent.run(opened, opened.attempts[0])
    small = await submit(hbm_bytes=GIB // 8)
    await deciding()
    beside = await agent.one_order()
    assert isinstance(beside, StartAttempt)
    assert (beside.loan_id, beside.attempt.job_id) == (opened.loan_id, small)
    large = await submit(hbm_bytes=GIB // 2)
    await deciding()
    assert [reason.code for reason in (await store.get_job(large)).reasons] == ["LoanOpen"]
    kept = await agent.one_order()
    assert (kept.kind, kept.more) == ("expect_work", True)
    await agent.end(opened, opened.attempts[0], AttemptEnd.SIGNALLED, signal=9)
    await deciding()
    start, last = [each.order for each in await agent.orders()]
    assert start.attempt.job_id == large
    assert (last.kind, last.more) == ("expect_work", False)
    assert (await store.get_job(opened.attempts[0].job_id)).failure_reason == "signal"


async def test_a_job_that_came_just_as_its_loan_ended_is_placed_again_at_once_but_only_once(
    store: Store, agent: ModelAgent, opened: OpenLoan, submit: Submit, deciding: Deciding
) -> None:
    """The node was told that nothing waits, and ends the loan by itself."""
    await agent.lend(opened)
    await agent.run(opened, opened.attempts[0])
    job_id = await submit(hbm_bytes=GIB // 8)

    async def starts(later: float = 0.0) -> list[StartAttempt]:
        await deciding(later)
        return [each.order for each in await agent.orders() if isinstance(each.order, StartAttempt)]

    over = Reason(code=LOAN_OVER, sentence="the loan takes no more work")
    [start] = await starts()
    assert start.attempt.job_id == job_id
    await agent.attempt(start, start.attempt, AttemptState.ENDED, end=AttemptEnd.NOT_STARTED, reason=over)
    assert await starts() == [], "that loan is not asked again"
    assert [reason.code for reason in (await store.get_job(job_id)).reasons] == ["LoanOpen"]
    await agent.end(opened, opened.attempts[0], AttemptEnd.EXITED, exit_code=0)
    await agent.give_back(opened)
    await deciding()
    again = await agent.one_order()
    assert [spec.job_id for spec in again.attempts] == [job_id], "and the next one has it at once"
    await agent.lend(again)
    await agent.attempt(again, again.attempts[0], AttemptState.ENDED, end=AttemptEnd.NOT_STARTED, reason=over)
    await deciding()
    [waits] = (await store.get_job(job_id)).reasons
    assert (waits.code, (await store.get_job(job_id)).state) == (LOAN_OVER, JobState.QUEUED)
    await agent.give_back(again)
    await deciding(11.0)
    assert [spec.job_id for spec in (await agent.one_order()).attempts] == [job_id]


async def test_jobs_that_are_too_large_for_one_order_follow_it(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    words = ["x" * 100_000] * 6
    jobs = [await submit(argv=words, hbm_bytes=GIB // 8) for _ in range(3)]
    await deciding()
    opened, *rest = [each.order for each in await agent.orders()]
    assert [each.kind for each in rest] == ["start_attempt"] * 2
    assert [spec.job_id for spec in (*opened.attempts, *(each.attempt for each in rest))] == jobs
    assert {each.loan_id for each in rest} == {opened.loan_id}
    assert all(len(each.model_dump_json()) < 2 << 20 for each in (opened, *rest))


async def test_an_engine_is_looked_at_again_before_it_is_parked(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    """The policy was set to manual between the snapshot and the commit, and the setter has its 200."""
    await submit(hbm_bytes=GIB // 2)
    now = time.time()
    actions = decide(await store.load_snapshot(now), now)
    await store.put_policy("alpha", EnginePolicy(when="manual"), None, "ann", now)
    assert await store.commit(actions, now) == 0
    await store.put_policy("alpha", EnginePolicy(when="always"), None, "ann", now)
    await agent.report(engine("alpha", {"gpu": GIB // 2}, state=EngineState.UNREACHABLE))
    assert await store.commit(actions, now) == 0
    await agent.report(engine("alpha", {"gpu": GIB // 2}))
    assert await store.commit(actions, now) == 1


async def test_cancelling_a_running_job_stops_its_attempt_once(
    store: Store, agent: ModelAgent, opened: OpenLoan, deciding: Deciding
) -> None:
    spec = opened.attempts[0]
    await agent.lend(opened)
    await agent.run(opened, spec)
    assert (await store.cancel_job(spec.job_id, "ann", time.time())).state is JobState.STOPPING
    await deciding()
    await deciding()
    stop = await agent.one_order()
    assert (stop.kind, stop.attempt_id, stop.end) == ("stop_attempt", spec.attempt_id, AttemptEnd.CANCELLED)
    await agent.attempt(opened, spec, AttemptState.STOPPING)
    await agent.end(opened, spec, AttemptEnd.CANCELLED, signal=15)
    assert (await store.get_job(spec.job_id)).state is JobState.CANCELLED


@pytest.mark.parametrize(
    ("end", "more", "state"),
    [
        (AttemptEnd.TIMED_OUT, {}, JobState.TIMED_OUT),
        (AttemptEnd.PREEMPTED, {}, JobState.QUEUED),
        (AttemptEnd.SPAWN_FAILED, {}, JobState.FAILED),
        (AttemptEnd.RUNNER_LOST, {}, JobState.FAILED),
    ],
)
async def test_what_an_end_means(
    store: Store, agent: ModelAgent, opened: OpenLoan, end: AttemptEnd, more: dict[str, Any], state: JobState
) -> None:
    await agent.lend(opened)
    await agent.run(opened, opened.attempts[0])
    await agent.end(opened, opened.attempts[0], end, **more)
    job = await store.get_job(opened.attempts[0].job_id)
    assert job.state is state
    assert job.failure_reason == (end.value if state is JobState.FAILED else None)


async def test_steps_and_engines_are_recorded(store: Store, agent: ModelAgent, opened: OpenLoan) -> None:
    await agent.accept(opened)
    await agent.report(
        LoanStepTaken(loan_id=opened.loan_id, step=LoanStep.GATE_CLOSED, engine_id="alpha", monotonic_seconds=12.5),
        LoanStepTaken(loan_id=opened.loan_id, step=LoanStep.PARK_SENT, engine_id="alpha", monotonic_seconds=13.5),
        engine("alpha", {"gpu": 0}, state=EngineState.PARKED, gate=GateState.CLOSED),
        LoanChanged(loan_id="nobody's", epoch=1, event=None, state=LoanState.DRAINING),
    )
    steps = (await store.get_loan(opened.loan_id)).steps
    assert [(step.step, step.monotonic_seconds) for step in steps] == [
        (LoanStep.GATE_CLOSED, 12.5),
        (LoanStep.PARK_SENT, 13.5),
    ]
    assert (await store.get_engine("alpha")).state is EngineState.PARKED
    assert "not known here" in (await types(store, "alert"))[-1].sentence


async def test_text_that_no_database_holds_is_cleaned(store: Store, agent: ModelAgent) -> None:
    answer = await agent.report(
        Alert(severity="warning", code="x", sentence="a\0b", data={"k\0": ["\0"]}),
        OrderAnswer(seq=1, outcome="refused", detail="c\0d"),
        engine("alpha", {"gpu": 1}, reason=Reason(code="x", sentence="e\0f")),
    )
    assert (answer.acknowledged, answer.unsupported) == (agent.report_id, [])
    assert [event.sentence for event in await types(store, "alert")] == ["a\ufffdb"]
    raw = agent.envelope(Alert(severity="info", code="y", sentence="x"))
    raw["report"]["sentence"] = "\ud800"
    await agent.send(raw)
    assert (await types(store, "alert"))[-1].sentence == "\ufffd"
    agent.devices = [device("gpu").model_copy(update={"quarantined": Reason(code="x", sentence="g\0")})]
    await agent.register()


async def test_a_report_that_cannot_be_written_keeps_no_other_from_being_taken(store: Store, agent: ModelAgent) -> None:
    bad = [device("other").model_copy(update={"index": 2**80}), OrderAnswer(seq=2**80, outcome="accepted")]
    answer = await agent.report(*bad, Alert(severity="info", code="x", sentence="after them"))
    assert answer.unsupported == [agent.report_id - 2, agent.report_id - 1]
    told = await types(store, "alert")
    assert [event.data["code"] for event in told] == ["report_failed", "report_failed", "x"]


async def test_a_query_that_no_text_can_equal_is_the_requests_fault(store: Store) -> None:
    with pytest.raises(InvalidRequest, match="project"):
        await store.list_jobs(project="\0")
    if not store.url.startswith("sqlite"):
        with pytest.raises(InvalidRequest, match="NUL"):
            await store.get_job("\0")


async def test_occupancy_is_contiguous_and_exact(store: Store, agent: ModelAgent) -> None:
    def turn(kind: OccupancyKind, owner: str | None = None) -> OccupancyChanged:
        return OccupancyChanged(device_id="gpu", occupancy=kind, owner_id=owner)

    times = [(10.0, OccupancyKind.SERVING), (20.5, OccupancyKind.IDLE), (20.5, OccupancyKind.DRAINING)]
    times += [(31.25, OccupancyKind.JOB), (31.25, OccupancyKind.JOB), (30.0, OccupancyKind.WAKING)]
    await agent.send(*(agent.envelope(turn(kind), at) for at, kind in times))
    found = await store.usage("gpu", 0.0, 100.0, now=50.0)
    assert [(each.started_at, each.ended_at, each.kind) for each in found] == [
        (10.0, 20.5, OccupancyKind.SERVING),
        (20.5, 31.25, OccupancyKind.DRAINING),
        (31.25, None, OccupancyKind.WAKING),
    ]
    cut = await store.usage("gpu", 15.0, 25.0, now=50.0)
    assert [(each.started_at, each.ended_at) for each in cut] == [(15.0, 20.5), (20.5, 25.0)]
    with pytest.raises(NotFound, match="device"):
        await store.usage("nope", 0.0, 1.0)
    with pytest.raises(InvalidRequest, match="until"):
        await store.usage(None, 1.0, 1.0)
