"""How far an operation is: its loan says it."""

from __future__ import annotations

from sqlalchemy import Connection, RowMapping, select

from ...agents.protocol.loans import LoanState, LoanStep
from ...agents.protocol.wire import Reason
from ..errors import NotFound
from ..model import EngineId, LoanId, OperationRow
from ..tables import loan_steps, loans, nodes, operations
from .engine_sleep import PARK
from .operator_verbs import GIVEN_UP
from .reading import as_reason

_ON_THE_WAY = (LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING)
_PROVED = (LoanState.LENT, LoanState.RECALLING)
_NOT_WOKEN = (GIVEN_UP, "LoanNotHeld")  # closed, and the engine not brought back


def operation(conn: Connection, operation_id: str) -> OperationRow:
    row = conn.execute(select(operations).where(operations.c.id == operation_id)).mappings().one_or_none()
    if row is None:
        raise NotFound("operation", operation_id)
    loan = conn.execute(select(loans).where(loans.c.id == row["loan_id"])).mappings().one()
    settled = select(loan_steps.c.step).where(
        loan_steps.c.loan_id == loan["id"], loan_steps.c.step == LoanStep.SETTLED.value
    )
    state, reason = _park(loan, conn.execute(settled.limit(1)).one_or_none() is not None)
    if row["kind"] != PARK:
        state, reason = _resume(loan)
    if state == "running" and reason is None:
        reason = _silence(conn, loan["node_id"])
    return OperationRow(
        id=row["id"],
        kind=row["kind"],
        engine_id=EngineId(row["engine_id"]),
        loan_id=LoanId(row["loan_id"]),
        requested_by=row["requested_by"],
        created_at=row["created_at"],
        state=state,
        reason=reason,
        loan_state=LoanState(loan["state"]),
    )


def _park(loan: RowMapping, was_settled: bool) -> tuple[str, Reason | None]:
    """Done once the engine is proved parked, whatever became of it since."""
    state = LoanState(loan["state"])
    if was_settled or state in _PROVED:
        return "succeeded", None
    # One that a registration told of is ahead of the reports that say whether it was parked.
    if state in _ON_THE_WAY or (loan["adopted"] and state is not LoanState.CLOSED):
        return "running", None
    return "failed", as_reason(loan["reason"])


def _resume(loan: RowMapping) -> tuple[str, Reason | None]:
    """Done once the engine is back. One that is in trouble is brought back for as long as it takes."""
    reason = as_reason(loan["reason"])
    if loan["state"] != LoanState.CLOSED.value:
        return "running", reason if loan["state"] == LoanState.FAULTED.value else None
    return ("failed", reason) if reason is not None and reason.code in _NOT_WOKEN else ("succeeded", None)


def _silence(conn: Connection, node_id: str) -> Reason | None:
    node = conn.execute(select(nodes.c.name).where(nodes.c.id == node_id, nodes.c.silent_since.is_not(None)))
    name = node.scalar_one_or_none()
    if name is None:
        return None
    sentence = f"node {name} is silent: how far it is will be known when it speaks again"
    return Reason(code="NodeUnreachable", sentence=sentence, data={"node": name})
