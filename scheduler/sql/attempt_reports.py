"""What a node says of its attempts and of the orders that it was given."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, select, update

from ...agents.protocol.loans import LoanState
from ...agents.protocol.wire import AttemptChanged, AttemptEnd, AttemptState, OrderAnswer, Reason, SetPolicy
from ..lifecycle import EVENT_OF_REPORT, TERMINAL_JOB_STATES, JobEvent, JobState
from ..tables import attempts, jobs, orders
from . import park_trouble, policies
from .changes import (
    as_json,
    end_attempt,
    locked_attempt,
    locked_job,
    locked_loan,
    move_attempt,
    move_job,
    set_loan_state,
)
from .writer import Tx


def attempt_changed(tx: Tx, node_id: str, report: AttemptChanged, now: float) -> None:
    attempt = locked_attempt(tx, report.attempt_id)
    if attempt is None or attempt["node_id"] != node_id:
        tx.event(
            "alert",
            f"the node reports an attempt that is not known here: {report.attempt_id} is {report.state}",
            now,
            severity="warning",
            node_id=node_id,
            data={"code": "attempt_unknown_here", "attempt_id": report.attempt_id, "job_id": report.job_id},
        )
        return
    if attempt["state"] == AttemptState.ENDED.value:
        _after_the_end(tx, attempt, report, now)
        return
    values: dict[str, Any] = {"reported": True, "missing_incarnation": None}
    for name in ("started_at", "peak_hbm_bytes"):
        value = getattr(report, name)
        if value is not None:
            values[name] = value
    if report.processes:
        values["processes"] = {name: who.model_dump(mode="json") for name, who in report.processes.items()}
    if report.cleanup is not None:
        values["cleanup"] = as_json(report.cleanup)
    if report.state is AttemptState.ENDED:
        end = report.end or AttemptEnd.RUNNER_LOST
        values |= {"exit_code": report.exit_code, "signal": report.signal}
        if report.ended_at is not None:
            values["ended_at"] = report.ended_at
        end_attempt(tx, attempt, end, now, reason=report.reason, values=values)
        return
    event = EVENT_OF_REPORT[report.state]
    if event is None:
        tx.conn.execute(update(attempts).where(attempts.c.id == attempt["id"]).values(**values))
        return
    if report.state is AttemptState.RUNNING:
        values.setdefault("started_at", attempt["started_at"] or now)
    move_attempt(tx, attempt, event, now, sentence=f"attempt {attempt['attempt_no']} is {report.state}", values=values)
    if report.state in (AttemptState.RUNNING, AttemptState.SUSPENDED, AttemptState.STOPPING):
        _job_started(tx, attempt, values.get("started_at") or now, now)


def _job_started(tx: Tx, attempt: RowMapping, started_at: float, now: float) -> None:
    job = locked_job(tx, attempt["job_id"])
    if job is None or job["state"] not in (JobState.STARTING, JobState.STOPPING) or job["started_at"] is not None:
        return
    values: dict[str, Any] = {"started_at": started_at, "trouble": None, "trouble_count": 0, "reasons": []}
    move_job(
        tx,
        job,
        JobEvent.STARTED,
        now,
        sentence="the job runs",
        actor="agent",
        values=values,
        attempt=attempt,
    )


def _after_the_end(tx: Tx, attempt: RowMapping, report: AttemptChanged, now: float) -> None:
    """The result is final; trouble in cleaning up goes to a field of its own."""
    if attempt["end"] == AttemptEnd.LOST.value:
        ended = f"ended: {report.end}" if report.state is AttemptState.ENDED else f"is {report.state}"
        tx.event(
            "lost_attempt_reported",
            f"attempt {attempt['attempt_no']}, which was resolved as lost, {ended}; that changes nothing",
            now,
            actor="agent",
            severity="warning",
            job_id=attempt["job_id"],
            attempt_id=attempt["id"],
            loan_id=attempt["loan_id"],
            node_id=attempt["node_id"],
            data={"state": report.state.value, "end": report.end, "exit_code": report.exit_code},
        )
    if report.cleanup is None or report.cleanup.model_dump(mode="json") == attempt["cleanup"]:
        return
    cleanup = as_json(report.cleanup)
    tx.conn.execute(update(attempts).where(attempts.c.id == attempt["id"]).values(cleanup=cleanup))
    tx.conn.execute(update(jobs).where(jobs.c.id == attempt["job_id"]).values(cleanup_state=cleanup))
    tx.touch("jobs")


def order_answered(tx: Tx, node_id: str, report: OrderAnswer, now: float) -> None:
    statement = select(orders).where(orders.c.node_id == node_id, orders.c.seq == report.seq).with_for_update()
    order = tx.conn.execute(statement).mappings().one_or_none()
    if order is None or order["outcome"] is not None:
        return
    tx.conn.execute(
        update(orders)
        .where(orders.c.node_id == node_id, orders.c.seq == report.seq)
        .values(outcome=report.outcome, detail=report.detail, answered_at=now)
    )
    if report.outcome == "accepted":
        return
    tx.event(
        "order_refused",
        f"order {report.seq} ({order['kind']}) is {report.outcome}: {report.detail}",
        now,
        actor="agent",
        severity="warning",
        loan_id=order["loan_id"],
        attempt_id=order["attempt_id"],
        engine_id=order["body"].get("engine_id"),
        node_id=node_id,
        data={"outcome": report.outcome, "kind": order["kind"]},
    )
    reason = Reason(code="OrderRefused", sentence=report.detail or f"the node answered {report.outcome}")
    if order["kind"] == "open_loan":
        _loan_refused(tx, order, reason, now)
    elif order["kind"] == "start_attempt" and report.outcome != "refused":
        # A refused one's end is reported apart; these two changed nothing and nobody will speak of them again.
        attempt = locked_attempt(tx, order["attempt_id"])
        if attempt is not None and not attempt["reported"]:
            end_attempt(tx, attempt, AttemptEnd.NOT_STARTED, now, reason=reason)
    elif order["kind"] == "set_policy":
        policies.refused(tx, SetPolicy.model_validate(order["body"]), reason.sentence)
    elif order["kind"] == "stop_attempt":
        _stop_refused(tx, order, now)


def _loan_refused(tx: Tx, order: RowMapping, reason: Reason, now: float) -> None:
    """It changed nothing on the node, so nothing of it ever started there; unless the node has spoken of it, and
    then this answer belongs to a second delivery."""
    loan = locked_loan(tx, order["loan_id"])
    if loan is not None and not loan["reported"] and loan["state"] != LoanState.CLOSED:
        park_trouble.left_alone(tx, loan, reason, now)
        set_loan_state(tx, loan, LoanState.CLOSED, now, reason=reason)


def _stop_refused(tx: Tx, order: RowMapping, now: float) -> None:
    """The node does not know the attempt, yet nothing proves that it is over: people have to look."""
    live = select(attempts.c.job_id).where(attempts.c.id == order["attempt_id"], attempts.c.state != "ended")
    job_id = tx.conn.execute(live).scalar_one_or_none()
    job = locked_job(tx, job_id) if job_id else None
    if job is not None and JobState(job["state"]) not in TERMINAL_JOB_STATES:
        tx.event(
            "alert",
            "the node did not take the order to stop this job",
            now,
            severity="warning",
            job_id=job["id"],
            attempt_id=order["attempt_id"],
            node_id=order["node_id"],
            data={"code": "stop_refused"},
        )
