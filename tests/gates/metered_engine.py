"""An engine as a gate sees one: requests that take as long as the test wants, and gauges of them as vLLM has them.

The gauges' names and labels are vLLM's (docs.vllm.ai, "Production Metrics", v0.11).
"""

from __future__ import annotations

import asyncio
import socket

from aiohttp import web


class MeteredEngine:
    def __init__(self) -> None:
        self.running = 0
        self.arrivals = 0
        self.go = asyncio.Event()  # what every request waits for
        self.has_metrics = True
        self.port = 0
        self._runner: web.AppRunner | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def start(self) -> MeteredEngine:
        app = web.Application()
        app.router.add_get("/metrics", self._metrics)
        app.router.add_post("/v1/completions", self._answer)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        await web.SockSite(self._runner, listener).start()
        return self

    async def stop(self) -> None:
        self.go.set()
        runner, self._runner = self._runner, None
        if runner is not None:
            await runner.cleanup()

    async def _metrics(self, request: web.Request) -> web.Response:
        if not self.has_metrics:
            return web.Response(status=404)
        labels = 'engine="0",model_name="m"'
        return web.Response(
            text="# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {float(self.running)}\n"
            "# TYPE vllm:num_requests_waiting gauge\n"
            f"vllm:num_requests_waiting{{{labels}}} 0.0\n"
        )

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.arrivals += 1
        self.running += 1
        try:
            if body.get("wait", True):
                await self.go.wait()
        finally:
            self.running -= 1
        return web.json_response({"choices": [{"text": "hello"}]})
