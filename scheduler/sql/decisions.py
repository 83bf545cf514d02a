"""Decisions become rows, orders and events: in one transaction, guarded by the leader's term, each by itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final, assert_never

from sqlalchemy import RowMapping, bindparam, exc, insert, select, update

from ...agents.protocol import wire
from ...agents.protocol.loans import LoanState
from ...agents.protocol.plans import plans_refusal
from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import AttemptSpec, AttemptState, EngineState
from .. import actions
from ..actions import Action
from ..lifecycle import JobEvent, JobState, advance_job
from ..tables import attempts, devices, engines, jobs, loan_devices, loans, nodes
from .changes import give_order, one_row
from .history import node_lost_sight
from .job_writes import new_id
from .leadership import check_term
from .writer import Tx

_ACTOR: Final = "scheduler"
_SPECS_BYTES_MAX: Final = 1 << 20  # in one order; the node refuses lines above 4 MiB

# Built once: building a statement costs more than running it.
_INSERT_LOAN: Final = insert(loans)
_INSERT_LOAN_DEVICES: Final = insert(loan_devices)
_INSERT_ATTEMPT: Final = insert(attempts)
_LOCKED_NODE: Final = select(nodes).where(nodes.c.id == bindparam("key")).with_for_update()
_CLAIM: Final = (
    update(jobs)
    .where(
        jobs.c.id == bindparam("job"),
        jobs.c.state == JobState.QUEUED.value,
        jobs.c.attempt_no == bindparam("before"),
    )
    .values(
        state=advance_job("any", JobState.QUEUED, JobEvent.PLACED).value,
        attempt_no=bindparam("after"),
        loan_id=bindparam("loan"),
        assigned_loan_id=None,
        reasons=[],
    )
    .returning(jobs)
)


class TooLate(Exception):
    """The facts moved on since the snapshot; the next decision will see them."""


def commit(tx: Tx, wanted: Sequence[Action], term: int, now: float) -> int:
    check_term(tx, term)
    applied = 0
    for action in wanted:
        mark = tx.mark()
        savepoint = tx.conn.begin_nested()
        try:
            _apply(tx, action, term, now)
        except (TooLate, exc.IntegrityError):
            savepoint.rollback()
            tx.undo_to(mark)
        else:
            savepoint.commit()
            applied += 1
    return applied


def _apply(tx: Tx, action: Action, term: int, now: float) -> None:
    match action:
        case actions.OpenLoan():
            open_loan(tx, action, term, now)
        case actions.StartAttempt():
            _start_attempt(tx, action, term, now)
        case actions.StopAttempt():
            _stop_attempt(tx, action, term, now)
        case actions.ExpectWork():
            _expect_work(tx, action, term, now)
        case actions.RecallLoan():
            _recall_loan(tx, action, term, now)
        case actions.SetReasons():
            _set_reasons(tx, action)
        case actions.MarkSilent():
            _mark_silent(tx, action, now)
        case _:
            assert_never(action)


def _node_in_use(tx: Tx, node_id: str) -> None:
    """Nothing is started on a node that is silent or has not used its registration yet. The lock keeps a
    registration, which ends all orders, from slipping in between."""
    node = tx.conn.execute(_LOCKED_NODE, {"key": node_id}).mappings().one_or_none()
    if node is None or node["silent_since"] is not None or node["confirmed_incarnation"] != node["incarnation"]:
        raise TooLate


def open_loan(tx: Tx, action: actions.OpenLoan, term: int, now: float, actor: str = "scheduler") -> str:
    """Writes and orders it; returns its id. Raises TooLate, IntegrityError where another loan has a device."""
    _node_in_use(tx, action.node_id)
    loan_id = new_id()
    device_ids: list[str] = sorted(action.device_ids)
    engine_ids: list[str] = sorted(action.engine_ids)
    epoch = _next_epoch(tx, action.node_id, device_ids)
    policies = _policies_of(tx, action, engine_ids, now)
    if plans_refusal(policies, {str(key): plan for key, plan in action.plans.items()}) is not None:
        raise TooLate  # they were made for another policy
    tx.conn.execute(
        _INSERT_LOAN,
        {
            "id": loan_id,
            "node_id": action.node_id,
            "epoch": epoch,
            "device_ids": device_ids,
            "engine_ids": engine_ids,
            "need_bytes": action.need_bytes,
            "room_bytes": dict(action.room_bytes),
            "state": (LoanState.DRAINING if engine_ids else LoanState.SETTLING).value,
            "engine_lost": False,
            "policies": {key: policy.model_dump(mode="json") for key, policy in policies.items()},
            "plans": {key: plan.model_dump(mode="json") for key, plan in action.plans.items()} or None,
            "restore_by_seconds": action.restore_by_seconds,
            "without_job": None if action.without_job is None else action.without_job.model_dump(mode="json"),
            "recall_ordered": False,
            "expects_more": bool(action.later_job_ids),
            "reported": False,
            "adopted": False,
            "opened_at": now,
        },
    )
    tx.conn.execute(
        _INSERT_LOAN_DEVICES, [{"loan_id": loan_id, "device_id": each, "open": True} for each in device_ids]
    )
    specs = [_claim(tx, place, loan_id, action.node_id, now) for place in action.places]
    if action.later_job_ids:
        tx.conn.execute(
            update(jobs)
            .where(jobs.c.id.in_(action.later_job_ids), jobs.c.state == JobState.QUEUED.value)
            .values(assigned_loan_id=loan_id)
        )
    first, needs = _that_fit(specs), action.need_bytes_by_device
    order = wire.OpenLoan(
        loan_id=loan_id,
        epoch=epoch,
        device_ids=list(action.device_ids),
        engine_ids=engine_ids,
        need_bytes=action.need_bytes,
        restore_by_seconds=action.restore_by_seconds,
        expects_more=bool(action.later_job_ids),
        need_bytes_by_device=None if needs is None else {str(each): nbytes for each, nbytes in needs.items()},
        policies=policies,
        plans={str(key): plan for key, plan in action.plans.items()},
        attempts=specs[:first],
        without_job=action.without_job,
    )
    give_order(tx, action.node_id, order, term, now, loan_id=loan_id)
    for spec in specs[first:]:
        start = wire.StartAttempt(loan_id=loan_id, attempt=spec)
        give_order(tx, action.node_id, start, term, now, loan_id=loan_id, attempt_id=spec.attempt_id)
    _tell_opened(tx, action, loan_id, epoch, actor, now)
    tx.touch("loans", "engines")
    return loan_id


def _tell_opened(tx: Tx, action: actions.OpenLoan, loan_id: str, epoch: int, actor: str, now: float) -> None:
    device_ids, engine_ids = sorted(action.device_ids), sorted(action.engine_ids)
    sleeps = action.without_job
    why = f"{len(action.places)} job(s)" if sleeps is None else f"no job: its engines sleep, by {sleeps.wanted_by}"
    tx.event(
        "loan_changed",
        f"a loan of {len(device_ids)} device(s) was opened for {why}",
        now,
        actor=actor,
        loan_id=loan_id,
        engine_id=engine_ids[0] if sleeps is not None and len(engine_ids) == 1 else None,
        node_id=action.node_id,
        to_state=(LoanState.DRAINING if engine_ids else LoanState.SETTLING).value,
        data={"device_ids": device_ids, "engine_ids": engine_ids, "epoch": epoch, "need_bytes": action.need_bytes},
    )


def _policies_of(tx: Tx, action: actions.OpenLoan, engine_ids: Sequence[str], now: float) -> dict[str, EnginePolicy]:
    """The policies that rule the loan, if each engine may still be parked: a policy that was set to `manual` after
    the snapshot was answered with a 200."""
    ready = (engines.c.node_id == action.node_id) & engines.c.present & engines.c.verified
    wish = action.without_job
    if wish is None or wish.wanted_by != "operator":
        ready &= engines.c.not_before <= now
    statement = select(engines.c.id, engines.c.policy).where(
        engines.c.id.in_(engine_ids), ready, engines.c.state == EngineState.RUNNING.value
    )
    rows = tx.conn.execute(statement.order_by(engines.c.id).with_for_update()).all()
    found = {row.id: EnginePolicy.model_validate(row.policy) for row in rows}
    if len(found) != len(engine_ids) or not all(_allows(policy, wish) for policy in found.values()):
        raise TooLate
    return found


def _allows(policy: EnginePolicy, wish: wire.WithoutJob | None) -> bool:
    if wish is None:
        return policy.when == "always"
    return policy.on_pressure if wish.wanted_by == "pressure" else True


def _that_fit(specs: Sequence[AttemptSpec]) -> int:
    """How many of them one order may carry; always the first, which a job's own limit keeps small enough."""
    total = 0
    for count, spec in enumerate(specs):
        total += len(spec.model_dump_json())
        if count and total > _SPECS_BYTES_MAX:
            return count
    return len(specs)


def _next_epoch(tx: Tx, node_id: str, device_ids: Sequence[str]) -> int:
    """One number above what any of the devices has seen, for all of them."""
    statement = (
        select(devices.c.epoch)
        .where(devices.c.id.in_(device_ids), devices.c.node_id == node_id, devices.c.quarantined.is_(None))
        .order_by(devices.c.id)
        .with_for_update()
    )
    epochs = tx.conn.execute(statement).scalars().all()
    if len(epochs) != len(device_ids):
        raise TooLate
    epoch = int(max(epochs)) + 1
    tx.conn.execute(update(devices).where(devices.c.id.in_(device_ids)).values(epoch=epoch))
    return epoch


def _claim(tx: Tx, place: actions.Place, loan_id: str, node_id: str, now: float) -> AttemptSpec:
    """The guarded claim: the job is still queued and nobody has claimed it since the snapshot."""
    number = place.attempt_no + 1
    state = advance_job(place.job_id, JobState.QUEUED, JobEvent.PLACED)
    job = (
        tx.conn.execute(_CLAIM, {"job": place.job_id, "before": place.attempt_no, "after": number, "loan": loan_id})
        .mappings()
        .one_or_none()
    )
    if job is None:
        raise TooLate
    attempt_id = new_id()
    tx.conn.execute(
        _INSERT_ATTEMPT,
        {
            "id": attempt_id,
            "job_id": place.job_id,
            "attempt_no": number,
            "loan_id": loan_id,
            "node_id": node_id,
            "device_ids": list(place.device_ids),
            "hbm_bytes": place.hbm_bytes,
            "state": AttemptState.PLACED.value,
            "created_at": now,
            "processes": {},
            "stop_ordered": False,
            "reported": False,
            "doubt": False,
        },
    )
    tx.event(
        "job_changed",
        f"attempt {number} was placed",
        now,
        actor=_ACTOR,
        job_id=place.job_id,
        attempt_id=attempt_id,
        loan_id=loan_id,
        node_id=node_id,
        from_state=JobState.QUEUED.value,
        to_state=state.value,
    )
    tx.touch("jobs")
    return _spec(job, attempt_id, number, place)


def _spec(job: RowMapping, attempt_id: str, number: int, place: actions.Place) -> AttemptSpec:
    return AttemptSpec(
        attempt_id=attempt_id,
        job_id=job["id"],
        attempt_no=number,
        argv=job["argv"],
        env=job["env"],
        workdir=job["workdir"],
        device_ids=list(place.device_ids),
        hbm_bytes=place.hbm_bytes,
        time_limit_seconds=job["time_limit_seconds"],
        kill_grace_seconds=job["kill_grace_seconds"],
    )


def _open_loan_row(tx: Tx, loan_id: str) -> dict[str, Any]:
    row = tx.conn.execute(select(loans).where(loans.c.id == loan_id).with_for_update()).mappings().one_or_none()
    if row is None or row["recall_ordered"] or row["state"] == LoanState.CLOSED.value:
        raise TooLate
    return dict(row)


def _start_attempt(tx: Tx, action: actions.StartAttempt, term: int, now: float) -> None:
    _node_in_use(tx, action.node_id)
    loan = _open_loan_row(tx, action.loan_id)
    if loan["state"] != LoanState.LENT.value:
        raise TooLate
    spec = _claim(tx, action.place, action.loan_id, action.node_id, now)
    order = wire.StartAttempt(loan_id=action.loan_id, attempt=spec)
    give_order(tx, action.node_id, order, term, now, loan_id=action.loan_id, attempt_id=spec.attempt_id)


def _stop_attempt(tx: Tx, action: actions.StopAttempt, term: int, now: float) -> None:
    live = (attempts.c.id == action.attempt_id) & (attempts.c.state != AttemptState.ENDED.value)
    if not one_row(tx, update(attempts).where(live, ~attempts.c.stop_ordered).values(stop_ordered=True)):
        raise TooLate
    give_order(
        tx, action.node_id, wire.StopAttempt(attempt_id=action.attempt_id), term, now, attempt_id=action.attempt_id
    )


def _expect_work(tx: Tx, action: actions.ExpectWork, term: int, now: float) -> None:
    _node_in_use(tx, action.node_id)
    _open_loan_row(tx, action.loan_id)
    tx.conn.execute(update(loans).where(loans.c.id == action.loan_id).values(expects_more=action.more))
    order = wire.ExpectWork(loan_id=action.loan_id, more=action.more)
    give_order(tx, action.node_id, order, term, now, loan_id=action.loan_id)


def _recall_loan(tx: Tx, action: actions.RecallLoan, term: int, now: float) -> None:
    _node_in_use(tx, action.node_id)
    _open_loan_row(tx, action.loan_id)
    recall_loan(tx, action.node_id, action.loan_id, action.reason, term, now)
    tx.event(
        "loan_recall_ordered",
        f"the loan is recalled: {action.reason}",
        now,
        loan_id=action.loan_id,
        node_id=action.node_id,
    )


def recall_loan(tx: Tx, node_id: str, loan_id: str, reason: str, term: int, now: float) -> None:
    """Orders the node to end the loan; from now on it takes no more jobs."""
    tx.conn.execute(update(loans).where(loans.c.id == loan_id).values(recall_ordered=True))
    give_order(tx, node_id, wire.RecallLoan(loan_id=loan_id, reason=reason), term, now, loan_id=loan_id)
    tx.touch("loans", "decide")


def _set_reasons(tx: Tx, action: actions.SetReasons) -> None:
    rows = [
        {
            "code": reason.code,
            "sentence": reason.sentence,
            "since": reason.since,
            "next_check": reason.next_check,
            "data": dict(reason.data),
        }
        for reason in action.reasons
    ]
    here = (jobs.c.id == action.job_id) & (jobs.c.state == JobState.QUEUED.value)
    if not one_row(tx, update(jobs).where(here).values(reasons=rows)):
        raise TooLate
    tx.touch("jobs")


def _mark_silent(tx: Tx, action: actions.MarkSilent, now: float) -> None:
    here = (nodes.c.id == action.node_id) & (nodes.c.heard_count == action.heard_count)
    mark = update(nodes).where(here, nodes.c.silent_since.is_(None)).values(silent_since=now)
    last_seen_at = tx.conn.execute(mark.returning(nodes.c.last_seen_at)).scalar_one_or_none()
    if last_seen_at is None:
        raise TooLate
    node_lost_sight(tx, action.node_id, last_seen_at)
    tx.event(
        "node_silent",
        "the node has not been heard of for its lease; its attempts are unknown, nothing is started there",
        now,
        severity="warning",
        node_id=action.node_id,
    )
    tx.touch("nodes", "jobs", "decide")
