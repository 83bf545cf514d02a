"""A receiver of gate webhooks, as one is written by docs/gates.md: it trusts nothing that is not signed."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import socket
import ssl
import time
from typing import Any

from aiohttp import web

SECRET = b"a secret of the tests, long enough"
_WINDOW_SECONDS = 300


class WebhookServer:
    """Holds one gate. Faults: ``status``, ``hangs``, ``answer`` (sent instead of the right one), ``lies``."""

    def __init__(self) -> None:
        self.state = "closed"
        self.in_flight: int | None = 0
        self.calls: list[dict[str, Any]] = []
        self.hosts: list[str] = []
        self.refused: list[str] = []
        self.status: int | None = None
        self.redirects_to: str | None = None
        self.hangs = asyncio.Event()
        self.hangs.set()
        self.answer: bytes | None = None
        self.lies = False  # says what it was asked for, and does nothing
        self.says_nothing = False  # no state in its answers
        self.port = 0
        self._seen: set[str] = set()
        self._runner: web.AppRunner | None = None
        self._tls: ssl.SSLContext | None = None

    async def start(self, tls: ssl.SSLContext | None = None) -> WebhookServer:
        self._tls = tls or self._tls
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener, ssl_context=self._tls).start()
        return self

    async def stop(self) -> None:
        self.hangs.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.hosts.append(request.headers.get("Host", ""))
        await self.hangs.wait()
        if self.redirects_to is not None:
            return web.Response(status=307, headers={"Location": self.redirects_to})
        wrong = self._wrong(request, body)
        if wrong is not None:
            self.refused.append(wrong)
            return web.json_response({"detail": wrong}, status=401)
        if self.status is not None:
            return web.json_response({"detail": "out of order"}, status=self.status)
        call: dict[str, Any] = json.loads(body)
        self.calls.append(call)
        said = self.state
        if call["verb"] in ("close", "open"):
            said = {"close": "closed", "open": "open"}[call["verb"]]
            if not self.lies:
                self.state = said
        if call["verb"] == "abort":
            self.in_flight = 0
        if self.answer is not None:
            return web.Response(body=self.answer, content_type="application/json")
        answer: dict[str, Any] = {"id": call["id"], "state": said}
        if self.says_nothing:
            del answer["state"]
        if self.in_flight is not None:
            answer["in_flight"] = self.in_flight
        return web.json_response(answer)

    def _wrong(self, request: web.Request, body: bytes) -> str | None:
        fields = dict(part.split("=", 1) for part in request.headers.get("Lull-Signature", "").split(",") if part)
        if request.method != "POST" or request.content_type != "application/json" or not fields.keys() >= {"t", "id"}:
            return "not a signed call"
        wanted = hmac.new(SECRET, f"v1.{fields['t']}.{fields['id']}.".encode() + body, hashlib.sha256).hexdigest()
        if not hmac.compare_digest(wanted, fields.get("v1", "")):
            return "wrong signature"
        if abs(time.time() - int(fields["t"])) > _WINDOW_SECONDS:
            return "wrong time"
        if fields["id"] in self._seen or json.loads(body)["id"] != fields["id"]:
            return "seen before"
        self._seen.add(fields["id"])
        return None
