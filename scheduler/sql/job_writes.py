"""What users do to jobs."""

from __future__ import annotations

from typing import Any, Final

import uuid_utils
from sqlalchemy import Connection, RowMapping, delete, func, insert, select

from ...agents.protocol.sizes import in_words
from ..errors import Conflict, IdempotencyMismatch, NotFound, QueueFull, Unsatisfiable
from ..lifecycle import TERMINAL_JOB_STATES, JobEvent, JobState
from ..model import JobId, SubmitResult
from ..placement import largest_possible
from ..requests import JobRequest
from ..tables import devices, engines, idempotency_keys, jobs
from .changes import locked_job, move_job
from .retention import IDEMPOTENCY_SECONDS
from .writer import Tx

_NOBODY: Final = ""  # whose key a retry is: no principal is called so
# Built once: building a statement costs more than running it.
_INSERT_JOB: Final = insert(jobs)
_WAITING: Final = (
    select(func.count()).select_from(jobs).where(jobs.c.state.in_((JobState.QUEUED.value, JobState.HELD.value)))
)
_SIZES: Final = select(devices.c.node_id, devices.c.id, devices.c.capacity_bytes, devices.c.spawn_margin_bytes).where(
    devices.c.present
)
_RESIDUALS: Final = select(engines.c.residual_bytes).where(engines.c.present)


def new_id() -> str:
    """UUIDv7: ids sort by when they were made."""
    return str(uuid_utils.uuid7())


def submit(
    tx: Tx,
    request: JobRequest,
    principal: str,
    idempotency_key: str | None,
    body_sha256: str,
    now: float,
    queue_jobs_max: int,
    retry_of: str | None = None,
) -> SubmitResult:
    """The key's row commits with the job's: a repeated request finds both or neither."""
    if idempotency_key is not None:
        seen = replayed(tx, principal, idempotency_key, body_sha256, now)
        if seen is not None:
            return SubmitResult(seen, replayed=True)
    _check_possible(tx.conn, request)
    waiting = tx.conn.execute(_WAITING).scalar_one()
    if waiting >= queue_jobs_max:
        raise QueueFull(queue_jobs_max)
    job_id = JobId(new_id())
    tx.conn.execute(
        _INSERT_JOB,
        {
            "id": job_id,
            "name": request.name,
            "state": JobState.QUEUED.value,
            "argv": list(request.argv),
            "env": request.env,
            "workdir": request.workdir,
            "priority": request.priority,
            "project": request.project,
            "gpus": request.gpus,
            "hbm_bytes": request.hbm_bytes,
            "time_limit_seconds": request.time_limit_seconds,
            "kill_grace_seconds": request.kill_grace_seconds,
            "created_at": now,
            "queued_at": now,
            "reasons": [],
            "attempt_no": 0,
            "not_before": 0.0,
            "trouble_count": 0,
            "stop_wanted": False,
            "submitted_by": principal,
        },
    )
    if idempotency_key is not None:
        remember(tx, principal, idempotency_key, body_sha256, job_id, now)
    tx.event(
        "job_changed",
        "the job was submitted" if retry_of is None else f"the job was submitted to retry {retry_of}",
        now,
        actor=principal,
        job_id=job_id,
        to_state=JobState.QUEUED.value,
        data={"retry_of": retry_of} if retry_of else None,
    )
    tx.touch("jobs", "decide")
    return SubmitResult(job_id, replayed=False)


def retry(
    tx: Tx, job_id: str, principal: str, idempotency_key: str | None, now: float, queue_jobs_max: int
) -> SubmitResult:
    """Submits what an ended job asked for, or answers the job that was made so within a day and has not ended."""
    request = request_of_retry(tx, job_id)  # locks the job: of two at once one makes the new job
    digest = f"retry {job_id}"[:64]
    if idempotency_key is not None:
        seen = replayed(tx, principal, idempotency_key, digest, now)
        if seen is not None:
            return SubmitResult(seen, replayed=True)
    made = replayed(tx, _NOBODY, digest, digest, now)
    if made is not None:
        job = _job(tx, made)
        if JobState(job["state"]) not in TERMINAL_JOB_STATES:
            if idempotency_key is not None:
                remember(tx, principal, idempotency_key, digest, made, now)
            return SubmitResult(made, replayed=True)
        mark = (idempotency_keys.c.principal == _NOBODY) & (idempotency_keys.c.key == digest)
        tx.conn.execute(delete(idempotency_keys).where(mark))
    result = submit(tx, request, principal, idempotency_key, digest, now, queue_jobs_max, retry_of=job_id)
    remember(tx, _NOBODY, digest, digest, result.job_id, now)
    return result


def remember(tx: Tx, principal: str, key: str, body_sha256: str, made_id: str, now: float) -> None:
    """``made_id``: what the request made, a job or an operation."""
    tx.conn.execute(
        insert(idempotency_keys).values(
            principal=principal, key=key, body_sha256=body_sha256, job_id=made_id, created_at=now
        )
    )


def replayed(tx: Tx, principal: str, key: str, body_sha256: str, now: float) -> JobId | None:
    if tx.conn.dialect.name == "postgresql":
        # A row that another server is about to insert cannot be locked; its key can.
        both = func.hashtextextended(f"{principal} {key}", 0)
        tx.conn.execute(select(func.pg_advisory_xact_lock(both)))
    here = (idempotency_keys.c.principal == principal) & (idempotency_keys.c.key == key)
    row = tx.conn.execute(select(idempotency_keys).where(here).with_for_update()).one_or_none()
    if row is None:
        return None
    if row.created_at < now - IDEMPOTENCY_SECONDS:
        tx.conn.execute(delete(idempotency_keys).where(here))
        return None
    if row.body_sha256 != body_sha256:
        raise IdempotencyMismatch(key)
    return JobId(row.job_id)


def _check_possible(conn: Connection, request: JobRequest) -> None:
    """Refuses what no known node could ever run. With no node known yet it waits."""
    rows = conn.execute(_SIZES).all()
    if not rows:
        return
    kept: dict[str, int] = {}
    for residual in conn.execute(_RESIDUALS).scalars():
        for device_id, nbytes in residual.items():
            kept[device_id] = kept.get(device_id, 0) + nbytes
    by_node: dict[str, list[int]] = {}
    for row in rows:
        size = row.capacity_bytes - kept.get(row.id, 0) - (row.spawn_margin_bytes or 0)
        by_node.setdefault(row.node_id, []).append(max(0, size))
    largest_gpus = max(len(sizes) for sizes in by_node.values())
    largest_bytes = largest_possible(by_node.values(), request.gpus)
    if largest_bytes == 0:
        raise Unsatisfiable(
            "gpus",
            f"no node has {request.gpus} devices; the largest has {largest_gpus}",
            largest_bytes=0,
            largest_gpus=largest_gpus,
        )
    if request.hbm_bytes is not None and request.hbm_bytes > largest_bytes:
        raise Unsatisfiable(
            "hbm_bytes",
            f"{in_words(request.hbm_bytes)} on each of {request.gpus} devices of one node do not exist;"
            f" the largest possible is {in_words(largest_bytes)}",
            largest_bytes=largest_bytes,
            largest_gpus=largest_gpus,
        )


def cancel(tx: Tx, job_id: str, principal: str, now: float) -> None:
    job = _job(tx, job_id)
    state = JobState(job["state"])
    if state is JobState.CANCELLED or state is JobState.STOPPING:
        return
    if state in TERMINAL_JOB_STATES:
        raise Conflict(f"the job has ended already: {state}", state=state.value)
    waiting = state in (JobState.QUEUED, JobState.HELD)
    event = JobEvent.CANCELLED if waiting else JobEvent.STOP_WANTED
    sentence = f"cancelled by {principal}"
    if not move_job(tx, job, event, now, sentence=sentence, actor=principal, values={"stop_wanted": True}):
        raise Conflict("the job changed at the same moment; look again", state=state.value)


def hold(tx: Tx, job_id: str, principal: str, now: float) -> None:
    job = _job(tx, job_id)
    state = JobState(job["state"])
    if state is JobState.HELD:
        return
    if state is not JobState.QUEUED:
        raise Conflict(f"the job is {state}: only a queued one can be held", state=state.value)
    sentence = f"held by {principal}"
    why = {"code": "Held", "sentence": sentence, "since": now, "next_check": None, "data": {"by": principal}}
    values: dict[str, Any] = {"reasons": [why], "assigned_loan_id": None}
    if not move_job(tx, job, JobEvent.HOLD, now, sentence=sentence, actor=principal, values=values):
        raise Conflict("the job changed at the same moment; look again", state=state.value)


def release(tx: Tx, job_id: str, principal: str, now: float) -> None:
    job = _job(tx, job_id)
    state = JobState(job["state"])
    if state is JobState.QUEUED:
        return
    if state is not JobState.HELD:
        raise Conflict(f"the job is {state}: only a held one can be released", state=state.value)
    values: dict[str, Any] = {"reasons": [], "queued_at": now}
    move_job(tx, job, JobEvent.RELEASE, now, sentence=f"released by {principal}", actor=principal, values=values)


def request_of_retry(tx: Tx, job_id: str) -> JobRequest:
    """What to submit to run a job again that has ended without success: its result stays as it is."""
    job = _job(tx, job_id)
    state = JobState(job["state"])
    if state not in TERMINAL_JOB_STATES:
        raise Conflict(f"the job is {state}: only one that has ended can be retried", state=state.value)
    if state is JobState.SUCCEEDED:
        raise Conflict("the job has succeeded: there is nothing to retry; submit it anew", state=state.value)
    return JobRequest.model_validate({name: job[name] for name in JobRequest.model_fields})


def _job(tx: Tx, job_id: str) -> RowMapping:
    job = locked_job(tx, job_id)
    if job is None:
        raise NotFound("job", job_id)
    return job
