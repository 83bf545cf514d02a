"""History: who held each device, second by second."""

from __future__ import annotations

from datetime import datetime, timedelta
from typing import Annotated, Final

from fastapi import APIRouter, Query, Request

from . import schemas, views
from .problems import invalid_field
from .services import now, services_of

router = APIRouter(tags=["history"])

RANGE_MAX: Final = timedelta(days=31)


@router.get("/usage", summary="Exact intervals that touch [since, until), cut to it; the last 24 hours by default")
async def usage(
    request: Request,
    since: Annotated[datetime | None, Query(description="ISO 8601; UTC unless it says otherwise")] = None,
    until: Annotated[datetime | None, Query(description="ISO 8601; now by default")] = None,
    device: Annotated[str | None, Query(description="A device's id; all devices by default")] = None,
) -> schemas.UsageList:
    try:
        ends = views.time_of(now()) if until is None else schemas.as_utc(until)
        begins = ends - timedelta(days=1) if since is None else schemas.as_utc(since)
    except OverflowError:  # within a day of the first or last moment that a date can name
        raise invalid_field("since", "since and until must be dates of our time") from None
    if begins >= ends:
        raise invalid_field("since", "must be before until")
    if ends - begins > RANGE_MAX:
        raise invalid_field("since", f"one answer covers at most {RANGE_MAX.days} days; ask for less at a time")
    rows = await services_of(request).store.usage(device, begins.timestamp(), ends.timestamp())
    return schemas.UsageList(since=begins, until=ends, items=[views.interval_of(row) for row in rows])
