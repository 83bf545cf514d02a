"""A stand-in started as a process, with what an adapter's test asks of it from outside."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lull.agents.engine_process import EngineProcess
from lull.agents.probe import HostMemoryProbe
from lull.agents.processes import descendants, identity
from lull.vmm.host_device import HostDevice
from tests.agent_node import free_port
from tests.waiting import wait_until

MIB = 1 << 20
HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@dataclass
class Spawned:
    """It is an `EngineOutside` as well: what the agent would see of this engine."""

    child: subprocess.Popen[bytes]
    device: HostDevice
    port: int
    root: Path
    process: EngineProcess | None = field(default=None)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def incarnation(self) -> str | None:
        known = identity(self.child.pid) if self.child.poll() is None else None
        return None if known is None else f"{known.boot_id}:{known.pid}:{known.start_ticks}"

    def pids(self) -> set[int]:
        return {self.child.pid, *descendants(self.child.pid)}

    async def held_bytes(self) -> dict[str, int]:
        facts = HostMemoryProbe({self.device.uuid: self.device.capacity_bytes}).look()
        pids = self.pids()
        return {self.device.uuid: facts[self.device.uuid].bytes_of(pids)}

    def held_mib(self) -> float:
        facts = HostMemoryProbe({self.device.uuid: self.device.capacity_bytes}).look()
        return facts[self.device.uuid].bytes_of({self.child.pid, *descendants(self.child.pid)}) / MIB

    def set_faults(self, *names: str) -> None:
        (self.root / "faults.json").write_text(json.dumps(names))

    def calls(self) -> list[str]:
        """``METHOD /path`` of every request, in order."""
        return [f"{one['method']} {one['path']}" for one in self.raw_calls()]

    def raw_calls(self) -> list[dict[str, Any]]:
        path = self.root / "calls"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def forget_calls(self) -> None:
        (self.root / "calls").unlink(missing_ok=True)

    def wait_gone(self) -> int:
        """Its exit code."""
        return self.child.wait(10)


def stand_in_command(script: str, root: Path, device: Path, port: int, *flags: str) -> list[str]:
    """The argv of ``tests/engines/SCRIPT``; its calls and faults lie in ``root``."""
    return [
        *(sys.executable, str(HERE / script), "--port", str(port), "--device", str(device)),
        *("--calls", str(root / "calls"), "--faults", str(root / "faults.json"), *flags),
    ]


@contextmanager
def spawned(root: Path, script: str, *flags: str, health: str = "/health") -> Iterator[Spawned]:
    """Started and listening; killed at the end, if it still lives."""
    device = HostDevice.create(root / "device", capacity_bytes=16 * MIB)
    port = free_port()
    argv = stand_in_command(script, root, device.path, port, *flags)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment) as child:
        engine = Spawned(child, device, port, root)
        try:
            wait_until(lambda: _answers(engine, health), 30, f"{script} listening")
            engine.forget_calls()
            yield engine
        finally:
            child.kill()


def _answers(engine: Spawned, health: str) -> bool:
    assert engine.child.poll() is None, f"the stand-in ended with {engine.child.returncode}"
    try:
        return httpx.get(engine.url + health, timeout=5, trust_env=False).status_code < 500
    except httpx.TransportError:
        return False
