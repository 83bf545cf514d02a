from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import uvloop

from lull.agents.gates.base import ClosedTerms
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gateway.process import Gateway
from lull.agents.gateway.settings import GatewaySettings, Limits
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config: pytest.Config, item: Any) -> Mapping[str, Callable[[], Any]]:
    """Modules with ``ON_BOTH_LOOPS`` run on uvloop too, as the gateway does: when a connection is told that its peer
    does not read, or has gone, is the loop's business."""
    factories: dict[str, Callable[[], Any]] = {"asyncio": asyncio.new_event_loop}
    if getattr(item.module, "ON_BOTH_LOOPS", False):
        factories["uvloop"] = uvloop.new_event_loop
    return factories


@pytest.fixture
def sockets() -> Any:
    """A directory with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="lull-") as path:
        yield Path(path)


@dataclass
class World:
    """A gateway in this process, one engine behind it with the model ``m``, and a client."""

    gateway: Gateway
    gate: GatewayGate
    engine: RecordingEngine
    client: aiohttp.ClientSession
    control: Path
    state_dir: Path
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)

    @property
    def url(self) -> str:
        return f"http://{self.gateway.listen}"

    def request(self, path: str = "/v1/completions", **body: Any) -> Any:
        return self.client.post(f"{self.url}{path}", json={"model": "m", **body})

    def ask(self, **body: Any) -> asyncio.Task[tuple[int, dict[str, str], bytes]]:
        """A request in a task of its own: status, headers, body."""

        async def run() -> tuple[int, dict[str, str], bytes]:
            async with self.request(**body) as answer:
                return answer.status, dict(answer.headers), await answer.read()

        task = asyncio.create_task(run())
        self.tasks.append(task)
        return task

    async def close(
        self, mode: Any = "hold", requests_max: int = 1000, seconds_max: float = 60.0, retry: int | None = None
    ) -> int:
        return await self.gate.close("e1", ClosedTerms(mode, requests_max, seconds_max, retry))

    async def held(self, count: int) -> None:
        await self.seen("held", count)

    async def in_flight(self, count: int) -> None:
        await self.seen("in_flight", count)

    async def requests(self, count: int) -> None:
        await wait_until_async(lambda: self.gateway.relay.requests == count, 5, f"{count} requests are here")

    async def seen(self, name: str, count: int) -> None:
        last: Any = None

        async def look() -> bool:
            nonlocal last
            last = await self.gate.observe("e1")
            return bool(getattr(last, name) == count)

        await wait_until_async(look, 10, f"{name} == {count}")

    async def raw(self, data: bytes, *, end: bool = True) -> bytes:
        """Sends bytes as they are and reads until the gateway closes."""
        host, port = self.gateway.listen.split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(data)
            await writer.drain()
            async with asyncio.timeout(10):
                return await reader.read()
        finally:
            writer.close()


Start = Callable[..., Any]


@pytest.fixture
async def start(sockets: Path) -> AsyncIterator[Start]:
    """Starts a World; keyword arguments are limits and settings."""
    worlds: list[World] = []
    engines: list[RecordingEngine] = []

    async def begin(
        *, open_gate: bool = True, reuse: bool = True, server: dict[str, Any] | None = None, **limits: Any
    ) -> World:
        state_dir = sockets / "state"
        control = sockets / "control.sock"
        bounds: dict[str, Any] = {"stop_seconds_max": 2.0, "abort_seconds_max": 1.0, **limits}
        settings = GatewaySettings(
            host="127.0.0.1",
            port=0,
            control=control,
            state_dir=state_dir,
            pid_file=state_dir / "gateway.pid",
            reuse_connections=reuse,
            limits=Limits(**bounds),
        )
        engine = await RecordingEngine().start(**(server or {}))
        engines.append(engine)
        gateway = Gateway(settings)
        await gateway.start()
        gate = GatewayGate(control)
        client = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20))
        world = World(gateway, gate, engine, client, control, state_dir)
        worlds.append(world)
        await gate.ensure_route("e1", "one", ["m"], engine.url)
        if open_gate:
            await gate.open("e1")
        return world

    yield begin
    for world in worlds:
        for task in world.tasks:
            task.cancel()
        await asyncio.gather(*world.tasks, return_exceptions=True)
        await world.client.close()
        if world.control.exists():
            hurry = asyncio.Event()
            hurry.set()
            await world.gateway.stop(hurry)
    for engine in engines:
        engine.go.set()
        await engine.stop()


@pytest.fixture
async def world(start: Start) -> World:
    begun: World = await start()
    return begun


def problem(status: int, text: bytes) -> dict[str, Any]:
    document: dict[str, Any] = json.loads(text)
    assert document["status"] == status
    assert document["error"]["message"] == document["detail"]
    return document
