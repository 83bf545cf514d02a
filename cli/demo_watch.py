"""What the demo sees while it runs: every process of its box and the device memory each holds, straight from /proc."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import psutil

from ..bench.proc_facts import DeviceMemory, anonymous_bytes, device_memory

SAMPLE_SECONDS: Final = 0.1
SAMPLES_MAX: Final = 50_000

PART: Final = "engine part"
_VLLM_MODULE: Final = "vllm.entrypoints.openai.api_server"
_MODULE_ROLES: Final = {
    "lull.cli.demo_job": "job",
    "lull.cli.demo_load": "load",
    "lull.agents.gateway": "gateway",
}


@dataclass(frozen=True, slots=True)
class Seen:
    """One process of the box."""

    role: str
    name: str | None  # an engine's
    pid: int
    parent: int
    argv: tuple[str, ...]

    def document(self) -> dict[str, Any]:
        return {"role": self.role, "name": self.name, "pid": self.pid, "parent": self.parent, "argv": list(self.argv)}


def role_of(argv: Sequence[str]) -> tuple[str, str | None]:
    """What a process is, by the command line that Lull or the demo gave it, and an engine's name."""
    for index, word in enumerate(argv):
        rest = argv[index + 1 :]
        if word in _MODULE_ROLES:
            return _MODULE_ROLES[word], None
        if word.endswith("/agents/runner.py"):
            return "runner", None
        if word == _VLLM_MODULE and "--served-model-name" in rest[:-1]:
            return "engine", rest[rest.index("--served-model-name") + 1]
        if word == "lull.cli" and rest:
            if rest[0] == "engine":
                name = rest[rest.index("--name") + 1] if "--name" in rest[:-1] else None
                return "engine", name
            return rest[0], None
    return "other", None


def with_parts(seen: Sequence[Seen]) -> list[Seen]:
    """An engine may have processes of its own below the one that serves: vLLM's core and workers."""
    found = {one.pid: one for one in seen}
    parts: list[Seen] = []
    for one in seen:
        above, left = found.get(one.parent), len(found)
        while one.role == "other" and above is not None and above.role == "other" and left:
            above, left = found.get(above.parent), left - 1
        is_part = one.role == "other" and above is not None and above.role == "engine"
        parts.append(replace(one, role=PART, name=above.name) if is_part and above is not None else one)
    return parts


def look_at(processes: Sequence[psutil.Process]) -> list[Seen]:
    found: list[Seen] = []
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess, psutil.ZombieProcess):
            argv = tuple(process.cmdline())
            role, name = role_of(argv)
            found.append(Seen(role, name, process.pid, process.ppid(), argv))
    return with_parts(found)


@dataclass(frozen=True, slots=True)
class Sample:
    at: float  # monotonic
    processes: tuple[Seen, ...]
    memory: DeviceMemory
    anonymous: Mapping[int, int]  # private memory by engine pid: where backups are

    def pids(self, role: str, name: str | None = None) -> list[int]:
        return [seen.pid for seen in self.processes if seen.role == role and name in (None, seen.name)]

    def engine_pids(self, name: str) -> list[int]:
        return [*self.pids("engine", name), *self.pids(PART, name)]

    def engine_bytes(self, name: str, device_uuid: str) -> int:
        return self.memory.held_by(self.engine_pids(name), device_uuid)

    def job_bytes(self, device_uuid: str) -> int:
        return self.memory.held_by(self.pids("job"), device_uuid)

    def used_bytes(self, device_uuid: str) -> int:
        return self.memory.by_device.get(device_uuid, 0)


def take_sample(processes: Sequence[psutil.Process]) -> Sample:
    seen = look_at(processes)
    anonymous = {engine.pid: anonymous_bytes(engine.pid) for engine in seen if engine.role in ("engine", PART)}
    return Sample(time.monotonic(), tuple(seen), device_memory(process.pid for process in seen), anonymous)


class Watcher:
    """Samples the box in a thread. The samples may be read at any time."""

    def __init__(self, list_processes: Callable[[], list[psutil.Process]]) -> None:
        self.samples: list[Sample] = []
        self.failed: Exception | None = None
        self._list_processes = list_processes
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watcher", daemon=True)

    def __enter__(self) -> Watcher:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def now(self) -> Sample:
        return take_sample(self._list_processes())

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and len(self.samples) < SAMPLES_MAX:
                self.samples.append(self.now())
                self._stop.wait(SAMPLE_SECONDS)
        except Exception as error:  # noqa: BLE001  the demo reports it: what was not seen was not proved
            self.failed = error
