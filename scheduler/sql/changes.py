"""The state changes of jobs, attempts and loans: each guarded, each with its event in the same transaction."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import RowMapping, Update, bindparam, insert, select, update

from ...agents.protocol.loans import LoanEvent, LoanState
from ...agents.protocol.wire import GPU_LOST, LOAN_OVER, AttemptEnd, AttemptState, Order, Reason
from ..errors import NotFound
from ..lifecycle import (
    TERMINAL_JOB_STATES,
    AttemptEvent,
    IllegalAttemptTransition,
    JobEvent,
    JobState,
    advance_attempt,
    advance_job,
    job_event_of_end,
)
from ..tables import attempts, jobs, loan_devices, loans, nodes, orders
from .writer import Tx

BACKOFF_SECONDS_MIN: Final = 5.0
BACKOFF_SECONDS_MAX: Final = 300.0
AGENT: Final = "agent"

_PROGRESS: Final = {
    AttemptState.UNKNOWN: 0,
    AttemptState.PLACED: 0,
    AttemptState.STARTING: 1,
    AttemptState.RUNNING: 2,
    AttemptState.SUSPENDED: 3,
    AttemptState.STOPPING: 4,
    AttemptState.ENDED: 5,
}

# Built once: building a statement costs more than running it.
_NEXT_SEQ: Final = (
    update(nodes)
    .where(nodes.c.id == bindparam("node"))
    .values(order_seq=nodes.c.order_seq + 1)
    .returning(nodes.c.order_seq, nodes.c.incarnation)
)
_INSERT_ORDER: Final = insert(orders)
_LOCKED_JOB: Final = select(jobs).where(jobs.c.id == bindparam("key")).with_for_update()
_LOCKED_ATTEMPT: Final = select(attempts).where(attempts.c.id == bindparam("key")).with_for_update()
_LOCKED_LOAN: Final = select(loans).where(loans.c.id == bindparam("key")).with_for_update()


def backoff_seconds(count: int) -> float:
    """After the ``count``-th trouble in a row: 5, 10, 20, … 300 s."""
    return min(BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN * 2.0 ** max(0, min(count, 16) - 1))


def as_json(reason: Reason | None) -> dict[str, Any] | None:
    return None if reason is None else reason.model_dump(mode="json")


def one_row(tx: Tx, statement: Update) -> bool:
    """Runs a guarded update; whether it found its row."""
    return tx.conn.execute(statement).rowcount == 1


def give_order(
    tx: Tx,
    node_id: str,
    order: Order,
    term: int,
    now: float,
    *,
    loan_id: str | None = None,
    attempt_id: str | None = None,
) -> int:
    """Appends to the node's orders. The node's row stays locked to the commit, so seqs appear in their order."""
    given = tx.conn.execute(_NEXT_SEQ, {"node": node_id}).one_or_none()
    if given is None:
        raise NotFound("node", node_id)
    tx.conn.execute(
        _INSERT_ORDER,
        {
            "node_id": node_id,
            "seq": given.order_seq,
            "kind": order.kind,
            "body": order.model_dump(mode="json"),
            "term": term,
            "incarnation": given.incarnation,
            "loan_id": loan_id,
            "attempt_id": attempt_id,
            "created_at": now,
        },
    )
    tx.touch(f"orders:{node_id}")
    return int(given.order_seq)


# ---- jobs ------------------------------------------------------------------------------------------------------


def locked_job(tx: Tx, job_id: str) -> RowMapping | None:
    return tx.conn.execute(_LOCKED_JOB, {"key": job_id}).mappings().one_or_none()


def move_job(
    tx: Tx,
    job: RowMapping,
    event: JobEvent,
    now: float,
    *,
    sentence: str,
    actor: str = "scheduler",
    values: Mapping[str, Any] | None = None,
    attempt: RowMapping | None = None,
) -> bool:
    """Moves a job by its machine. A terminal job stays as it is: False, and nothing is written."""
    old = JobState(job["state"])
    if old in TERMINAL_JOB_STATES:
        return False
    new = advance_job(job["id"], old, event)
    changed = {"state": new.value, **(values or {})}
    if new in TERMINAL_JOB_STATES:
        changed |= {"reasons": [], "assigned_loan_id": None}
        changed.setdefault("ended_at", now)
    if not one_row(tx, update(jobs).where(jobs.c.id == job["id"], jobs.c.state == old.value).values(**changed)):
        return False
    if new is not old:
        tx.event(
            "job_changed",
            sentence,
            now,
            actor=actor,
            from_state=old.value,
            to_state=new.value,
            job_id=job["id"],
            attempt_id=attempt["id"] if attempt else None,
            loan_id=attempt["loan_id"] if attempt else None,
            node_id=attempt["node_id"] if attempt else None,
        )
    tx.touch("jobs", "decide")
    return True


def requeue_values(job: RowMapping, reason: Reason, now: float, *, ran: bool) -> dict[str, Any]:
    """Queued again, with why and not before when. One that has run starts counting its troubles anew.

    One that came just as its loan ended has no trouble: it may be placed again at once, unless it happens twice.
    """
    trouble: dict[str, Any] = job["trouble"] or {}
    too_late = reason.code == LOAN_OVER and trouble.get("code") != LOAN_OVER
    count = 1 if ran else job["trouble_count"] + 1
    not_before = now if too_late else now + backoff_seconds(count)
    return {
        "queued_at": now,
        "not_before": not_before,
        "trouble": as_json(reason),
        "trouble_count": count,
        "assigned_loan_id": None,
        "started_at": None,
        "reasons": [
            {
                "code": reason.code,
                "sentence": reason.sentence,
                "since": now,
                "next_check": not_before,
                "data": reason.data,
            }
        ],
    }


# ---- attempts --------------------------------------------------------------------------------------------------


def locked_attempt(tx: Tx, attempt_id: str) -> RowMapping | None:
    return tx.conn.execute(_LOCKED_ATTEMPT, {"key": attempt_id}).mappings().one_or_none()


def move_attempt(
    tx: Tx,
    attempt: RowMapping,
    event: AttemptEvent,
    now: float,
    *,
    sentence: str,
    actor: str = AGENT,
    severity: str = "info",
    values: Mapping[str, Any] | None = None,
) -> bool:
    """Moves an attempt that is not over. Where its machine has no edge, reports were lost: the node's fact is
    taken and recorded as such."""
    old = AttemptState(attempt["state"])
    if old is AttemptState.ENDED:
        return False
    type_ = "attempt_changed"
    try:
        new = advance_attempt(attempt["id"], old, event)
    except IllegalAttemptTransition:
        new = AttemptState.UNKNOWN if event is AttemptEvent.LOST_SIGHT else AttemptState(event.value)
        if _PROGRESS[new] <= _PROGRESS[old]:
            return True  # an older word than the registration's: it says less than is known
        type_ = "attempt_state_adopted"
    changed = {"state": new.value, **(values or {})}
    if not one_row(
        tx, update(attempts).where(attempts.c.id == attempt["id"], attempts.c.state == old.value).values(**changed)
    ):
        return False
    if new is not old:
        tx.event(
            type_,
            sentence,
            now,
            actor=actor,
            severity=severity,
            job_id=attempt["job_id"],
            attempt_id=attempt["id"],
            loan_id=attempt["loan_id"],
            node_id=attempt["node_id"],
            from_state=old.value,
            to_state=new.value,
        )
    tx.touch("jobs", "decide")
    return True


def end_attempt(
    tx: Tx,
    attempt: RowMapping,
    end: AttemptEnd,
    now: float,
    *,
    reason: Reason | None = None,
    actor: str = AGENT,
    values: Mapping[str, Any] | None = None,
) -> bool:
    """The attempt's end, and what it means for its job, in one transaction. Repeated: nothing happens."""
    given = dict(values or {})
    given.setdefault("ended_at", now)
    moved = move_attempt(
        tx,
        attempt,
        AttemptEvent.ENDED,
        now,
        sentence=f"attempt {attempt['attempt_no']} ended: {end}",
        actor=actor,
        values={"end": end.value, "reason": as_json(reason), "missing_incarnation": None, **given},
    )
    job = locked_job(tx, attempt["job_id"]) if moved else None
    if job is None:
        return moved
    event, failure = job_event_of_end(end, given.get("exit_code"), stop_wanted=job["stop_wanted"])
    if failure is not None and reason is not None and reason.code == GPU_LOST:
        failure = GPU_LOST  # whatever the program made of it
    if event is JobEvent.REQUEUED:
        ran = end is AttemptEnd.PREEMPTED
        why = reason or Reason(
            code="Preempted" if ran else "NotStarted",
            sentence="the loan had to end before the job did" if ran else "the attempt was proved not to have started",
        )
        values_ = requeue_values(job, why, now, ran=ran)
        move_job(
            tx, job, event, now, sentence=f"queued again: {why.sentence}", actor=actor, values=values_, attempt=attempt
        )
        return True
    result = {
        "exit_code": given.get("exit_code"),
        "signal": given.get("signal"),
        "failure_reason": failure,
        "ended_at": given["ended_at"],
    }
    if given.get("started_at") is not None:
        result["started_at"] = given["started_at"]
    if given.get("cleanup") is not None:
        result["cleanup_state"] = given["cleanup"]
    move_job(tx, job, event, now, sentence=f"the job ended: {event}", actor=actor, values=result, attempt=attempt)
    return True


def lose_sight(tx: Tx, attempt: RowMapping, now: float, sentence: str) -> None:
    """Nobody can say whether it runs or ran. Its job is not started again: time alone proves nothing."""
    moved = move_attempt(
        tx,
        attempt,
        AttemptEvent.LOST_SIGHT,
        now,
        sentence=sentence,
        actor="scheduler",
        values={"missing_incarnation": None},
    )
    if moved and attempt["state"] != AttemptState.UNKNOWN:
        tx.event(
            "alert",
            sentence,
            now,
            severity="critical",
            job_id=attempt["job_id"],
            attempt_id=attempt["id"],
            loan_id=attempt["loan_id"],
            node_id=attempt["node_id"],
            data={"code": "attempt_unknown"},
        )


# ---- loans -----------------------------------------------------------------------------------------------------


def locked_loan(tx: Tx, loan_id: str) -> RowMapping | None:
    return tx.conn.execute(_LOCKED_LOAN, {"key": loan_id}).mappings().one_or_none()


def set_loan_state(
    tx: Tx,
    loan: RowMapping,
    new: LoanState,
    now: float,
    *,
    type_: str = "loan_changed",
    event: LoanEvent | None = None,
    reason: Reason | None = None,
    actor: str = AGENT,
    values: Mapping[str, Any] | None = None,
) -> None:
    """Writes a loan's next state, which the caller has from the loan's machine or from the node's facts."""
    old = LoanState(loan["state"])
    changed: dict[str, Any] = {"state": new.value, **(values or {})}
    if reason is not None:
        changed["reason"] = as_json(reason)
    if new is LoanState.CLOSED:
        changed |= {"closed_at": now, "missing_incarnation": None}
    tx.conn.execute(update(loans).where(loans.c.id == loan["id"]).values(**changed))
    if new is not old or type_ != "loan_changed":
        tx.event(
            type_,
            reason.sentence if reason is not None else f"the loan is {new}",
            now,
            actor=actor,
            severity="critical" if new is LoanState.FAULTED else "info",
            loan_id=loan["id"],
            node_id=loan["node_id"],
            from_state=old.value,
            to_state=new.value,
            data={"event": event.value if event else None, "reason": as_json(reason)},
        )
    tx.touch("loans", "engines", "decide")
    if new is LoanState.FAULTED:
        _set_engine_restore_state(tx, loan["id"], "faulted")
    if new is LoanState.CLOSED:
        tx.conn.execute(update(loan_devices).where(loan_devices.c.loan_id == loan["id"]).values(open=False))
        _end_what_never_started(tx, loan, now, reason, actor)
        if loan["engine_ids"]:
            _set_engine_restore_state(tx, loan["id"], "failed" if event is LoanEvent.GIVEN_UP else "restored")


def _set_engine_restore_state(tx: Tx, loan_id: str, state: str) -> None:
    """Beside the jobs' results, never in their place. Only jobs that ran under the loan, or whose engine this loan
    lost: an engine that was never touched has nothing to restore."""
    ran = select(attempts.c.job_id).where(attempts.c.loan_id == loan_id)
    if state != "faulted":
        faulted = select(jobs.c.id).where(jobs.c.engine_restore_state == "faulted")
        ran = ran.where(attempts.c.started_at.is_not(None) | attempts.c.job_id.in_(faulted))
    tx.conn.execute(update(jobs).where(jobs.c.id.in_(ran)).values(engine_restore_state=state))
    tx.touch("jobs")


def _end_what_never_started(tx: Tx, loan: RowMapping, now: float, reason: Reason | None, actor: str) -> None:
    """A closed loan is over for good on its node: an attempt that was only placed in it can no longer start. Had it
    started, the node's report of that, which has a lower id, would have been taken before this one. Where reports
    are known to be missing that does not follow, and nothing is concluded."""
    statement = (
        select(attempts)
        .where(attempts.c.loan_id == loan["id"], attempts.c.state == AttemptState.PLACED.value)
        .order_by(attempts.c.id)
        .with_for_update()
    )
    kept = loan["reason"]
    why = reason or (Reason.model_validate(kept) if kept else None)
    for attempt in tx.conn.execute(statement).mappings().all():
        if attempt["doubt"]:
            lose_sight(tx, attempt, now, "the loan is closed, but reports that may speak of this attempt were lost")
        else:
            end_attempt(tx, attempt, AttemptEnd.NOT_STARTED, now, reason=why, actor=actor)
