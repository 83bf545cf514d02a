"""Whatever an engine sends, in whatever segments: a client gets the answer that a strict reader finds in it, or none
that is whole; how the bytes were cut changes nothing; and bytes behind the answer reach nobody.
"""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lull.agents.gateway.engine_connection import EngineConnection, Pool
from lull.agents.gateway.heads import AnswerHead
from lull.agents.gateway.settings import Limits

FIELD = re.compile(rb"([-!#$%&'*+.^_`|~0-9a-zA-Z]+):([\t -~\x80-\xff]*)")
START = re.compile(rb"HTTP/1\.([01]) ([1-9][0-9][0-9])(?: [\t -~\x80-\xff]*)?")
Answer = tuple[int, bytes]


def strict(data: bytes, *, ended: bool) -> tuple[Answer | None, bool]:
    """The answer, if it is whole and without fault, and whether another request may follow on its connection."""
    while True:
        head, end, data = data.partition(b"\r\n\r\n")
        start, *lines = head.split(b"\r\n")
        found = START.fullmatch(start)
        if not end or found is None or found[2] == b"101":
            return None, False
        fields = [FIELD.fullmatch(line) for line in lines]
        headers = [(each[1].lower(), each[2].strip(b" \t")) for each in fields if each is not None]
        framing = [(name, value) for name, value in headers if name in (b"content-length", b"transfer-encoding")]
        if len(headers) != len(lines) or len(framing) > 1:
            return None, False
        if int(found[2]) >= 200:
            break
    status = int(found[2])
    named = [word.strip().lower() for name, value in headers if name == b"connection" for word in value.split(b",")]
    closes = b"close" in named
    keeps = found[1] == b"1" and not closes
    if status in (204, 304):
        body, rest = b"", data
    elif not framing:
        return ((status, data), False) if ended else (None, False)
    elif framing[0][0] == b"content-length":
        if re.fullmatch(rb"[0-9]{1,15}", framing[0][1]) is None or len(data) < int(framing[0][1]):
            return None, False
        body, rest = data[: int(framing[0][1])], data[int(framing[0][1]) :]
    elif framing[0][1].lower() == b"chunked":
        whole = unchunk(data)
        if whole is None:
            return None, False
        body, rest = whole
    else:
        return None, False
    return (status, body), keeps and not rest


def unchunk(data: bytes) -> tuple[bytes, bytes] | None:
    body = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        if not end or re.fullmatch(rb"[0-9a-fA-F]+(;[\t -~\x80-\xff]*)?", line) is None:
            return None
        size = int(line.partition(b";")[0], 16)
        if not size:
            break
        if data[size : size + 2] != b"\r\n":
            return None
        body, data = body + data[:size], data[size + 2 :]
    while True:
        line, end, data = data.partition(b"\r\n")
        if not end or (line and FIELD.fullmatch(line) is None):
            return None
        if not line:
            return body, data


class EngineSide(asyncio.Transport):
    """Where the gateway writes; what it reads is handed to it by the test, so that segments stay as they are cut."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})
        self.closed = False

    def write(self, data: Any) -> None:
        pass

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.closed = True

    def get_write_buffer_size(self) -> int:
        return 0


class Asking:
    def __init__(self, *, unframe: bool) -> None:
        self.unframe = unframe
        self.head: AnswerHead | None = None
        self.body = b""
        self.ends = 0
        self.lost = False

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None:
        assert self.head is None
        assert not self.lost
        self.head, self.status, self.length = head, head.status, head.content_length
        self.on_piece(piece, complete)

    def on_piece(self, piece: bytes, complete: bool) -> None:
        assert not self.ends
        self.body += piece
        self.ends += complete

    def on_lost(self, text: str) -> None:
        assert not self.ends
        self.lost = True

    on_broken = on_lost

    def answer(self) -> Answer | None:
        """As its client would read it."""
        if not self.ends or self.head is None:
            return None
        assert self.length is None or self.length == len(self.body)
        body = self.body
        if self.head.chunked and not self.unframe:
            whole = unchunk(body)
            assert whole is not None
            assert whole[1] == b""
            body = whole[0]
        return self.status, body


Result = tuple[Answer | None, bool]


@pytest.fixture(scope="module")
def ends() -> Iterator[tuple[asyncio.Runner, socket.socket]]:
    here, there = socket.socketpair()
    with asyncio.Runner() as runner, here, there:
        yield runner, here


def read(ends: Any, segments: list[bytes], *, ended: bool, unframe: bool, first: bytes | None) -> Result:
    """The answer that a client gets, and whether the connection is kept for another request."""

    async def run() -> Result:
        pool = Pool("127.0.0.1", 1, Limits(), reuse=True)
        connection, transport = EngineConnection(pool), EngineSide(ends[1])
        connection.connection_made(transport)
        if first is not None:
            before = Asking(unframe=False)
            connection.send(before, b"", unframe=False)
            connection.data_received(first)
            if pool.take() is not connection:
                pool.retire()
                return None, False  # refused: stricter than the reader here, which is allowed for what has a fault
        asking = Asking(unframe=unframe)
        connection.send(asking, b"", unframe=unframe)
        for segment in segments:
            if not transport.closed:
                connection.data_received(segment)
        kept = pool.idle == 1 and not transport.closed
        if ended and not transport.closed:
            connection.eof_received()
        connection.connection_lost(None)
        pool.retire()
        return asking.answer(), kept

    return ends[0].run(run())  # type: ignore[no-any-return]


BODIES = st.sampled_from(
    [b"", b"{}", b"abc", b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nno", b"0\r\n\r\n", b"\r\n\r\n", b"data: 1\n\n"]
)
STATUSES = st.sampled_from([b"200 OK"] * 5 + [b"204 No Content", b"304 Not Modified", b"400 Bad", b"503 ", b"299"])
HEADERS = st.lists(
    st.sampled_from(
        [b"X: 1", b"Connection: close", b"Connection: keep-alive", b"Upgrade: h2c", b"Content-Type: a/b; c"]
    ),
    max_size=2,
)
INTERIM = st.sampled_from([b""] * 5 + [b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.1 103 Early\r\nLink: x\r\n\r\n"])
ODD = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b" ",
        b"nocolon\r\n",
        b"Content-Length: 3\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nPOISON",
    ]
)


@st.composite
def answers(draw: st.DrawFn) -> bytes:
    """Without fault, but for lengths of what has no body."""
    status, body = draw(STATUSES), draw(BODIES)
    lines = [b"HTTP/1.%s %s" % (draw(st.sampled_from([b"1", b"1", b"1", b"0"])), status), *draw(HEADERS)]
    framing = draw(st.sampled_from(["length", "length", "chunked", "none"]))
    bodiless = status[:3] in (b"204", b"304")
    if framing == "length":
        lines.append(b"Content-Length: %d" % len(body))
    elif framing == "chunked" and lines[0].startswith(b"HTTP/1.1"):
        lines.append(b"Transfer-Encoding: chunked")
        at = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:at], body[at:]) if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n"
        body += draw(st.sampled_from([b"", b"X-T: 1\r\n"])) + b"\r\n"
    return draw(INTERIM) + b"\r\n".join(lines) + b"\r\n\r\n" + (b"" if bodiless else body)


@st.composite
def streams(draw: st.DrawFn) -> tuple[bytes, bool]:
    """Bytes, and whether they are an answer without fault."""
    data = draw(answers())
    faults = draw(st.integers(0, 2))
    for _ in range(faults):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.one_of(ODD, st.binary(max_size=3))) + data[at + draw(st.integers(0, 3)) :]
    return data, not faults


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(stream=streams(), ended=st.booleans(), unframe=st.booleans(), again=st.booleans(), draw=st.data())
def test_a_client_gets_what_a_strict_reader_finds_and_cuts_change_nothing(
    ends: Any, stream: tuple[bytes, bool], ended: bool, unframe: bool, again: bool, draw: st.DataObject
) -> None:
    data, faultless = stream
    expected, keeps = strict(data, ended=ended)
    head = data.partition(b"\r\n\r\n")[0] + b"\r\n\r\n"
    # An answer with the same head before it: what is known of that one may decide nothing but what it may.
    repeats = again and strict(head, ended=False)[1]
    first = head if repeats else b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}" if again else None
    places = sorted(draw.draw(st.sets(st.integers(0, len(data)), max_size=8)))
    cut = [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]
    for segments in ([data] if data else [], cut, [data[at : at + 1] for at in range(len(data))]):
        answer, kept = read(ends, segments, ended=ended, unframe=unframe, first=first)
        assert answer in (expected, None)
        assert keeps or not kept
        if faultless:
            assert (answer, kept) == (expected, keeps)


@pytest.mark.parametrize("data", [b"HTTP/1.1 200 OK\nContent-Length: 3\n\nabc", b"\x00\x01garbage\n"])
def test_what_never_becomes_a_head_is_not_waited_for(ends: Any, data: bytes) -> None:
    asking = Asking(unframe=False)

    async def run() -> None:
        pool = Pool("127.0.0.1", 1, Limits(), reuse=True)
        connection, transport = EngineConnection(pool), EngineSide(ends[1])
        connection.connection_made(transport)
        connection.send(asking, b"", unframe=False)
        connection.data_received(data)
        assert transport.closed
        pool.retire()

    ends[0].run(run())
    assert asking.lost
