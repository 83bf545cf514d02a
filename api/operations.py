"""What was asked of an engine and takes its time."""

from __future__ import annotations

from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from . import schemas, views
from .caching import NOT_MODIFIED, answer
from .services import now, services_of

router = APIRouter(tags=["operations"])

WAIT_SECONDS_MAX: Final = 60.0


@router.get(
    "/operations/{operation_id}",
    response_model=schemas.Operation,
    responses=NOT_MODIFIED,
    summary="Show how far an operation is",
)
async def show(
    request: Request,
    operation_id: str,
    wait_seconds: Annotated[
        float, Query(ge=0, le=WAIT_SECONDS_MAX, description="Answer once it is over, at the latest after this")
    ] = 0,
) -> Response:
    services = services_of(request)
    deadline = now() + wait_seconds
    with services.topics.watch("loans") as watch:
        while True:
            watch.clear()
            row = await services.store.get_operation(operation_id)
            left = deadline - now()
            if row.state != "running" or left <= 0 or services.topics.stopping.is_set():
                return answer(request, views.operation_of(row))
            await watch.wait(left)
