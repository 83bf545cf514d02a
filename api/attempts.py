"""Attempts by themselves: what an operator decides about one whose fate nobody knows."""

from __future__ import annotations

from typing import Annotated, Literal

from fastapi import APIRouter, Request
from fastapi.responses import Response
from pydantic import BaseModel, ConfigDict, Field

from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .services import now, principal_of, read_body, services_of

router = APIRouter(tags=["attempts"])


class ResolveRequest(BaseModel):
    """`failed`: its job has failed, reason `lost`. `requeue`: its job is started anew, perhaps beside it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    outcome: Literal["failed", "requeue"]
    confirm: Annotated[bool, Field(description="Needed for `requeue`: the job may then run twice at once")] = False


@router.get(
    "/attempts/{attempt_id}",
    response_model=schemas.Attempt,
    responses=NOT_MODIFIED,
    summary="Show one attempt",
)
async def show(request: Request, attempt_id: str) -> Response:
    return answer(request, views.attempt_of(await services_of(request).store.get_attempt(attempt_id)))


@router.post(
    "/attempts/{attempt_id}/resolve",
    summary="End an attempt of unknown fate by an operator's word",
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ResolveRequest"}}},
        }
    },
)
async def resolve(request: Request, attempt_id: str) -> schemas.Attempt:
    wanted = await read_body(request, ResolveRequest)
    row = await services_of(request).store.resolve_attempt(
        attempt_id, wanted.outcome, principal_of(request), now(), confirmed=wanted.confirm
    )
    return views.attempt_of(row)
