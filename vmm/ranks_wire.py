"""Frames between the leader and its ranks, over a Unix socket: four bytes of length, then a JSON object.

Both sides talk to processes of their own user only. A frame that is too long or makes no sense ends the connection.
"""

from __future__ import annotations

import errno
import json
import os
import select
import socket
import struct
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

from .errors import LullMemoryError
from .ranks_protocol import Kind, Message, Verb

FRAME_BYTES_MAX: Final = 64 << 10
REASON_CHARACTERS_MAX: Final = 2000
SEND_SECONDS_MAX: Final = 5
_PATH_BYTES_MAX: Final = 107  # sun_path, less its ending
_LENGTH: Final = struct.Struct("!I")
_CREDENTIALS: Final = struct.Struct("iII")  # pid, uid, gid
_TIME: Final = struct.Struct("ll")


class RankLinkError(LullMemoryError):
    """The other side is gone, is somebody else, or does not speak this protocol."""


@dataclass(frozen=True, slots=True)
class Hello:
    """A rank's first word. ``ranks`` is how many it thinks there are."""

    rank: int
    ranks: int


@dataclass(frozen=True, slots=True)
class Welcome:
    """The leader's answer; ``refusal`` is empty if the rank is in."""

    refusal: str


@dataclass(frozen=True, slots=True)
class StatusQuery:
    number: int


@dataclass(frozen=True, slots=True)
class StatusAnswer:
    number: int
    state: str
    parked_tags: tuple[str, ...]
    known_tags: tuple[str, ...]
    failure: str


Frame = Message | Hello | Welcome | StatusQuery | StatusAnswer
_HELLO, _WELCOME, _QUERY, _STATUS = "hello", "welcome", "status_query", "status"


def encode(frame: Frame) -> bytes:
    match frame:
        case Message():
            content: dict[str, Any] = {
                "kind": frame.kind,
                "operation": frame.operation,
                "verb": frame.verb,
                "tags": frame.tags,
                "error": frame.error[:REASON_CHARACTERS_MAX],
                "reason": frame.reason[:REASON_CHARACTERS_MAX],
            }
        case Hello():
            content = {"kind": _HELLO, "rank": frame.rank, "ranks": frame.ranks}
        case Welcome():
            content = {"kind": _WELCOME, "refusal": frame.refusal}
        case StatusQuery():
            content = {"kind": _QUERY, "number": frame.number}
        case StatusAnswer():
            content = {
                "kind": _STATUS,
                "number": frame.number,
                "state": frame.state,
                "parked_tags": frame.parked_tags,
                "known_tags": frame.known_tags,
                "failure": frame.failure[:REASON_CHARACTERS_MAX],
            }
    body = json.dumps(content).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise RankLinkError(f"a frame of {len(body)} bytes is larger than {FRAME_BYTES_MAX}: too many or too long tags")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> Frame:
    """Raises RankLinkError for anything that `encode` does not make."""
    try:
        content = json.loads(body)
        kind = content["kind"]
        if kind == _HELLO:
            return Hello(_integer(content, "rank"), _integer(content, "ranks"))
        if kind == _WELCOME:
            return Welcome(_text(content, "refusal"))
        if kind == _QUERY:
            return StatusQuery(_integer(content, "number"))
        if kind == _STATUS:
            return StatusAnswer(
                _integer(content, "number"),
                _text(content, "state"),
                _texts(content, "parked_tags"),
                _texts(content, "known_tags"),
                _text(content, "failure"),
            )
        return Message(
            Kind(kind),
            _integer(content, "operation"),
            None if content["verb"] is None else Verb(content["verb"]),
            None if content["tags"] is None else _texts(content, "tags"),
            _text(content, "error"),
            _text(content, "reason"),
        )
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RankLinkError(f"a frame makes no sense: {type(error).__name__} {error}") from error


def _integer(content: dict[str, Any], name: str) -> int:
    value = content[name]
    if type(value) is not int or not 0 <= value < 1 << 63:
        raise ValueError(f"{name} is no number that counts something")
    return value


def _text(content: dict[str, Any], name: str) -> str:
    value = content[name]
    if not isinstance(value, str):
        raise TypeError(f"{name} is no text")
    return value


def _texts(content: dict[str, Any], name: str) -> tuple[str, ...]:
    value = content[name]
    if not isinstance(value, list) or not all(isinstance(one, str) for one in cast("list[object]", value)):
        raise TypeError(f"{name} is no list of texts")
    return tuple(cast("list[str]", value))


class Link:
    """One connection. One thread receives; any may send."""

    def __init__(self, connection: socket.socket) -> None:
        """Raises RankLinkError if the other process is not of our user."""
        self._socket = connection
        self._sending = threading.Lock()
        credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        self.peer_pid, uid, _ = _CREDENTIALS.unpack(credentials)
        if uid != os.getuid():
            connection.close()
            raise RankLinkError(f"process {self.peer_pid} is of user {uid}, not {os.getuid()}")
        # A peer that reads nothing may cost so long, and no longer.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, _TIME.pack(SEND_SECONDS_MAX, 0))

    def send(self, frame: Frame) -> None:
        """Raises RankLinkError if it cannot be sent within SEND_SECONDS_MAX; the connection is useless then."""
        data = encode(frame)
        try:
            with self._sending:
                self._socket.sendall(data)
        except OSError as error:
            self.hang_up()
            raise RankLinkError(f"could not be told: {error}") from error

    def receive(self, seconds_max: float | None = None) -> Frame:
        """The next frame. Raises RankLinkError when there will be none, or none came in time."""
        if seconds_max is not None:
            waiting = select.poll()  # which has no limit on descriptors: an engine may have thousands
            waiting.register(self._socket, select.POLLIN)
            if not waiting.poll(seconds_max * 1000):
                raise RankLinkError(f"said nothing for {seconds_max} s")
        (nbytes,) = _LENGTH.unpack(self._exactly(_LENGTH.size))
        if not 0 < nbytes <= FRAME_BYTES_MAX:
            raise RankLinkError(f"announced a frame of {nbytes} bytes; at most {FRAME_BYTES_MAX} are allowed")
        return decode(self._exactly(nbytes))

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            try:
                piece = self._socket.recv(nbytes - len(data))
            except OSError as error:
                raise RankLinkError(f"is gone: {error}") from error
            if not piece:
                raise RankLinkError("is gone: the connection was closed")
            data += piece
        return bytes(data)

    def hang_up(self) -> None:
        """Wakes the thread that receives. Again is no change."""
        try:
            self._socket.shutdown(socket.SHUT_RDWR)
        except OSError as error:
            if error.errno not in (errno.ENOTCONN, errno.EBADF):
                raise

    def close(self) -> None:
        self._socket.close()


def listen(path: Path, backlog: int) -> socket.socket:
    """Bound at ``path`` with mode 0600. Raises RankLinkError if somebody listens there already."""
    _require_short(path)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        os.fchmod(listener.fileno(), 0o600)  # before bind, so that it is never open to others
        try:
            listener.bind(str(path))
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            _remove_if_stale(path)
            listener.bind(str(path))
        listener.listen(backlog)
    except BaseException:
        listener.close()
        raise
    return listener


def connect(path: Path, seconds_max: float, wait: Callable[[float], object], now: Callable[[], float]) -> Link:
    """Tries until the leader listens. Raises RankLinkError if it does not within ``seconds_max``."""
    _require_short(path)
    deadline = now() + seconds_max
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.connect(str(path))
        except OSError as error:
            connection.close()
            if error.errno not in (errno.ENOENT, errno.ECONNREFUSED, errno.EAGAIN):
                raise
            if now() > deadline:
                raise RankLinkError(f"no leader at {path} within {seconds_max} s: {error}") from error
            wait(0.02)
        else:
            return Link(connection)


def _remove_if_stale(path: Path) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
            return
    raise RankLinkError(f"another leader listens at {path}; give each engine a socket of its own")


def _require_short(path: Path) -> None:
    if len(os.fsencode(path)) > _PATH_BYTES_MAX:
        raise ValueError(f"socket path {path} is longer than {_PATH_BYTES_MAX} bytes; use a shorter folder")
