"""Starts the gateway for an agent, or takes over the one that an earlier agent started."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..gates.base import GateUnreachable
from ..gates.gateway import GatewayGate, GatewayInfo

START_SECONDS_MAX: Final = 20.0
_LOOK_SECONDS: Final = 0.05
_OUTPUT_BYTES_MAX: Final = 4000


class GatewayNotStarted(Exception):
    """The gateway ended at once or did not answer; the text holds what it said."""


@dataclass(frozen=True, slots=True)
class GatewayPaths:
    """Where an agent keeps its gateway's files."""

    control: Path
    state_dir: Path

    @property
    def pid_file(self) -> Path:
        return self.state_dir / "gateway.pid"

    @property
    def log_file(self) -> Path:
        return self.state_dir / "gateway.log"


async def adopt_or_start(
    listen: str, paths: GatewayPaths, *, seconds_max: float = START_SECONDS_MAX
) -> tuple[GatewayInfo, bool]:
    """The gateway on this control socket, and whether it was started now (then every gate of it is closed).

    It gets a session of its own and no pipe of ours, so it outlives the agent. One that answers is taken as it is,
    also if it listens elsewhere: the caller compares ``listen``.
    """
    gate = GatewayGate(paths.control)
    try:
        return await gate.info(), False
    except GateUnreachable:
        pass
    paths.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
    output = paths.state_dir / "gateway.out"
    process = _spawn(listen, paths, output)
    # Our child, so it has to be reaped when it ends. Not by the event loop, whose child transports kill at their end.
    threading.Thread(target=process.wait, name="gateway-reaper", daemon=True).start()
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds_max
    while True:
        try:
            return await gate.info(), True
        except GateUnreachable as error:
            if process.poll() is not None or loop.time() > deadline:
                said = _tail(output) or str(error)
                raise GatewayNotStarted(f"lull gateway (pid {process.pid}) did not start: {said}") from error
        await asyncio.sleep(_LOOK_SECONDS)


def _spawn(listen: str, paths: GatewayPaths, output: Path) -> subprocess.Popen[bytes]:
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        return subprocess.Popen(
            [
                *(sys.executable, "-m", "lull.agents.gateway"),
                *("--listen", listen),
                *("--control", str(paths.control)),
                *("--state-dir", str(paths.state_dir)),
                *("--pid-file", str(paths.pid_file)),
                *("--log-file", str(paths.log_file)),
            ],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            cwd="/",
        )
    finally:
        os.close(descriptor)


def _tail(path: Path) -> str:
    try:
        return path.read_bytes()[-_OUTPUT_BYTES_MAX:].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
