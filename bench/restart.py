"""An engine that is started again after a crash, with its weights in a memory service and without, in one run.

Real engines as processes, killed with SIGKILL: while they run, and while they are parked. Reported is what each says of
itself when it listens: seconds since its process was started, and how many of these it took to have its weights.
"""

from __future__ import annotations

import json
import os
import secrets
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ..vmm import host_memory
from ..vmm.control_client import ControlClient
from ..vmm.errors import OutOfHostMemory
from ..vmm.host_device import HostDevice
from .memory_attach import memory_service

KV_CACHE_BYTES: Final = 64 << 20
_START_SECONDS_MAX: Final = 600.0
_END_SECONDS_MAX: Final = 30.0


class EngineNotStarted(RuntimeError):
    pass


def run(weights_bytes: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Needs twice the weights of host memory; raises OutOfHostMemory where it is not there, EngineNotStarted."""
    needed_bytes, available_bytes = 2 * weights_bytes + (1 << 30), host_memory.available_bytes()
    if needed_bytes > available_bytes:
        raise OutOfHostMemory(needed_bytes, available_bytes, f"a run with {weights_bytes} bytes of weights")
    starts: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(prefix="lull-bench-") as text:
        directory = Path(text)
        device = HostDevice.create(
            directory / "device", capacity_bytes=weights_bytes + 2 * KV_CACHE_BYTES, uuid=f"HOST-{secrets.token_hex(8)}"
        )
        key = directory / "key"
        key.write_text(secrets.token_hex(16))
        argv = ["--device", str(device.path), "--weights", str(weights_bytes), "--control-key-file", str(key)]

        def start(name: str, more: Sequence[str], *, park: bool = False) -> None:
            say(name)
            with _engine([*argv, *more]) as said:
                starts.append({"start": name, **{key: said[key] for key in _KEPT}})
                if park:
                    ControlClient(said["listening"], key.read_bytes()).release()

        start("cold, weights of its own", [])
        start("again after kill -9", [])
        with memory_service(device, directory / "memory.sock") as socket:
            flags = ["--memory-service", str(socket)]
            start("cold, weights in the memory service", flags)
            start("again after kill -9, weights in the memory service", flags, park=True)
            start("again after kill -9 while parked, weights in the memory service", flags)
    return {"bench": "restart", "weights_bytes": weights_bytes, "starts": starts}


_KEPT: Final = ("weights", "weights_seconds", "ready_seconds")


@contextmanager
def _engine(more: Sequence[str]) -> Generator[dict[str, Any]]:
    """What the engine says when it listens; it is killed at the end of the block."""
    argv = [sys.executable, "-P", "-m", "lull.cli.engine_serve", "--name", "bench", "--port", "0"]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LULL_")}
    process = subprocess.Popen(
        [*argv, "--kv-cache", str(KV_CACHE_BYTES), *more], stdout=subprocess.PIPE, env=environment
    )
    assert process.stdout is not None, "it was asked for"
    try:
        yield json.loads(_line(process))
    finally:
        process.kill()
        process.wait(_END_SECONDS_MAX)
        process.stdout.close()


def _line(process: subprocess.Popen[bytes]) -> bytes:
    assert process.stdout is not None, "it was asked for"
    deadline, pending = time.monotonic() + _START_SECONDS_MAX, b""
    while b"\n" not in pending:
        readable, _, _ = select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))
        piece = os.read(process.stdout.fileno(), 65536) if readable else b""
        if not piece:
            raise EngineNotStarted(f"the engine did not start: it ended, or {_START_SECONDS_MAX} s have passed")
        pending += piece
    return pending
