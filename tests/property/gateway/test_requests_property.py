"""Whatever bytes a client sends, in whatever segments: an engine sees the requests that a strict reader finds in them,
with their bodies, and nothing else; and how the bytes were cut changes nothing.

The gateway's own connection class reads; the engine and the oracle are written here, from RFC 9112, and share no line
with it. What the engine got is read once more with h11, as uvicorn would.
"""

from __future__ import annotations

import asyncio
import json
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lull.agents.gateway.relay import Relay
from lull.agents.gateway.request_connection import State
from lull.agents.gateway.routes import RouteSpec, RouteTable
from lull.agents.gateway.settings import Limits

Arrived = tuple[str, bytes]  # target and body
OK = b'{"model": "m"}'
FIELD = re.compile(rb"([-!#$%&'*+.^_`|~0-9a-zA-Z]+):([\t -~\x80-\xff]*)")


# ---- a strict reader ---------------------------------------------------------------------------------------------


def strict(data: bytes) -> Iterator[tuple[bytes, bytes, dict[bytes, list[bytes]], bytes]]:
    """Method, target, headers and body of one request after the other, until something is odd or not whole."""
    while data := re.sub(rb"\A(?:\r\n)+", b"", data):
        head, end, data = data.partition(b"\r\n\r\n")
        start, *lines = head.split(b"\r\n")
        words = start.split(b" ")
        if not end or len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            return
        headers: dict[bytes, list[bytes]] = {}
        for line in lines:
            found = FIELD.fullmatch(line)
            if found is None:
                return
            headers.setdefault(found[1].lower(), []).append(found[2].strip(b" \t"))
        lengths, codings = headers.get(b"content-length", []), headers.get(b"transfer-encoding", [])
        if len(lengths) + len(codings) > 1 or [each for each in codings if each.lower() != b"chunked"]:
            return
        if codings:
            body, rest = strict_chunks(data)
            if body is None:
                return
            data = rest
        else:
            length = lengths[0] if lengths else b"0"
            if re.fullmatch(rb"[0-9]+", length) is None or len(data) < int(length):
                return
            body, data = data[: int(length)], data[int(length) :]
        yield words[0], words[1], headers, body
        if words[2] == b"HTTP/1.0" or b"close" in [
            word.strip().lower() for value in headers.get(b"connection", []) for word in value.split(b",")
        ]:
            return


def strict_chunks(data: bytes) -> tuple[bytes | None, bytes]:
    body = b""
    while True:
        line, end, data = data.partition(b"\r\n")
        found = re.fullmatch(rb"([0-9a-fA-F]+)(;[\t -~\x80-\xff]*)?", line)
        if not end or found is None:
            return None, b""
        size = int(found[1], 16)
        if not size:
            break
        body += data[:size]
        if data[size : size + 2] != b"\r\n":
            return None, b""
        data = data[size + 2 :]
    while True:
        line, end, data = data.partition(b"\r\n")
        if not end or (line and FIELD.fullmatch(line) is None):
            return None, b""
        if not line:
            return body, data


def accepted(data: bytes) -> list[Arrived]:
    """What may reach the engine, at most."""
    found: list[Arrived] = []
    for method, target, _, body in strict(data):
        if method == b"POST" and target.partition(b"?")[0] == b"/v1/completions":
            try:
                document = json.loads(body)
            except ValueError:
                continue
            if isinstance(document, dict) and document.get("model") == "m":
                found.append((target.partition(b"#")[0].decode("latin-1"), body))
    return found


# ---- the engine --------------------------------------------------------------------------------------------------


def read_by_h11(raw: bytes) -> list[Arrived]:
    if not raw:
        return []
    connection = h11.Connection(h11.SERVER)
    connection.receive_data(raw)
    found: list[Arrived] = []
    target, body = "", b""
    while True:
        event = connection.next_event()
        if isinstance(event, h11.Request):
            target, body = event.target.decode("latin-1"), b""
        elif isinstance(event, h11.Data):
            body += bytes(event.data)
        elif isinstance(event, h11.EndOfMessage):
            found.append((target, body))
            connection.send(h11.Response(status_code=200, headers=[("Content-Length", "0")]))
            connection.send(h11.EndOfMessage())
            connection.start_next_cycle()
        else:
            assert event is h11.NEED_DATA, event
            assert not connection.trailing_data[0], connection.trailing_data
            return found


class Engine(asyncio.Protocol):
    """Answers what the strict reader finds, and writes down each byte."""

    def __init__(self, raw: list[bytes]) -> None:
        self.raw = raw
        self.unread = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport: Any = transport

    def data_received(self, data: bytes) -> None:
        self.raw.append(data)
        self.unread += data
        for _, _, headers, body in strict(self.unread):
            head = len(self.unread.partition(b"\r\n\r\n")[0]) + 4
            self.unread = self.unread[head + len(body) :]
            assert not any(name.startswith(b"x-lull") for name in headers)
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
            return
        if b"\r\n\r\n" in self.unread and not re.search(rb"(?i)\r\ncontent-length: [1-9]", self.unread):
            self.transport.abort()  # no request: what was sent shows in the record


class ClientSide(asyncio.Transport):
    """Where the gateway's connection writes; no socket, so that segments stay as they are cut."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: Any) -> None:
        assert not self.closed
        self.written += data

    def is_closing(self) -> bool:
        return self.closed

    def close(self) -> None:
        self.closed = True

    def abort(self) -> None:
        self.closed = True

    def write_eof(self) -> None:
        self.closed = True

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


@dataclass
class Rig:
    loop: asyncio.AbstractEventLoop
    relay: Relay
    raw: list[bytes] = field(default_factory=list)

    def run(self, segments: list[bytes], *, wait: bool) -> tuple[list[int], list[Arrived], bool]:
        return self.loop.run_until_complete(self._run(segments, wait=wait))

    async def _run(self, segments: list[bytes], *, wait: bool) -> tuple[list[int], list[Arrived], bool]:
        """Statuses, what reached the engine, and whether the gateway ended the connection."""
        self.raw.clear()
        client = ClientSide()
        connection = self.relay.protocol()
        connection.connection_made(client)
        for segment in segments:
            if client.closed:
                break
            connection.data_received(segment)
            if wait:
                await self._quiet(connection)
        await self._quiet(connection)
        connection.connection_lost(None)
        assert self.relay.requests == 0
        arrived = read_by_h11(b"".join(self.raw))
        return [int(found) for found in re.findall(rb"HTTP/1\.1 (\d{3})", client.written)], arrived, client.closed

    async def _quiet(self, connection: Any) -> None:
        async with asyncio.timeout(10):
            while connection._state is State.BUSY:
                await asyncio.sleep(0)


@pytest.fixture(scope="module")
def rig() -> Iterator[Rig]:
    raw: list[bytes] = []
    with asyncio.Runner() as runner, tempfile.TemporaryDirectory() as state_dir:
        loop = runner.get_loop()

        async def start() -> tuple[Relay, asyncio.Server]:
            server = await loop.create_server(lambda: Engine(raw), "127.0.0.1", 0)
            limits = Limits()
            routes = RouteTable(Path(state_dir), limits, reuse_connections=True)
            port = server.sockets[0].getsockname()[1]
            spec = RouteSpec(name="one", models=("m",), upstream=f"http://127.0.0.1:{port}")
            routes.put("e1", spec).open()
            return Relay(routes, limits), server

        relay, server = runner.run(start())
        yield Rig(loop, relay, raw)
        relay.routes.get("e1").renew_connections()
        server.close()


# ---- what clients send -------------------------------------------------------------------------------------------

BODIES = st.sampled_from(
    [
        OK,
        b'{"model": "m", "a": "POST /sleep HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n"}',
        b'{"model": "m", "b": 12345678901234567890}',
        b'{"model": "other"}',
        b"{}",
        b"",
        b"POST /sleep HTTP/1.1\r\nHost: y\r\nContent-Length: 10000\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 14\r\n\r\n" + OK,
        b"0\r\n\r\n",
    ]
)
TARGETS = st.sampled_from([b"/v1/completions"] * 5 + [b"/v1/completions?a=b", b"/sleep", b"/livez", b"/v1/models"])
HEADERS = st.lists(
    st.sampled_from(
        [
            b"X-Lull-Canary: 1",
            b"x_lull: 2",
            b"Content_Length: 3",
            b"Transfer_Encoding: chunked",
            b"Upgrade: h2c",
            b"Accept:",
            b"Connection: keep-alive",
            b"Connection: x-a, upgrade",
            b"Connection: close",
            b"X-A: caf\xe9\t",
            b"Expect: 100-continue",
        ]
    ),
    max_size=3,
)
ODD = st.sampled_from(
    [
        b"\r\n",
        b"\n",
        b"\r",
        b"\x00",
        b" ",
        b":",
        b"X: a\nY: b",
        b"nocolon\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"Transfer-Encoding: chunked\r\n",
        b"Content-Length: 5\r\n",
        b"\r\n\r\n",
        b"0\r\n\r\n",
        b"POST /sleep HTTP/1.1\r\nHost: x\r\n\r\n",
    ]
)


@st.composite
def requests(draw: st.DrawFn) -> bytes:
    """Without fault."""
    body = draw(BODIES)
    start = b"%s %s HTTP/1.1" % (draw(st.sampled_from([b"POST"] * 6 + [b"GET"])), draw(TARGETS))
    lines = [start, b"Host: x", *draw(HEADERS)]
    if draw(st.booleans()):
        lines.append(b"Content-Length: %d" % len(body))
    else:
        lines.append(b"Transfer-Encoding: chunked")
        at = draw(st.integers(0, len(body)))
        parts = [part for part in (body[:at], body[at:]) if part]
        body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n"
        body += draw(st.sampled_from([b"", b"X-Lull-Canary: 1\r\n", b"Content-Length: 3\r\n"])) + b"\r\n"
    return draw(st.sampled_from([b"", b"", b"\r\n", b"\r\n\r\n"])) + b"\r\n".join(lines) + b"\r\n\r\n" + body


@st.composite
def odd_streams(draw: st.DrawFn) -> bytes:
    data = b"".join(draw(st.lists(requests(), min_size=1, max_size=3)))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(data)))
        data = data[:at] + draw(st.one_of(ODD, st.binary(max_size=3))) + data[at + draw(st.integers(0, 3)) :]
    return data


@st.composite
def cuts(draw: st.DrawFn, data: bytes) -> list[bytes]:
    if draw(st.booleans()):
        size = draw(st.sampled_from([1, 2, 3, 7, 64]))
        places = list(range(size, len(data), size))
    else:
        places = sorted(draw(st.sets(st.integers(0, len(data)), max_size=6)))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]


SETTINGS = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@SETTINGS
@given(stream=odd_streams(), draw=st.data())
def test_an_engine_sees_what_a_strict_reader_finds_and_cuts_change_nothing(
    rig: Rig, stream: bytes, draw: st.DataObject
) -> None:
    whole = rig.run([stream], wait=False)
    allowed = accepted(stream)
    assert whole[1] == allowed[: len(whole[1])]
    segments = draw.draw(cuts(stream))
    assert rig.run(segments, wait=draw.draw(st.booleans())) == whole


@SETTINGS
@given(stream=st.lists(requests(), min_size=1, max_size=3), draw=st.data())
def test_requests_without_fault_all_arrive(rig: Rig, stream: list[bytes], draw: st.DataObject) -> None:
    """Up to the first that is refused while its body is not read: nothing is looked for behind that."""
    data = b"".join(stream)
    statuses, arrived, closed = rig.run(draw.draw(cuts(data)), wait=draw.draw(st.booleans()))
    expected = accepted(data)
    assert arrived == expected[: len(arrived)]
    if not closed:
        assert arrived == expected
    assert len([status for status in statuses if status != 100]) <= len(stream)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_cuts_at_every_place_of_requests_in_a_row(rig: Rig, size: int) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    sized = head + b"Content-Length: 14\r\n\r\n" + OK
    chunked = head + b"Transfer-Encoding: chunked\r\n\r\n3\r\n" + OK[:3] + b"\r\nb\r\n" + OK[3:] + b"\r\n0\r\n\r\n"
    stream = b"\r\n" + sized + b"\r\n\r\n" + sized + chunked + b"\r\n" + sized
    expected = ([200] * 4, [("/v1/completions", OK)] * 4, False)
    for at in range(len(stream) - size):
        assert rig.run([stream[:at], stream[at : at + size], stream[at + size :]], wait=False) == expected
