"""What a registering node holds is adopted, or named to be given back. Where this database lost something, the
node's facts win."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import insert, select, update

from ...agents.protocol.loans import LoanState
from ...agents.protocol.wire import AttemptState, HeldLoan, Register
from ..lifecycle import JobState
from ..tables import attempts, devices, jobs, loan_devices, loans
from . import attempt_reports
from .changes import set_loan_state
from .writer import Tx


def adopt_loans(tx: Tx, register: Register, now: float) -> list[str]:
    """Known and open: the node's state is taken. The others are to be recalled; until they are over their devices
    are not lent again, so an unknown one gets a row."""
    recall: list[str] = []
    for held in register.loans:
        statement = select(loans).where(loans.c.id == held.loan_id).with_for_update()
        loan = tx.conn.execute(statement).mappings().one_or_none()
        if loan is None:
            _take_in(tx, register.node_id, held, now)
            recall.append(held.loan_id)
        elif loan["state"] == LoanState.CLOSED.value or loan["node_id"] != register.node_id:
            recall.append(held.loan_id)
        else:
            values = {"reported": True, "missing_incarnation": None}
            if loan["state"] != held.state.value:
                # Its reports may still be on their way: they are then older than this.
                values["adopted"] = True
                set_loan_state(tx, loan, held.state, now, type_="loan_state_adopted", values=values)
            else:
                tx.conn.execute(update(loans).where(loans.c.id == held.loan_id).values(**values))
        raise_epochs(tx, dict.fromkeys(held.device_ids, held.epoch))
    return recall


def _take_in(tx: Tx, node_id: str, held: HeldLoan, now: float) -> None:
    tx.conn.execute(
        insert(loans).values(
            id=held.loan_id,
            node_id=node_id,
            epoch=held.epoch,
            device_ids=held.device_ids,
            engine_ids=held.engine_ids,
            need_bytes=0,
            room_bytes={},
            state=held.state.value,
            engine_lost=False,
            policies={},
            recall_ordered=True,
            reported=True,
            adopted=True,
            opened_at=now,
        )
    )
    taken = select(loan_devices.c.device_id).where(loan_devices.c.open)
    covered = set(tx.conn.execute(taken.where(loan_devices.c.device_id.in_(held.device_ids))).scalars())
    for device_id in sorted(set(held.device_ids)):
        free = device_id not in covered
        tx.conn.execute(insert(loan_devices).values(loan_id=held.loan_id, device_id=device_id, open=free))
    tx.event(
        "alert",
        "the node holds a loan that is not known here; it is recalled",
        now,
        severity="warning",
        loan_id=held.loan_id,
        node_id=node_id,
        data={"code": "loan_unknown", "state": held.state.value},
    )


def raise_epochs(tx: Tx, seen: Mapping[str, int]) -> None:
    """The node refuses lower epochs; a database that lost commits must go past what the node has seen."""
    for device_id, epoch in sorted(seen.items()):
        lower = (devices.c.id == device_id) & (devices.c.epoch < epoch)
        tx.conn.execute(update(devices).where(lower).values(epoch=epoch))


def adopt_attempts(tx: Tx, register: Register, now: float) -> list[str]:
    """Known ones take the node's state, their ends included. The others are to be stopped; one whose job waits here
    becomes that job's attempt, lest the job be started beside it."""
    stop: list[str] = []
    for report in register.attempts:
        row = tx.conn.execute(select(attempts).where(attempts.c.id == report.attempt_id)).mappings().one_or_none()
        if row is None and _take_in_attempt(tx, register.node_id, report, now):
            row = tx.conn.execute(select(attempts).where(attempts.c.id == report.attempt_id)).mappings().one()
        over = row is None or row["state"] == AttemptState.ENDED.value or row["node_id"] != register.node_id
        if over and report.state is not AttemptState.ENDED:
            stop.append(report.attempt_id)
        if not over:
            attempt_reports.attempt_changed(tx, register.node_id, report, now)
    return stop


def _take_in_attempt(tx: Tx, node_id: str, report: Any, now: float) -> bool:
    """The database lost the placing (failover, restored copy); the node's facts win. One that has ended may be of
    a loan that is over at the node and not listed either: without its end its job would run a second time."""
    job = tx.conn.execute(select(jobs).where(jobs.c.id == report.job_id).with_for_update()).mappings().one_or_none()
    loan = tx.conn.execute(select(loans).where(loans.c.id == report.loan_id)).mappings().one_or_none()
    if job is None or job["state"] != JobState.QUEUED.value:
        return False
    if loan is None and report.state is AttemptState.ENDED:
        _write_closed(tx, node_id, report.loan_id, now)
        device_ids: list[str] = []
    elif loan is None or loan["node_id"] != node_id:
        return False
    else:
        device_ids = loan["device_ids"]
    number = job["attempt_no"] + 1
    tx.conn.execute(
        update(jobs)
        .where(jobs.c.id == job["id"])
        .values(state=JobState.STARTING.value, attempt_no=number, loan_id=report.loan_id, assigned_loan_id=None)
    )
    tx.conn.execute(
        insert(attempts).values(
            id=report.attempt_id,
            job_id=job["id"],
            attempt_no=number,
            loan_id=report.loan_id,
            node_id=node_id,
            device_ids=device_ids,
            hbm_bytes=job["hbm_bytes"] or 0,
            state=AttemptState.PLACED.value,
            created_at=now,
            processes={},
            stop_ordered=False,
            reported=True,
            doubt=False,
        )
    )
    tx.event(
        "attempt_adopted",
        "the node holds an attempt that was not known here",
        now,
        severity="warning",
        job_id=job["id"],
        attempt_id=report.attempt_id,
        loan_id=report.loan_id,
        node_id=node_id,
        from_state=JobState.QUEUED.value,
        to_state=JobState.STARTING.value,
    )
    tx.touch("jobs", "decide")
    return True


def _write_closed(tx: Tx, node_id: str, loan_id: str, now: float) -> None:
    """Of a loan that nobody here remembers there is only that it was, and that it is over."""
    tx.conn.execute(
        insert(loans).values(
            id=loan_id,
            node_id=node_id,
            epoch=0,
            device_ids=[],
            engine_ids=[],
            need_bytes=0,
            room_bytes={},
            state=LoanState.CLOSED.value,
            engine_lost=False,
            policies={},
            recall_ordered=True,
            reported=True,
            adopted=True,
            opened_at=now,
            closed_at=now,
        )
    )
