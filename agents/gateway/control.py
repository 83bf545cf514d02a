"""The control API on the Unix socket (mode 0600): what an agent says to the gateway and asks of it.

Each call changes the state in memory before it answers, and the answer tells that state; all are safe to repeat.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any, Final, TypeVar

from aiohttp import web
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..protocol.wire import ProcessIdentity
from .problems import CONTENT_TYPE, Problem
from .routes import ENGINE_ID_CHARS_MAX, ClosedTerms, Route, RouteSpec, RouteTable

_log = logging.getLogger(__name__)

BODY_BYTES_MAX: Final = 64 * 1024
DRAIN_POLL_SECONDS_MAX: Final = 300.0
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class CloseRequest(ClosedTerms):
    model_config = ConfigDict(extra="forbid", frozen=True)

    # From now until the gate will be opened, if that is foreseen. The next close says it anew.
    expected_open_seconds: Annotated[float, Field(ge=0, le=30 * 24 * 3600)] | None = None


class ExpectRequest(BaseModel):
    """In how many seconds the closed gate will be opened; None: nobody knows. The next close forgets it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    open_seconds: Annotated[float, Field(ge=0, le=30 * 24 * 3600)] | None


_Body = TypeVar("_Body", bound=BaseModel)


def product_version() -> str:
    try:
        return version("gpu-lull")
    except PackageNotFoundError:
        return "unknown"


class Control:
    def __init__(self, routes: RouteTable, me: ProcessIdentity, listen: str) -> None:
        self._routes = routes
        self._me = me
        self._listen = listen
        self.stopping = asyncio.Event()

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_problems], client_max_size=BODY_BYTES_MAX)
        app.router.add_get("/info", self._info)
        app.router.add_get("/routes", self._list)
        app.router.add_get("/routes/{engine_id}", self._show)
        app.router.add_put("/routes/{engine_id}", self._put)
        app.router.add_delete("/routes/{engine_id}", self._delete)
        app.router.add_post("/routes/{engine_id}/close", self._close)
        app.router.add_post("/routes/{engine_id}/expect", self._expect)
        app.router.add_post("/routes/{engine_id}/open", self._open)
        app.router.add_get("/routes/{engine_id}/drained", self._drained)
        app.router.add_get("/routes/{engine_id}/wanted", self._wanted)
        app.router.add_post("/routes/{engine_id}/abort", self._abort)
        return app

    def _route(self, request: web.Request) -> Route:
        return self._routes.get(request.match_info["engine_id"])

    async def _info(self, _: web.Request) -> web.Response:
        return web.json_response({**self._me.model_dump(), "listen": self._listen, "version": product_version()})

    async def _list(self, _: web.Request) -> web.Response:
        return web.json_response({"routes": [_document(route) for route in self._routes]})

    async def _show(self, request: web.Request) -> web.Response:
        return web.json_response(_document(self._route(request)))

    async def _put(self, request: web.Request) -> web.Response:
        engine_id = request.match_info["engine_id"]
        if len(engine_id) > ENGINE_ID_CHARS_MAX:
            detail = f"The engine id is longer than {ENGINE_ID_CHARS_MAX} characters."
            raise Problem(400, "bad_engine_id", detail)
        spec = await _read(request, RouteSpec)
        route = self._routes.put(engine_id, spec)
        await self._routes.save()
        _log.info("engine %s: route of %s to %s", engine_id, ", ".join(spec.models), spec.upstream)
        return web.json_response(_document(route))

    async def _delete(self, request: web.Request) -> web.Response:
        engine_id = request.match_info["engine_id"]
        self._routes.delete(engine_id)
        await self._routes.save()
        _log.info("engine %s: route removed", engine_id)
        return web.Response(status=204)

    async def _close(self, request: web.Request) -> web.Response:
        body = await _read(request, CloseRequest)
        route = self._route(request)
        route.close(body.terms(), body.expected_open_seconds)
        await self._routes.save()
        _log.info("engine %s: closed (%s), %d in flight", route.engine_id, body.gate, route.admission.in_flight)
        # Counted now: whatever was admitted before the gate closed is in it or has ended.
        return web.json_response({"state": route.view().state, "in_flight": route.admission.in_flight})

    async def _expect(self, request: web.Request) -> web.Response:
        body = await _read(request, ExpectRequest)
        route = self._route(request)
        route.expect_open(body.open_seconds)
        return web.json_response(_document(route))

    async def _open(self, request: web.Request) -> web.Response:
        route = self._route(request)
        _log.info("engine %s: open, %d held", route.engine_id, route.admission.held)
        route.open()
        return web.json_response(_document(route))

    async def _drained(self, request: web.Request) -> web.Response:
        route = self._route(request)
        await self._unless_stopping(route.wait_idle(_seconds_of(request)))
        return web.json_response({"state": route.view().state, "in_flight": route.admission.in_flight})

    async def _wanted(self, request: web.Request) -> web.Response:
        route = self._route(request)
        await self._unless_stopping(route.wait_wanted(_seconds_of(request)))
        return web.json_response(_document(route))

    async def _unless_stopping(self, wait: Coroutine[Any, Any, Any]) -> None:
        waiting = asyncio.ensure_future(wait)
        stopping = asyncio.ensure_future(self.stopping.wait())
        try:
            await asyncio.wait({waiting, stopping}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            waiting.cancel()
            stopping.cancel()

    async def _abort(self, request: web.Request) -> web.Response:
        route = self._route(request)
        aborted = route.abort()
        _log.warning("engine %s: %d requests aborted", route.engine_id, aborted)
        return web.json_response({"aborted": aborted, "in_flight": route.admission.in_flight})


def _seconds_of(request: web.Request) -> float:
    text = request.query.get("seconds", "30")
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= DRAIN_POLL_SECONDS_MAX:
        detail = f"seconds: {text[:50]!r} is not a number from 0 to {DRAIN_POLL_SECONDS_MAX:g}."
        raise Problem(400, "bad_seconds", detail)
    return seconds


def _document(route: Route) -> dict[str, Any]:
    return {
        "engine_id": route.engine_id,
        "name": route.spec.name,
        "models": list(route.spec.models),
        "upstream": route.spec.upstream,
        **asdict(route.view()),
    }


async def _read(request: web.Request, kind: type[_Body]) -> _Body:
    body = await request.read()
    try:
        return kind.model_validate_json(body or b"{}")
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "body"
        raise Problem(422, "invalid", f"{field}: {first['msg']}") from None


@web.middleware
async def _problems(request: web.Request, handler: Handler) -> web.StreamResponse:
    try:
        return await handler(request)
    except Problem as problem:
        return web.Response(
            status=problem.status,
            body=json.dumps(problem.document()).encode(),
            headers=problem.headers(),
            content_type=CONTENT_TYPE,
        )
    except web.HTTPException as error:
        body = {"type": "about:blank", "title": error.reason, "status": error.status, "detail": error.text or ""}
        error.content_type = "application/problem+json"
        error.text = json.dumps({**body, "code": "http"})
        raise
