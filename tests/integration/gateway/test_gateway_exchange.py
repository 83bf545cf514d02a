"""One connection serves many requests: giving one of them up may not touch another."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from multidict import CIMultiDict
from yarl import URL

from lull.agents.gateway.admission import Admission, Outcome
from lull.agents.gateway.exchange import Exchange, NotSent, Pool
from lull.agents.gateway.settings import Limits
from tests.recording_engine import RecordingEngine
from tests.waiting import wait_until_async


class Bench:
    """Exchanges without a gateway around them."""

    def __init__(self) -> None:
        self.admission = Admission()
        self.admission.open()
        self.pool = Pool(Limits(connect_seconds_max=0.5), reuse=True)
        self.live: set[Exchange] = set()

    def begin(self) -> Exchange:
        ticket = self.admission.arrive(0.0, lambda: None)
        return Exchange(self.admission, ticket, self.pool, self.live)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    made = Bench()
    yield made
    await made.pool.closed()


@pytest.fixture
async def engine() -> AsyncIterator[RecordingEngine]:
    made = await RecordingEngine().start()
    yield made
    made.go.set()
    await made.stop()


def _to(engine: RecordingEngine) -> URL:
    return URL(f"{engine.url}/v1/completions")


async def test_answer_that_came_whole_frees_its_connection_for_others(bench: Bench, engine: RecordingEngine) -> None:
    """The client leaves with the answer still unread here: the connection may be another request's by then."""
    first = bench.begin()
    answer = await first.answer(_to(engine), CIMultiDict(), b"{}")
    await wait_until_async(lambda: answer.connection is None, 5, "the whole answer is here")
    second = bench.begin()
    waiting = asyncio.ensure_future(second.answer(_to(engine), CIMultiDict(), b'{"do": "wait"}'))
    await wait_until_async(lambda: len(engine.arrivals) == 2, 5, "the second request is at the engine")
    assert first.hang_up(Outcome.DISCONNECTED, 5.0) is None
    assert bench.admission.in_flight == 1
    engine.go.set()
    assert await (await waiting).read() == b'{"do": "wait"}'
    second.finished(Outcome.ANSWERED)
    assert bench.admission.in_flight == 0
    assert bench.live == set()


async def test_connection_that_was_hung_up_is_never_used_again(bench: Bench) -> None:
    connections = 0
    asked: asyncio.Queue[None] = asyncio.Queue()
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

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1/completions")
        first = bench.begin()
        waiting = asyncio.ensure_future(first.answer(url, CIMultiDict(), b"{}"))
        await asked.get()
        waiting.cancel()
        lingering = first.hang_up(Outcome.DISCONNECTED, 5.0)
        assert lingering is not None
        assert bench.admission.in_flight == 1
        go.set()
        await lingering
        assert bench.admission.in_flight == 0
        for _ in range(2):
            later = bench.begin()
            answer = await later.answer(url, CIMultiDict(), b"{}")
            assert await answer.read() == b"{}"
            later.finished(Outcome.ANSWERED)
        assert connections == 2  # one given up, one for the two that came later


async def test_what_is_still_connecting_is_gone_at_once(bench: Bench) -> None:
    with socket.socket() as listener, socket.socket() as filler, socket.socket() as other:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        for full in (filler, other):
            full.setblocking(False)
            full.connect_ex(listener.getsockname())
        exchange = bench.begin()
        url = URL(f"http://127.0.0.1:{listener.getsockname()[1]}/")
        waiting = asyncio.ensure_future(exchange.answer(url, CIMultiDict(), b"{}"))
        done, _ = await asyncio.wait({waiting}, timeout=0.05)
        assert not done
        assert not exchange.sent
        assert exchange.hang_up(Outcome.DISCONNECTED, 5.0) is None
        assert bench.admission.in_flight == 0
        with contextlib.suppress(asyncio.CancelledError):
            await waiting


async def test_nothing_was_sent_to_a_closed_port(bench: Bench, engine: RecordingEngine) -> None:
    await engine.stop()
    exchange = bench.begin()
    with pytest.raises(NotSent):
        await exchange.answer(_to(engine), CIMultiDict(), b"{}")
    assert exchange.hang_up(Outcome.FAILED, 5.0) is None
    assert bench.admission.in_flight == 0


async def test_cut_ends_a_wait_for_an_engine(bench: Bench, engine: RecordingEngine) -> None:
    async def deaf(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        await reader.read()
        await ended.wait()
        writer.close()

    asked, ended = asyncio.Event(), asyncio.Event()
    async with await asyncio.start_server(deaf, "127.0.0.1", 0) as server:
        exchange = bench.begin()
        url = URL(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/")
        waiting: asyncio.Future[Any] = asyncio.ensure_future(exchange.answer(url, CIMultiDict(), b"{}"))
        await asked.wait()
        waiting.cancel()
        lingering = exchange.hang_up(Outcome.DISCONNECTED, 60.0)
        assert lingering is not None
        exchange.cut()
        await asyncio.wait({lingering})
        assert bench.admission.in_flight == 0
        ended.set()
