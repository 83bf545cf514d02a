"""How one gateway process was started. Built once, passed down."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of the data path."""

    body_bytes_max: int = 16 * 2**20  # of one request
    buffered_bytes_max: int = 256 * 2**20  # of all requests together; held ones keep theirs
    requests_max: int = 10_000  # at once, held ones included
    body_seconds_max: float = 60.0  # for a client to send its request's body
    idle_seconds_max: float = 75.0  # of a client's connection between two requests, slow heads included
    connect_seconds_max: float = 5.0
    silence_seconds_max: float = 1800.0  # without a byte from the engine, or without the client taking one
    keepalive_seconds: float = 5.0  # between the comments that a held streaming client gets
    abort_seconds_max: float = 5.0  # for an engine to close a connection that was aborted
    stop_seconds_max: float = 30.0  # for what is in flight after SIGTERM


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
