"""The engine as a process, over its socket."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import typer

from lull.cli.engine_serve import serve
from lull.vmm.host_device import HostDevice
from lull.vmm.reference_engine.faults import DEATH_EXIT_CODE
from lull.vmm.reference_engine.settings import KEY_ENVIRONMENT_NAME
from tests.reference_engines import CANARY, MIB, Client, EngineProcess, engine_process, local_engine, small_settings
from tests.waiting import wait_until, wait_until_async


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EngineProcess]:
    with engine_process(tmp_path_factory.mktemp("engine")) as engine:
        engine.wait_listening()
        yield engine


async def test_two_processes_give_bitwise_the_same_answer(engine: EngineProcess, tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as here, engine.client() as there:
        sampled = {"temperature": 0.8, "seed": 3, "max_tokens": 24}
        assert await there.answer() == await here.answer()
        assert await there.answer(**sampled) == await here.answer(**sampled)


async def test_a_park_over_the_wire_gives_the_memory_back(engine: EngineProcess) -> None:
    async with engine.client() as client:
        right = await client.answer()
        addresses = (await client.http.get("/lull/addresses")).json()
        assert (addresses["pid"], engine.device_bytes()) == (engine.pid, 4 * MIB)
        before = engine.witness()
        assert (await client.park()).json() == {"status": "success"}
        assert (engine.device_bytes(), engine.device.free_bytes()) == (0, 16 * MIB)
        assert (await client.complete()).status_code == 400
        assert (await client.http.get("/health")).status_code == 200
        assert (await client.wake()).json() == {"status": "success"}
        assert engine.device_bytes() == 4 * MIB
        assert await client.answer() == right
        assert (await client.http.get("/lull/addresses")).json() == addresses
        after = engine.witness()
        assert after.while_not_running - before.while_not_running == 1
        assert after.served - before.served == 1


async def test_a_stream_comes_token_by_token_as_server_sent_events(engine: EngineProcess) -> None:
    async with engine.client() as client:
        right = await client.answer()
        async with client.http.stream("POST", "/v1/completions", json={**CANARY, "stream": True}) as reply:
            assert reply.headers["content-type"].startswith("text/event-stream")
            text = (await reply.aread()).decode()
        *events, end = text.split("\n\n")
        assert end == ""
        assert events[-1] == "data: [DONE]"
        choices = [json.loads(event.removeprefix("data: "))["choices"][0] for event in events[:-1]]
        assert [token for choice in choices for token in choice["token_ids"]] == right["token_ids"]
        assert [p for c in choices for p in c["logprobs"]["token_logprobs"]] == right["logprobs"]["token_logprobs"]


async def go_away(engine: EngineProcess, *, stream: bool) -> None:
    """Asks for tokens that take minutes, and leaves once the engine has the request."""
    body = json.dumps({**CANARY, "stream": stream}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n".encode()
    async with engine.client() as other:
        before = engine.witness().requests
        reader, writer = await asyncio.open_connection("127.0.0.1", int(engine.url.rpartition(":")[2]))
        writer.write(head + body)
        await writer.drain()
        if stream:
            assert b"200 OK" in await reader.readline()
        park = asyncio.create_task(other.park())
        await wait_until_async(lambda: parking(other), 20, "the park waiting for the request in flight")
        writer.close()
        await writer.wait_closed()
        assert (await asyncio.wait_for(park, 20)).status_code == 200
        assert (await other.wake()).status_code == 200
        assert engine.witness().requests == before + 1


async def parking(client: Client) -> bool:
    return await client.state() == "parking"


async def test_who_goes_away_and_sigterm_end_what_is_being_computed(tmp_path: Path) -> None:
    with engine_process(tmp_path, "--token-delay", "60", "--restore-mode", "model_weights=PINNED") as engine:
        engine.wait_listening()
        await go_away(engine, stream=True)
        await go_away(engine, stream=False)
        async with engine.client() as client:
            body = {**CANARY, "stream": True}
            async with client.http.stream("POST", "/v1/completions", json=body) as reply:
                lines = reply.aiter_lines()
                assert (await anext(lines)).startswith("data: ")
                engine.process.send_signal(signal.SIGTERM)
                rest = [line async for line in lines if line]
        assert "the engine is stopping" in rest[-1]
        assert engine.process.wait(10) == 0
        assert engine.process.stderr is not None
        assert engine.process.stderr.read() == ""
        counts = engine.witness()
        assert (counts.requests, counts.served, counts.while_not_running) == (3, 0, 0)


async def test_the_faults_that_kill(tmp_path: Path) -> None:
    with ExitStack() as stack:
        names = ("die-parked", "die-on-resume")
        paths = [tmp_path / name for name in names]
        for path in paths:
            path.mkdir()
        after_park, on_resume = (
            stack.enter_context(engine_process(path, "--fault", name)) for path, name in zip(paths, names, strict=True)
        )
        after_park.wait_listening()
        async with after_park.client() as client:
            assert (await client.park()).json() == {"status": "success"}
            assert after_park.process.wait(10) == DEATH_EXIT_CODE
        on_resume.wait_listening()
        async with on_resume.client() as client:
            await client.park()
            assert await client.state() == "parked"
            with pytest.raises(httpx.RemoteProtocolError):
                await client.wake()
            assert on_resume.process.wait(10) == DEATH_EXIT_CODE
        assert after_park.device.free_bytes() == on_resume.device.free_bytes() == 16 * MIB


def test_a_missing_device_is_one_line_and_an_exit_code(tmp_path: Path) -> None:
    argv = [sys.executable, "-X", "importtime", "-m", "lull.cli.engine_serve", "--name", "x", "--device", str(tmp_path)]
    ended = subprocess.run(
        argv, env={KEY_ENVIRONMENT_NAME: "k"}, capture_output=True, text=True, timeout=60, check=False
    )
    assert ended.returncode == 1
    *imports, last = ended.stderr.splitlines()
    assert last == f"lull engine serve: {tmp_path} is not a host device: it has no device.json"
    assert all(line.startswith("import time:") for line in imports)
    assert not any(line.endswith(" torch") for line in imports)  # said at once, without seconds of loading


@pytest.fixture
def signals_kept() -> Iterator[None]:
    """serve() takes over the signals of the process, which here is ours."""
    kept = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in kept.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("signals_kept")
@pytest.mark.parametrize(
    ("flags", "code", "said"),
    [
        ({"weights": "16MiB"}, 1, "out of device memory"),
        ({"weights": "1KiB"}, 2, "the least is"),
        ({"kv_cache": "1KiB"}, 2, "hold no token"),
        ({"weights": "many"}, 2, "--weights is 'many'"),
        ({"restore_mode": ["model_weights=NONE"]}, 2, "would lose the weights"),
        ({"fault": ["explode"]}, 2, "no such fault"),
        ({"witness": Path("/nowhere/witness")}, 1, "/nowhere/witness"),
        ({"control_key_file": Path("/nowhere/key")}, 1, "/nowhere/key"),
        ({"host": "192.0.2.1"}, 1, "--host 192.0.2.1"),
        ({"port": -1}, 2, "--port"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: dict[str, object],
    code: int,
    said: str,
) -> None:
    monkeypatch.setenv(KEY_ENVIRONMENT_NAME, "k")
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    defaults: dict[str, object] = {"device": device.path, "port": 0, "weights": "2MiB", "kv_cache": "2MiB"}
    with pytest.raises(typer.Exit) as left:
        serve("x", **(defaults | flags))  # type: ignore[arg-type]
    shown = capsys.readouterr()
    assert left.value.exit_code == code
    assert said in shown.err
    assert shown.err.count("\n") == 1
    assert shown.out == ""


@pytest.mark.usefixtures("signals_kept")
def test_a_port_in_use_is_noticed_before_memory_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(KEY_ENVIRONMENT_NAME, "k")
    device = HostDevice.create(tmp_path / "device", capacity_bytes=MIB)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(typer.Exit) as left:  # and not for lack of memory
            serve("x", port=port, device=str(device.path), weights="1TiB")
    assert left.value.exit_code == 1
    assert f"--port {port}: Address already in use" in capsys.readouterr().err


def test_a_missing_memory_service_is_said_at_once_and_waiting_for_it_ends_cleanly(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "device", capacity_bytes=MIB)
    given = ("--name", "x", "--device", str(device.path), "--memory-service", str(tmp_path / "nowhere"))
    with subprocess.Popen(
        [sys.executable, "-m", "lull.cli.engine_serve", *given],
        env={**os.environ, KEY_ENVIRONMENT_NAME: "k"},
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stderr is not None
        said = process.stderr.readline()
        process.terminate()
        _, more = process.communicate(timeout=30)
    assert f"waiting for it: memory service {tmp_path / 'nowhere'}: No such file" in said
    assert (process.returncode, more) == (0, "")


def test_a_dead_engine_holds_nothing(engine: EngineProcess) -> None:
    """Last of this file: it ends the engine that the others share."""
    engine.process.kill()
    engine.process.wait(10)
    wait_until(lambda: engine.device.free_bytes() == 16 * MIB, 5, "the ledger forgetting the dead process")
