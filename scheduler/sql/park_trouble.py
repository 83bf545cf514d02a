"""Back-off after a loan that did not come to be: of its engines, or of its devices where no engine is on them. What
was refused once would be refused again at once, however many jobs wait; it is forgotten once a loan is lent there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from sqlalchemy import BindParameter, RowMapping, Table, bindparam, select, update

from ...agents.protocol.loans import LoanEvent, LoanState
from ...agents.protocol.wire import LoanChanged, Reason
from ..tables import devices, engines
from .changes import AGENT, as_json, backoff_seconds
from .writer import Tx

# The park did not work out: closing traffic again at once would not either.
PARK_TROUBLE: Final = {
    LoanEvent.DRAIN_DEADLINE_ABORTED: "WaitingForDrain",
    LoanEvent.PREFLIGHT_REFUSED: "EngineNotReady",
    LoanEvent.GOLDEN_WRONG: "EngineNotReady",
    LoanEvent.PARK_REFUSED: "EngineNotReady",
    LoanEvent.PARK_DEADLINE: "EngineNotReady",
    LoanEvent.MEMORY_NOT_FREE: "HBMNotFreed",
    LoanEvent.FOREIGN_PROCESS: "ForeignProcess",
}
_BEFORE_LENT: Final = (LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING)
_SERVES_AGAIN: Final = (LoanEvent.CANARY_RIGHT, LoanEvent.ENGINE_BACK)

# Built once: building a statement costs more than running it.
_IDS: Final[BindParameter[str]] = bindparam("ids", expanding=True)
_FORGET_DEVICES: Final = (
    update(devices)
    .where(devices.c.id.in_(_IDS), devices.c.trouble_count > 0)
    .values(trouble=None, trouble_count=0, not_before=0.0)
)
_FORGET_ENGINES: Final = (
    update(engines)
    .where(engines.c.id.in_(_IDS), engines.c.trouble_count > 0)
    .values(trouble=None, trouble_count=0, not_before=0.0)
)
_TROUBLED_ENGINES: Final = select(engines.c.id, engines.c.trouble_count).where(
    engines.c.id.in_(_IDS), engines.c.trouble.is_not(None)
)


def note(tx: Tx, loan: RowMapping, report: LoanChanged, now: float) -> None:
    """What the report means for the next loan there. ``loan``: as it was before."""
    if report.event is LoanEvent.MEMORY_FREE:
        _forget(tx, loan)
        return
    if report.event in _SERVES_AGAIN:
        _count_from(tx, loan, now)
        return
    code = _trouble_code(LoanState(loan["state"]), report)
    if code is None:
        return
    reason = report.reason or Reason(code=code, sentence=f"the last park ended with {report.event or 'a refusal'}")
    its = [each for each in loan["engine_ids"] if each == report.engine_id]
    left_alone(tx, loan, reason, now, engine_ids=its, event=report.event)


def _trouble_code(before: LoanState, report: LoanChanged) -> str | None:
    event = report.event
    if event is None:  # the first word of a loan: one that is over with it was refused
        return "LoanRefused" if report.state is LoanState.CLOSED else None
    if event is LoanEvent.ENGINE_LOST:  # once it is lent, its park has worked
        return "EngineLost" if before in _BEFORE_LENT else None
    if event is LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE:
        told = None if report.reason is None else report.reason.code
        return told if before is LoanState.SETTLING and told in PARK_TROUBLE.values() else None
    return PARK_TROUBLE.get(event)


def left_alone(
    tx: Tx,
    loan: RowMapping,
    reason: Reason,
    now: float,
    *,
    engine_ids: Sequence[str] = (),
    event: LoanEvent | None = None,
) -> None:
    """For a while, and the longer the oftener. ``engine_ids``: whose fault it is, if not all of the loan's."""
    table, ids = _rows_of(loan)
    statement = select(table).where(table.c.id.in_(engine_ids or ids)).order_by(table.c.id)
    for row in tx.conn.execute(statement).mappings().all():
        count = row["trouble_count"] + 1
        not_before = now + backoff_seconds(count)
        tx.conn.execute(
            update(table)
            .where(table.c.id == row["id"])
            .values(trouble=as_json(reason), trouble_count=count, not_before=not_before)
        )
        is_engine = table is engines
        who = f"engine {row['name']}" if is_engine else f"device {row['id']}"
        tx.event(
            "park_ineffective" if event is LoanEvent.MEMORY_NOT_FREE else "park_failed",
            f"{who}: {reason.sentence}",
            now,
            actor=AGENT,
            severity="warning",
            engine_id=row["id"] if is_engine else None,
            device_id=None if is_engine else row["id"],
            loan_id=loan["id"],
            node_id=loan["node_id"],
            data={"reason": as_json(reason), "not_before": not_before},
        )


def _forget(tx: Tx, loan: RowMapping) -> None:
    tx.conn.execute(_FORGET_DEVICES, {"ids": loan["device_ids"]})
    if loan["engine_ids"]:
        tx.conn.execute(_FORGET_ENGINES, {"ids": loan["engine_ids"]})


def _count_from(tx: Tx, loan: RowMapping, now: float) -> None:
    """Until the engines serve again nobody would park them anyway: the back-off counts from now on."""
    for row in tx.conn.execute(_TROUBLED_ENGINES, {"ids": loan["engine_ids"]}).all():
        not_before = now + backoff_seconds(row.trouble_count)
        tx.conn.execute(update(engines).where(engines.c.id == row.id).values(not_before=not_before))


def _rows_of(loan: RowMapping) -> tuple[Table, list[str]]:
    return (engines, loan["engine_ids"]) if loan["engine_ids"] else (devices, loan["device_ids"])
