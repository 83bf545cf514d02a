"""Starts the gateway for an agent, or takes over the one that an earlier agent started."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..detached import output_tail, start_module
from ..gates.base import GateUnreachable
from ..gates.gateway import GatewayGate, GatewayInfo

START_SECONDS_MAX: Final = 20.0
_LOOK_SECONDS: Final = 0.05


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
    words = [
        *("--listen", listen),
        *("--control", str(paths.control)),
        *("--state-dir", str(paths.state_dir)),
        *("--pid-file", str(paths.pid_file)),
        *("--log-file", str(paths.log_file)),
    ]
    process = start_module("lull.agents.gateway", words, output)
    loop = asyncio.get_running_loop()
    deadline = loop.time() + seconds_max
    while True:
        try:
            return await gate.info(), True
        except GateUnreachable as error:
            if process.poll() is not None or loop.time() > deadline:
                said = output_tail(output) or str(error)
                raise GatewayNotStarted(f"lull gateway (pid {process.pid}) did not start: {said}") from error
        await asyncio.sleep(_LOOK_SECONDS)
