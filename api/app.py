"""The ASGI app: every route, every error, one envelope. It holds no state but ``Services``."""

from __future__ import annotations

import functools
import importlib.metadata
import math
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final, Literal

from fastapi import APIRouter, FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.openapi.utils import get_openapi
from fastapi.responses import Response
from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema
from starlette.exceptions import HTTPException

from ..agents.protocol.policy import EnginePolicy
from ..agents.protocol.wire import PROTOCOL_VERSION, OrderEnvelope, Register, ReportBatch
from ..scheduler import errors
from ..scheduler.requests import JobRequest, ParkRequest
from ..scheduler.store import Store
from . import agents, attempts, engines, events, jobs, loans, logs, nodes, operations, plans, schemas, usage
from .auth import Authenticator
from .middleware import Envelope
from .problems import MEDIA_TYPE, Problem, invalid_field, invalid_request
from .rate_limit import RateLimit
from .services import Services, StreamTimes, services_of

PREFIX: Final = "/api/v1"
BODY_BYTES_MAX: Final = 1024 * 1024
AGENT_BODY_BYTES_MAX: Final = 16 * 1024 * 1024  # 500 reports, or all that a large node holds
# What FastAPI does not see, since these handlers read bodies and write lines themselves.
_BODIES: Final[Sequence[tuple[type[BaseModel], Literal["validation", "serialization"]]]] = (
    (JobRequest, "validation"),
    (EnginePolicy, "validation"),
    (ParkRequest, "validation"),
    (attempts.ResolveRequest, "validation"),
    (Register, "validation"),
    (ReportBatch, "validation"),
    (OrderEnvelope, "validation"),
    (schemas.ProblemView, "validation"),
)

system = APIRouter(tags=["system"])


@system.get("/version", summary="The server's version")
async def version() -> schemas.Version:
    return schemas.Version(version=installed_version(), protocol_version=PROTOCOL_VERSION)


@functools.cache  # reads the distribution's metadata from disk
def installed_version() -> str:
    return importlib.metadata.version("gpu-lull")


async def livez(_request: Request) -> Response:
    return Response("ok\n", media_type="text/plain")


async def readyz(request: Request) -> Response:
    """Ready once the database answers. Without authentication, hence without data."""
    try:
        await services_of(request).store.last_event_seq()
    except errors.SchedulerError:
        return Response("not ready\n", 503, {"Retry-After": "2"}, "text/plain")
    return Response("ok\n", media_type="text/plain")


def create_app(
    store: Store,
    authenticator: Authenticator,
    *,
    body_bytes_max: int = BODY_BYTES_MAX,
    requests_per_second_max: float = math.inf,
    times: StreamTimes | None = None,
) -> FastAPI:
    """``store`` is started and closed by the caller. ``requests_per_second_max``: of one principal, agents apart."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncGenerator[None]:
        services: Services = app.state.services
        unsubscribe = store.subscribe(services.topics.on_commit)
        try:
            yield
        finally:
            unsubscribe()
            services.topics.stop()
            services.relays.fail_all("the server is shutting down")

    app = FastAPI(
        title="Lull",
        summary="Lends the GPUs of resident inference engines to jobs, and gives them back.",
        version=installed_version(),
        openapi_url=f"{PREFIX}/openapi.json",
        # The pages would load scripts from elsewhere; the document itself is served, to who has the token.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        generate_unique_id_function=_operation_id,
        lifespan=lifespan,
        responses={
            "default": {
                "description": "RFC 9457",
                "content": {MEDIA_TYPE: {"schema": {"$ref": "#/components/schemas/ProblemView"}}},
            }
        },
    )
    app.state.services = Services.of(store, times)
    for module in (jobs, attempts, logs, engines, plans, operations, nodes, loans, usage, events, agents):
        app.include_router(module.router, prefix=PREFIX)
    app.include_router(system, prefix=PREFIX)
    app.add_route("/livez", livez, include_in_schema=False)
    app.add_route("/readyz", readyz, include_in_schema=False)
    if requests_per_second_max < math.inf:
        app.add_middleware(RateLimit, requests_per_second_max=requests_per_second_max)  # within the envelope
    app.add_middleware(
        Envelope,
        authenticator=authenticator,
        body_bytes_max=body_bytes_max,
        agent_body_bytes_max=AGENT_BODY_BYTES_MAX,
    )
    app.add_exception_handler(Problem, _answer)
    app.add_exception_handler(errors.SchedulerError, _answer)
    app.add_exception_handler(RequestValidationError, _answer)
    app.add_exception_handler(HTTPException, _answer)
    app.openapi = _document_of(app)  # type: ignore[method-assign]
    return app


def _operation_id(route: APIRoute) -> str:
    return f"{route.tags[0]}_{route.name}"


async def _answer(_request: Request, error: Exception) -> Response:
    return problem_of(error).response()


def problem_of(error: Exception) -> Problem:
    """The answer to each error that a handler may raise."""
    match error:
        case Problem():
            return error
        case RequestValidationError():
            return invalid_request(error.errors())
        case errors.SchedulerError():
            return _problem_of_scheduler(error)
        case HTTPException(status_code=404):
            return Problem("not_found", "there is no such route; see /api/v1/openapi.json")
        case HTTPException(status_code=405):
            return Problem("method_not_allowed", "this route has other methods", headers=error.headers)
        case HTTPException():
            return Problem("invalid_request", str(error.detail), headers=error.headers)
        case _:
            raise error


def _problem_of_scheduler(error: errors.SchedulerError) -> Problem:
    text = str(error)
    match error:
        case errors.NotFound():
            return Problem("not_found", text)
        case errors.VersionConflict():
            extra = {"current_version": error.current_version}
            return Problem("version_mismatch", text, headers={"ETag": f'"{error.current_version}"'}, extra=extra)
        case errors.PolicyLocked():
            return Problem("policy_locked", text)
        case errors.StaleIncarnation():
            return Problem("stale_agent", text, extra={"current_incarnation": error.current})
        case errors.DuplicateIdentity():
            wait = error.retry_after_seconds
            return Problem("duplicate_identity", text, headers={} if wait is None else {"Retry-After": str(wait)})
        case errors.Conflict():
            ended = error.state in jobs.ENDED
            return Problem("job_ended" if ended else "conflict", text, extra={"state": error.state})
        case errors.PolicyNotHonoured():
            return Problem("policy_not_honoured", text)
        case errors.IdempotencyMismatch():
            return Problem("idempotency_mismatch", text)
        case errors.Unsatisfiable():
            message = text.removeprefix(f"{error.field}: ")
            largest = {"largest_hbm_bytes": error.largest_bytes, "largest_gpus": error.largest_gpus}
            return invalid_field(error.field, message, code="unsatisfiable", **largest)
        case errors.InvalidRequest():
            return invalid_field(error.field, text.removeprefix(f"{error.field}: "))
        case errors.QueueFull():
            return Problem("queue_full", text, headers={"Retry-After": "10"}, extra={"queue_jobs_max": error.jobs_max})
        case errors.StorageFull():
            return Problem("storage_full", text, headers=_retry_after(error))
        case errors.DatabaseUnavailable():
            return Problem("database_unavailable", text, headers=_retry_after(error))
        case errors.NotLeader():
            return Problem("database_unavailable", text, headers={"Retry-After": "2"})
        case _:
            raise error


def _retry_after(error: errors.DatabaseUnavailable) -> dict[str, str]:
    return {"Retry-After": str(error.retry_after_seconds)}


def _document_of(app: FastAPI) -> Callable[[], dict[str, Any]]:
    def document() -> dict[str, Any]:
        if app.openapi_schema is None:
            made = get_openapi(
                title=app.title, version=app.version, summary=app.summary, routes=app.routes, openapi_version="3.1.0"
            )
            _, bodies = models_json_schema(_BODIES, ref_template="#/components/schemas/{model}")
            components = made.setdefault("components", {})
            known = components.setdefault("schemas", {})
            for name, schema in bodies["$defs"].items():
                known.setdefault(name, schema)
            components["schemas"] = dict(sorted(known.items()))
            components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
            made["security"] = [{"token": []}]
            app.openapi_schema = made
        return app.openapi_schema

    return document
