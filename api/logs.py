"""Logs: a client's GET and an agent's POST, joined. Bytes are passed on as they come; kept are only the last ones of
an attempt that has ended, which are answered when its node is silent or does not have them any more.

GET registers a relay and orders the node's agent to fetch; the agent POSTs to the relay's id. One request may be
answered by several POSTs, one after the other; the one that says ``Lull-Log-End: 1`` is the last.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Annotated, Final, Literal

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from ..agents.protocol.wire import AttemptEnd, AttemptState, FetchLog
from ..scheduler.lifecycle import TERMINAL_JOB_STATES
from ..scheduler.model import AttemptRow, JobRow, LogTail
from .middleware import StreamCut
from .problems import Problem, invalid_field
from .relays import AgentSilent, Part, Relay, RelayClosed, Relays
from .services import SEQ_MAX, Services, now, services_of

router = APIRouter(tags=["jobs"])
agent_router = APIRouter(tags=["agents"])

OFFSET: Final = "Lull-Log-Offset"
GAP: Final = "Lull-Log-Gap"
END: Final = "Lull-Log-End"
PROBLEM: Final = "Lull-Log-Problem"
ATTEMPT: Final = "Lull-Log-Attempt"
SOURCE: Final = "Lull-Log-Source"
_HEADERS: Final = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-store", "X-Accel-Buffering": "no"}
_BYTES_TYPE: Final = "text/plain; charset=utf-8"


@router.get(
    "/jobs/{job_id}/logs",
    summary="A stream's bytes, from the node that has them",
    response_class=StreamingResponse,
    responses={
        200: {
            "description": "The bytes. Lull-Log-Offset is where they begin, Lull-Log-Gap how many before were not kept."
            " Lull-Log-Source: server says that the node did not have them and these are the last that are kept here",
            "content": {"text/plain": {"schema": {"type": "string", "format": "binary"}}},
        }
    },
)
async def job_logs(
    request: Request,
    job_id: str,
    stream: Literal["stdout", "stderr"] = "stdout",
    offset: Annotated[int, Query(ge=0, le=SEQ_MAX, description="The first byte wanted")] = 0,
    follow: Annotated[bool, Query(description="Wait for the job to start, and go on to its end")] = False,
    attempt: Annotated[int | None, Query(ge=1, description="By default the newest that was started")] = None,
    after_attempt: Annotated[int | None, Query(ge=1, description="The first that was started after this one")] = None,
) -> Response:
    services = services_of(request)
    row = await _attempt_to_read(services, job_id, (attempt, after_attempt), follow)
    if row is None:
        return Response(b"", media_type=_BYTES_TYPE, headers={**_HEADERS, OFFSET: "0"})
    # An end that is kept is no more than a part: the node is asked first, unless it is known not to answer.
    tail = await services.store.log_tail(row.id, stream) if row.state is AttemptState.ENDED else None
    if tail is not None and tail.node_silent:
        return _kept(tail, row, offset)
    relay = services.relays.register(row.node_id, follow=follow)
    if relay is None:
        raise Problem("too_many_streams", "too many logs are being read; try again", headers={"Retry-After": "5"})
    try:
        order = FetchLog(request_id=relay.request_id, attempt_id=row.id, stream=stream, offset=offset, follow=follow)
        await services.store.add_order(row.node_id, order, now())
        part = await _first_part(services, relay, row)
    except Problem as problem:
        services.relays.close(relay)
        if tail is None or problem.code not in ("agent_silent", "log_expired"):
            raise
        return _kept(tail, row, offset)
    except BaseException:
        services.relays.close(relay)
        raise
    headers = {**_HEADERS, OFFSET: str(part.offset), GAP: str(part.gap_bytes), ATTEMPT: str(row.no)}
    return _LogResponse(services.relays, relay, headers)


def _kept(tail: LogTail, row: AttemptRow, offset: int) -> Response:
    begin = max(offset, tail.offset)
    gap = {GAP: str(begin - offset), OFFSET: str(begin), ATTEMPT: str(row.no), SOURCE: "server"}
    return Response(tail.data[begin - tail.offset :], media_type=_BYTES_TYPE, headers={**_HEADERS, **gap})


async def _first_part(services: Services, relay: Relay, row: AttemptRow) -> Part:
    try:
        part = await relay.first_part(services.topics.stopping)
    except AgentSilent as silent:
        raise Problem(
            "agent_silent",
            f"node {row.node_id} has the log, and its agent does not answer ({silent}); the log is kept there:"
            " try again once the agent runs",
            headers={"Retry-After": "10"},
            extra={"node_id": row.node_id},
        ) from None
    if part is None:
        raise Problem("shutting_down", "try again in a moment", headers={"Retry-After": "2"})
    if part.problem == "busy":
        raise Problem("too_many_streams", f"node {row.node_id} is sending many logs", headers={"Retry-After": "5"})
    if part.problem is not None:
        raise Problem("log_expired", f"node {row.node_id} no longer keeps this log ({part.problem})")
    return part


async def _attempt_to_read(
    services: Services, job_id: str, wanted: tuple[int | None, int | None], follow: bool
) -> AttemptRow | None:
    """The attempt whose log is meant; None if the job has ended and was never started."""
    deadline = now() + services.times.long_poll
    with services.topics.watch("jobs") as watch:
        while True:
            watch.clear()
            job = await services.store.get_job(job_id)
            found = _pick(job, *wanted)
            if found is not None:
                return found
            if job.state in TERMINAL_JOB_STATES:
                if wanted == (None, None):
                    return None
                raise Problem("not_found", f"job {job_id} has ended and has no log of such an attempt")
            left = deadline - now()
            if not follow or left <= 0 or services.topics.stopping.is_set():
                raise Problem(
                    "no_attempt_yet",
                    f"job {job_id} is {job.state}: there is no log before it is started; use follow=1 to wait",
                    headers={"Retry-After": "1"},
                    extra={"state": job.state},
                )
            await watch.wait(left)


def _pick(job: JobRow, no: int | None, after: int | None) -> AttemptRow | None:
    # An attempt that is placed waits for its loan, and one that ended before its start has no log.
    started = [
        attempt
        for attempt in job.attempts
        if attempt.state != AttemptState.PLACED and attempt.end != AttemptEnd.NOT_STARTED
    ]
    if no is None and after is None:
        return started[-1] if started else None
    return next(
        (attempt for attempt in started if attempt.no == no or (after is not None and attempt.no > after)), None
    )


class _LogResponse(StreamingResponse):
    """Closes its relay however it ends: a client that leaves before the first byte included."""

    def __init__(self, relays: Relays, relay: Relay, headers: dict[str, str]) -> None:
        super().__init__(_bytes_of(relay), headers=headers, media_type=_BYTES_TYPE)
        self._relays = relays
        self._relay = relay

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._relays.close(self._relay)


async def _bytes_of(relay: Relay) -> AsyncIterator[bytes]:
    try:
        async for chunk in relay.chunks():
            yield chunk
    except AgentSilent as silent:
        raise StreamCut(f"log of node {relay.node_id}: {silent}") from None


@agent_router.post(
    "/agent/logs/{request_id}",
    status_code=204,
    summary="Bytes of a log that was asked for by FetchLog",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def take_log(request: Request, request_id: str) -> Response:
    relay = services_of(request).relays.get(request_id)
    if relay is None:
        raise _gone()
    if relay.sending.locked():
        raise Problem("conflict", "another POST for this log is still open; send one after the other")
    async with relay.sending:
        part = Part(_number(request, OFFSET), _number(request, GAP), _number(request, END, 1) != 0, _problem(request))
        relay.begin(part)
        taken = await _take_bytes(request, relay)
        # An empty answer that promises more would promise it for ever when nobody follows.
        if part.is_last or part.problem is not None or (taken == 0 and not relay.follow):
            relay.end()
    return Response(status_code=204)


@agent_router.post(
    "/agent/attempts/{attempt_id}/log-tail/{stream}",
    status_code=204,
    summary="The last bytes of an ended attempt's log, at most 64 KiB",
    openapi_extra={"requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string"}}}}},
)
async def keep_tail(request: Request, attempt_id: str, stream: Literal["stdout", "stderr"]) -> Response:
    data = await request.body()
    await services_of(request).store.keep_log_tail(attempt_id, stream, _number(request, OFFSET), data, now())
    return Response(status_code=204)


async def _take_bytes(request: Request, relay: Relay) -> int:
    """Passes the body on; raises relay_gone as soon as the client has left, also while no bytes come."""
    pump = asyncio.create_task(_pump(request, relay))
    gone = asyncio.create_task(relay.closed.wait())
    try:
        await asyncio.wait((pump, gone), return_when=asyncio.FIRST_COMPLETED)
        if not pump.done():
            raise _gone()
        return pump.result()
    except RelayClosed:
        raise _gone() from None
    except ClientDisconnect:
        relay.fail("the agent's connection broke")
        raise StreamCut(f"log request {relay.request_id}: the agent's connection broke") from None
    finally:
        gone.cancel()
        pump.cancel()
        await asyncio.gather(pump, gone, return_exceptions=True)


async def _pump(request: Request, relay: Relay) -> int:
    taken = 0
    async for chunk in request.stream():
        await relay.put(chunk)
        taken += len(chunk)
    return taken


def _gone() -> Problem:
    # The connection goes too: an agent in the middle of a body learns of it at its next write.
    return Problem("relay_gone", "the reader has left; stop sending", headers={"Connection": "close"})


def _number(request: Request, header: str, default: int = 0) -> int:
    text = request.headers.get(header)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) <= 18):
        raise invalid_field(header, "send a whole number that is not negative")
    return int(text)


def _problem(request: Request) -> str | None:
    text = request.headers.get(PROBLEM)
    if text is None:
        return None
    if not (text.isascii() and text.replace("_", "").isalnum() and len(text) <= 64):
        raise invalid_field(PROBLEM, "send a code: letters, digits and underscores")
    return text
