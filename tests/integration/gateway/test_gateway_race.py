"""The law of the gate under load, judged by the engine's own record: a gateway process, an engine and clients that
never stop asking, while the gate is closed and opened as fast as it goes."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms, GateUnreachable
from lull.agents.gates.gateway import GatewayGate
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async

# Many clients: closes find requests in every stage. Few: they find nothing in flight and something just arriving.
CASES = [
    ("--reuse-connections", "hold", 16, 12),
    ("--no-reuse-connections", "refuse", 16, 12),
    ("--reuse-connections", "refuse", 2, 40),
    ("--no-reuse-connections", "hold", 2, 40),
]


class WatchedEngine(RecordingEngine):
    """Fails on every request that comes between a drain that reported zero and the next open."""

    def __init__(self) -> None:
        super().__init__()
        self.parked = False
        self.violations: list[Any] = []

    async def _handle(self, request: Any) -> Any:
        if self.parked:
            self.violations.append((request.method, request.raw_path))
        return await super()._handle(request)

    async def one_more_arrival(self) -> None:
        before = len(self.arrivals)
        await wait_until_async(lambda: len(self.arrivals) > before, 20, "requests flow")

    async def _do_pause(self, request: Any, body: Any) -> Any:
        """Answers a few turns of the loop later, so that closes find requests in every stage."""
        for _ in range(body["n"] % 20):
            await asyncio.sleep(0)
        return await self._do_echo(request, body)


@contextlib.asynccontextmanager
async def _running(sockets: Path, flag: str) -> AsyncIterator[GatewayGate]:
    """A gateway process, killed at the end."""
    control = sockets / "control.sock"
    gate = GatewayGate(control)
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "lull.agents.gateway", "--listen", "127.0.0.1:0", "--control", str(control)),
        *("--state-dir", str(sockets / "state"), "--log-file", str(sockets / "log"), flag),
        stdout=asyncio.subprocess.DEVNULL,
    )

    async def answers() -> bool:
        assert process.returncode is None
        with contextlib.suppress(GateUnreachable):
            return bool(await gate.info())
        return False

    try:
        await wait_until_async(answers, 20, "the gateway answers")
        yield gate
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Load:
    """Clients that never stop asking. Some leave in the middle, at all kinds of moments; a refused one waits."""

    def __init__(self, url: str, clients_count: int) -> None:
        self.statuses: dict[int, int] = {}
        self.left = 0
        self.opened = asyncio.Event()
        self._url = url
        self._stop = False
        self._clients = [asyncio.create_task(self._client(number * 1000)) for number in range(clients_count)]

    async def end(self) -> None:
        self._stop = True
        self.opened.set()
        await asyncio.gather(*self._clients)

    async def _client(self, n: int) -> None:
        async with aiohttp.ClientSession() as session:
            while not self._stop:
                n += 1
                try:
                    async with asyncio.timeout(0.002 * (n % 5) if n % 7 == 0 else 30):
                        status = await self._ask(session, n)
                except TimeoutError:
                    self.left += 1
                    continue
                if status == 503:
                    await self.opened.wait()

    async def _ask(self, session: aiohttp.ClientSession, n: int) -> int:
        async with session.post(self._url, json={"model": "m", "do": "pause", "n": n}) as answer:
            await answer.read()
            self.statuses[answer.status] = self.statuses.get(answer.status, 0) + 1
            return answer.status


@pytest.mark.parametrize(("flag", "mode", "clients_count", "rounds"), CASES)
async def test_nothing_arrives_between_drained_and_open(
    sockets: Path, flag: str, mode: Any, clients_count: int, rounds: int
) -> None:
    engine = WatchedEngine()
    await engine.start()
    try:
        async with _running(sockets, flag) as gate:
            await gate.ensure_route("e1", "one", ["m"], engine.url)
            await gate.open("e1")
            load = Load(f"http://{(await gate.info()).listen}/v1/completions", clients_count)
            for _ in range(rounds):
                await engine.one_more_arrival()
                load.opened.clear()
                if await gate.close("e1", ClosedTerms(mode, 1000, 60.0)):
                    assert await gate.wait_drained("e1", 20) == 0
                engine.parked = True
                # Time for anything that is still on its way: two round trips through the gateway.
                for _ in range(2):
                    assert (await gate.observe("e1")).in_flight == 0
                engine.parked = False
                await gate.open("e1")
                load.opened.set()
            await load.end()
            await gate.close("e1", ClosedTerms("refuse", 0, 1.0))
            assert await gate.wait_drained("e1", 20) == 0
            seen = await gate.observe("e1")
    finally:
        await engine.stop()
    assert engine.violations == []
    said = (sockets / "log").read_text()[-3000:]
    assert set(load.statuses) <= ({200} if mode == "hold" else {200, 503}), said
    assert load.left > 0
    # Every request has one end, and the engine's own count agrees with the gateway's and the clients'.
    assert seen.failed_total == 0, said
    assert seen.requests_total == seen.answered_total + seen.refused_total + seen.disconnected_total
    assert seen.answered_total <= len(engine.arrivals) <= seen.answered_total + seen.disconnected_total
    assert seen.answered_total >= load.statuses[200]
