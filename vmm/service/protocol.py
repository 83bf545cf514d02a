"""Frames between an engine and the memory service: 4 bytes of length, big-endian, then one JSON object.

A frame may carry one descriptor, by SCM_RIGHTS. Everything is bounded: the length, the time from a frame's first byte
to its last, the descriptors. What breaks a rule is MalformedFrame, and no descriptor of such a frame stays open.
"""

from __future__ import annotations

import array
import contextlib
import json
import os
import re
import socket
import struct
import time
from collections.abc import Mapping
from typing import Any, Final, NoReturn, cast

from .errors import InvalidRequest, MalformedFrame

VERSION: Final = 1
FRAME_BYTES_MAX: Final = 1 << 20
FRAME_SECONDS_MAX: Final = 10.0
ALLOCATION_BYTES_MAX: Final = 1 << 50
WAIT_SECONDS_MAX: Final = 3600.0
KEY_PATTERN: Final = re.compile(r"[\x21-\x7e]{1,512}")
POOL_PATTERN: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:@/-]{0,127}")
HANDLE_PATTERN: Final = re.compile(r"[A-Za-z0-9._:-]{1,128}")
HASH_PATTERN: Final = re.compile(r"[0-9a-f]{64}")
VALUE_BYTES_MAX: Final = 16 << 10  # of one entry's JSON value

_LENGTH: Final = struct.Struct(">I")
_FD_BYTES: Final = array.array("i").itemsize
_FDS_SEEN_MAX: Final = 4  # room for more than the one that is allowed: a second one is found out, not cut off

Message = dict[str, Any]


def pack(message: Mapping[str, Any]) -> bytes:
    body = json.dumps(message, separators=(",", ":"), allow_nan=False).encode()
    if len(body) > FRAME_BYTES_MAX:
        raise MalformedFrame(f"a frame of {len(body)} bytes is longer than {FRAME_BYTES_MAX}")
    return _LENGTH.pack(len(body)) + body


def send(connection: socket.socket, message: Mapping[str, Any], fd: int | None = None) -> None:
    """OSError if the other side is gone or does not take it within the socket's time-out."""
    send_frame(connection, pack(message), fd)


def send_frame(connection: socket.socket, frame: bytes, fd: int | None = None) -> None:
    """`send` for what is packed already."""
    sent = 0
    if fd is not None:
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))]
        sent = connection.sendmsg([frame], rights)
    connection.sendall(frame[sent:])


def receive(
    connection: socket.socket, *, first_byte_seconds_max: float | None, frame_seconds_max: float = FRAME_SECONDS_MAX
) -> tuple[Message, int | None] | None:
    """The next message with its descriptor, which is the caller's then; None at the end of the stream.

    Raises TimeoutError before the first byte, MalformedFrame after it. ``first_byte_seconds_max`` None: for ever.
    """
    fds: list[int] = []
    try:
        frame = _receive_frame(connection, fds, first_byte_seconds_max, frame_seconds_max)
        if frame is None:
            _require(not fds, "a descriptor without a frame")
            return None
        _require(len(fds) <= 1, f"{len(fds)} descriptors in one frame; at most one is allowed")
        message = _parse(frame)
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise
    return message, fds[0] if fds else None


def _receive_frame(
    connection: socket.socket, fds: list[int], first_byte_seconds_max: float | None, frame_seconds_max: float
) -> bytes | None:
    connection.settimeout(first_byte_seconds_max)
    head = _receive_some(connection, _LENGTH.size, fds)
    if not head:
        return None
    deadline = time.monotonic() + frame_seconds_max
    head += _receive_exactly(connection, _LENGTH.size - len(head), fds, deadline)
    (length,) = _LENGTH.unpack(head)
    _require(0 < length <= FRAME_BYTES_MAX, f"a frame of {length} bytes; 1 to {FRAME_BYTES_MAX} are allowed")
    return _receive_exactly(connection, length, fds, deadline)


def _receive_exactly(connection: socket.socket, nbytes: int, fds: list[int], deadline: float) -> bytes:
    received = bytearray()
    while len(received) < nbytes:
        left_seconds = deadline - time.monotonic()
        _require(left_seconds > 0, "the frame did not come whole in time")
        connection.settimeout(left_seconds)
        try:
            piece = _receive_some(connection, nbytes - len(received), fds)
        except TimeoutError:
            _fail("the frame did not come whole in time")
        _require(bool(piece), "the stream ended within a frame")
        received += piece
    return bytes(received)


def _receive_some(connection: socket.socket, nbytes: int, fds: list[int]) -> bytes:
    """Some bytes, at least one unless the stream has ended; descriptors that came with them are added to ``fds``."""
    room = socket.CMSG_SPACE(_FDS_SEEN_MAX * _FD_BYTES)
    data, ancillary, flags, _ = connection.recvmsg(nbytes, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, payload in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(payload[: len(payload) - len(payload) % _FD_BYTES])
            fds += numbers
    _require(not flags & socket.MSG_CTRUNC, "more descriptors than one frame may carry")
    return data


def _parse(body: bytes) -> Message:
    try:
        message: object = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise MalformedFrame(f"a frame is not JSON: {str(error)[:200]}") from None
    if not isinstance(message, dict):
        _fail("a frame is not a JSON object")
    return cast("Message", message)


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


class Fields:
    """Takes the fields of a request one by one, each checked; `end` refuses what is left over.

    Raises InvalidRequest: the frame was a frame, so whoever sent it keeps its connection, and what it has written.
    """

    def __init__(self, message: Message) -> None:
        self._left = dict(message)

    def integer(self, name: str, least: int, most: int) -> int:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
            _invalid(f"{name} is {_shown(value)}; an integer from {least} to {most} is needed")
        return value

    def seconds(self, name: str) -> float:
        value = self._take(name)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= WAIT_SECONDS_MAX:
            _invalid(f"{name} is {_shown(value)}; 0 to {WAIT_SECONDS_MAX} seconds are allowed")
        return float(value)

    def text(self, name: str, pattern: re.Pattern[str]) -> str:
        value = self._take(name)
        if not isinstance(value, str) or not pattern.fullmatch(value):
            _invalid(f"{name} is {_shown(value)}; it must match {pattern.pattern}")
        return value

    def optional_text(self, name: str, pattern: re.Pattern[str]) -> str | None:
        """None if the field is absent or null."""
        if self._left.get(name) is None:
            self._left.pop(name, None)
            return None
        return self.text(name, pattern)

    def integers(self, name: str, least: int, most: int) -> list[int]:
        given = self._take(name)
        if not isinstance(given, list):
            _invalid(f"{name} is {_shown(given)}; a list of integers is needed")
        numbers: list[int] = []
        for number in cast("list[object]", given):
            if isinstance(number, bool) or not isinstance(number, int) or not least <= number <= most:
                _invalid(f"{name} has {_shown(number)}; integers from {least} to {most} are needed")
            numbers.append(number)
        return numbers

    def optional_texts(self, name: str, pattern: re.Pattern[str]) -> list[str] | None:
        """None if the field is absent or null."""
        given = self._left.pop(name, None)
        if given is None:
            return None
        if not isinstance(given, list):
            _invalid(f"{name} is {_shown(given)}; a list is needed")
        texts = [text for text in cast("list[object]", given) if isinstance(text, str) and pattern.fullmatch(text)]
        if len(texts) != len(cast("list[object]", given)):
            _invalid(f"{name} has something that does not match {pattern.pattern}")
        return texts

    def value(self, name: str) -> object:
        """Any JSON, within its bound."""
        value = self._take(name)
        nbytes = len(json.dumps(value))
        if nbytes > VALUE_BYTES_MAX:
            _invalid(f"{name} has {nbytes} bytes; at most {VALUE_BYTES_MAX} are allowed")
        return value

    def end(self) -> None:
        if self._left:
            _invalid(f"unknown field {_shown(next(iter(self._left)))}")

    def _take(self, name: str) -> object:
        if name not in self._left:
            _invalid(f"{name} is missing")
        return self._left.pop(name)


def close_quietly(fd: int | None) -> None:
    """A descriptor that came with a request that is refused."""
    if fd is not None:
        with contextlib.suppress(OSError):
            os.close(fd)


def _shown(value: object) -> str:
    return repr(value)[:80]


def _require(condition: bool, text: str) -> None:
    if not condition:
        _fail(text)


def _fail(text: str) -> NoReturn:
    raise MalformedFrame(text)


def _invalid(text: str) -> NoReturn:
    raise InvalidRequest(text)
