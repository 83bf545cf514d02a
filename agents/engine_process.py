"""The process of a supervised engine: started in a session of its own, adopted by the next agent by its identity.

Its record is written before anything trusts it; an agent that died between the start and the record finds the process
again by the mark in its environment, so an engine is never started twice.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from ..vmm.tags import RestoreMode
from .node_files import ProcessRecord, Text, fitting, replace_json
from .processes import (
    descendants,
    find_by_environ,
    find_started,
    identity,
    is_same,
    read_stat,
    send_signal,
    wait_exited,
)
from .protocol.policy import EnginePolicy
from .protocol.wire import ProcessIdentity
from .settings import MEMORY_SERVICE_FLAGS, RESTORE_MODE_FLAGS, EngineSettings

ENGINE_MARK: Final = "LULL_ENGINE"
_KILL_SECONDS_MAX: Final = 30.0
_LOG_BYTES_MAX: Final = 64 << 20
_LISTEN: Final = "0A"  # as /proc/net/tcp has it
_SHAPES: Final[dict[str, TypeAdapter[Any]]] = {
    "process": TypeAdapter(ProcessRecord),
    "restore_modes": TypeAdapter(dict[Text, RestoreMode]),
}


class EngineWillNotDie(RuntimeError):
    """SIGKILL was sent and the process is still there."""


def render_command(command: list[str], policy: EnginePolicy, memory_socket: Path | None) -> list[str]:
    """The command with ``{restore_mode_flags}`` replaced by ``--restore-mode TAG=MODE`` for every tag, and
    ``{memory_service_flags}`` by ``--memory-service SOCKET``."""
    rendered: list[str] = []
    for word in command:
        if word == RESTORE_MODE_FLAGS:
            for tag, mode in sorted(policy.restore_modes.items()):
                rendered += ["--restore-mode", f"{tag}={mode}"]
        elif word == MEMORY_SERVICE_FLAGS:
            rendered += [] if memory_socket is None else ["--memory-service", str(memory_socket)]
        else:
            rendered.append(word)
    return rendered


class EngineProcess:
    """At most one process of one engine. ``directory`` holds its record and its log."""

    def __init__(
        self,
        directory: Path,
        engine_id: str,
        settings: EngineSettings,
        memory_socket: Path | None = None,
        cuda_visible: str = "",
    ) -> None:
        """``cuda_visible``: the UUIDs of its GPUs; it sees no other one, whatever the agent sees."""
        if settings.command is None:
            raise ValueError(f"engine {settings.name} has no command: it is attached")
        self._command = settings.command
        self._env = {"CUDA_VISIBLE_DEVICES": cuda_visible, **settings.env}
        self._memory_socket = memory_socket
        self._directory = directory
        self._engine_id = engine_id
        self._child: subprocess.Popen[bytes] | None = None
        self.process: ProcessIdentity | None = None
        self._leader: ProcessIdentity | None = None  # the last one: its session may outlive it
        self.restore_modes: dict[str, str] = {}  # that it was started with
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)

    def adopt(self) -> bool:
        """Finds a process that an earlier agent started; True if there is one."""
        value = fitting(self._directory / "process.json", _SHAPES)
        known = None
        if value.keys() >= _SHAPES.keys():
            self.restore_modes = dict(value["restore_modes"])
            self._leader = known = ProcessIdentity.model_validate(value["process"])
        if known is not None and is_same(known):
            self.process = known
            return True
        for pid in find_by_environ(ENGINE_MARK, self._engine_id):
            stat = read_stat(pid)
            if stat is not None and stat.session == pid:
                self._leader = self.process = identity(pid)
        return self.process is not None

    @property
    def alive(self) -> bool:
        if self._child is not None and self._child.poll() is not None:
            self._child = None  # reaped
        return self.process is not None and is_same(self.process)

    def pids(self) -> set[int]:
        """Its own pid and those of its descendants, of which some may outlive it."""
        if self.process is not None and self.alive:
            return {self.process.pid, *descendants(self.process.pid)}
        return set() if self._leader is None else {left.pid for left in self._left()}

    def _left(self) -> list[ProcessIdentity]:
        return find_started(ENGINE_MARK, self._engine_id, self._leader)

    def start(self, policy: EnginePolicy) -> ProcessIdentity:
        """Starts it with the flags of ``policy``. Raises OSError; RuntimeError if it runs."""
        if self.alive:
            raise RuntimeError(f"engine {self._engine_id} runs already")
        log = self._open_log()
        try:
            self._child = subprocess.Popen(
                render_command(self._command, policy, self._memory_socket),
                env={**os.environ, **self._env, ENGINE_MARK: self._engine_id},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=self._directory,
            )
        finally:
            os.close(log)
        self._leader = self.process = identity(self._child.pid)
        if self.process is None:
            raise OSError(f"{self._command[0]} ended at once with code {self._child.wait(5)}; see {self.log_path}")
        self.restore_modes = {tag: str(mode) for tag, mode in policy.restore_modes.items()}
        self._write_record()
        return self.process

    @property
    def log_path(self) -> Path:
        return self._directory / "engine.log"

    def _open_log(self) -> int:
        if self.log_path.exists() and self.log_path.stat().st_size > _LOG_BYTES_MAX:
            self.log_path.rename(self.log_path.with_suffix(".log.1"))
        return os.open(self.log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)

    def _write_record(self) -> None:
        assert self.process is not None
        value = {
            "process": self.process.model_dump(),
            "restore_modes": self.restore_modes,
            "started_at": time.time(),
        }
        replace_json(self._directory / "process.json", value)

    async def stop(self, seconds_max: float) -> None:
        """SIGTERM, then SIGKILL to it and what it left behind, also by an engine that died; raises EngineWillNotDie."""
        process, pids = self.process, self.pids()
        left = [known for pid in pids if (known := identity(pid)) is not None]
        if process is not None:
            send_signal(process, signal.SIGTERM)
            if not await wait_exited(process, seconds_max):
                send_signal(process, signal.SIGKILL)
            await wait_exited(process, _KILL_SECONDS_MAX)
        left += [known for known in self._left() if known not in left]
        for known in left:
            if known != process:
                send_signal(known, signal.SIGKILL)
        for known in left:
            if not await wait_exited(known, _KILL_SECONDS_MAX):
                raise EngineWillNotDie(f"pid {known.pid} of engine {self._engine_id} does not end")
        if self._child is not None:
            await asyncio.to_thread(self._child.wait, _KILL_SECONDS_MAX)
            self._child = None
        self.process = self._leader = None

    async def wait_gone(self, seconds_max: float) -> bool:
        """True as soon as the process is gone; False after ``seconds_max``."""
        if self.process is None:
            return True
        return await wait_exited(self.process, seconds_max)


def listening_pid(port: int) -> int | None:
    """The process that listens on a TCP port of this node: how an attached engine's process is found.

    Whose a socket is costs a walk over the descriptors of all processes, so that is asked only of one that is there.
    """
    if not _is_listened_to(port):
        return None
    import psutil

    for connection in psutil.net_connections("tcp"):
        is_listening = connection.status == psutil.CONN_LISTEN and connection.pid is not None
        if is_listening and connection.laddr and connection.laddr.port == port:
            return int(connection.pid or 0)
    return None


def _is_listened_to(port: int) -> bool:
    for table in ("tcp", "tcp6"):
        with contextlib.suppress(FileNotFoundError), open(f"/proc/self/net/{table}") as rows:  # no IPv6: no table
            for row in rows:
                _, local, _, state, *_ = row.split(maxsplit=4)
                if state == _LISTEN and local.endswith(f":{port:04X}"):
                    return True
    return False
