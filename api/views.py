"""The scheduler's rows as what the API sends."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any, overload

from ..agents.protocol.wire import DeviceProcess, Reason
from ..scheduler import model
from ..scheduler.lifecycle import JobState
from ..scheduler.requests import JobRequest
from . import schemas
from .plans import plans_of


@overload
def time_of(seconds: float) -> datetime: ...
@overload
def time_of(seconds: None) -> None: ...
def time_of(seconds: float | None) -> datetime | None:
    return None if seconds is None else datetime.fromtimestamp(seconds, UTC)


def reason_of(reason: Reason | None) -> schemas.ReasonView | None:
    if reason is None:
        return None
    return schemas.ReasonView(code=reason.code, sentence=reason.sentence, data=reason.data)


def job_reason_of(reason: model.JobReason) -> schemas.ReasonView:
    return schemas.ReasonView(
        code=reason.code,
        sentence=reason.sentence,
        since=time_of(reason.since),
        next_check=time_of(reason.next_check),
        data=dict(reason.data),
    )


def attempt_of(row: model.AttemptRow) -> schemas.Attempt:
    return schemas.Attempt(
        id=row.id,
        job_id=row.job_id,
        no=row.no,
        state=row.state,
        end=row.end,
        exit_code=row.exit_code,
        signal=row.signal,
        node_id=row.node_id,
        device_ids=list(row.device_ids),
        hbm_bytes=row.hbm_bytes,
        loan_id=row.loan_id,
        created_at=time_of(row.created_at),
        started_at=time_of(row.started_at),
        ended_at=time_of(row.ended_at),
        peak_hbm_bytes=row.peak_hbm_bytes,
        reason=reason_of(row.reason),
        cleanup=reason_of(row.cleanup),
    )


def job_of(row: model.JobRow) -> schemas.Job:
    return schemas.Job(
        id=row.id,
        name=row.name,
        state=row.state,
        argv=list(row.argv),
        env=dict(row.env),
        workdir=row.workdir,
        priority=row.priority,
        project=row.project,
        gpus=row.gpus,
        hbm_bytes=row.hbm_bytes,
        time_limit_seconds=row.time_limit_seconds,
        kill_grace_seconds=row.kill_grace_seconds,
        created_at=time_of(row.created_at),
        queued_at=time_of(row.queued_at),
        started_at=time_of(row.started_at),
        ended_at=time_of(row.ended_at),
        exit_code=row.exit_code,
        signal=row.signal,
        failure_reason=row.failure_reason,
        reasons=[job_reason_of(reason) for reason in row.reasons],
        attempt_no=row.attempt_no,
        attempts=[attempt_of(attempt) for attempt in row.attempts],
        loan_id=row.loan_id,
        cleanup_state=reason_of(row.cleanup_state),
        engine_restore_state=row.engine_restore_state,
        submitted_by=row.submitted_by,
    )


def new_job_of(job_id: str, request: JobRequest, principal: str, now: float) -> schemas.Job:
    """The job as the submit has just made it, without reading it back."""
    created_at = time_of(now)
    return schemas.Job(
        id=job_id,
        name=request.name,
        state=JobState.QUEUED,
        argv=list(request.argv),
        env=dict(request.env),
        workdir=request.workdir,
        priority=request.priority,
        project=request.project,
        gpus=request.gpus,
        hbm_bytes=request.hbm_bytes,
        time_limit_seconds=request.time_limit_seconds,
        kill_grace_seconds=request.kill_grace_seconds,
        created_at=created_at,
        queued_at=created_at,
        submitted_by=principal,
    )


def engine_of(row: model.EngineRow) -> schemas.Engine:
    return schemas.Engine(
        id=row.id,
        name=row.name,
        kind=row.kind,
        models=list(row.models),
        node_id=row.node_id,
        device_ids=list(row.device_ids),
        supervised=row.supervised,
        state=row.state,
        gate=row.gate,
        verified=row.verified,
        incarnation=row.incarnation,
        device_bytes=dict(row.device_bytes),
        residual_bytes=dict(row.residual_bytes),
        capabilities=row.capabilities,
        learned=row.learned,
        policy_version=row.policy_version,
        policy_version_in_force=row.policy_version_in_force,
        policy_locked=row.policy_locked,
        policy_refused=row.policy_refused,
        tells_requests=row.tells_requests,
        endpoint=row.endpoint,
        reason=reason_of(row.reason),
        loan_id=row.loan_id,
        parked=None if row.parked is None else parked_of(row.parked),
        last_wake=None if row.last_wake is None else wake_of(row.last_wake),
        not_before=time_of(row.not_before) if row.not_before > 0 else None,
        updated_at=time_of(row.updated_at),
    )


def parked_of(loan: model.LoanRow) -> schemas.ParkedView:
    assert loan.without_job is not None
    return schemas.ParkedView(
        loan_id=loan.id,
        since=time_of(loan.opened_at),
        wanted_by=loan.without_job.wanted_by,
        wake_on_request=loan.without_job.wake_on_request,
        at_most_seconds=loan.restore_by_seconds,
    )


def wake_of(woken: Mapping[str, Any]) -> schemas.WakeView:
    return schemas.WakeView.model_validate({**woken, "at": time_of(woken["at"])})


def operation_of(row: model.OperationRow) -> schemas.Operation:
    return schemas.Operation.model_validate(
        {
            "id": row.id,
            "kind": row.kind,
            "state": row.state,
            "engine_id": row.engine_id,
            "loan_id": row.loan_id,
            "loan_state": row.loan_state,
            "reason": reason_of(row.reason),
            "requested_by": row.requested_by,
            "created_at": time_of(row.created_at),
        }
    )


def policy_of(row: model.PolicyRow) -> schemas.PolicyView:
    return schemas.PolicyView(
        engine_id=row.engine_id,
        version=row.version,
        version_in_force=row.version_in_force,
        refused=row.refused,
        locked=row.locked,
        policy=row.policy,
    )


def device_of(row: model.DeviceRow) -> schemas.Device:
    return schemas.Device(
        id=row.id,
        node_id=row.node_id,
        index=row.index,
        kind=row.kind,
        capacity_bytes=row.capacity_bytes,
        free_bytes=row.free_bytes,
        processes=[DeviceProcess.model_validate(process) for process in row.processes],
        quarantined=reason_of(row.quarantined),
        observed_at=time_of(row.observed_at),
        occupancy=row.occupancy,
        occupancy_since=time_of(row.occupancy_since),
        owner_id=row.owner_id,
        loan_id=row.loan_id,
    )


def node_of(row: model.NodeRow) -> schemas.Node:
    return schemas.Node(
        id=row.id,
        name=row.name,
        state="up" if row.silent_since is None else "silent",
        version=row.version,
        boot_id=row.boot_id,
        incarnation=row.incarnation,
        registered_at=time_of(row.registered_at),
        last_seen_at=time_of(row.last_seen_at),
        silent_since=time_of(row.silent_since),
        devices=[device_of(device) for device in row.devices],
        engine_ids=list(row.engine_ids),
    )


def step_of(row: model.StepRow) -> schemas.LoanStepView:
    return schemas.LoanStepView(
        step=row.step,
        at=time_of(row.at),
        monotonic_seconds=row.monotonic_seconds,
        engine_id=row.engine_id,
        attempt_id=row.attempt_id,
        data=dict(row.data),
    )


def loan_of(row: model.LoanRow) -> schemas.Loan:
    return schemas.Loan(
        id=row.id,
        node_id=row.node_id,
        state=row.state,
        epoch=row.epoch,
        device_ids=list(row.device_ids),
        engine_ids=list(row.engine_ids),
        attempt_ids=list(row.attempt_ids),
        need_bytes=row.need_bytes,
        engine_lost=row.engine_lost,
        recall_ordered=row.recall_ordered,
        reason=reason_of(row.reason),
        opened_at=time_of(row.opened_at),
        closed_at=time_of(row.closed_at),
        restore_by_seconds=row.restore_by_seconds,
        without_job=row.without_job,
        first_byte_seconds=row.first_byte_seconds,
        plans=plans_of(row),
        steps=[step_of(step) for step in row.steps],
    )


def event_of(row: model.EventRow) -> schemas.Event:
    return schemas.Event(
        seq=row.seq,
        at=time_of(row.at),
        type=row.type,
        severity=row.severity,
        actor=row.actor,
        sentence=row.sentence,
        job_id=row.job_id,
        attempt_id=row.attempt_id,
        loan_id=row.loan_id,
        engine_id=row.engine_id,
        device_id=row.device_id,
        node_id=row.node_id,
        from_state=row.from_state,
        to_state=row.to_state,
        data=dict(row.data),
    )


def interval_of(row: model.Interval) -> schemas.UsageInterval:
    return schemas.UsageInterval(
        device_id=row.device_id,
        kind=row.kind,
        owner_id=row.owner_id,
        loan_id=row.loan_id,
        started_at=time_of(row.started_at),
        ended_at=time_of(row.ended_at),
    )
