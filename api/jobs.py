"""Jobs: submit, list, show, cancel, hold, release, retry, attempts."""

from __future__ import annotations

import hashlib
import json
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from ..scheduler.lifecycle import TERMINAL_JOB_STATES, JobState
from ..scheduler.model import JobRow
from ..scheduler.requests import JobRequest
from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .idempotency import KEY_PARAMETER, idempotency_key
from .services import PAGE_MAX, Services, now, principal_of, read_body, services_of

router = APIRouter(tags=["jobs"])

WAIT_SECONDS_MAX: Final = 60.0
ENDED: Final = frozenset(TERMINAL_JOB_STATES)


@router.post(
    "/jobs",
    status_code=201,
    summary="Submit a job",
    responses={
        200: {"model": schemas.Job, "description": "This Idempotency-Key was used before with the same body"},
        201: {"model": schemas.Job, "description": "Queued"},
    },
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/JobRequest"}}},
        },
        "parameters": [KEY_PARAMETER],
    },
)
async def submit(request: Request) -> Response:
    # The hottest route: it takes the bare request and sends ready bytes.
    wanted = await read_body(request, JobRequest)
    services = services_of(request)
    principal, at = principal_of(request), now()
    key = idempotency_key(request)
    digest = _digest(wanted) if key is not None else ""
    result = await services.store.submit_job(wanted, principal, key, digest, at)
    if result.replayed:
        job, status = views.job_of(await services.store.get_job(result.job_id)), 200
    else:
        job, status = views.new_job_of(result.job_id, wanted, principal, at), 201
    return _json(job, status, {"Location": f"/api/v1/jobs/{result.job_id}"})


@router.get("/jobs", response_model=schemas.JobPage, responses=NOT_MODIFIED, summary="List jobs, newest first")
async def list_jobs(
    request: Request,
    state: Annotated[list[JobState] | None, Query(description="Only jobs in one of these states")] = None,
    project: str | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX)] = 100,
    cursor: str | None = None,
) -> Response:
    store = services_of(request).store
    rows, next_cursor = await store.list_jobs(states=state or (), project=project, limit=limit, cursor=cursor)
    return answer(request, schemas.JobPage(items=[views.job_of(row) for row in rows], next_cursor=next_cursor))


@router.get(
    "/jobs/{job_id}",
    response_model=schemas.Job,
    responses=NOT_MODIFIED,
    summary="Show a job with its reasons and attempts",
)
async def show(
    request: Request,
    job_id: str,
    wait_seconds: Annotated[
        float, Query(ge=0, le=WAIT_SECONDS_MAX, description="Answer once the job has ended, at the latest after this")
    ] = 0,
) -> Response:
    services = services_of(request)
    row = await services.store.get_job(job_id)
    if wait_seconds > 0 and row.state not in TERMINAL_JOB_STATES:
        row = await _wait_ended(services, job_id, wait_seconds)
    return answer(request, views.job_of(row))


async def _wait_ended(services: Services, job_id: str, seconds: float) -> JobRow:
    deadline = now() + seconds
    with services.topics.watch("jobs") as watch:
        while True:
            watch.clear()
            row = await services.store.get_job(job_id)
            left = deadline - now()
            if row.state in TERMINAL_JOB_STATES or left <= 0 or services.topics.stopping.is_set():
                return row
            await watch.wait(left)


@router.post("/jobs/{job_id}/cancel", status_code=202, summary="Cancel a job")
async def cancel(request: Request, job_id: str) -> schemas.Job:
    row = await services_of(request).store.cancel_job(job_id, principal_of(request), now())
    return views.job_of(row)


@router.post("/jobs/{job_id}/hold", summary="Keep a queued job from being started until it is released")
async def hold(request: Request, job_id: str) -> schemas.Job:
    return views.job_of(await services_of(request).store.hold_job(job_id, principal_of(request), now()))


@router.post("/jobs/{job_id}/release", summary="Let a held job be started")
async def release(request: Request, job_id: str) -> schemas.Job:
    return views.job_of(await services_of(request).store.release_job(job_id, principal_of(request), now()))


@router.post(
    "/jobs/{job_id}/retry",
    status_code=201,
    response_model=schemas.Job,
    summary="Submit anew what a job asked for that has ended without success",
    responses={
        200: {
            "model": schemas.Job,
            "description": "It was retried within 24 h, by this Idempotency-Key or by a job that has not ended",
        }
    },
    openapi_extra={"parameters": [KEY_PARAMETER]},
)
async def retry(request: Request, job_id: str) -> Response:
    store = services_of(request).store
    result = await store.retry_job(job_id, principal_of(request), idempotency_key(request), now())
    job = views.job_of(await store.get_job(result.job_id))
    return _json(job, 200 if result.replayed else 201, {"Location": f"/api/v1/jobs/{job.id}"})


@router.get("/jobs/{job_id}/attempts", summary="List a job's attempts, oldest first")
async def attempts(request: Request, job_id: str) -> schemas.AttemptList:
    rows = await services_of(request).store.list_attempts(job_id)
    return schemas.AttemptList(items=[views.attempt_of(row) for row in rows])


def _digest(wanted: JobRequest) -> str:
    # Of the meaning, not of the bytes: the same body with its members in another order is the same body.
    canonical = json.dumps(wanted.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(canonical.encode("utf-8", "surrogatepass")).hexdigest()


def _json(view: schemas.View, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    return Response(view.model_dump_json().encode(), status, headers, "application/json")
