"""What agents speak: register, the stream of orders, reports. The agent dials; the server only answers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response, StreamingResponse

from ..agents.protocol.wire import PROTOCOL_VERSION, OrderEnvelope, Register, Registered, ReportBatch, ReportsAnswer
from ..scheduler.errors import SchedulerError
from .logs import agent_router as logs_router
from .problems import invalid_field
from .services import SEQ_MAX, Services, now, read_body, services_of

router = APIRouter(tags=["agents"])
router.include_router(logs_router)

KEEP_ALIVE: Final = b'{"seq":0}\n'
_BATCH: Final = 100


@router.post(
    "/agent/register",
    summary="A node's agent tells everything that it holds",
    response_model=Registered,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/Register"}}},
        }
    },
)
async def register(request: Request) -> Response:
    holds = await read_body(request, Register)
    if holds.protocol_version != PROTOCOL_VERSION:
        raise invalid_field(
            "protocol_version",
            f"this server speaks version {PROTOCOL_VERSION}, the agent {holds.protocol_version}:"
            " run the same release of both",
        )
    registered = await services_of(request).store.register(holds, now())
    return Response(registered.model_dump_json().encode(), media_type="application/json")


@router.post(
    "/agent/reports",
    summary="A batch of reports, at most 500",
    response_model=ReportsAnswer,
    openapi_extra={
        "requestBody": {
            "required": True,
            "content": {"application/json": {"schema": {"$ref": "#/components/schemas/ReportBatch"}}},
        }
    },
)
async def reports(request: Request) -> Response:
    batch = await read_body(request, ReportBatch)
    answer = await services_of(request).store.take_reports(batch, now())
    return Response(answer.model_dump_json().encode(), media_type="application/json")


@router.get(
    "/agent/orders",
    summary="A node's orders, one JSON object a line, for as long as the connection lives",
    response_class=StreamingResponse,
    responses={200: {"content": {"application/x-ndjson": {"schema": {"$ref": "#/components/schemas/OrderEnvelope"}}}}},
)
async def orders(
    request: Request,
    node_id: str,
    after: Annotated[int, Query(ge=0, le=SEQ_MAX, description="The last order that the agent has written down")] = 0,
) -> Response:
    services = services_of(request)
    # Before the first byte, so that an unknown node or a stale registration is a problem with a status.
    found = await services.store.orders_after(node_id, after, _BATCH)
    return StreamingResponse(
        _lines(services, node_id, after, found),
        media_type="application/x-ndjson",
        headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


async def _lines(services: Services, node_id: str, after: int, found: list[OrderEnvelope]) -> AsyncIterator[bytes]:
    """Writing a line is no sign of the node's life: a stopped process still has room in its socket's buffer.

    The newest stream of a node is the only one: an older one ends when it is woken by the newer."""
    topic = f"orders:{node_id}"
    me = object()
    services.order_streams[node_id] = me
    services.topics.on_commit((topic,))
    store = services.store
    try:
        with services.topics.watch(topic) as watch:
            # Something may have been ordered since `found` was read, when nobody watched: look again first.
            is_first = True
            while services.order_streams.get(node_id) is me and not services.topics.stopping.is_set():
                if found:
                    after = found[-1].seq
                    for envelope in found:
                        yield envelope.model_dump_json().encode() + b"\n"
                elif is_first or not await watch.wait(services.times.keep_alive):
                    yield KEEP_ALIVE
                is_first = False
                watch.clear()
                try:
                    found = await store.orders_after(node_id, after, _BATCH)
                except SchedulerError:
                    return  # a newer registration, or no database: the agent comes back and is told which
    finally:
        if services.order_streams.get(node_id) is me:
            del services.order_streams[node_id]
