"""How one gateway process was started. Built once, passed down."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

# Of the files that the process may open: for calls of the agent, which may wait for each engine, logs and routes.
_FILES_RESERVED_MAX: Final = 256


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the data path."""

    body_bytes_max: int = 16 * 2**20  # of one request
    # Of all requests together, those included at which an engine may be though their clients are gone. What closed
    # gates hold may have half of both, so that it never shuts out engines that are open.
    buffered_bytes_max: int = 256 * 2**20
    requests_max: int = 10_000  # at once
    connections_max: int = 20_000  # of clients, idle ones included
    body_seconds_max: float = 60.0  # for a client to send its request's body
    idle_seconds_max: float = 75.0  # of a client's connection between two requests, slow heads included
    connect_seconds_max: float = 5.0
    # Without a byte from the engine, whether its client is there or gone; for a client to take the end of an answer.
    silence_seconds_max: float = 1800.0
    keepalive_seconds: float = 5.0  # between the comments that a held streaming client gets
    abort_seconds_max: float = 5.0  # for an engine to close a connection that was aborted
    stop_seconds_max: float = 30.0  # for what is in flight after SIGTERM

    @property
    def held_requests_max(self) -> int:
        return max(1, self.requests_max // 2)

    @property
    def held_bytes_max(self) -> int:
        return self.buffered_bytes_max // 2

    def within_files(self, files_max: int) -> Limits:
        """These limits for a process that may open ``files_max`` files: a request may need a connection to its engine
        beside its client's, and the agent has to get through whatever clients do."""
        pairs = max(1, (files_max - min(_FILES_RESERVED_MAX, files_max // 4)) // 2)
        return replace(
            self, connections_max=min(self.connections_max, pairs), requests_max=min(self.requests_max, pairs)
        )


@dataclass(frozen=True, slots=True)
class GatewaySettings:
    host: str
    port: int
    control: Path
    state_dir: Path
    pid_file: Path
    log_file: Path | None = None
    reuse_connections: bool = True
    limits: Limits = Limits()


def parse_listen(text: str) -> tuple[str, int]:
    """Host and port of ``127.0.0.1:8070`` or ``[::1]:8070``. ValueError says what is wrong."""
    host, colon, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"{text!r} is not HOST:PORT with a port from 0 to 65535, for example 127.0.0.1:8070")
    return host, int(port)
