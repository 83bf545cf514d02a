"""One connection serves many requests: giving one of them up may not touch another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from lull.agents.gateway.admission import Admission, Outcome
from lull.agents.gateway.engine_connection import Pool
from lull.agents.gateway.exchange import Exchange
from lull.agents.gateway.heads import AnswerHead
from lull.agents.gateway.settings import Limits
from lull.agents.gateway.siblings import Siblings
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async


class Asking:
    """An exchange and what its client is told."""

    def __init__(self, bench: Bench) -> None:
        ticket = bench.siblings.arrive(0.0, lambda: None)
        self.exchange = Exchange(ticket, bench.pool, bench.live)
        self.status = 0
        self.body = b""
        self.complete = False
        self.trouble = ""

    def start(self, body: bytes = b"{}") -> Asking:
        head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
        self.exchange.start(self, head + body, unframe=True)
        return self

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None:
        self.status = head.status
        self.on_piece(piece, complete)

    def on_piece(self, piece: bytes, complete: bool) -> None:
        self.body += piece
        self.complete = complete

    def on_lost(self, text: str) -> None:
        self.trouble = f"lost: {text}"

    def on_broken(self, text: str) -> None:
        self.trouble = f"broken: {text}"

    def on_not_sent(self, text: str) -> None:
        self.trouble = f"not sent: {text}"

    def on_aborted(self) -> None:
        self.trouble = "aborted"

    async def answered(self) -> bytes:
        await wait_until_async(lambda: self.complete, 5, "the whole answer is here")
        return self.body


class Bench:
    """Exchanges without a gateway around them."""

    def __init__(self, port: int) -> None:
        self.admission = Admission()
        self.admission.open()
        self.siblings = Siblings((self.admission,))
        self.pool = Pool("127.0.0.1", port, Limits(connect_seconds_max=0.5), reuse=True)
        self.live: set[Exchange] = set()

    def ask(self, body: bytes = b"{}") -> Asking:
        return Asking(self).start(body)


@pytest.fixture
async def engine() -> AsyncIterator[RecordingEngine]:
    made = await RecordingEngine().start()
    yield made
    made.go.set()
    await made.stop()


@pytest.fixture
async def bench(engine: RecordingEngine) -> AsyncIterator[Bench]:
    made = Bench(engine.port)
    yield made
    made.pool.retire()


async def test_answer_that_came_whole_frees_its_connection_for_others(bench: Bench, engine: RecordingEngine) -> None:
    """The client leaves when its answer is here: the connection may be another request's by then."""
    first = bench.ask()
    assert await first.answered() == b"{}"
    assert bench.pool.idle == 1
    second = bench.ask(b'{"do": "wait"}')
    assert bench.pool.idle == 0
    await wait_until_async(lambda: len(engine.arrivals) == 2, 5, "the second request is at the engine")
    first.exchange.hang_up(Outcome.DISCONNECTED, 5.0)
    assert bench.admission.in_flight == 1
    engine.go.set()
    assert await second.answered() == b'{"do": "wait"}'
    assert bench.admission.in_flight == 0
    assert bench.live == set()


async def test_connection_that_was_hung_up_is_never_used_again() -> None:
    connections = 0
    asked: asyncio.Queue[None] = asyncio.Queue()
    ended: asyncio.Queue[None] = asyncio.Queue()
    go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Takes no notice of a client's end: answers, and would keep the connection."""
        nonlocal connections
        connections += 1
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                await reader.readuntil(b"\r\n\r\n{}")
                asked.put_nowait(None)
                await go.wait()
                writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        ended.put_nowait(None)

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        bench = Bench(server.sockets[0].getsockname()[1])
        first = bench.ask()
        await asked.get()
        first.exchange.hang_up(Outcome.DISCONNECTED, 5.0)
        assert first.exchange.lingers
        assert bench.admission.in_flight == 1
        go.set()
        await wait_until_async(lambda: bench.admission.in_flight == 0, 5, "the engine has let go")
        assert first.status == 0  # nobody is told what a client that left did not wait for
        for _ in range(2):
            assert await bench.ask().answered() == b"{}"
        assert connections == 2  # one given up, one for the two that came later
        bench.pool.retire()
        for _ in range(2):
            await ended.get()


async def test_what_is_still_connecting_is_gone_at_once() -> None:
    with socket.socket() as listener, socket.socket() as filler, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for full in (filler, other):
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        bench = Bench(listener.getsockname()[1])
        asking = bench.ask()
        connecting = asking.exchange._connecting
        assert connecting is not None
        done, _ = await asyncio.wait({connecting}, timeout=0.05)
        assert not done
        assert not asking.exchange.sent
        asking.exchange.hang_up(Outcome.DISCONNECTED, 5.0)
        assert asking.exchange.is_over
        assert bench.admission.in_flight == 0
        assert bench.live == set()
        await asyncio.wait({connecting})


async def test_nothing_was_sent_to_a_closed_port(bench: Bench, engine: RecordingEngine) -> None:
    await engine.stop()
    asking = bench.ask()
    await wait_until_async(lambda: asking.trouble, 5, "the port is closed")
    assert asking.trouble.startswith("not sent: ")
    assert bench.live == set()
    assert bench.admission.in_flight == 1  # whoever asked says what becomes of the ticket


async def test_cut_ends_a_wait_for_an_engine() -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        await ended.wait()
        writer.close()
        with contextlib.suppress(ConnectionError):
            await writer.wait_closed()
        gone.set()

    asked, ended, gone = asyncio.Event(), asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(deaf, "127.0.0.1", 0) as server:
        bench = Bench(server.sockets[0].getsockname()[1])
        asking = bench.ask()
        await asked.wait()
        asking.exchange.cut()
        assert bench.admission.in_flight == 1  # its client is there still
        asking.exchange.hang_up(Outcome.DISCONNECTED, 60.0)
        assert bench.admission.in_flight == 1
        asking.exchange.cut()
        assert bench.admission.in_flight == 0
        ended.set()
        await gone.wait()


async def test_idle_connections_are_given_up_after_a_while(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lull.agents.gateway.engine_connection.REUSE_SECONDS_MAX", 0.5)
    await bench.ask().answered()
    assert bench.pool.idle == 1
    await wait_until_async(lambda: bench.pool.idle == 0, 5, "the idle connection is closed")


@pytest.mark.parametrize("last", [b"", b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\n\r\nx"], ids=["its end", "bytes"])
async def test_stale_connection_is_found_before_the_loop_hears_of_it(last: bytes) -> None:
    """In the very turn of the loop in which a request would be written to it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        bench = Bench(listener.getsockname()[1])
        connection = await bench.pool.connect()
        peer, _ = listener.accept()
        bench.pool.give_back(connection)
        assert bench.pool.idle == 1
        peer.sendall(last)
        if not last:
            peer.shutdown(socket.SHUT_WR)
        assert bench.pool.take() is None
        assert bench.pool.idle == 0
        peer.close()
        await wait_until_async(lambda: connection._transport.is_closing(), 5, "our end is closed")
        await asyncio.sleep(0)
