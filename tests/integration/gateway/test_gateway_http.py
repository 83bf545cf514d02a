"""The corners of HTTP/1 on both sides: what an engine may answer, how bytes may come, what clients may do meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from tests.waiting import wait_until_async

BODY = b'{"model": "r"}'
ASK = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
LAST = ASK.replace(b"Host: x", b"Host: x\r\nConnection: close")
OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"


class RawEngine:
    """Answers each whole request of a connection with the next reply, in the pieces in which it is given."""

    def __init__(self, replies: Sequence[Sequence[bytes]], *, close: bool = False) -> None:
        self.seen: list[bytes] = []
        self.connections = 0
        self._replies = replies
        self._close = close
        self._server: asyncio.Server | None = None
        self._open: dict[asyncio.StreamWriter, asyncio.Event] = {}

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> RawEngine:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for writer, ended in list(self._open.items()):
            writer.close()
            await asyncio.wait_for(ended.wait(), 5)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._open[writer] = ended = asyncio.Event()
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while not writer.is_closing():
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                self.seen.append(head + await reader.readexactly(length))
                for piece in self._replies[min(len(self.seen), len(self._replies)) - 1]:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)  # as segments of their own
                if self._close:
                    break
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        del self._open[writer]
        ended.set()


@contextlib.asynccontextmanager
async def raw_engine(world: Any, *replies: Sequence[bytes], close: bool = False) -> AsyncIterator[RawEngine]:
    async with RawEngine(replies, close=close) as engine:
        await world.gate.ensure_route("e2", "raw", ["r"], engine.url)
        await world.gate.open("e2")
        yield engine


def _parts(text: bytes) -> list[tuple[int, bytes]]:
    """Status and rest of each answer."""
    found = re.split(rb"HTTP/1\.1 (\d{3}) ", text)[1:]
    return [(int(status), rest) for status, rest in zip(found[::2], found[1::2], strict=True)]


# ---- what an engine may answer ---------------------------------------------------------------------------------------


async def test_interim_answers_are_not_the_clients(world: Any) -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: </x>\r\n\r\n"
    for pieces in ([interim + OK], [interim, OK], [interim[:10], interim[10:] + OK[:20], OK[20:]]):
        async with raw_engine(world, pieces):
            ((status, rest),) = _parts(await world.raw(LAST))
            assert (status, rest[-2:]) == (200, b"{}")
            assert b"Link" not in rest


async def test_switching_protocols_is_502(world: Any) -> None:
    async with raw_engine(world, [b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\nPRI * HTTP/2.0"]):
        ((status, _),) = _parts(await world.raw(LAST))
        assert status == 502
        assert await world.gate.wait_drained("e2", 5) == 0


@pytest.mark.parametrize("status", [204, 304])
async def test_answers_without_a_body(world: Any, status: int) -> None:
    async with raw_engine(world, [b"HTTP/1.1 %d N\r\nX: 1\r\n\r\n" % status], [OK]) as engine:
        first, second = _parts(await world.raw(ASK + LAST))
        assert (first[0], first[1].endswith(b"X: 1\r\n\r\n")) == (status, True)
        assert second[0] == 200
        assert engine.connections == 1


async def test_answer_that_ends_with_its_connection_is_whole(world: Any) -> None:
    """What a client that speaks HTTP/1.1 gets of it ends with a mark, so that it can tell a cut from an end."""
    pieces = [b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n\r\nab", b"cd"]
    async with raw_engine(world, pieces, close=True):
        async with world.request(model="r") as answer:
            assert await answer.read() == b"abcd"
            assert answer.headers["Transfer-Encoding"] == "chunked"
        text = await world.raw(LAST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert text.endswith(b"\r\n\r\nabcd")
        assert b"chunked" not in text
    assert (await world.gate.observe("e2")).answered_total == 2


CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nab\n\r\n4;x=1\r\n\r\n\r\n\r\n0\r\nT: 1\r\n\r\n"


async def test_chunks_in_any_pieces(world: Any) -> None:
    """Cut anywhere, an answer comes through whole, and the connection serves the next one."""
    cuts = list(range(1, len(CHUNKED), 7))
    replies = [[CHUNKED[:cut], CHUNKED[cut:]] for cut in cuts]
    async with raw_engine(world, *replies, [CHUNKED[n : n + 1] for n in range(len(CHUNKED))]) as engine:
        for _ in range(len(cuts) + 1):
            async with world.request(model="r") as answer:
                assert await answer.read() == b"ab\n\r\n\r\n"
        assert engine.connections == 1


async def test_chunked_answer_to_a_client_of_http10(world: Any) -> None:
    async with raw_engine(world, [CHUNKED]):
        text = await world.raw(LAST.replace(b"HTTP/1.1", b"HTTP/1.0"))
        assert text.endswith(b"\r\n\r\nab\n\r\n\r\n")
        assert b"Transfer-Encoding" not in text


POISON = b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"evil"'


@pytest.mark.parametrize("answer", [OK, CHUNKED], ids=["length", "chunked"])
async def test_what_follows_an_answer_reaches_nobody(world: Any, answer: bytes) -> None:
    replies = [[answer + POISON], [answer, POISON], [answer[:-1], answer[-1:] + POISON], [answer]]
    async with raw_engine(world, *replies) as engine:
        for _ in range(5):
            async with world.request(model="r") as reply:
                assert b"evil" not in await reply.read()
        assert engine.connections > 2


async def test_the_engines_word_on_its_connection_is_not_the_clients(world: Any) -> None:
    hops = b"Connection: close, X-Hop\r\nX-Hop: 1\r\nKeep-Alive: timeout=5\r\n"
    closing = OK.replace(b"Content-Length", hops + b"Content-Length")
    async with raw_engine(world, [closing], close=True) as engine:
        first, second = _parts(await world.raw(ASK + LAST))
        assert first[0] == second[0] == 200
        assert not re.search(rb"connection|x-hop|keep-alive", first[1], re.IGNORECASE)
        assert engine.connections == 2


async def test_heads_alike_but_for_their_length(world: Any) -> None:
    """The way by which heads that came before are not read again, with a wrong length at its end."""
    replies = [b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: %d\r\n\r\n%s" % (n, b"a" * n) for n in (3, 100, 1)]
    wrong = b"HTTP/1.1 200 OK\r\nX: 1\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\naa"
    async with raw_engine(world, *([each] for each in replies), [replies[0] + b"a"], [wrong], [OK]) as engine:
        for size in (3, 100, 1):
            assert len((await world.ask(model="r"))[2]) == size
        assert engine.connections == 1
        assert (await world.ask(model="r"))[2] == b"aaa"
        async with world.request(model="r") as reply:
            assert reply.status == 502


# ---- how bytes may come ----------------------------------------------------------------------------------------------


async def test_requests_in_any_pieces(world: Any) -> None:
    chunked = (
        b"\r\nPOST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"5\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\n\r\n"
    )
    async with raw_engine(world, [OK]) as engine:
        reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
        for text in (ASK, chunked, ASK):
            for n in range(len(text)):
                writer.write(text[n : n + 1])
                await writer.drain()
            assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")
        writer.close()
        assert [seen.endswith(b"\r\n\r\n" + BODY) for seen in engine.seen] == [True] * 3


@pytest.mark.parametrize(
    "second",
    [
        ASK.replace(b"Content-Length: 14", b"Content-Length: 14\r\nContent-Length: 15"),
        ASK.replace(b"Content-Length: 14", b"Content-Length: 14\r\nTransfer-Encoding: chunked"),
        ASK.replace(b"Content-Length: 14", b"Content-Length: +14"),
        ASK.replace(b"Content-Length: 14", b"Content-Length: 1 4"),
        ASK.replace(b"Content-Length: 14\r\n", b"Content-Length: 14\n"),
        ASK.replace(b"Host: x", b"Host : x"),
    ],
)
async def test_a_bad_head_after_a_good_one_like_it(world: Any, second: bytes) -> None:
    async with raw_engine(world, [OK]) as engine:
        first, other = _parts(await world.raw(ASK + second))
        assert (first[0], other[0]) == (200, 400)
        assert len(engine.seen) == 1


async def test_a_length_that_differs_from_the_one_before(world: Any) -> None:
    longer = BODY[:-1] + b', "n": 1}'
    async with raw_engine(world, [OK]) as engine:
        other = ASK.replace(BODY, longer).replace(b"14", b"%d" % len(longer))
        text = await world.raw(ASK + other + ASK + LAST)
        assert [status for status, _ in _parts(text)] == [200] * 4
        assert [seen.partition(b"\r\n\r\n")[2] for seen in engine.seen] == [BODY, longer, BODY, BODY]


async def test_upgrades_are_not_taken_up(world: Any) -> None:
    upgrade = b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nHTTP2-Settings: AAM\r\nHost: x"
    async with raw_engine(world, [OK]) as engine:
        first, second = _parts(await world.raw(ASK.replace(b"Host: x", upgrade) + LAST))
        assert first[0] == second[0] == 200
        assert engine.seen[0].endswith(BODY)
        assert b"h2c" not in engine.seen[0]


async def test_head_is_answered_without_a_body(world: Any) -> None:
    text = await world.raw(
        b"HEAD /v1/models HTTP/1.1\r\nHost: x\r\n\r\nGET /livez HTTP/1.1\r\nConnection: close\r\n\r\n"
    )
    first, second = _parts(text)
    assert first[0] == 200
    assert re.search(rb"Content-Length: [1-9]", first[1])
    assert first[1].endswith(b"\r\n\r\n")
    assert second[1].endswith(b"\r\n\r\nok\n")


# ---- what clients may do meanwhile -----------------------------------------------------------------------------------


async def test_requests_that_come_before_the_answer_wait_their_turn(world: Any) -> None:
    first = json.dumps({"model": "m", "do": "wait", "n": 1}).encode()
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    for body in (first, b'{"model": "m", "n": 2}', b'{"model": "m", "n": 3, "pad": "%s"}' % (b"x" * 200_000)):
        writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await world.in_flight(1)
    assert world.engine.bodies("n") == [1]
    world.engine.go.set()
    async with asyncio.timeout(10):
        for n in (1, 2, 3):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
            assert json.loads(await reader.readexactly(length))["n"] == n
    writer.close()


async def test_a_client_that_leaves_with_requests_waiting_leaves_with_all(world: Any) -> None:
    _, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    body = b'{"model": "m", "do": "wait"}'
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    writer.write(ASK * 3)
    await world.in_flight(1)
    writer.close()
    await world.in_flight(0)
    await world.requests(0)
    assert len(world.engine.arrivals) == 1


async def test_a_client_that_reads_slowly_gets_every_byte(world: Any) -> None:
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"), limit=4096)
    body = json.dumps({"model": "m", "do": "flood", "blocks": 128}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"\r\n\r\n")
    count = 0
    async with asyncio.timeout(60):
        while size := int(await reader.readuntil(b"\r\n"), 16):
            assert (await reader.readexactly(size)).strip(b"x") == b""
            await reader.readexactly(2)
            count += size
    assert count == 128 * 65536
    writer.close()


async def test_who_sends_too_much_is_told_so_before_the_end(start: Any) -> None:
    """The answer is not lost in the reset that unread bytes would cause."""
    world = await start(body_bytes_max=1000)
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 9000000\r\n\r\n")
    async with asyncio.timeout(10):
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413")
        with contextlib.suppress(ConnectionError):
            for _ in range(100):
                writer.write(b"x" * 65536)
                await writer.drain()
        await reader.read()
    writer.close()
    await world.requests(0)


async def test_framing_has_a_bound_too(start: Any) -> None:
    world = await start(body_bytes_max=1000)
    text = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    reply = await world.raw(text + b"1;%s\r\n{\r\n" % (b"x" * 100_000))
    assert reply.startswith(b"HTTP/1.1 413")


async def test_connections_without_a_request_end_when_the_gateway_does(world: Any) -> None:
    assert (await world.ask())[0] == 200
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    await wait_until_async(lambda: len(world.gateway.relay.connections) == 2, 5, "both connections are here")
    await world.gateway.stop(asyncio.Event())
    async with asyncio.timeout(5):
        assert await reader.read() == b""
    writer.close()


async def test_an_address_that_leads_back_to_the_gateway_is_told_and_does_not_go_round(world: Any) -> None:
    await world.gate.ensure_route("e2", "two", ["loop"], world.url)
    await world.gate.open("e2")
    async with world.client.post(f"{world.url}/v1/completions", json={"model": "loop"}) as answer:
        assert answer.status == 508
        assert (await answer.json(content_type=None))["code"] == "loop"
    assert world.gateway.routes.get("e2").view().answered_total == 1
