"""Jobs and attempts as people see them. What only the moment of reading knows is filled in here: a place in the
queue, and what a job that is being started waits for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from sqlalchemy import Connection, RowMapping, func, select

from ...agents.protocol.loans import LoanState
from ...agents.protocol.wire import AttemptEnd, AttemptState, Reason
from ..explain import QUEUED_BEHIND, queued_behind, waiting_for_loan
from ..lifecycle import JobState
from ..model import AttemptId, AttemptRow, DeviceId, JobId, JobRow, LoanId, NodeId
from ..tables import jobs
from .snapshots import job_reasons

CHECK_SECONDS = 1.0  # decide looks at least this often


def job_row(row: RowMapping, now: float, attempts: Iterable[AttemptRow]) -> JobRow:
    state = JobState(row["state"])
    reasons = job_reasons(row["reasons"])
    if state is JobState.QUEUED:
        reasons = tuple(replace(each, next_check=max(row["not_before"], now + CHECK_SECONDS)) for each in reasons)
    elif state is JobState.STARTING and row["loan_state"] is not None:
        reasons = waiting_for_loan(LoanState(row["loan_state"]), row["loan_id"], row["opened_at"], now + CHECK_SECONDS)
    return JobRow(
        id=JobId(row["id"]),
        name=row["name"],
        state=state,
        argv=tuple(row["argv"]),
        env=row["env"],
        workdir=row["workdir"],
        priority=row["priority"],
        project=row["project"],
        gpus=row["gpus"],
        hbm_bytes=row["hbm_bytes"],
        time_limit_seconds=row["time_limit_seconds"],
        kill_grace_seconds=row["kill_grace_seconds"],
        created_at=row["created_at"],
        queued_at=row["queued_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        exit_code=row["exit_code"],
        signal=row["signal"],
        failure_reason=row["failure_reason"],
        reasons=reasons,
        attempt_no=row["attempt_no"],
        loan_id=None if row["loan_id"] is None else LoanId(row["loan_id"]),
        cleanup_state=_reason(row["cleanup_state"]),
        engine_restore_state=row["engine_restore_state"],
        submitted_by=row["submitted_by"],
        attempts=tuple(attempts),
    )


def attempt_row(row: RowMapping) -> AttemptRow:
    state = AttemptState(row["state"])
    if row["silent_since"] is not None and state is not AttemptState.ENDED:
        state = AttemptState.UNKNOWN
    return AttemptRow(
        id=AttemptId(row["id"]),
        job_id=JobId(row["job_id"]),
        no=row["attempt_no"],
        loan_id=LoanId(row["loan_id"]),
        node_id=NodeId(row["node_id"]),
        device_ids=tuple(DeviceId(each) for each in row["device_ids"]),
        hbm_bytes=row["hbm_bytes"],
        state=state,
        end=None if row["end"] is None else AttemptEnd(row["end"]),
        exit_code=row["exit_code"],
        signal=row["signal"],
        created_at=row["created_at"],
        started_at=row["started_at"],
        ended_at=row["ended_at"],
        peak_hbm_bytes=row["peak_hbm_bytes"],
        reason=_reason(row["reason"]),
        cleanup=_reason(row["cleanup"]),
    )


def with_positions(conn: Connection, rows: list[JobRow], now: float) -> list[JobRow]:
    """Fills in how many jobs are ahead of those that wait behind others or were not decided about yet."""
    wanted = {row.id for row in rows if row.state is JobState.QUEUED and _waits_behind(row)}
    if not wanted:
        return rows
    order = (jobs.c.priority.desc(), jobs.c.created_at, jobs.c.id)
    place = (func.row_number().over(order_by=order) - 1).label("ahead")
    queue = select(jobs.c.id, place).where(jobs.c.state == JobState.QUEUED.value).subquery()
    found = conn.execute(select(queue.c.id, queue.c.ahead).where(queue.c.id.in_(wanted))).mappings()
    ahead = {each["id"]: int(each["ahead"]) for each in found}
    return [_placed(row, ahead.get(row.id, 0), now) if row.id in wanted else row for row in rows]


def _waits_behind(row: JobRow) -> bool:
    return not row.reasons or any(reason.code == QUEUED_BEHIND for reason in row.reasons)


def _placed(row: JobRow, ahead: int, now: float) -> JobRow:
    since = next((reason.since for reason in row.reasons if reason.code == QUEUED_BEHIND), row.queued_at)
    others = tuple(reason for reason in row.reasons if reason.code != QUEUED_BEHIND)
    return replace(row, reasons=(queued_behind(ahead, since, now + CHECK_SECONDS), *others))


def _reason(value: Mapping[str, Any] | None) -> Reason | None:
    return None if value is None else Reason.model_validate(value)
