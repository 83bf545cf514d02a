"""An HTTP server that stands where an engine would and writes down all that reaches it.

What it does with a request stands in the request: ``{"model": ..., "do": "wait"}``. A verb that it does not know fails.
"""

from __future__ import annotations

import asyncio
import json
import socket
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

CHUNK = b'data: {"n": 1}\n\n'


@dataclass
class Arrival:
    method: str
    path: str  # as it stood in the request line
    headers: dict[str, str]
    body: dict[str, Any]
    raw_headers: list[tuple[str, str]] = field(default_factory=list)


class RecordingEngine:
    """Listens on a free loopback port, or again on the one it had."""

    def __init__(self) -> None:
        self.arrivals: list[Arrival] = []
        self.cancelled: list[dict[str, Any]] = []
        self.finished: list[dict[str, Any]] = []
        self.connections = 0
        self.go = asyncio.Event()  # what "wait", "stream" and "deaf" wait for
        self.port = 0
        self.step: asyncio.Queue[bytes | None] = asyncio.Queue()  # what "steps" sends; None ends it
        self._runner: web.ServerRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self, **server: Any) -> RecordingEngine:
        runner = web.ServerRunner(
            web.Server(self._handle, handler_cancellation=True, access_log=None, **server), shutdown_timeout=0.1
        )
        await runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port), backlog=512)
        self.port = listener.getsockname()[1]
        await web.SockSite(runner, listener).start()
        self._runner = runner
        return self

    async def stop(self) -> None:
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    def bodies(self, key: str) -> list[Any]:
        return [arrival.body.get(key) for arrival in self.arrivals]

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        raw = await request.read()
        body = json.loads(raw) if raw else {}
        self.arrivals.append(
            Arrival(request.method, request.raw_path, dict(request.headers), body, list(request.headers.items()))
        )
        verb = getattr(self, "_do_" + body.get("do", "echo"))
        try:
            response: web.StreamResponse = await verb(request, body)
        except asyncio.CancelledError:
            self.cancelled.append(body)
            raise
        self.finished.append(body)
        return response

    async def _do_echo(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        return web.json_response(body, headers={"X-Engine": "yes", "Keep-Alive": "timeout=3"})

    async def _do_status(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        if "deep" in body:
            return web.Response(text="[" * body["deep"], status=body["status"])
        return web.json_response({"error": {"message": "no such token"}}, status=body["status"])

    async def _do_wait(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        await self.go.wait()
        return web.json_response(body)

    async def _do_deaf(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        """Works on to the end also when its client has gone, as engines without a check for that do."""
        await asyncio.shield(asyncio.ensure_future(self.go.wait()))
        return web.json_response(body)

    async def _do_steps(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        while (chunk := await self.step.get()) is not None:
            await out.write(chunk)
        await out.write_eof()
        return out

    async def _do_stream(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await out.prepare(request)
        for _ in range(body.get("chunks", 3)):
            await out.write(CHUNK)
        await out.write(b"data: [DONE]\n\n")
        await out.write_eof()
        return out

    async def _do_die(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        """Closes its connection: before the head, in the middle of a chunked body, or of one with a length."""
        assert request.transport is not None
        where = body["where"]
        if where != "head":
            out = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            if where == "length":
                out.content_length = 10 * len(CHUNK)
            await out.prepare(request)
            await out.write(CHUNK)
        request.transport.close()
        return web.Response()

    async def _do_flood(self, request: web.BaseRequest, body: dict[str, Any]) -> web.StreamResponse:
        """Sends as fast as it is taken, and counts what it could write."""
        out = web.StreamResponse(headers={"Content-Type": "application/octet-stream"})
        await out.prepare(request)
        self.flooded_bytes = 0
        block = b"x" * 65536
        for _ in range(body["blocks"]):
            await out.write(block)
            self.flooded_bytes += len(block)
        await out.write_eof()
        return out
