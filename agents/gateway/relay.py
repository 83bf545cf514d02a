"""The data path: read a request, pass the gate, relay the engine's answer chunk by chunk.

Order: the body is read whole (bounded) before the gate is asked, so a slow upload neither counts as in flight nor
reaches an engine whose gate has closed meanwhile. Between admission and the engine's socket there is no further queue.
"""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import struct
import time
from collections.abc import Mapping
from typing import Final

import aiohttp
from aiohttp import web
from aiohttp.http import HttpVersion10, HttpVersion11
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict

from .admission import RETRY_AFTER_SECONDS_DEFAULT, Outcome, Refusal, Ticket, TicketState
from .exchange import EngineLost, Exchange, NotSent
from .filtering import (
    LIVE_PATH,
    MODELS_PATH,
    Asked,
    check_query,
    inference_path,
    read_body,
    request_headers,
    response_headers,
    split_target,
)
from .problems import Problem
from .routes import Route, RouteTable
from .settings import Limits

_log = logging.getLogger(__name__)

_REFUSAL_TEXT: Final[Mapping[Refusal, str]] = {
    Refusal.GATE_REFUSES: "The engine is lent out; its policy is to refuse requests meanwhile.",
    Refusal.HOLD_FULL: "The engine is lent out and as many requests as its policy allows wait for it already.",
    Refusal.HOLD_DEADLINE: "The engine did not come back within the time that its policy lets a request wait.",
    Refusal.ROUTE_REMOVED: "The engine was taken out of this gateway.",
    Refusal.STOPPING: "The gateway is stopping.",
}
_SSE: Final = "text/event-stream"
_KEEPALIVE: Final = b": keepalive\n\n"
_ERROR_BODY_BYTES_MAX: Final = 64 * 1024
# The watch of a relay is set anew at most this often, not for every chunk.
_WATCH_STEP_SECONDS: Final = 1.0
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)


class StreamBroken(ConnectionError):
    """Ends the client's connection without the end of the message: aiohttp closes it on any ConnectionError."""


class Relay:
    """Handler of every request on the public address."""

    def __init__(self, routes: RouteTable, limits: Limits) -> None:
        self._routes = routes
        self._limits = limits
        self._requests = 0
        self._buffered_bytes = 0
        self.lingering: set[asyncio.Task[None]] = set()
        self._empty = asyncio.Event()
        self.stopping = False

    @property
    def requests(self) -> int:
        """Requests that are being handled now, held ones included."""
        return self._requests

    async def wait_empty(self) -> None:
        """Returns when no request is being handled and no engine holds one of a client that is gone."""
        while self._requests or self.lingering:
            self._empty.clear()
            await self._empty.wait()

    def _wake_if_empty(self) -> None:
        if not self._requests and not self.lingering:
            self._empty.set()

    def _lingered(self, task: asyncio.Task[None]) -> None:
        self.lingering.discard(task)
        self._wake_if_empty()

    async def __call__(self, request: web.BaseRequest) -> web.StreamResponse:
        self._requests += 1
        try:
            response = await self._handle(request)
        except Problem as problem:
            response = problem.response()
        finally:
            self._requests -= 1
            self._wake_if_empty()
        if self.stopping and not response.prepared:
            response.force_close()
        return response

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        path, query = split_target(request.raw_path)
        if path in (LIVE_PATH, MODELS_PATH) or path.startswith(MODELS_PATH + "/"):
            return self._answer_itself(request, path)
        path = inference_path(request.method, path)
        check_query(query)
        if self.stopping:
            raise _refused(Refusal.STOPPING, None)
        if self._requests > self._limits.requests_max:
            raise Problem(
                503,
                "gateway_full",
                f"{self._limits.requests_max} requests are here already.",
                retry_after_seconds=RETRY_AFTER_SECONDS_DEFAULT,
                close=True,
            )
        reserved = _Reserved(self)
        try:
            body = await self._read(request, reserved)
            asked = read_body(body)
            route = self._routes.find(asked.model)
            return await self._pass(request, route, asked, path, query, body)
        finally:
            reserved.release()

    def _answer_itself(self, request: web.BaseRequest, path: str) -> web.Response:
        if request.method not in ("GET", "HEAD"):
            raise Problem(405, "method_not_allowed", f"{path[:200]} takes GET.", allow="GET, HEAD")
        if path == LIVE_PATH:
            return web.Response(text="ok\n")
        models = [
            {"id": model, "object": "model", "created": route.created_at, "owned_by": "lull"}
            for model, route in self._routes.models()
        ]
        if path == MODELS_PATH:
            return web.json_response({"object": "list", "data": models})
        wanted = path.removeprefix(MODELS_PATH + "/")
        for model in models:
            if model["id"] == wanted:
                return web.json_response(model)
        raise Problem(404, "model_not_found", f"No engine here serves the model {wanted[:200]!r}.")

    # ---- reading ----------------------------------------------------------------------------------------------

    async def _read(self, request: web.BaseRequest, reserved: _Reserved) -> bytes:
        bytes_max = self._limits.body_bytes_max
        too_large = Problem(
            413, "body_too_large", f"The body is longer than {bytes_max} bytes, the bound of this gateway.", close=True
        )
        if request.headers.get("Content-Encoding", "identity").lower() != "identity":
            raise Problem(415, "content_encoding", "Content-Encoding: send the body uncompressed.", close=True)
        if request.content_length is not None and request.content_length > bytes_max:
            raise too_large
        await _say_continue(request)
        chunks: list[bytes] = []
        size = 0
        try:
            async with asyncio.timeout(self._limits.body_seconds_max):
                while chunk := await request.content.readany():
                    size += len(chunk)
                    if size > bytes_max:
                        raise too_large
                    reserved.take(len(chunk))
                    chunks.append(chunk)
        except TimeoutError:
            raise Problem(
                408, "body_too_slow", f"The body took longer than {self._limits.body_seconds_max:g} s.", close=True
            ) from None
        except (aiohttp.ClientError, web.RequestPayloadError, HttpProcessingError) as error:
            raise Problem(400, "bad_body", f"The body could not be read: {str(error)[:200]}", close=True) from None
        return b"".join(chunks)

    def reserve(self, count: int) -> None:
        if self._buffered_bytes + count > self._limits.buffered_bytes_max:
            raise Problem(
                503,
                "gateway_full",
                f"The requests that wait here hold {self._limits.buffered_bytes_max} bytes already.",
                retry_after_seconds=RETRY_AFTER_SECONDS_DEFAULT,
                close=True,
            )
        self._buffered_bytes += count

    def release(self, count: int) -> None:
        self._buffered_bytes -= count

    # ---- the gate ---------------------------------------------------------------------------------------------

    async def _pass(
        self, request: web.BaseRequest, route: Route, asked: Asked, path: str, query: str, body: bytes
    ) -> web.StreamResponse:
        changed = asyncio.Event()
        ticket = route.admission.arrive(time.monotonic(), changed.set)
        begun: web.StreamResponse | None = None
        exchange: Exchange | None = None
        try:
            if ticket.state is TicketState.HELD:
                begun = await self._hold(request, route, ticket, changed, asked)
            if ticket.refusal is not None:
                raise _refused(ticket.refusal, route.admission.terms.retry_after_seconds)
            exchange = route.begin(ticket)
            return await self._exchange(request, route, exchange, begun, path, query, body)
        except Problem as problem:
            if begun is None:
                raise
            await begun.write(problem.event())
            raise StreamBroken(problem.detail) from problem
        finally:
            if exchange is None:
                route.admission.finish(ticket, time.monotonic(), Outcome.DISCONNECTED)

    async def _hold(
        self, request: web.BaseRequest, route: Route, ticket: Ticket, changed: asyncio.Event, asked: Asked
    ) -> web.StreamResponse | None:
        """Waits while the ticket is held. A streaming client that waits long gets comments, so that its read time-out
        does not fire; its answer has then begun."""
        begun: web.StreamResponse | None = None
        while ticket.state is TicketState.HELD:
            left = min(route.admission.seconds_left(ticket, time.monotonic()), self._limits.keepalive_seconds)
            try:
                async with asyncio.timeout(left):
                    await changed.wait()
            except TimeoutError:
                route.admission.expire(ticket, time.monotonic())
            if ticket.state is TicketState.HELD and asked.stream:
                if begun is None:
                    begun = web.StreamResponse(headers={"Content-Type": _SSE, "Cache-Control": "no-cache"})
                    await begun.prepare(request)
                # A client that does not read gets none: its full buffer must not keep this task from its turn.
                if not request.protocol.writing_paused:
                    await begun.write(_KEEPALIVE)
        return begun

    # ---- the engine -------------------------------------------------------------------------------------------

    async def _exchange(
        self,
        request: web.BaseRequest,
        route: Route,
        exchange: Exchange,
        begun: web.StreamResponse | None,
        path: str,
        query: str,
        body: bytes,
    ) -> web.StreamResponse:
        loop = asyncio.get_running_loop()
        outcome, linger_seconds = Outcome.DISCONNECTED, self._limits.silence_seconds_max
        out = begun
        started = whole = False
        try:
            async with asyncio.timeout(self._limits.silence_seconds_max) as watch:
                exchange.on_abort(lambda: None if watch.expired() else watch.reschedule(loop.time()))
                headers = request_headers(request.headers, request.headers.getall("Connection", ()))
                answer = await exchange.answer(route.url(path, query), headers, body)
                if begun is None:
                    out = await _begin(request, answer)
                else:
                    await _check_stream(answer)
                assert out is not None
                started = True
                await _relay(answer, out, exchange, watch)
                whole = True
                exchange.finished(Outcome.ANSWERED)
                await out.write_eof()
                return out
        except (NotSent, EngineLost, aiohttp.ClientError, HttpProcessingError, TimeoutError) as error:
            if isinstance(error, aiohttp.ClientConnectionResetError):
                raise  # The client's side: aiohttp uses the class for writing to a transport that is closing.
            outcome, linger_seconds = Outcome.FAILED, self._limits.abort_seconds_max
            problem = _failed(error, exchange, route)
            if started:
                raise _broken(request, problem) from error
            raise problem from error
        except Problem:
            outcome = Outcome.FAILED
            raise
        finally:
            if not whole and (task := exchange.hang_up(outcome, linger_seconds)) is not None:
                self.lingering.add(task)
                task.add_done_callback(self._lingered)


class _Reserved:
    """One request's share of the bytes that may be buffered."""

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._bytes = 0

    def take(self, count: int) -> None:
        self._relay.reserve(count)
        self._bytes += count

    def release(self) -> None:
        self._relay.release(self._bytes)
        self._bytes = 0


def _refused(refusal: Refusal, retry_after_seconds: int | None) -> Problem:
    return Problem(
        503,
        refusal.value,
        _REFUSAL_TEXT[refusal],
        retry_after_seconds=RETRY_AFTER_SECONDS_DEFAULT if retry_after_seconds is None else retry_after_seconds,
    )


def _failed(error: Exception, exchange: Exchange, route: Route) -> Problem:
    name = route.spec.name
    if exchange.aborted:
        problem = Problem(
            503,
            "aborted",
            f"The request was ended so that engine {name} can be lent out.",
            retry_after_seconds=route.admission.terms.retry_after_seconds or RETRY_AFTER_SECONDS_DEFAULT,
        )
    elif isinstance(error, NotSent):
        problem = Problem(502, "engine_unreachable", f"Engine {name} does not take connections: {str(error)[:200]}")
    elif isinstance(error, TimeoutError | aiohttp.SocketTimeoutError):
        problem = Problem(
            504, "engine_silent", f"Engine {name} sent nothing for {route.limits.silence_seconds_max:g} s."
        )
    else:
        problem = Problem(
            502,
            "engine_lost",
            f"The connection to engine {name} broke; it may have worked on the request, so it was not sent again.",
        )
    _log.warning("engine %s: %s: %s: %r", route.engine_id, problem.code, problem.detail, error)
    return problem


def _broken(request: web.BaseRequest, problem: Problem) -> StreamBroken:
    """A connection's end is the end of an HTTP/1.0 message: there only a reset shows that it is not whole."""
    if request.version < HttpVersion11 and request.transport is not None:
        request.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
        request.transport.abort()
    return StreamBroken(problem.detail)


async def _say_continue(request: web.BaseRequest) -> None:
    expected = request.headers.get("Expect")
    if expected is None or request.version <= HttpVersion10:
        return
    if expected.lower() != "100-continue":
        raise Problem(417, "expectation_failed", f"Expect: {expected[:100]!r} is not known.", close=True)
    await request.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
    request.writer.output_size = 0  # The answer proper has not begun.


async def _begin(request: web.BaseRequest, answer: aiohttp.ClientResponse) -> web.StreamResponse:
    headers: CIMultiDict[str] = response_headers(answer.headers, answer.headers.getall("Connection", ()))
    out = web.StreamResponse(status=answer.status, reason=answer.reason, headers=headers)
    await out.prepare(request)
    return out


async def _check_stream(answer: aiohttp.ClientResponse) -> None:
    """A client that was kept waiting has its 200 and its content type: an answer of another kind becomes an event."""
    if answer.status == 200 and answer.content_type == _SSE and "Content-Encoding" not in answer.headers:
        return
    body = await answer.content.read(_ERROR_BODY_BYTES_MAX)
    text = body.decode("utf-8", "replace")
    try:
        text = str(json.loads(text)["error"]["message"])
    except (ValueError, KeyError, TypeError):
        text = text[:1000]
    raise Problem(answer.status if answer.status >= 400 else 502, "engine_refused", text)


async def _relay(
    answer: aiohttp.ClientResponse, out: web.StreamResponse, exchange: Exchange, watch: asyncio.Timeout
) -> None:
    """Chunk by chunk; a client that reads slowly slows the engine down."""
    loop = asyncio.get_running_loop()
    watched_at = loop.time()
    silence_seconds = (watch.when() or watched_at) - watched_at
    first = True
    async for chunk in answer.content.iter_any():
        await out.write(chunk)
        if first:
            first = False
            exchange.first_byte()
        # An abort has set the watch to now: that stays.
        if (now := loop.time()) - watched_at > _WATCH_STEP_SECONDS and not (exchange.aborted or watch.expired()):
            watched_at = now
            watch.reschedule(now + silence_seconds)
