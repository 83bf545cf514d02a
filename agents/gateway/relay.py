"""What all connections of clients share: the routes, the bounds of the whole, and the end."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Mapping
from typing import Final

from .admission import Refusal, Ticket
from .client_connection import ClientConnection
from .exchange import Exchange
from .filtering import LIVE_PATH, MODELS_PATH
from .problems import Problem
from .request_connection import RequestConnection
from .routes import Route, RouteTable
from .settings import Limits
from .siblings import RETRY_AFTER_SECONDS_DEFAULT

_log = logging.getLogger(__name__)

_REFUSAL_TEXT: Final[Mapping[Refusal, str]] = {
    Refusal.GATE_REFUSES: "The engine takes no requests now; its policy is to refuse them meanwhile.",
    Refusal.HOLD_FULL: "The engine takes no requests now, and as many as its policy allows wait already.",
    Refusal.HOLD_DEADLINE: "The engine did not come back within the time that its policy lets a request wait.",
    Refusal.OPENS_TOO_LATE: "The engine takes no requests now and is expected later than its policy lets one wait.",
    Refusal.ROUTE_REMOVED: "The engine was taken out of this gateway.",
    Refusal.STOPPING: "The gateway is stopping.",
}


class Relay:
    """Makes the protocol of every connection on the public address."""

    def __init__(self, routes: RouteTable, limits: Limits) -> None:
        self.routes = routes
        self.limits = limits
        self.loop = asyncio.get_running_loop()
        self.requests = 0  # that are being handled now, held and lingering ones included
        self.connections: set[RequestConnection] = set()
        self.lingering: dict[Exchange, int] = {}  # with the bytes that are reserved for each
        self.stopping = False
        self._buffered_bytes = 0
        self._held_requests = self._held_bytes = 0
        self._empty = asyncio.Event()

    def protocol(self) -> ClientConnection:
        return ClientConnection(self)

    # ---- connections ----------------------------------------------------------------------------------------------

    def connect(self, connection: RequestConnection) -> None:
        """Counts one more client. Raises Problem if there are too many: files have to be left for everything else."""
        if self.stopping:  # accepted right before
            raise _stopping()
        if len(self.connections) >= self.limits.connections_max:
            raise _full(f"{self.limits.connections_max} clients are connected already.")
        self.connections.add(connection)

    def disconnect(self, connection: RequestConnection) -> None:
        self.connections.discard(connection)
        if self.stopping:
            self._wake_if_empty()

    # ---- requests -------------------------------------------------------------------------------------------------

    def enter(self) -> None:
        """Counts one more request. Raises Problem if it may not come in."""
        if self.stopping:
            raise _stopping()
        if self.requests >= self.limits.requests_max:
            raise _full(f"{self.limits.requests_max} requests are here already.")
        self.requests += 1

    def leave(self, reserved_bytes: int) -> None:
        self.requests -= 1
        self._buffered_bytes -= reserved_bytes
        if self.stopping:
            self._wake_if_empty()

    def reserve(self, count: int) -> None:
        """Bytes of a body that is kept here. Raises Problem if all together would be too many."""
        if self._buffered_bytes + count > self.limits.buffered_bytes_max:
            raise _full(f"The requests that wait here hold {self.limits.buffered_bytes_max} bytes already.")
        self._buffered_bytes += count

    def has_room_to_hold(self, count: int) -> bool:
        """Whether one more request with a body of so many bytes may wait for a gate that is closed."""
        limits = self.limits
        return self._held_requests < limits.held_requests_max and self._held_bytes + count <= limits.held_bytes_max

    def hold(self, count: int) -> None:
        self._held_requests += 1
        self._held_bytes += count

    def release(self, count: int) -> None:
        self._held_requests -= 1
        self._held_bytes -= count

    def linger(self, exchange: Exchange, reserved_bytes: int) -> None:
        """An engine may still be at it though its client is gone: till then it counts, and so does its body, which may
        not have left yet."""
        self.lingering[exchange] = reserved_bytes
        exchange.on_over = self._lingered

    def _lingered(self, exchange: Exchange) -> None:
        self.leave(self.lingering.pop(exchange))

    # ---- the end --------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Nothing new is taken; connections without a request end now."""
        self.stopping = True
        for connection in list(self.connections):
            connection.close_if_idle()

    def abort(self) -> None:
        for connection in list(self.connections):
            connection.abort()

    async def wait_empty(self) -> None:
        """Returns when no request is being handled, no engine holds one of a client that is gone, and every client has
        taken what was answered."""
        while self.requests or self.connections:
            self._empty.clear()
            await self._empty.wait()

    def _wake_if_empty(self) -> None:
        if not self.requests and not self.connections:
            self._empty.set()

    # ---- what the gateway answers by itself -------------------------------------------------------------------------

    def own_answer(self, method: bytes, path: str) -> tuple[str, bytes]:
        """Content type and body. Raises Problem."""
        if method not in (b"GET", b"HEAD"):
            raise Problem(405, "method_not_allowed", f"{path[:200]} takes GET.", allow="GET, HEAD")
        if path == LIVE_PATH:
            return "text/plain; charset=utf-8", b"ok\n"
        models = [
            {"id": model, "object": "model", "created": created_at, "owned_by": "lull"}
            for model, created_at in self.routes.models()
        ]
        if path == MODELS_PATH:
            return "application/json", json.dumps({"object": "list", "data": models}).encode()
        wanted = path.removeprefix(MODELS_PATH + "/")
        for model in models:
            if model["id"] == wanted:
                return "application/json", json.dumps(model).encode()
        raise Problem(404, "model_not_found", f"No engine here serves the model {wanted[:200]!r}.")

    # ---- problems -------------------------------------------------------------------------------------------------

    def refused(self, ticket: Ticket, now: float, text: str = "") -> Problem:
        assert ticket.refusal is not None
        if ticket.refusal is Refusal.STOPPING:
            retry_after_seconds = RETRY_AFTER_SECONDS_DEFAULT
        else:
            retry_after_seconds = ticket.siblings.retry_after_seconds(ticket.gate, now)
        text = text or _REFUSAL_TEXT[ticket.refusal]
        return Problem(503, ticket.refusal.value, text, retry_after_seconds=retry_after_seconds)

    def not_held(self, ticket: Ticket, now: float) -> Problem:
        """A gate would have held it, but the gateway may not."""
        limits = self.limits
        text = (
            f"The engine takes no requests now, and of those that wait for closed gates this gateway keeps at most"
            f" {limits.held_requests_max} with {limits.held_bytes_max} bytes."
        )
        return self.refused(ticket, now, text)

    def aborted(self, ticket: Ticket, route: Route, now: float) -> Problem:
        problem = Problem(
            503,
            "aborted",
            f"The request was ended so that engine {route.spec.name} can be lent out.",
            retry_after_seconds=ticket.siblings.retry_after_seconds(ticket.gate, now),
        )
        return _logged(route, problem, "aborted")

    def unreachable(self, route: Route, text: str) -> Problem:
        detail = f"Engine {route.spec.name} does not take connections: {text[:200]}"
        return _logged(route, Problem(502, "engine_unreachable", detail), text)

    def silent(self, route: Route) -> Problem:
        detail = f"Engine {route.spec.name} sent nothing for {self.limits.silence_seconds_max:g} s."
        return _logged(route, Problem(504, "engine_silent", detail), "time-out")

    def lost(self, route: Route, text: str) -> Problem:
        detail = (
            f"The connection to engine {route.spec.name} broke; it may have worked on the request, so it was not sent"
            " again."
        )
        return _logged(route, Problem(502, "engine_lost", detail), text)


def _logged(route: Route, problem: Problem, text: str) -> Problem:
    _log.warning("engine %s: %s: %s: %s", route.engine_id, problem.code, problem.detail, text)
    return problem


def _stopping() -> Problem:
    code, text = Refusal.STOPPING.value, _REFUSAL_TEXT[Refusal.STOPPING]
    return Problem(503, code, text, retry_after_seconds=RETRY_AFTER_SECONDS_DEFAULT, close=True)


def _full(detail: str) -> Problem:
    return Problem(503, "gateway_full", detail, retry_after_seconds=RETRY_AFTER_SECONDS_DEFAULT, close=True)
