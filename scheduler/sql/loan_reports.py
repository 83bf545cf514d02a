"""What a node says of its loans. The scheduler advances them by the same table; where that has no edge, reports
were lost and the node's facts win."""

from __future__ import annotations

from typing import Any

from sqlalchemy import RowMapping, insert, select, update

from ...agents.protocol.loans import IllegalLoanTransition, LoanState, advance
from ...agents.protocol.wire import LoanChanged, LoanStepTaken, RecallLoan, RequestAnswered
from ..tables import engines, loan_steps, loans
from . import park_trouble
from .changes import AGENT, give_order, locked_loan, one_row, set_loan_state
from .leadership import ruling_term
from .writer import Tx


def loan_changed(tx: Tx, node_id: str, report: LoanChanged, now: float) -> None:
    loan = locked_loan(tx, report.loan_id)
    if loan is None or loan["node_id"] != node_id:
        tx.event(
            "alert",
            f"the node reports a loan that is not known here: {report.loan_id} is {report.state}",
            now,
            severity="warning",
            node_id=node_id,
            data={"code": "loan_unknown", "loan_id": report.loan_id, "state": report.state},
        )
        return
    old = LoanState(loan["state"])
    if old is LoanState.CLOSED:
        # One without devices was taken in as over: what is told of it now is older than that.
        if report.state is not LoanState.CLOSED and loan["device_ids"]:
            _recall_closed(tx, loan, report, now)
        return
    park_trouble.note(tx, loan, report, now)
    values: dict[str, Any] = {"reported": True, "missing_incarnation": None}
    if report.engine_lost:
        values["engine_lost"] = True
    type_, adopted = _judge(loan["id"], old, report, adopted=bool(loan["adopted"]))
    if type_ is None:  # older than what the registration said
        tx.conn.execute(update(loans).where(loans.c.id == loan["id"]).values(**values))
        return
    set_loan_state(
        tx,
        loan,
        report.state,
        now,
        type_=type_,
        event=report.event,
        reason=report.reason,
        values={**values, "adopted": adopted},
    )


def _judge(loan_id: str, old: LoanState, report: LoanChanged, *, adopted: bool) -> tuple[str | None, bool]:
    """The type of the event to record (None: nothing new), and whether the loan stays ahead of its reports."""
    if report.event is None:
        first = old is LoanState.DRAINING or old is LoanState.SETTLING
        expected: LoanState | None = LoanState(old) if first else None
    else:
        try:
            expected = advance(loan_id, old, report.event)
        except IllegalLoanTransition:
            expected = None
    if expected is report.state:
        return "loan_changed", False
    if adopted:
        return ("loan_changed", False) if report.state is old else (None, True)
    return "loan_state_adopted", False


def _recall_closed(tx: Tx, loan: RowMapping, report: LoanChanged, now: float) -> None:
    order = RecallLoan(loan_id=loan["id"], reason="the scheduler has closed this loan")
    give_order(tx, loan["node_id"], order, ruling_term(tx), now, loan_id=loan["id"])
    tx.event(
        "alert",
        f"the node says {report.state} of a loan that is closed here; it is recalled",
        now,
        severity="warning",
        loan_id=loan["id"],
        node_id=loan["node_id"],
        data={"code": "loan_closed_here", "state": report.state},
    )


def step_taken(tx: Tx, node_id: str, report_id: int, report: LoanStepTaken, at: float) -> None:
    statement = select(loans.c.id).where(loans.c.id == report.loan_id, loans.c.node_id == node_id)
    if tx.conn.execute(statement).one_or_none() is None:
        return  # LoanChanged of the same loan says that it is not known
    tx.conn.execute(
        insert(loan_steps).values(
            loan_id=report.loan_id,
            report_id=report_id,
            step=report.step.value,
            engine_id=report.engine_id,
            attempt_id=report.attempt_id,
            at=at,
            monotonic_seconds=report.monotonic_seconds,
            data=report.data,
        )
    )
    tx.touch("loans")


def request_answered(tx: Tx, node_id: str, report: RequestAnswered, at: float) -> None:
    """How long the request waited that woke an engine: told once, and kept with the loan and the engine."""
    mine = (loans.c.id == report.loan_id) & (loans.c.node_id == node_id)
    first = update(loans).where(mine, loans.c.first_byte_seconds.is_(None)).values(first_byte_seconds=report.seconds)
    if not one_row(tx, first):
        return  # told before, or of a loan that LoanChanged says is not known
    woken = {"loan_id": report.loan_id, "at": at, "first_byte_seconds": report.seconds}
    here = (engines.c.id == report.engine_id) & (engines.c.node_id == node_id)
    tx.conn.execute(update(engines).where(here).values(last_wake=woken))
    tx.event(
        "engine_woken",
        f"the request that woke the engine got its first byte after {report.seconds:.3f} s",
        at,
        actor=AGENT,
        loan_id=report.loan_id,
        engine_id=report.engine_id,
        node_id=node_id,
        data={"first_byte_seconds": report.seconds},
    )
    tx.touch("loans", "engines")
