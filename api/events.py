"""Events: server-sent, each with its sequence number as id, so that a reader goes on where it broke off."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Final

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import Response
from sse_starlette.event import ServerSentEvent
from sse_starlette.sse import EventSourceResponse

from ..scheduler.errors import DatabaseUnavailable
from . import schemas, views
from .problems import Problem, invalid_field
from .services import PAGE_MAX, SEQ_MAX, Services, services_of

router = APIRouter(tags=["history"])

_BATCH: Final = 500
_IDLE_SECONDS_MAX: Final = 3600.0  # looked at again by then, even if nothing was said to have changed


@router.get(
    "/events",
    response_model=schemas.EventPage,
    summary="Events as they happen (server-sent), or with follow=0 one page of them",
    responses={200: {"content": {"text/event-stream": {}}}},
)
async def events(
    request: Request,
    since: Annotated[
        int | None, Query(ge=0, le=SEQ_MAX, description="The last sequence number that was seen; 0: all")
    ] = None,
    type: Annotated[list[str] | None, Query(description="Only these types")] = None,
    follow: bool = True,
    limit: Annotated[int, Query(ge=1, le=PAGE_MAX, description="Of a page")] = _BATCH,
    last_event_id: Annotated[str | None, Header(description="Goes before since")] = None,
) -> Response:
    services = services_of(request)
    after = _after(since, last_event_id)
    if not follow:
        rows = await services.store.events_after(after, limit, type or ())
        page = schemas.EventPage(items=[views.event_of(row) for row in rows], next_seq=rows[-1].seq if rows else after)
        return Response(page.model_dump_json().encode(), media_type="application/json")
    if services.event_streams >= services.event_streams_max:
        raise Problem(
            "too_many_streams",
            f"{services.event_streams_max} event streams are open; close one, or read pages with follow=0",
            headers={"Retry-After": "10"},
        )
    return EventSourceResponse(
        _messages(services, after, type or ()),
        ping=services.times.heartbeat,
        ping_message_factory=lambda: ServerSentEvent(comment="heartbeat"),
        sep="\n",
        send_timeout=60,
    )


def _after(since: int | None, last_event_id: str | None) -> int:
    if last_event_id is None:
        return since or 0
    if not (last_event_id.isascii() and last_event_id.isdigit() and len(last_event_id) <= 18):
        raise invalid_field("Last-Event-ID", "send the id of the last event that was seen, a whole number")
    return int(last_event_id)


async def _messages(services: Services, after: int, types: Sequence[str]) -> AsyncIterator[ServerSentEvent]:
    services.event_streams += 1
    try:
        with services.topics.watch("events") as watch:
            while not services.topics.stopping.is_set():
                watch.clear()
                # Read first: an event that commits later has a higher number, so nothing below is missed.
                newest = await services.store.last_event_seq() if types else 0
                rows = await services.store.events_after(after, _BATCH, types)
                for row in rows:
                    after = row.seq
                    text = views.event_of(row).model_dump_json()
                    yield ServerSentEvent(data=text, id=str(row.seq), event=row.type, sep="\n")
                if len(rows) < _BATCH:
                    after = max(after, newest)  # what the filter left out is not looked at again
                    if not services.topics.stopping.is_set():
                        await watch.wait(_IDLE_SECONDS_MAX)
    except DatabaseUnavailable:
        return  # the reader comes back, and gets a 503 while it lasts
    finally:
        services.event_streams -= 1
