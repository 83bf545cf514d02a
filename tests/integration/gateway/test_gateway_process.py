"""The gateway as a process of its own: how it starts, what outlives whom, how it ends."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms, GateUnreachable
from lull.agents.gates.gateway import GatewayGate, GatewayInfo
from lull.agents.gateway.launch import GatewayNotStarted, GatewayPaths, adopt_or_start
from lull.agents.gateway.process import CannotStart, ControlSocket
from lull.agents.processes import is_same, read_stat, send_signal, wait_exited
from lull.agents.protocol.wire import GateState
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async


class Gateways:
    """Gateway processes of one test, on one control socket and state directory."""

    def __init__(self, directory: Path) -> None:
        self.paths = GatewayPaths(directory / "control.sock", directory / "state")
        self.gate = GatewayGate(self.paths.control)
        self.known: list[Any] = []

    def command(self, *more: str, listen: str = "127.0.0.1:0") -> list[str]:
        return [
            *(sys.executable, "-m", "lull.agents.gateway", "--listen", listen, "--control", str(self.paths.control)),
            *("--state-dir", str(self.paths.state_dir), *more),
        ]

    async def run(self, *more: str, before: Sequence[str] = (), **options: str) -> subprocess.Popen[str]:
        """Starts one, by the command ``before`` it, and waits until it answers."""
        command = [*before, *self.command(*more, **options)]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.known.append(process)

        async def answers() -> bool:
            assert process.poll() is None, process.communicate()
            with contextlib.suppress(GateUnreachable):
                return (await self.gate.info()).pid == process.pid
            return False

        await wait_until_async(answers, 20, "the gateway answers")
        return process

    async def adopt(self, listen: str = "127.0.0.1:0") -> tuple[GatewayInfo, bool]:
        info, started = await adopt_or_start(listen, self.paths)
        if started:
            self.known.append(info.process)
        return info, started

    def end(self) -> None:
        for process in self.known:
            if isinstance(process, subprocess.Popen):
                process.kill()
                process.communicate()
            else:
                send_signal(process, signal.SIGKILL)


@pytest.fixture
def gateways(sockets: Path) -> Iterator[Gateways]:
    made = Gateways(sockets)
    yield made
    made.end()


@pytest.fixture
async def engine() -> AsyncIterator[RecordingEngine]:
    made = await RecordingEngine().start()
    yield made
    made.go.set()
    await made.stop()


@pytest.fixture
async def client() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def _ask(client: aiohttp.ClientSession, info: GatewayInfo, **body: Any) -> tuple[int, dict[str, str]]:
    async with client.post(f"http://{info.listen}/v1/completions", json={"model": "m", **body}) as answer:
        await answer.read()
        return answer.status, dict(answer.headers)


async def _seen(gate: GatewayGate, name: str, count: int) -> None:
    async def look() -> bool:
        return bool(getattr(await gate.observe("e1"), name) == count)

    await wait_until_async(look, 10, f"{name} == {count}")


def _said(gateways: Gateways, *more: str, **options: str) -> tuple[int, str]:
    """Exit code and output of one that cannot start."""
    done = subprocess.run(gateways.command(*more, **options), capture_output=True, text=True, timeout=30, check=False)
    return done.returncode, done.stdout + done.stderr


async def test_starts_answers_and_ends_in_order(
    gateways: Gateways, engine: RecordingEngine, client: aiohttp.ClientSession
) -> None:
    process = await gateways.run()
    info = await gateways.gate.info()
    assert info.pid == process.pid
    assert is_same(info.process)
    assert gateways.paths.pid_file.read_text() == f"{process.pid}\n"
    await gateways.gate.ensure_route("e1", "one", ["m"], engine.url)
    await gateways.gate.ensure_route("e2", "two", ["n"], engine.url)
    await gateways.gate.open("e1")
    in_flight = asyncio.create_task(_ask(client, info, do="wait"))
    await _seen(gateways.gate, "in_flight", 1)
    held = asyncio.create_task(_ask(client, info, model="n"))

    async def one_held() -> bool:
        return (await gateways.gate.observe("e2")).held == 1

    await wait_until_async(one_held, 10, "the other engine's request is held")

    process.send_signal(signal.SIGTERM)
    status, headers = await held
    assert (status, "Retry-After" in headers, headers.get("Connection")) == (503, True, "close")
    # Nothing new is taken, and what is in flight goes on.
    host, port = info.listen.split(":")

    async def refused() -> bool:
        try:
            _, writer = await asyncio.open_connection(host, int(port))
        except ConnectionRefusedError:
            return True
        writer.close()
        return False

    await wait_until_async(refused, 10, "the gateway takes no connections")
    assert (await gateways.gate.observe("e1")).in_flight == 1
    engine.go.set()
    assert (await in_flight)[0] == 200
    out, err = await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0, err
    assert out.splitlines() == [f"lull gateway: listening on http://{info.listen}, control {gateways.paths.control}"]
    assert not gateways.paths.control.exists()
    assert not gateways.paths.pid_file.exists()


async def test_ends_at_once_when_asked_twice(
    gateways: Gateways, engine: RecordingEngine, client: aiohttp.ClientSession
) -> None:
    process = await gateways.run()
    info = await gateways.gate.info()
    await gateways.gate.ensure_route("e1", "one", ["m"], engine.url)
    await gateways.gate.open("e1")
    asking = asyncio.create_task(_ask(client, info, do="wait"))
    await _seen(gateways.gate, "in_flight", 1)
    for _ in range(2):
        process.send_signal(signal.SIGTERM)
        await wait_until_async(lambda: _signals_taken(process.pid), 5, "the signal is taken")
    await asyncio.to_thread(process.communicate, timeout=20)
    assert process.returncode == 0
    with pytest.raises(aiohttp.ClientError):
        await asking


async def test_ends_within_its_bound(start: Any) -> None:
    world = await start(stop_seconds_max=0.1)
    asking = world.ask(do="wait")
    await world.in_flight(1)
    await world.gateway.stop(asyncio.Event())
    with pytest.raises(aiohttp.ClientError):
        await asking
    assert not world.control.exists()


def _signals_taken(pid: int) -> bool:
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return True
    pending = [line for line in status.splitlines() if line.startswith(("SigPnd", "ShdPnd"))]
    return all(int(line.split()[1], 16) == 0 for line in pending)


async def test_clients_that_only_connect_lock_nobody_out(
    gateways: Gateways, engine: RecordingEngine, client: aiohttp.ClientSession
) -> None:
    """Not up to the last file that the gateway may open: the agent gets through, and so do they who are connected."""
    await gateways.run(before=("prlimit", "--nofile=128:128"))
    info = await gateways.gate.info()
    await gateways.gate.ensure_route("e1", "one", ["m"], engine.url)
    await gateways.gate.open("e1")
    assert (await _ask(client, info))[0] == 200
    host, port = info.listen.split(":")
    async with contextlib.AsyncExitStack() as stack:

        async def connect() -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
            reader, writer = await asyncio.open_connection(host, int(port))
            stack.callback(writer.close)
            return reader, writer

        clients = await asyncio.gather(*(connect() for _ in range(200)))
        first = [asyncio.create_task(reader.readline()) for reader, _ in clients]
        await wait_until_async(lambda: sum(each.done() for each in first) > 100, 20, "there is no room for most")
        for _ in range(20):
            assert await gateways.gate.close("e1", ClosedTerms("hold", 10, 60.0)) == 0
            await gateways.gate.open("e1")
        assert (await _ask(client, info))[0] == 200  # on the connection that it had
        in_time = next(n for n, each in enumerate(first) if not each.done())
        clients[in_time][1].write(
            b'POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n{"model": "m"}'
        )
        assert (await first[in_time]).startswith(b"HTTP/1.1 200 ")
        for each in first:
            each.cancel()
        said = {each for each in await asyncio.gather(*first, return_exceptions=True) if isinstance(each, bytes)}
        assert said <= {b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 503 Service Unavailable\r\n"}


async def test_second_start_on_the_same_control_socket_fails(start: Any, gateways: Gateways) -> None:
    world = await start()
    code, said = await asyncio.to_thread(_said, gateways)
    assert code == 1
    control = gateways.paths.control
    assert said.strip() == f"lull gateway: another gateway is running with --control {control}; stop it first"
    assert world.control == control
    assert (await world.ask())[0] == 200


async def test_port_in_use_is_one_line_and_exit_code_1(gateways: Gateways) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        code, said = await asyncio.to_thread(lambda: _said(gateways, listen=listen))
    assert code == 1
    assert said.strip() == f"lull gateway: --listen {listen}: the port is in use by another process; choose another one"
    assert not gateways.paths.control.exists()


async def test_bad_flags_are_named(gateways: Gateways) -> None:
    code, said = await asyncio.to_thread(lambda: _said(gateways, listen="127.0.0.1"))
    assert code == 2
    assert "--listen" in said


async def test_killed_gateway_comes_back_closed_and_knows_its_models(
    gateways: Gateways, engine: RecordingEngine, client: aiohttp.ClientSession
) -> None:
    first, _ = await gateways.adopt()
    await gateways.gate.ensure_route("e1", "one", ["m"], engine.url)
    await gateways.gate.close("e1", ClosedTerms("hold", 5, 30.0))
    await gateways.gate.open("e1")
    assert (await _ask(client, first))[0] == 200
    send_signal(first.process, signal.SIGKILL)
    assert await wait_exited(first.process, 10)
    assert gateways.paths.control.is_socket()  # stale

    second, started = await gateways.adopt()
    assert started
    assert second.pid != first.pid
    seen = await gateways.gate.observe("e1")
    assert (seen.state, seen.requests_total) == (GateState.CLOSED, 0)
    asking = asyncio.create_task(_ask(client, second, n="held"))
    await _seen(gateways.gate, "held", 1)
    assert engine.bodies("n") == [None]
    await gateways.gate.open("e1")
    assert (await asking)[0] == 200
    saved = json.loads((gateways.paths.state_dir / "routes.json").read_text())
    assert saved["routes"][0]["terms"]["hold_requests_max"] == 5


async def test_gateway_outlives_the_agent_and_is_adopted_by_the_next(
    gateways: Gateways, engine: RecordingEngine, client: aiohttp.ClientSession
) -> None:
    agent = """
import asyncio, sys
from pathlib import Path
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gateway.launch import GatewayPaths, adopt_or_start
control, state, url = sys.argv[1:]
async def main():
    await adopt_or_start("127.0.0.1:0", GatewayPaths(Path(control), Path(state)))
    gate = GatewayGate(Path(control))
    await gate.ensure_route("e1", "one", ["m"], url)
    await gate.open("e1")
    print("ready", flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""
    process = subprocess.Popen(
        [sys.executable, "-c", agent, str(gateways.paths.control), str(gateways.paths.state_dir), engine.url],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    gateways.known.append(process)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == "ready\n"
    info = await gateways.gate.info()
    gateways.known.append(info.process)
    stat = read_stat(info.pid)
    assert stat is not None
    assert stat.session == info.pid
    os.killpg(process.pid, signal.SIGKILL)
    await asyncio.to_thread(process.wait, 10)
    assert is_same(info.process)
    assert (await _ask(client, info))[0] == 200  # open stays open

    adopted, started = await gateways.adopt()
    assert (adopted, started) == (info, False)
    await gateways.gate.close("e1", ClosedTerms("hold", 10, 60.0))
    asking = asyncio.create_task(_ask(client, info))
    await _seen(gateways.gate, "held", 1)
    await gateways.gate.open("e1")
    assert (await asking)[0] == 200


async def test_launch_says_why_it_did_not_start(gateways: Gateways) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        listen = f"127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(GatewayNotStarted, match="port is in use"):
            await gateways.adopt(listen)


def test_control_path_that_is_no_socket_is_left_alone(sockets: Path) -> None:
    path = sockets / "file"
    path.write_text("mine")
    with pytest.raises(CannotStart, match="is no socket"):
        ControlSocket(path)
    assert path.read_text() == "mine"


def test_control_path_that_is_too_long_is_named(sockets: Path) -> None:
    with pytest.raises(CannotStart, match="--control"):
        ControlSocket(sockets / ("x" * 200))


async def test_damaged_routes_file_is_set_aside(start: Any, sockets: Path) -> None:
    (sockets / "state").mkdir()
    (sockets / "state" / "routes.json").write_text('{"version": 1, "routes": [{"engine_id"')
    world = await start()
    assert (await world.ask())[0] == 200
    assert (world.state_dir / "routes.damaged").exists()
    assert json.loads((world.state_dir / "routes.json").read_text())["routes"][0]["engine_id"] == "e1"
