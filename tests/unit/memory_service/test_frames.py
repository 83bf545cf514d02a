"""Frames on a socket: what is wrong with one is found, and no descriptor of it stays open."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from collections.abc import Iterator

import pytest

from lull.vmm.errors import DriverError, LullMemoryError, OutOfDeviceMemory, OutOfHostMemory, UnsupportedMode
from lull.vmm.service import errors, protocol
from lull.vmm.service.errors import InvalidRequest, MalformedFrame
from lull.vmm.service.protocol import Fields

Pair = tuple[socket.socket, socket.socket]


@pytest.fixture
def pair() -> Iterator[Pair]:
    before = len(os.listdir("/proc/self/fd"))
    left, right = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with left, right:
        yield left, right
    assert len(os.listdir("/proc/self/fd")) == before, "a descriptor was left open"


def receive(connection: socket.socket) -> tuple[protocol.Message, int | None] | None:
    return protocol.receive(connection, first_byte_seconds_max=5, frame_seconds_max=0.2)


def send_raw(connection: socket.socket, data: bytes, *fds: int) -> None:
    rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
    connection.sendmsg([data], rights)


def framed(body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + body


def test_a_message_and_its_descriptor_arrive(pair: Pair) -> None:
    protocol.send(pair[0], {"op": "x", "n": [1, "é"]}, pair[0].fileno())
    received = receive(pair[1])
    assert received is not None
    message, fd = received
    assert message == {"op": "x", "n": [1, "é"]}
    assert fd is not None
    assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
    os.close(fd)


def test_a_large_message_comes_in_pieces(pair: Pair) -> None:
    message = {"text": "x" * 100_000}
    pair[0].setblocking(False)
    frame = protocol.pack(message)
    sent = pair[0].send(frame[:1000])
    pair[0].send(frame[sent:60_000])
    sent = 60_000
    pair[0].send(frame[sent:])
    received = receive(pair[1])
    assert received == (message, None)


def test_the_end_of_a_stream_between_frames_is_none(pair: Pair) -> None:
    pair[0].close()
    assert receive(pair[1]) is None


@pytest.mark.parametrize(
    ("data", "match"),
    [
        (struct.pack(">I", 0), "0 bytes"),
        (struct.pack(">I", protocol.FRAME_BYTES_MAX + 1), "bytes; 1 to"),
        (b"\xff\xff\xff\xff", "bytes; 1 to"),
        (framed(b"not json"), "not JSON"),
        (framed(b"\xff\xfe"), "not JSON"),
        (framed(b"[1]"), "not a JSON object"),
        (framed(b'{"n": NaN}'), "NaN"),
        (framed(b'{"n": ' + b"9" * 5000 + b"}"), "not JSON"),
        (framed(b"[" * 100_000 + b"]" * 100_000), "not JSON"),
        (framed(b'{"op": "x"}')[:-3], "in time"),
        (b"\x00", "in time"),
    ],
)
def test_what_is_no_frame_is_refused(pair: Pair, data: bytes, match: str) -> None:
    pair[0].sendall(data)
    with pytest.raises(MalformedFrame, match=match):
        receive(pair[1])


def test_a_frame_that_is_cut_off_is_refused(pair: Pair) -> None:
    pair[0].sendall(framed(b'{"op": "x"}')[:-3])
    pair[0].close()
    with pytest.raises(MalformedFrame, match="ended within a frame"):
        receive(pair[1])


@pytest.mark.parametrize("count", [2, 4, 5, 20])
def test_more_than_one_descriptor_is_refused_and_all_are_closed(pair: Pair, count: int) -> None:
    send_raw(pair[0], framed(b'{"op": "x"}'), *[pair[0].fileno()] * count)
    with pytest.raises(MalformedFrame, match="descriptors"):
        receive(pair[1])


def test_descriptors_of_a_bad_frame_are_closed(pair: Pair) -> None:
    send_raw(pair[0], framed(b"nonsense"), pair[0].fileno())
    with pytest.raises(MalformedFrame):
        receive(pair[1])


def test_descriptors_spread_over_the_pieces_of_one_frame_count_together(pair: Pair) -> None:
    frame = framed(b'{"op": "x"}')
    send_raw(pair[0], frame[:6], pair[0].fileno())
    send_raw(pair[0], frame[6:], pair[0].fileno())
    with pytest.raises(MalformedFrame, match="2 descriptors"):
        receive(pair[1])


def test_a_frame_that_is_too_long_is_not_sent() -> None:
    with pytest.raises(MalformedFrame, match="longer than"):
        protocol.pack({"x": "y" * protocol.FRAME_BYTES_MAX})


@pytest.mark.parametrize("value", [True, 1.5, "1", None, -1, 11, [], {}])
def test_integers_are_integers_within_their_bounds(value: object) -> None:
    with pytest.raises(InvalidRequest, match="n is"):
        Fields({"n": value}).integer("n", 0, 10)


@pytest.mark.parametrize("value", [True, "1", None, -0.1, 3601, float("inf")])
def test_seconds_are_numbers_within_their_bounds(value: object) -> None:
    with pytest.raises(InvalidRequest, match="s is"):
        Fields({"s": value}).seconds("s")


def test_missing_and_unknown_fields_are_refused() -> None:
    with pytest.raises(InvalidRequest, match="key is missing"):
        Fields({}).text("key", protocol.KEY_PATTERN)
    with pytest.raises(InvalidRequest, match="unknown field 'more'"):
        Fields({"more": 1}).end()
    with pytest.raises(InvalidRequest, match="at most"):
        Fields({"v": "x" * protocol.VALUE_BYTES_MAX}).value("v")


@pytest.mark.parametrize(
    "error",
    [
        OutOfDeviceMemory(10, 5, 100),
        OutOfHostMemory(10, 5, "the backup in the memory service"),
        DriverError("create", "refused"),
        UnsupportedMode("no"),
        errors.ServiceRefused("no"),
        errors.WrongLock("no"),
        errors.LockTimeout("late"),
        errors.StaleLayout("old"),
        errors.LayoutInvalid("bad"),
    ],
)
def test_errors_come_over_the_wire_as_themselves(error: LullMemoryError) -> None:
    there = errors.from_wire(errors.to_wire(error))
    assert type(there) is type(error)
    assert str(error) in str(there)
    assert vars(there).keys() == vars(error).keys()


def test_an_error_of_a_later_version_is_still_an_error() -> None:
    assert isinstance(errors.from_wire({"code": "something_new", "text": "x"}), errors.ServiceRefused)
