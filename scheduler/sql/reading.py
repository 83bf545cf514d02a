"""What people and agents read. Pages are by key, never by offset."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from sqlalchemy import Connection, RowMapping, func, select

from ...agents.protocol.capabilities import Capabilities
from ...agents.protocol.loans import LoanState, LoanStep
from ...agents.protocol.plans import Learned, Plan
from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import ORDER, EngineState, GateState, OccupancyKind, OrderEnvelope, Reason
from ..errors import Conflict, InvalidRequest, NotFound, StaleIncarnation
from ..lifecycle import JobState
from ..model import (
    AttemptId,
    AttemptRow,
    DeviceId,
    DeviceRow,
    EngineId,
    EngineRow,
    EventRow,
    Interval,
    JobRow,
    LoanId,
    LoanRow,
    NodeId,
    NodeRow,
    PolicyRow,
    StepRow,
)
from ..tables import attempts, devices, engines, events, jobs, loan_devices, loan_steps, loans, nodes, occupancy, orders
from ..usage import Sight, cut
from .job_rows import attempt_row, job_row, with_positions
from .snapshots import without_job_of

PAGE_MAX: Final = 1000
_INTERVALS_MAX: Final = 100_000


# ---- jobs ------------------------------------------------------------------------------------------------------


def job(conn: Connection, job_id: str, now: float) -> JobRow:
    row = conn.execute(_jobs_with_loans().where(jobs.c.id == job_id)).mappings().one_or_none()
    if row is None:
        raise NotFound("job", job_id)
    found = conn.execute(_attempts().where(attempts.c.job_id == job_id).order_by(attempts.c.attempt_no))
    return with_positions(conn, [job_row(row, now, [attempt_row(each) for each in found.mappings()])], now)[0]


def jobs_page(
    conn: Connection, states: Sequence[JobState], project: str | None, limit: int, cursor: str | None, now: float
) -> tuple[list[JobRow], str | None]:
    statement = _jobs_with_loans()
    if states:
        statement = statement.where(jobs.c.state.in_([state.value for state in states]))
    if project is not None:
        if "\0" in project:
            raise InvalidRequest("project", "a NUL cannot be in the name of a project")
        statement = statement.where(jobs.c.project == project)
    if cursor is not None:
        statement = statement.where(jobs.c.id < _key_of(cursor))
    limit = _page(limit)
    rows = conn.execute(statement.order_by(jobs.c.id.desc()).limit(limit + 1)).mappings().all()
    found = with_positions(conn, [job_row(row, now, ()) for row in rows[:limit]], now)
    return found, _cursor_of(found[-1].id) if len(rows) > limit else None


def attempt(conn: Connection, attempt_id: str) -> AttemptRow:
    row = conn.execute(_attempts().where(attempts.c.id == attempt_id)).mappings().one_or_none()
    if row is None:
        raise NotFound("attempt", attempt_id)
    return attempt_row(row)


def _jobs_with_loans() -> Any:
    loan_state = loans.c.state.label("loan_state")
    return select(jobs, loan_state, loans.c.opened_at).outerjoin(loans, loans.c.id == jobs.c.loan_id)


def _attempts() -> Any:
    return select(attempts, nodes.c.silent_since).join(nodes, nodes.c.id == attempts.c.node_id)


def _page(limit: int) -> int:
    if not 1 <= limit <= PAGE_MAX:
        raise InvalidRequest("limit", f"{limit} is not within 1 to {PAGE_MAX}")
    return limit


def _cursor_of(key: str) -> str:
    return base64.urlsafe_b64encode(key.encode()).decode().rstrip("=")


def _key_of(cursor: str) -> str:
    try:
        key = base64.urlsafe_b64decode(cursor + "=" * (-len(cursor) % 4)).decode("ascii")
    except (binascii.Error, UnicodeDecodeError, ValueError):
        key = ""
    if not 0 < len(key) <= 64:
        raise InvalidRequest("cursor", f"{cursor!r} is no cursor of this server; start without one")
    return key


# ---- engines and nodes -----------------------------------------------------------------------------------------


def engine_rows(conn: Connection) -> list[EngineRow]:
    statement = select(engines).where(engines.c.present).order_by(engines.c.name, engines.c.id)
    return _engine_rows(conn, conn.execute(statement).mappings().all())


def engine(conn: Connection, id_or_name: str) -> EngineRow:
    here = (engines.c.id == id_or_name) | (engines.c.name == id_or_name)
    rows = conn.execute(select(engines).where(here).order_by(engines.c.present.desc())).mappings().all()
    by_id = [row for row in rows if row["id"] == id_or_name]
    present = by_id or [row for row in rows if row["present"]]
    if not present:
        raise NotFound("engine", id_or_name)
    if len(present) > 1:
        ids = ", ".join(sorted(row["id"] for row in present))
        raise Conflict(f"several engines are named {id_or_name!r}; name one by its id: {ids}")
    return _engine_rows(conn, present)[0]


def _engine_rows(conn: Connection, rows: Iterable[RowMapping]) -> list[EngineRow]:
    lent: dict[str, RowMapping] = {}
    for loan in conn.execute(select(loans).where(loans.c.state != LoanState.CLOSED.value)).mappings():
        lent.update(dict.fromkeys(loan["engine_ids"], loan))
    asleep = {key: _loan_row(loan, (), ()) for key, loan in lent.items() if loan["without_job"] is not None}
    return [
        EngineRow(
            id=EngineId(row["id"]),
            node_id=NodeId(row["node_id"]),
            name=row["name"],
            kind=row["kind"],
            models=tuple(row["models"]),
            device_ids=tuple(DeviceId(each) for each in row["device_ids"]),
            supervised=row["supervised"],
            state=EngineState(row["state"]),
            gate=GateState(row["gate"]),
            verified=row["verified"],
            incarnation=row["incarnation"],
            device_bytes=row["device_bytes"],
            residual_bytes=row["residual_bytes"],
            capabilities=None if row["capabilities"] is None else Capabilities.model_validate(row["capabilities"]),
            learned=None if row["learned"] is None else Learned.model_validate(row["learned"]),
            processes=row["processes"],
            endpoint=row["endpoint"],
            reason=as_reason(row["reason"]),
            policy=EnginePolicy.model_validate(row["policy"]),
            policy_version=row["policy_version"],
            policy_version_in_force=row["policy_version_in_force"],
            policy_locked=row["policy_locked"],
            not_before=row["not_before"],
            loan_id=LoanId(lent[row["id"]]["id"]) if row["id"] in lent else None,
            updated_at=row["updated_at"],
            last_wake=row["last_wake"],
            parked=asleep.get(row["id"]),
            tells_requests=row["tells_requests"],
            policy_refused=_policy_refused(row),
        )
        for row in rows
    ]


def _policy_refused(row: RowMapping) -> str | None:
    """What was said of an older version, or of one that is in force after all, is over."""
    refused, version = row["policy_refused"], row["policy_version"]
    if refused is None or refused["version"] != version or row["policy_version_in_force"] >= version:
        return None
    return str(refused["sentence"])


def policy(conn: Connection, id_or_name: str) -> PolicyRow:
    return policy_of(engine(conn, id_or_name))


def policy_of(row: EngineRow) -> PolicyRow:
    return PolicyRow(
        row.id, row.policy_version, row.policy, row.policy_locked, row.policy_version_in_force, row.policy_refused
    )


def node_rows(conn: Connection) -> list[NodeRow]:
    return _node_rows(conn, conn.execute(select(nodes).order_by(nodes.c.name, nodes.c.id)).mappings().all())


def node(conn: Connection, id_or_name: str) -> NodeRow:
    here = (nodes.c.id == id_or_name) | (nodes.c.name == id_or_name)
    rows = conn.execute(select(nodes).where(here)).mappings().all()
    chosen = [row for row in rows if row["id"] == id_or_name] or rows
    if not chosen:
        raise NotFound("node", id_or_name)
    if len(chosen) > 1:
        raise Conflict(f"several nodes are named {id_or_name!r}; name one by its id")
    return _node_rows(conn, chosen)[0]


def _node_rows(conn: Connection, rows: Iterable[RowMapping]) -> list[NodeRow]:
    owned: dict[str, list[DeviceRow]] = {}
    for row in conn.execute(_devices()).mappings():
        owned.setdefault(row["node_id"], []).append(_device_row(row))
    resident: dict[str, list[EngineId]] = {}
    statement = select(engines.c.node_id, engines.c.id).where(engines.c.present).order_by(engines.c.name, engines.c.id)
    for node_id, engine_id in conn.execute(statement):
        resident.setdefault(node_id, []).append(EngineId(engine_id))
    return [
        NodeRow(
            id=NodeId(row["id"]),
            name=row["name"],
            version=row["version"],
            boot_id=row["boot_id"],
            incarnation=row["incarnation"],
            silent_since=row["silent_since"],
            last_seen_at=row["last_seen_at"],
            registered_at=row["registered_at"],
            devices=tuple(owned.get(row["id"], ())),
            engine_ids=tuple(resident.get(row["id"], ())),
        )
        for row in rows
    ]


def _devices() -> Any:
    now_open = (occupancy.c.device_id == devices.c.id) & occupancy.c.ended_at.is_(None)
    held = (loan_devices.c.device_id == devices.c.id) & loan_devices.c.open
    return (
        select(
            devices,
            nodes.c.silent_since,
            nodes.c.last_seen_at,
            occupancy.c.kind.label("occupancy"),
            occupancy.c.started_at,
            occupancy.c.owner_id,
            loan_devices.c.loan_id,
        )
        .join(nodes, nodes.c.id == devices.c.node_id)
        .outerjoin(occupancy, now_open)
        .outerjoin(loan_devices, held)
        .where(devices.c.present)
        .order_by(devices.c.node_id, devices.c.position, devices.c.id)
    )


def _device_row(row: RowMapping) -> DeviceRow:
    silent = row["silent_since"] is not None
    known = row["occupancy"] is not None and not silent
    return DeviceRow(
        id=DeviceId(row["id"]),
        node_id=NodeId(row["node_id"]),
        index=row["position"],
        kind=row["kind"],
        capacity_bytes=row["capacity_bytes"],
        free_bytes=row["free_bytes"],
        quarantined=as_reason(row["quarantined"]),
        processes=tuple(row["processes"]),
        observed_at=row["observed_at"],
        occupancy=OccupancyKind(row["occupancy"]) if known else OccupancyKind.UNKNOWN,
        occupancy_since=row["last_seen_at"] if silent else row["started_at"],
        owner_id=row["owner_id"] if known else None,
        loan_id=None if row["loan_id"] is None else LoanId(row["loan_id"]),
    )


# ---- loans -----------------------------------------------------------------------------------------------------


def loans_page(conn: Connection, open_only: bool, limit: int, cursor: str | None) -> tuple[list[LoanRow], str | None]:
    statement = select(loans)
    if open_only:
        statement = statement.where(loans.c.state != LoanState.CLOSED.value)
    if cursor is not None:
        statement = statement.where(loans.c.id < _key_of(cursor))
    limit = _page(limit)
    rows = conn.execute(statement.order_by(loans.c.id.desc()).limit(limit + 1)).mappings().all()
    ran = _attempts_of(conn, [row["id"] for row in rows[:limit]])
    found = [_loan_row(row, ran.get(row["id"], ()), ()) for row in rows[:limit]]
    return found, _cursor_of(found[-1].id) if len(rows) > limit else None


def loan(conn: Connection, loan_id: str) -> LoanRow:
    row = conn.execute(select(loans).where(loans.c.id == loan_id)).mappings().one_or_none()
    if row is None:
        raise NotFound("loan", loan_id)
    taken = select(loan_steps).where(loan_steps.c.loan_id == loan_id).order_by(loan_steps.c.report_id)
    steps = tuple(
        StepRow(
            LoanStep(step["step"]),
            None if step["engine_id"] is None else EngineId(step["engine_id"]),
            None if step["attempt_id"] is None else AttemptId(step["attempt_id"]),
            step["at"],
            step["monotonic_seconds"],
            step["data"],
        )
        for step in conn.execute(taken).mappings()
    )
    return _loan_row(row, _attempts_of(conn, [loan_id]).get(loan_id, ()), steps)


def _attempts_of(conn: Connection, loan_ids: Sequence[str]) -> dict[str, list[AttemptId]]:
    found: dict[str, list[AttemptId]] = {}
    statement = select(attempts.c.loan_id, attempts.c.id).where(attempts.c.loan_id.in_(loan_ids))
    for loan_id, attempt_id in conn.execute(statement.order_by(attempts.c.id)):
        found.setdefault(loan_id, []).append(AttemptId(attempt_id))
    return found


def _loan_row(row: RowMapping, attempt_ids: Iterable[AttemptId], steps: tuple[StepRow, ...]) -> LoanRow:
    return LoanRow(
        id=LoanId(row["id"]),
        node_id=NodeId(row["node_id"]),
        epoch=row["epoch"],
        device_ids=tuple(DeviceId(each) for each in row["device_ids"]),
        engine_ids=tuple(EngineId(each) for each in row["engine_ids"]),
        need_bytes=row["need_bytes"],
        policies={EngineId(key): EnginePolicy.model_validate(each) for key, each in row["policies"].items()},
        plans=_plans(row["plans"]),
        state=LoanState(row["state"]),
        reason=as_reason(row["reason"]),
        engine_lost=row["engine_lost"],
        restore_by_seconds=row["restore_by_seconds"],
        recall_ordered=row["recall_ordered"],
        opened_at=row["opened_at"],
        closed_at=row["closed_at"],
        attempt_ids=tuple(attempt_ids),
        without_job=without_job_of(row["without_job"]),
        first_byte_seconds=row["first_byte_seconds"],
        steps=steps,
    )


def _plans(value: Mapping[str, Any] | None) -> dict[EngineId, Plan]:
    return {EngineId(key): Plan.model_validate(each) for key, each in (value or {}).items()}


# ---- orders, events, history -----------------------------------------------------------------------------------


def orders_after(conn: Connection, node_id: str, seq: int, limit: int) -> tuple[list[OrderEnvelope], bool]:
    """The orders, and whether asking for them puts a registration in use."""
    statement = select(nodes.c.fence_seq, nodes.c.incarnation, nodes.c.confirmed_incarnation)
    known = conn.execute(statement.where(nodes.c.id == node_id)).one_or_none()
    if known is None:
        raise NotFound("node", node_id)
    if seq < known.fence_seq:
        raise StaleIncarnation(node_id, f"orders after {seq} are over", known.incarnation)
    wanted = select(orders).where(orders.c.node_id == node_id, orders.c.seq > seq).order_by(orders.c.seq)
    found = [
        OrderEnvelope(
            seq=row["seq"],
            term=row["term"],
            incarnation=row["incarnation"],
            order=ORDER.validate_python(row["body"]),
        )
        for row in conn.execute(wanted.limit(_page(limit))).mappings()
    ]
    return found, known.confirmed_incarnation != known.incarnation


def events_after(conn: Connection, seq: int, limit: int, types: Sequence[str]) -> list[EventRow]:
    statement = select(events).where(events.c.seq > seq)
    if types:
        statement = statement.where(events.c.type.in_(types))
    rows = conn.execute(statement.order_by(events.c.seq).limit(_page(limit))).mappings()
    return [EventRow(**row) for row in rows]


def last_event_seq(conn: Connection) -> int:
    return int(conn.execute(select(func.max(events.c.seq))).scalar() or 0)


def usage(conn: Connection, device_id: str | None, since: float, until: float, now: float) -> list[Interval]:
    if not since < until:
        raise InvalidRequest("until", "has to be later than `since`")
    if device_id is not None and conn.execute(select(devices.c.id).where(devices.c.id == device_id)).first() is None:
        raise NotFound("device", device_id)
    sights = {
        row.id: Sight(row.last_seen_at, row.silent_since is not None)
        for row in conn.execute(
            select(devices.c.id, nodes.c.last_seen_at, nodes.c.silent_since).join(
                nodes, nodes.c.id == devices.c.node_id
            )
        )
    }
    touching = (occupancy.c.started_at < until) & (occupancy.c.ended_at.is_(None) | (occupancy.c.ended_at > since))
    statement = select(occupancy).where(touching).order_by(occupancy.c.device_id, occupancy.c.no)
    if device_id is not None:
        statement = statement.where(occupancy.c.device_id == device_id)
    rows = conn.execute(statement.limit(_INTERVALS_MAX + 1)).mappings().all()
    if len(rows) > _INTERVALS_MAX:
        raise InvalidRequest("since", f"over {_INTERVALS_MAX} intervals; ask for a shorter time or one device")
    exact = [
        Interval(
            DeviceId(row["device_id"]),
            row["started_at"],
            row["ended_at"],
            OccupancyKind(row["kind"]),
            row["owner_id"],
            None if row["loan_id"] is None else LoanId(row["loan_id"]),
        )
        for row in rows
    ]
    return cut(exact, sights, since, until, now)


def as_reason(value: Mapping[str, Any] | None) -> Reason | None:
    return None if value is None else Reason.model_validate(value)
