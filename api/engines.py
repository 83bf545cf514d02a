"""Engines and their policies."""

from __future__ import annotations

import re
from typing import Annotated, Final

from fastapi import APIRouter, Header, Request, Response

from ..agents.protocol.capabilities import refusal
from ..agents.protocol.engine_kinds import MODES_ARE_FLAGS, known_capabilities
from ..agents.protocol.policy import EnginePolicy
from ..scheduler.requests import ParkRequest
from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .idempotency import KEY_PARAMETER, idempotency_key
from .problems import invalid_field
from .services import now, principal_of, read_body, services_of

router = APIRouter(tags=["engines"])

_ETAG_PATTERN: Final = re.compile(r'(?:W/)?"(\d{1,18})"')


@router.get("/engines", response_model=schemas.EngineList, responses=NOT_MODIFIED, summary="List engines")
async def list_engines(request: Request) -> Response:
    rows = await services_of(request).store.list_engines()
    return answer(request, schemas.EngineList(items=[views.engine_of(row) for row in rows]))


@router.get(
    "/engines/{engine}", response_model=schemas.Engine, responses=NOT_MODIFIED, summary="Show an engine by id or name"
)
async def show(request: Request, engine: str) -> Response:
    return answer(request, views.engine_of(await services_of(request).store.get_engine(engine)))


@router.post(
    "/engines/{engine}/restart",
    status_code=202,
    summary="Restart a supervised engine; not while its devices are lent or it is parked",
)
async def restart(request: Request, response: Response, engine: str) -> schemas.Engine:
    row = await services_of(request).store.restart_engine(engine, principal_of(request), now())
    response.headers["Location"] = f"/api/v1/engines/{row.id}"
    return views.engine_of(row)


@router.post(
    "/engines/{engine}/park",
    status_code=202,
    summary="Park an engine without a job, until its time is over, it is resumed, or a request wakes it",
    openapi_extra={
        "requestBody": {
            "required": False,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ParkRequest"}}},
        },
        "parameters": [KEY_PARAMETER],
    },
)
async def park(request: Request, response: Response, engine: str) -> schemas.Operation:
    wanted = await read_body(request, ParkRequest) if await request.body() else ParkRequest()
    key = idempotency_key(request)
    row = await services_of(request).store.park_engine(engine, wanted, principal_of(request), key, now())
    response.headers["Location"] = f"/api/v1/operations/{row.id}"
    return views.operation_of(row)


@router.post(
    "/engines/{engine}/resume",
    status_code=202,
    summary="Wake an engine that is parked without a job",
    openapi_extra={"parameters": [KEY_PARAMETER]},
)
async def resume(request: Request, response: Response, engine: str) -> schemas.Operation:
    key = idempotency_key(request)
    row = await services_of(request).store.resume_engine(engine, principal_of(request), key, now())
    response.headers["Location"] = f"/api/v1/operations/{row.id}"
    return views.operation_of(row)


@router.get("/engines/{engine}/policy", summary="An engine's policy; its version is the ETag")
async def get_policy(request: Request, response: Response, engine: str) -> schemas.PolicyView:
    row = await services_of(request).store.get_policy(engine)
    response.headers["ETag"] = f'"{row.version}"'
    return views.policy_of(row)


@router.put(
    "/engines/{engine}/policy",
    summary="Replace an engine's policy",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/EnginePolicy"}}},
        }
    },
)
async def put_policy(
    request: Request,
    response: Response,
    engine: str,
    if_match: Annotated[
        str | None, Header(description="The ETag that was read; 412 if the policy has changed since")
    ] = None,
) -> schemas.PolicyView:
    store = services_of(request).store
    policy = await read_body(request, EnginePolicy)
    expected_version = _expected_version(if_match)
    row = await store.get_engine(engine)
    changes_modes = policy.restore_modes != row.policy.restore_modes
    unable = refusal(row.capabilities or known_capabilities(row.kind), policy) if changes_modes else None
    if unable is not None and not row.policy_locked:
        raise invalid_field("restore_modes", unable, code="policy_not_honoured")
    # An engine that somebody else runs got its restore modes with its start flags: only a restart changes them.
    fixed = MODES_ARE_FLAGS.get(row.kind, True)
    if fixed and changes_modes and not row.supervised and not row.policy_locked:
        modes = {tag: str(mode) for tag, mode in row.policy.restore_modes.items()}
        raise invalid_field(
            "restore_modes",
            f"engine {row.name} is attached, not supervised: its restore modes were given to it at its start and Lull"
            f" cannot restart it; keep {modes}, or restart the engine and change the agent's configuration",
            code="policy_not_honoured",
        )
    if policy.on_pressure and row.tells_requests is False and not row.policy_locked:
        raise invalid_field(
            "on_pressure",
            f"the gate of engine {row.name} does not see requests while it is closed, so none could wake it; set it to"
            " false, or give the engine a gate that does: see gates.md",
            code="policy_not_honoured",
        )
    written = await store.put_policy(row.id, policy, expected_version, principal_of(request), now())
    response.headers["ETag"] = f'"{written.version}"'
    return views.policy_of(written)


def _expected_version(if_match: str | None) -> int | None:
    if if_match is None or if_match.strip() == "*":
        return None
    match = _ETAG_PATTERN.fullmatch(if_match.strip())
    if match is None:
        raise invalid_field("If-Match", "send the ETag of GET …/policy, for example \"3\", or '*'")
    return int(match[1])
