"""A whole Lull in one directory on this machine: server, agent, gateway and reference engines, for demo and benchmark.

Whoever opens a box becomes the reaper of its orphans, so everything that was started in it is found and ended by its
place in the process tree, whatever session it is in, and nothing else is touched.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, TypeVar

import psutil

from ..api.auth import TokenFileError, read_token
from ..api.client import Client, ClientError
from .agent_file import EngineEntry, write_agent_toml
from .proc_facts import device_memory
from .vllm_engine import VllmInstall

T = TypeVar("T")

# Safe path: the working directory must not lend its folders to the child's imports.
LULL: Final = (sys.executable, "-P", "-m", "lull.cli")
# The name of a socket has to fit into 107 bytes; the longest below it is vLLM's: tmp/ and a UUID.
DIRECTORY_BYTES_MAX: Final = 107 - len("/tmp/") - 36
END_SECONDS_MAX: Final = 15.0
LOG_TAIL_BYTES: Final = 4096
_POLL_SECONDS: Final = 0.1
_PR_SET_CHILD_SUBREAPER: Final = 36


class BoxError(Exception):
    """The box did not do what it should; the message says what was last seen."""


@dataclass(frozen=True, slots=True)
class EnginePlan:
    """One resident engine, alone on a device of its own: the reference engine, or a vLLM."""

    name: str
    weights_bytes: int
    kv_cache_bytes: int
    free_bytes: int  # what its device has left beside it
    flags: tuple[str, ...] = ()  # of the reference engine
    vllm: VllmInstall | None = None
    lends: bool = True

    @property
    def capacity_bytes(self) -> int:
        return self.weights_bytes + self.kv_cache_bytes + self.free_bytes


@dataclass(slots=True)
class Box:
    directory: Path
    engines: tuple[EnginePlan, ...]
    server_port: int
    gateway_port: int
    engine_ports: dict[str, int]
    environ: dict[str, str]
    up: subprocess.Popen[bytes] | None = None
    kept: bool = False
    others: list[subprocess.Popen[bytes]] = field(default_factory=list[subprocess.Popen[bytes]])

    @property
    def server_url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"

    @property
    def gateway_url(self) -> str:
        return f"http://127.0.0.1:{self.gateway_port}"

    @property
    def token_file(self) -> Path:
        return self.directory / "server" / "token"

    @property
    def context_file(self) -> Path:
        return self.directory / "cli.toml"

    def engine_url(self, name: str) -> str:
        return f"http://127.0.0.1:{self.engine_ports[name]}"

    def device_path(self, name: str) -> Path:
        return self.directory / f"device-{name}"

    def witness_path(self, name: str) -> Path:
        return self.directory / f"{name}.witness"

    def client(self) -> Client:
        return Client(self.server_url, read_token(self.token_file))

    def start(self) -> None:
        """Start everything; returns at once."""
        _write_agent_toml(self)
        log = (self.directory / "up.log").open("ab")
        with log:
            self.up = subprocess.Popen(
                [
                    *LULL,
                    "up",
                    "--config",
                    str(self.directory / "agent.toml"),
                    "--data-dir",
                    str(self.directory),
                    "--port",
                    str(self.server_port),
                ],
                env=self.environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def spawn(self, argv: Sequence[str]) -> subprocess.Popen[bytes]:
        """A process of the box beside those that Lull starts; it ends with the box."""
        with (self.directory / "spawned.log").open("ab") as log:
            process = subprocess.Popen(
                argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        self.others.append(process)
        return process

    def wait_ready(self, seconds: float, on_change: Callable[[str], None] = lambda _: None) -> None:
        """Until every engine is verified and its gate open. Raises BoxError with what was last seen."""
        deadline = time.monotonic() + seconds
        self.wait_for(self._server_answers, deadline - time.monotonic(), "the server's first answer")
        seen = ""

        def ready() -> bool:
            nonlocal seen
            now_seen = self._engine_states()
            if now_seen != seen:
                seen = now_seen
                on_change(now_seen)
            return now_seen.count("verified, gate open") == len(self.engines)

        self.wait_for(ready, deadline - time.monotonic(), "every engine to serve", lambda: seen)

    def _server_answers(self) -> bool:
        try:
            with self.client() as client:
                return bool(client.version().version)
        except (TokenFileError, ClientError):
            return False

    def _engine_states(self) -> str:
        with self.client() as client:
            engines = client.engines()
        words: list[str] = []
        for engine in sorted(engines, key=lambda engine: engine.name):
            state = "verified" if engine.state == "running" and engine.verified else engine.state
            words.append(f"{engine.name}: {state}, gate {engine.gate}")
        return "; ".join(words) or "no engine is registered"

    def wait_for(
        self, look: Callable[[], T], seconds: float, what: str, last_seen: Callable[[], str] = lambda: ""
    ) -> T:
        """The first true value of `look()`. Raises BoxError at the bound, or as soon as `lull up` is gone."""
        deadline = time.monotonic() + seconds
        pause = threading.Event()
        while True:
            found = look()
            if found:
                return found
            if self.up is not None and self.up.poll() is not None:
                raise BoxError(f"`lull up` ended with code {self.up.returncode} before {what}:\n{self.log_tail('up')}")
            if time.monotonic() > deadline:
                raise BoxError(f"waited {seconds:.0f} s for {what}; last seen: {last_seen() or found!r}")
            pause.wait(_POLL_SECONDS)

    def log_tail(self, name: str) -> str:
        for path in (self.directory / f"{name}.log", self.directory / "logs" / f"{name}.log"):
            with contextlib.suppress(OSError):
                return path.read_bytes()[-LOG_TAIL_BYTES:].decode(errors="replace").rstrip()
        return ""

    def processes(self) -> list[psutil.Process]:
        """Everything that lives in the box, whoever its parent is by now."""
        return psutil.Process().children(recursive=True)

    def end(self) -> list[str]:
        """End everything and remove the directory. Returns what could not be ended, in words: empty if all is well."""
        if self.up is not None and self.up.poll() is None:
            self.up.send_signal(signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.up.wait(END_SECONDS_MAX)
        trouble = end_processes(self.processes)
        uuids = set(device_uuids(self).values())
        shutil.rmtree(self.directory, ignore_errors=True)
        if self.directory.exists():
            trouble.append(f"{self.directory} could not be removed")
        for pid, held in device_memory().by_process.items():
            if uuids & held.keys():
                trouble.append(f"process {pid} still holds device memory")
        return trouble


def end_processes(list_processes: Callable[[], list[psutil.Process]]) -> list[str]:
    """SIGTERM, a bound, SIGKILL, until no process is left: what dies may leave children that become ours."""
    deadline = time.monotonic() + END_SECONDS_MAX
    send = psutil.Process.terminate
    while processes := list_processes():
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):
                send(process)
        psutil.wait_procs(processes, timeout=max(1.0, min(5.0, deadline - time.monotonic())))
        send = psutil.Process.kill
        if time.monotonic() > deadline:
            return [f"process {process.pid} could not be ended" for process in list_processes()]
    return []


def device_uuids(box: Box) -> dict[str, str]:
    """The uuid of each engine's device, of those that have been made."""
    found: dict[str, str] = {}
    for engine in box.engines:
        with contextlib.suppress(OSError, ValueError, KeyError):
            found[engine.name] = json.loads((box.device_path(engine.name) / "device.json").read_bytes())["uuid"]
    return found


def _write_agent_toml(box: Box) -> None:
    settings = {
        "server_url": box.server_url,
        "token_file": box.token_file,
        "data_dir": box.directory / "agent",
        "node_name": "this-machine",
        "gateway": {"listen": f"127.0.0.1:{box.gateway_port}"},
    }
    policy = {"gate": "hold", "restore_modes": {"model_weights": "CPU", "kv_cache": "NONE"}}
    entries = [
        EngineEntry(
            name=engine.name,
            port=box.engine_ports[engine.name],
            directory=box.directory,
            lull=LULL,
            weights_bytes=engine.weights_bytes,
            kv_cache_bytes=engine.kv_cache_bytes,
            capacity_bytes=engine.capacity_bytes,
            policy={"when": "always" if engine.lends else "manual", **policy},
            flags=("--threads", "1", *engine.flags),
            more=_vllm_keys(box, engine),
        )
        for engine in box.engines
    ]
    write_agent_toml(box.directory / "agent.toml", settings, entries)


def _vllm_keys(box: Box, engine: EnginePlan) -> dict[str, Any]:
    if engine.vllm is None:
        return {}
    model, port = box.directory / f"model-{engine.name}", box.engine_ports[engine.name]
    scratch = box.directory / "tmp"
    scratch.mkdir(exist_ok=True)
    engine.vllm.write_model(model, engine.weights_bytes)
    device = box.device_path(engine.name)
    return engine.vllm.engine_keys(engine.name, port, model, device, engine.kv_cache_bytes, scratch)


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now; all are held until all are known, so they differ."""
    with contextlib.ExitStack() as held:
        ports: list[int] = []
        for _ in range(count):
            probe = held.enter_context(socket.socket())
            probe.bind(("127.0.0.1", 0))
            ports.append(probe.getsockname()[1])
        return ports


def become_reaper() -> None:
    """Orphans below this process become its children (PR_SET_CHILD_SUBREAPER), so that none gets lost."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def _short_directory() -> Path:
    for parent in (tempfile.gettempdir(), "/tmp"):
        if len(os.fsencode(parent)) + len("/lull-xxxxxxxx") <= DIRECTORY_BYTES_MAX:
            return Path(tempfile.mkdtemp(prefix="lull-", dir=parent))
    raise BoxError(f"{tempfile.gettempdir()} is too long a path for Unix sockets; set TMPDIR to a shorter one")


@contextlib.contextmanager
def open_box(engines: Sequence[EnginePlan], on_trouble: Callable[[str], None]) -> Generator[Box]:
    """A started box. It is ended and removed on every way out, but where `kept` was set."""
    become_reaper()
    server_port, gateway_port, *engine_ports = free_ports(2 + len(engines))
    directory = _short_directory()
    environ: dict[str, Any] = {**os.environ, "LULL_CONFIG": str(directory / "cli.toml")}
    for name in ("LULL_SERVER", "LULL_TOKEN_FILE", "LULL_OUTPUT"):
        environ.pop(name, None)
    box = Box(
        directory=directory,
        engines=tuple(engines),
        server_port=server_port,
        gateway_port=gateway_port,
        engine_ports={engine.name: port for engine, port in zip(engines, engine_ports, strict=True)},
        environ=environ,
    )
    try:
        box.start()
        yield box
    finally:
        if box.kept:
            for process in box.others:
                process.terminate()
                process.wait(END_SECONDS_MAX)
        else:
            # A second Ctrl-C must not leave half of it behind.
            before = [(number, signal.signal(number, signal.SIG_IGN)) for number in (signal.SIGINT, signal.SIGTERM)]
            try:
                for sentence in box.end():
                    on_trouble(sentence)
            finally:
                for number, handler in before:
                    signal.signal(number, handler)
