"""The facts that a decision looks at, in as few statements as there are tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from sqlalchemy import Connection, Double, Select, bindparam, exists, func, select

from ...agents.protocol.capabilities import Capabilities, refusal
from ...agents.protocol.loans import LoanState
from ...agents.protocol.plans import Learned
from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import (
    LOAN_OVER,
    AttemptEnd,
    AttemptState,
    EngineState,
    GateState,
    OccupancyKind,
    Reason,
    WithoutJob,
)
from ..lifecycle import JobState
from ..model import (
    Attempt,
    AttemptId,
    Device,
    DeviceId,
    Engine,
    EngineId,
    Job,
    JobId,
    JobReason,
    Loan,
    LoanId,
    Node,
    NodeId,
    Snapshot,
)
from ..tables import attempts, devices, engines, jobs, loans, nodes, occupancy

JOBS_OF_A_SHAPE_MAX: Final = 100
_SHOWN: Final = (
    jobs.c.id,
    jobs.c.priority,
    jobs.c.created_at,
    jobs.c.gpus,
    jobs.c.hbm_bytes,
    jobs.c.attempt_no,
    jobs.c.not_before,
    jobs.c.trouble,
    jobs.c.assigned_loan_id,
    jobs.c.reasons,
)

# Built once: building a statement costs more than running it.
_NODES: Final = select(nodes)
_DEVICES: Final = select(devices).where(devices.c.present)
_IDLE: Final = select(occupancy.c.device_id, occupancy.c.started_at).where(
    occupancy.c.ended_at.is_(None), occupancy.c.kind == OccupancyKind.IDLE.value
)
_ENGINES: Final = select(engines).where(engines.c.present)
# Those in back-off are ranked apart: they can take nobody's place.
_PLACE: Final = func.row_number().over(
    partition_by=(jobs.c.gpus, jobs.c.hbm_bytes, jobs.c.not_before > bindparam("now", type_=Double)),
    order_by=(jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id),
)
_RANKED: Final = select(*_SHOWN, _PLACE.label("place")).where(jobs.c.state == JobState.QUEUED.value).subquery()
_JOBS: Final = select(_RANKED).where(_RANKED.c.place <= JOBS_OF_A_SHAPE_MAX)
_ATTEMPTS: Final = (
    select(attempts, jobs.c.stop_wanted)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .where(attempts.c.state != AttemptState.ENDED.value)
)
_CAME_TOO_LATE: Final = exists().where(
    attempts.c.loan_id == loans.c.id,
    attempts.c.end == AttemptEnd.NOT_STARTED.value,
    attempts.c.reason["code"].as_string() == LOAN_OVER,
)
_LOANS: Final = select(loans, _CAME_TOO_LATE.label("takes_no_more")).where(loans.c.state != LoanState.CLOSED.value)


def load(conn: Connection, now: float) -> Snapshot:
    return Snapshot(
        nodes=tuple(_nodes(conn)),
        devices=tuple(_devices(conn)),
        engines=tuple(_engines(conn)),
        jobs=tuple(_jobs(conn, now)),
        attempts=tuple(_attempts(conn)),
        loans=tuple(_loans(conn)),
    )


def load_node(conn: Connection, node_id: str) -> Snapshot:
    """What an operator's wish about an engine is judged by: its node, without jobs. No group goes beyond a node."""
    return Snapshot(
        nodes=tuple(_nodes(conn, _NODES.where(nodes.c.id == node_id))),
        devices=tuple(_devices(conn, _DEVICES.where(devices.c.node_id == node_id))),
        engines=tuple(
            _engines(
                conn,
                _ENGINES.where(engines.c.node_id == node_id),
                _IDLE.where(occupancy.c.device_id.in_(select(devices.c.id).where(devices.c.node_id == node_id))),
            )
        ),
        loans=tuple(_loans(conn, _LOANS.where(loans.c.node_id == node_id))),
    )


def _nodes(conn: Connection, statement: Select[Any] = _NODES) -> Iterable[Node]:
    for row in conn.execute(statement).mappings():
        silent = row["silent_since"] is not None
        in_use = row["confirmed_incarnation"] == row["incarnation"]
        yield Node(NodeId(row["id"]), row["name"], in_use and not silent, silent, row["heard_count"])


def _devices(conn: Connection, statement: Select[Any] = _DEVICES) -> Iterable[Device]:
    for row in conn.execute(statement).mappings():
        held: dict[str, int] = {}
        for process in row["processes"]:
            held[process["owner"]] = held.get(process["owner"], 0) + process["bytes"]
        yield Device(
            id=DeviceId(row["id"]),
            node_id=NodeId(row["node_id"]),
            index=row["position"],
            capacity_bytes=row["capacity_bytes"],
            free_bytes=row["free_bytes"],
            foreign_bytes=held.get("foreign", 0),
            engine_bytes=held.get("engine", 0),
            job_bytes=held.get("job", 0),
            margin_bytes=row["spawn_margin_bytes"],
            quarantined=row["quarantined"] is not None,
            not_before=row["not_before"],
            trouble=_reason(row["trouble"]),
        )


def _engines(conn: Connection, statement: Select[Any] = _ENGINES, idle: Select[Any, Any] = _IDLE) -> Iterable[Engine]:
    idle_since = {row.device_id: row.started_at for row in conn.execute(idle)}
    for row in conn.execute(statement).mappings():
        device_ids = tuple(DeviceId(each) for each in row["device_ids"])
        idle_at = [idle_since.get(each) for each in device_ids]
        policy = _policy(row["policy"])
        able = None if row["capabilities"] is None else Capabilities.model_validate(row["capabilities"])
        yield Engine(
            id=EngineId(row["id"]),
            node_id=NodeId(row["node_id"]),
            name=row["name"],
            device_ids=device_ids,
            state=EngineState(row["state"]),
            gate=GateState(row["gate"]),
            verified=row["verified"],
            policy=policy,
            device_bytes=row["device_bytes"],
            residual_bytes=row["residual_bytes"],
            idle_since=None if not idle_at or None in idle_at else max(at for at in idle_at if at is not None),
            not_before=row["not_before"],
            trouble=_reason(row["trouble"]),
            is_pressed=row["pressure"] is not None,
            refused=None if able is None else refusal(able, policy),
            capabilities=able,
            learned=None if row["learned"] is None else Learned.model_validate(row["learned"]),
        )


def _jobs(conn: Connection, now: float) -> Iterable[Job]:
    """Jobs of one shape are alike to placing: of each shape the first ones in order are enough to decide."""
    for row in conn.execute(_JOBS, {"now": now}).mappings():
        assigned = row["assigned_loan_id"]
        yield Job(
            id=JobId(row["id"]),
            priority=row["priority"],
            created_at=row["created_at"],
            gpus=row["gpus"],
            hbm_bytes=row["hbm_bytes"],
            attempt_no=row["attempt_no"],
            not_before=row["not_before"],
            trouble=_reason(row["trouble"]),
            assigned_loan_id=None if assigned is None else LoanId(assigned),
            reasons=job_reasons(row["reasons"]),
        )


def _attempts(conn: Connection) -> Iterable[Attempt]:
    for row in conn.execute(_ATTEMPTS).mappings():
        yield Attempt(
            id=AttemptId(row["id"]),
            job_id=JobId(row["job_id"]),
            loan_id=LoanId(row["loan_id"]),
            node_id=NodeId(row["node_id"]),
            device_ids=tuple(DeviceId(each) for each in row["device_ids"]),
            hbm_bytes=row["hbm_bytes"],
            state=AttemptState(row["state"]),
            stop_wanted=row["stop_wanted"],
            stop_ordered=row["stop_ordered"],
        )


def _loans(conn: Connection, statement: Select[Any] = _LOANS) -> Iterable[Loan]:
    for row in conn.execute(statement).mappings():
        yield Loan(
            id=LoanId(row["id"]),
            node_id=NodeId(row["node_id"]),
            device_ids=tuple(DeviceId(each) for each in row["device_ids"]),
            engine_ids=tuple(EngineId(each) for each in row["engine_ids"]),
            state=LoanState(row["state"]),
            need_bytes=row["need_bytes"],
            room_bytes={DeviceId(key): nbytes for key, nbytes in row["room_bytes"].items()},
            is_narrow=_is_narrow(row["plans"]),
            # One that its node did not list is over there; its reports will say how.
            recall_ordered=row["recall_ordered"] or row["missing_incarnation"] is not None,
            expects_more=row["expects_more"],
            engine_lost=row["engine_lost"],
            without_job=without_job_of(row["without_job"]),
            takes_no_more=bool(row["takes_no_more"]),
        )


def without_job_of(value: Mapping[str, Any] | None) -> WithoutJob | None:
    return None if value is None else WithoutJob.model_validate(value)


def _is_narrow(plans: Mapping[str, Mapping[str, Any]] | None) -> bool:
    return plans is not None and not all(plan["whole"] for plan in plans.values())


def _reason(value: Mapping[str, Any] | None) -> Reason | None:
    return None if value is None else Reason.model_validate(value)


def _policy(value: Mapping[str, Any]) -> EnginePolicy:
    return EnginePolicy.model_validate(value)


def job_reasons(rows: Iterable[Mapping[str, Any]]) -> tuple[JobReason, ...]:
    return tuple(JobReason(row["code"], row["sentence"], row["since"], row["next_check"], row["data"]) for row in rows)
