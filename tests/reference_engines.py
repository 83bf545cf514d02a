"""What the tests of the reference engine share: small ones in this process, real ones in their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lull.vmm.host_device import HostDevice
from lull.vmm.reference_engine.engine import Engine, build_engine
from lull.vmm.reference_engine.faults import FaultyRuntime, parse_faults
from lull.vmm.reference_engine.server import engine_app
from lull.vmm.reference_engine.settings import EngineSettings, parse_restore_modes
from lull.vmm.reference_engine.witness import Witness, WitnessCounts, read_witness
from lull.vmm.reference_engine.worker import Worker
from lull.vmm.signing import new_headers
from tests.memory import memfd_bytes
from tests.waiting import wait_until

KEY = b"control-key-of-the-tests"
MIB = 1 << 20
CANARY = {"prompt": "The quick brown fox", "max_tokens": 8, "temperature": 0, "logprobs": 1}
START_SECONDS_MAX = 60.0


def small_settings(tmp_path: Path, *, faults: Sequence[str] = (), **changes: Any) -> EngineSettings:
    """2 MiB of weights and 2 MiB of KV cache on a device of 16 MiB."""
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    values: dict[str, Any] = {
        "name": "small",
        "host": "127.0.0.1",
        "port": 0,
        "device": device,
        "weights_bytes": 2 * MIB,
        "kv_cache_bytes": 2 * MIB,
        "control_key": KEY,
        "restore_modes": parse_restore_modes([]),
        "witness": tmp_path / "witness",
        "faults": parse_faults(faults),
    }
    return EngineSettings(**(values | changes))


@dataclass
class Client:
    """Speaks to an engine, in this process or not."""

    http: httpx.AsyncClient

    async def signed(self, method: str, path: str, content: object = None) -> httpx.Response:
        body = b"" if content is None else json.dumps(content).encode()
        headers = new_headers(KEY, method, path, body, now=time.time())
        if body:
            headers["content-type"] = "application/json"
        return await self.http.request(method, path, content=body, headers=headers)

    async def park(self, *tags: str) -> httpx.Response:
        return await self.signed("POST", "/release_memory", {"tags": list(tags)} if tags else None)

    async def wake(self) -> httpx.Response:
        return await self.signed("POST", "/resume_memory")

    async def state(self) -> str:
        return (await self.signed("GET", "/memory_status")).json()["state"]

    async def complete(self, **fields: object) -> httpx.Response:
        return await self.http.post("/v1/completions", json={**CANARY, **fields})

    async def answer(self, **fields: object) -> dict[str, Any]:
        """The one choice of a greedy completion, with token ids and log-probabilities."""
        reply = await self.complete(**fields)
        assert reply.status_code == 200, reply.text
        return reply.json()["choices"][0]


@dataclass
class LocalEngine(Client):
    settings: EngineSettings
    engine: Engine
    worker: Worker

    def device_bytes(self) -> int:
        return memfd_bytes(os.getpid(), self.settings.device.uuid)

    def witness(self) -> WitnessCounts:
        assert self.settings.witness is not None
        return read_witness(self.settings.witness)


@asynccontextmanager
async def local_engine(settings: EngineSettings) -> AsyncIterator[LocalEngine]:
    """The server's application without its socket and process."""
    engine = build_engine(settings)
    worker = Worker(engine.model, token_delay_seconds=settings.token_delay_seconds)
    witness = Witness(settings.witness)
    app = engine_app(settings, engine, worker, witness)
    worker.start()
    try:
        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as http:
            yield LocalEngine(http, settings, engine, worker)
    finally:
        worker.stop()
        worker.join()
        if isinstance(engine.runtime, FaultyRuntime):
            engine.runtime.stop()
        witness.close()


@dataclass
class EngineProcess:
    """`lull engine serve` as a user starts it."""

    process: subprocess.Popen[str]
    device: HostDevice
    witness_path: Path
    url: str = ""
    said: dict[str, Any] = field(default_factory=dict)  # its one line on stdout

    @property
    def pid(self) -> int:
        return self.process.pid

    @asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with httpx.AsyncClient(base_url=self.url, timeout=60) as http:
            yield Client(http)

    def device_bytes(self) -> int:
        return memfd_bytes(self.pid, self.device.uuid)

    def witness(self) -> WitnessCounts:
        return read_witness(self.witness_path)

    def wait_listening(self) -> None:
        """The engine's one line on stdout says where it listens."""
        assert self.process.stdout is not None
        os.set_blocking(self.process.stdout.fileno(), False)
        line = wait_until(self._first_line, START_SECONDS_MAX, "the engine listening")
        self.said = json.loads(line)
        self.url = self.said["listening"]

    def _first_line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line and self.process.poll() is not None:
            assert self.process.stderr is not None
            raise AssertionError(f"the engine ended with {self.process.returncode}: {self.process.stderr.read()}")
        return line


@contextmanager
def engine_process(tmp_path: Path, *flags: str) -> Iterator[EngineProcess]:
    """Started, not yet waited for; killed at the end if it still lives."""
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    key_file = tmp_path / "key"
    key_file.write_bytes(KEY + b"\n")
    witness = tmp_path / "witness"
    argv = [sys.executable, "-m", "lull.cli.engine_serve", "--name", "small", "--port", "0"]
    argv += ["--device", str(device.path), "--weights", "2MiB", "--kv-cache", "2MiB"]
    argv += ["--control-key-file", str(key_file), "--witness", str(witness), *flags]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            yield EngineProcess(process, device, witness)
        finally:
            if process.poll() is None:
                process.kill()
