"""A server that takes some of what an agent says and not the rest: asked with pauses, and in smaller pieces."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from aiohttp import web

from lull.agents.journal import Journal
from lull.agents.protocol.wire import Alert, LoanStepTaken, OrderEnvelope, Register, Registered
from lull.agents.upstream import Upstream
from tests.waiting import wait_until_async


class Server:
    """Takes bodies of reports of at most ``body_bytes_max``."""

    def __init__(self, body_bytes_max: int) -> None:
        self.body_bytes_max = body_bytes_max
        self.registered: list[float] = []
        self.refused = 0
        self.taken: list[tuple[int, str]] = []

    async def register(self, request: web.Request) -> web.Response:
        self.registered.append(asyncio.get_running_loop().time())
        answer = Registered(incarnation=1, term=1, lease_seconds=30, orders_after=0, acknowledged=0)
        return web.json_response(answer.model_dump())

    async def orders(self, request: web.Request) -> web.StreamResponse:
        reply = web.StreamResponse()
        await reply.prepare(request)
        await asyncio.Event().wait()
        return reply

    async def reports(self, request: web.Request) -> web.Response:
        body = await request.read()
        if len(body) > self.body_bytes_max:
            self.refused += 1
            return web.Response(status=413, text="client intended to send too large body")
        reports = json.loads(body)["reports"]
        self.taken += [(one["id"], one["report"].get("code") or one["report"]["kind"]) for one in reports]
        last = self.taken[-1][0] if self.taken else 0
        return web.json_response({"acknowledged": last, "unsupported": []})


@asynccontextmanager
async def agent_of(server: Server, root: Path, journal: Journal) -> AsyncIterator[None]:
    app = web.Application(client_max_size=64 << 20)
    app.router.add_post("/api/v1/agent/register", server.register)
    app.router.add_get("/api/v1/agent/orders", server.orders)
    app.router.add_post("/api/v1/agent/reports", server.reports)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    (root / "token").write_text("lull_test")

    async def me() -> Register:
        nothing: list[object] = []
        return Register.model_validate(
            {
                "node_id": "n",
                "name": "n",
                "version": "0",
                "boot_id": "b",
                "machine_id": "m",
                "journal_id": journal.journal_id,
                "devices": nothing,
                "engines": nothing,
                "loans": nothing,
                "attempts": nothing,
            }
        )

    async def on_registered(registered: Registered) -> None:
        journal.report(Alert(severity="info", code="registered", sentence="there is always something to tell"))

    async def on_order(envelope: OrderEnvelope) -> None:
        raise AssertionError(envelope)

    port = runner.addresses[0][1]
    upstream = Upstream(
        f"http://127.0.0.1:{port}", root / "token", journal, asyncio.Event(), me, on_registered, on_order
    )
    task = asyncio.create_task(upstream.run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await upstream.aclose()
        await runner.cleanup()
        journal.close()


def step(journal: Journal, text: str) -> None:
    journal.report(
        LoanStepTaken.model_validate(
            {"loan_id": "l", "step": "accepted", "monotonic_seconds": 1.0, "data": {"text": text}}
        )
    )


async def test_a_server_that_takes_no_report_is_registered_with_ever_more_rarely(tmp_path: Path) -> None:
    server = Server(0)
    async with agent_of(server, tmp_path, Journal(tmp_path / "journal.sqlite")):
        await wait_until_async(lambda: len(server.registered) >= 6, 30, "registrations")
        pauses = [after - before for before, after in zip(server.registered, server.registered[1:], strict=False)]
        assert pauses[4] > 1.0, pauses  # 0.1 s doubled at each failure, and at least half of that


async def test_what_is_too_large_for_a_server_is_told_in_smaller_pieces(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    for _ in range(200):
        step(journal, "x" * 1000)
    server = Server(20_000)
    async with agent_of(server, tmp_path, journal):
        await wait_until_async(lambda: len(server.taken) >= 201, 30, "all reports")
        assert [number for number, _ in server.taken] == list(range(1, 202))
        assert len(server.registered) == 1
        assert server.refused < 20


async def test_one_report_that_no_server_takes_does_not_hold_up_the_others(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    step(journal, "small")
    step(journal, "x" * 200_000)
    step(journal, "small")
    server = Server(100_000)
    async with agent_of(server, tmp_path, journal):
        await wait_until_async(lambda: len(server.taken) >= 4, 30, "all reports")
        assert [kind for _, kind in server.taken[:3]] == ["loan_step", "report_too_big", "loan_step"]
        assert len(server.registered) == 1


async def test_a_proxy_with_a_wrong_limit_loses_no_report(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    step(journal, "x" * 5000)
    server = Server(1000)
    async with agent_of(server, tmp_path, journal):
        await wait_until_async(lambda: len(server.registered) >= 2, 30, "a second registration")
        server.body_bytes_max = 1 << 20
        await wait_until_async(lambda: server.taken, 30, "the report")
        assert server.taken[0] == (1, "loan_step")
