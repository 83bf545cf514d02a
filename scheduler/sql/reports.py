"""Reports become rows, by rising id per node and journal. What was taken before is dropped; nothing is lost to a
neighbour that cannot be read.
"""

from __future__ import annotations

import re
from typing import Any, Final, cast

from pydantic import ValidationError
from sqlalchemy import RowMapping, exc, select, update

from ...agents.protocol.wire import (
    Alert,
    AttemptChanged,
    DeviceObserved,
    EngineChanged,
    LoanChanged,
    LoanStepTaken,
    OccupancyChanged,
    OrderAnswer,
    ReportAgain,
    ReportBatch,
    ReportEnvelope,
    ReportsAnswer,
    RequestAnswered,
)
from ..errors import InvalidRequest, NotFound, StaleIncarnation
from ..tables import attempts, nodes
from . import attempt_reports, history, inventory, loan_reports, registration
from .changes import AGENT, give_order
from .database import is_fault_of_the_request
from .leadership import ruling_term
from .writer import Tx

REPORTS_MAX: Final = 500
_BAD: Final = re.compile("[\x00\ud800-\udfff]")
_KINDS: Final = frozenset(
    {
        "loan_changed",
        "loan_step",
        "request_answered",
        "attempt_changed",
        "engine_changed",
        "device_observed",
        "occupancy_changed",
        "alert",
        "order_answer",
    }
)


def take(tx: Tx, batch: ReportBatch, now: float) -> ReportsAnswer:
    if len(batch.reports) > REPORTS_MAX:
        raise InvalidRequest("reports", f"{len(batch.reports)} reports in one batch; send at most {REPORTS_MAX}")
    numbered = sorted(((_id_of(index, raw), raw) for index, raw in enumerate(batch.reports)), key=lambda pair: pair[0])
    node = tx.conn.execute(select(nodes).where(nodes.c.id == batch.node_id).with_for_update()).mappings().one_or_none()
    if node is None:
        raise NotFound("node", batch.node_id)
    _check_incarnation(tx, node, batch)
    registration.put_in_use(tx, node, now)
    acknowledged = int(node["acknowledged"])
    if numbered and numbered[0][0] > acknowledged + 1:
        _reports_missing(tx, node, acknowledged, numbered[0][0], now)
    unsupported: list[int] = []
    for number, raw in numbered:
        if number <= acknowledged:
            continue
        acknowledged = number
        if not _take_safely(tx, batch.node_id, storable(raw), now):
            unsupported.append(number)
    if node["acknowledged"] < node["newest_report"] <= acknowledged:
        registration.settle_loans(tx, node, now)
    values: dict[str, Any] = {
        "acknowledged": acknowledged,
        "heard_count": nodes.c.heard_count + 1,
        "last_seen_at": now,
        "silent_since": None,
    }
    tx.conn.execute(update(nodes).where(nodes.c.id == batch.node_id).values(**values))
    if node["silent_since"] is not None:
        tx.event("node_back", "the node speaks again", now, node_id=batch.node_id)
        give_order(tx, batch.node_id, ReportAgain(), ruling_term(tx), now)
        tx.touch("nodes", "jobs", "decide")
    return ReportsAnswer(acknowledged=acknowledged, unsupported=unsupported)


def _id_of(index: int, raw: dict[str, Any]) -> int:
    number = raw.get("id")
    if not isinstance(number, int) or isinstance(number, bool) or not 0 < number < 2**62:
        raise InvalidRequest(f"reports[{index}].id", f"{number!r} is no report id; ids are whole numbers from 1 up")
    return number


def _check_incarnation(tx: Tx, node: RowMapping, batch: ReportBatch) -> None:
    current = int(node["incarnation"])
    if batch.journal_id != node["journal_id"]:
        raise StaleIncarnation(batch.node_id, "these reports are of another journal than the one registered", current)
    if batch.incarnation != current:
        raise StaleIncarnation(batch.node_id, f"incarnation {batch.incarnation} does not rule, {current} does", current)


def _reports_missing(tx: Tx, node: RowMapping, acknowledged: int, first: int, now: float) -> None:
    """The node has forgotten reports that this database does not know: it was acknowledged, and the database then
    lost it. An attempt that seems only placed may have run meanwhile."""
    tx.conn.execute(
        update(attempts).where(attempts.c.node_id == node["id"], attempts.c.state != "ended").values(doubt=True)
    )
    tx.event(
        "alert",
        f"reports {acknowledged + 1} to {first - 1} of this node's journal are missing here",
        now,
        severity="critical" if acknowledged else "warning",
        node_id=node["id"],
        data={"code": "reports_missing", "from": acknowledged + 1, "to": first - 1},
    )


def storable(value: Any) -> Any:
    """Without what no text of a database holds: NUL and lone surrogates, say from a name of a file or a process."""
    match value:
        case str():
            return value if _BAD.search(value) is None else _BAD.sub("\ufffd", value)
        case dict():
            return {storable(key): storable(each) for key, each in cast("dict[str, Any]", value).items()}
        case list():
            return [storable(each) for each in cast("list[object]", value)]
        case _:
            return value


def _take_safely(tx: Tx, node_id: str, raw: dict[str, Any], now: float) -> bool:
    """One that cannot be written is told of and passed over: the node would send it, and all behind it, for ever."""
    mark = tx.mark()
    savepoint = tx.conn.begin_nested()
    try:
        taken = _take_one(tx, node_id, raw, now)
    except Exception as error:
        if isinstance(error, exc.SQLAlchemyError) and not is_fault_of_the_request(error):
            raise
        savepoint.rollback()
        tx.undo_to(mark)
        tx.event(
            "alert",
            f"report {raw['id']} cannot be taken: {type(error).__name__}",
            now,
            severity="critical",
            node_id=node_id,
            data={"code": "report_failed", "error": storable(str(error)[:1000])},
        )
        return False
    savepoint.commit()
    return taken


def _take_one(tx: Tx, node_id: str, raw: dict[str, Any], now: float) -> bool:
    """False: of a kind that this version does not know, or not readable as what it says it is."""
    try:
        envelope = ReportEnvelope.model_validate(raw)
    except ValidationError as error:
        inner: Any = raw.get("report")
        kind: Any = cast("dict[str, Any]", inner).get("kind") if isinstance(inner, dict) else None
        if kind in _KINDS:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"])
            tx.event(
                "alert",
                f"report {raw['id']} ({kind}) cannot be read: {where}: {first['msg']}",
                now,
                severity="warning",
                node_id=node_id,
                data={"code": "report_unreadable", "kind": kind},
            )
        return False
    report = envelope.report
    match report:
        case LoanChanged():
            loan_reports.loan_changed(tx, node_id, report, now)
        case LoanStepTaken():
            loan_reports.step_taken(tx, node_id, envelope.id, report, envelope.at)
        case RequestAnswered():
            loan_reports.request_answered(tx, node_id, report, envelope.at)
        case AttemptChanged():
            attempt_reports.attempt_changed(tx, node_id, report, now)
        case EngineChanged():
            inventory.engine_changed(tx, node_id, report, now)
        case DeviceObserved():
            inventory.device_observed(tx, node_id, report, now)
        case OccupancyChanged():
            history.occupancy_changed(tx, node_id, report, envelope.at)
        case OrderAnswer():
            attempt_reports.order_answered(tx, node_id, report, now)
        case Alert():
            tx.event(
                "alert",
                report.sentence,
                envelope.at,
                actor=AGENT,
                severity=report.severity,
                engine_id=report.engine_id,
                loan_id=report.loan_id,
                node_id=node_id,
                data={"code": report.code, **report.data},
            )
    return True
