"""What the handlers of one server share, and how they read a request's body."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Final, TypeVar, cast

from fastapi import Request
from pydantic import BaseModel, ValidationError

from ..scheduler.store import Store
from .problems import Problem, invalid_request
from .relays import Relays, RelayTimes
from .topics import Topics

PAGE_MAX: Final = 1000
SEQ_MAX: Final = 2**62  # what a database's integer holds, and to spare
Body = TypeVar("Body", bound=BaseModel)


@dataclass(frozen=True, slots=True)
class StreamTimes:
    """Seconds. Tests make them short; nothing else has a reason to."""

    keep_alive: float = 10.0  # between lines of an agent's order stream
    heartbeat: float = 15.0  # between comments of the event stream
    long_poll: float = 25.0  # how long one request may wait for a job to start
    relay: RelayTimes = field(default_factory=RelayTimes)


@dataclass(slots=True)
class Services:
    """One per server. ``order_streams`` holds the newest stream of each node."""

    store: Store
    times: StreamTimes
    topics: Topics
    relays: Relays
    event_streams_max: int = 256
    event_streams: int = 0
    order_streams: dict[str, object] = field(default_factory=dict[str, object])

    @classmethod
    def of(cls, store: Store, times: StreamTimes | None = None) -> Services:
        times = times or StreamTimes()
        return cls(store, times, Topics(), Relays(times.relay))


def services_of(request: Request) -> Services:
    return cast(Services, request.app.state.services)


def principal_of(request: Request) -> str:
    return cast(str, request.state.principal)


def now() -> float:
    return time.time()


async def read_body(request: Request, model: type[Body]) -> Body:
    """The body as ``model``; raises a Problem that names the field and the way out."""
    media_type = request.headers.get("content-type", "application/json").partition(";")[0].strip().lower()
    if media_type != "application/json":
        raise Problem("unsupported_media_type", "send the header 'Content-Type: application/json' and a JSON body")
    content = await request.body()
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        errors = error.errors(include_url=False, include_context=False, include_input=False)
        if errors and errors[0]["type"] == "json_invalid":
            raise Problem("malformed_json", f"{errors[0]['msg']}; send one JSON object") from None
        raise invalid_request(errors, known=model.model_fields, where="body") from None
