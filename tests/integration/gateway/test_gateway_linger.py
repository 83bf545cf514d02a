"""Requests that are given up while an engine may be at them: what counts until it has let go, and for how long."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

import pytest

from lull.agents.gates.base import ClosedTerms
from tests.waiting import wait_until_async

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]
HOLD = ClosedTerms("hold", 10, 60.0)


ON_BOTH_LOOPS = True  # see conftest.py


@contextlib.asynccontextmanager
async def _engine(world: Any, serve: Serve) -> AsyncIterator[None]:
    """An engine e2 with the model ``d``, whose connections are ended by the test."""
    writers: dict[asyncio.StreamWriter, asyncio.Event] = {}

    async def run(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writers[writer] = ended = asyncio.Event()
        try:
            await serve(reader, writer)
        finally:
            writer.close()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            ended.set()

    server = await asyncio.start_server(run, "127.0.0.1", 0, limit=1024)
    await world.gate.ensure_route("e2", "deaf", ["d"], f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await world.gate.open("e2")
    try:
        yield
    finally:
        server.close()
        for ended in writers.values():
            await asyncio.wait_for(ended.wait(), 10)


@contextlib.asynccontextmanager
async def _client(world: Any, size: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """Has asked e2 with a body of so many bytes."""
    body = b'{"model": "d", "pad": "%s"}' % (b"x" * size)
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    try:
        yield reader, writer
    finally:
        writer.close()


async def _seen(world: Any, name: str, count: int) -> None:
    async def look() -> bool:
        return bool(getattr(await world.gate.observe("e2"), name) == count)

    await wait_until_async(look, 10, f"{name} == {count}")


async def test_bodies_of_clients_that_left_count_until_the_engine_has_let_go(start: Any) -> None:
    """They may lie in the gateway still: this engine does not read."""
    world = await start(buffered_bytes_max=9 * 2**20)
    let_go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await let_go.wait()

    async with _engine(world, serve):
        async with _client(world, 8 * 2**20):
            await _seen(world, "in_flight", 1)
        await _seen(world, "disconnected_total", 1)
        async with _client(world, 4 * 2**20) as (reader, _):
            text = await reader.readuntil(b"}}")
            assert text.startswith(b"HTTP/1.1 503 ")
            assert b'"code": "gateway_full"' in text
        assert world.gateway.relay.requests == 1
        let_go.set()
        await _seen(world, "in_flight", 0)
        await world.requests(0)
        assert not world.gateway.relay.lingering
        assert world.gateway.relay._buffered_bytes == 0


async def test_requests_of_clients_that_left_count_until_the_engine_has_let_go(start: Any) -> None:
    world = await start(requests_max=1)
    let_go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await let_go.wait()

    async with _engine(world, serve):
        leaver = world.ask(model="d")
        await _seen(world, "in_flight", 1)
        leaver.cancel()
        await _seen(world, "disconnected_total", 1)
        assert (await world.ask())[0] == 503
        let_go.set()
        await world.requests(0)
        assert (await world.ask())[0] == 200


BROKEN = {
    "head too long": b"HTTP/1.1 200 OK\r\nX-Long: " + b"a" * 70_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    "bare LF": b"HTTP/1.1 200 OK\nContent-Length: 2\n\n{}",
    "101": b"HTTP/1.1 101 S\r\nConnection: upgrade\r\nUpgrade: h2c\r\n\r\n",
    "bad chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
}


@pytest.mark.parametrize("answer", BROKEN.values(), ids=list(BROKEN))
async def test_engine_whose_answer_is_none_is_at_it_until_it_closes(start: Any, answer: bytes) -> None:
    world = await start(abort_seconds_max=30.0)
    let_go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await reader.read()  # our side is shut: it can tell
        writer.write(b"and more")
        await let_go.wait()

    async with _engine(world, serve):
        status, _, text = await world.ask(model="d")
        assert (status, json.loads(text)["code"]) == (502, "engine_lost")
        assert await world.gate.close("e2", HOLD) == 1
        assert await world.gate.wait_drained("e2", 0.1) == 1
        let_go.set()
        assert await world.gate.wait_drained("e2", 5) == 0
        seen = await world.gate.observe("e2")
        assert (seen.failed_total, seen.answered_total) == (1, 0)
        await world.requests(0)


async def test_engine_whose_answer_is_none_is_let_go_after_a_bound(start: Any) -> None:
    world = await start(abort_seconds_max=0.2)
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"garbage\r\n\r\n")
        await ended.wait()

    async with _engine(world, serve):
        assert (await world.ask(model="d"))[0] == 502
        await _seen(world, "in_flight", 0)
        ended.set()


async def test_engine_that_sends_on_without_a_client_is_not_let_go(start: Any) -> None:
    """As long as it is heard of, it works; then ``silence_seconds_max`` is over."""
    world = await start(silence_seconds_max=0.5)
    asked, stop, ended = asyncio.Event(), asyncio.Event(), asyncio.Event()
    sent = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal sent
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        asked.set()
        while not stop.is_set():
            writer.write(b"1\r\nx\r\n")
            sent += 1
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), 0.02)
        await ended.wait()

    async with _engine(world, serve):
        leaver = world.ask(model="d", stream=True)
        await asked.wait()
        leaver.cancel()
        await _seen(world, "disconnected_total", 1)
        before = sent
        await wait_until_async(lambda: sent - before > 50, 30, "it has sent for longer than it may be silent")
        assert await world.gate.close("e2", HOLD) == 1
        stop.set()
        assert await world.gate.wait_drained("e2", 10) == 0
        ended.set()


async def test_abort_ends_also_what_an_engine_sends_without_a_client(start: Any) -> None:
    world = await start(abort_seconds_max=0.2)
    asked, gone = asyncio.Event(), asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        asked.set()
        while not writer.is_closing() and not gone.is_set():
            writer.write(b"1\r\nx\r\n")
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(gone.wait(), 0.02)

    async with _engine(world, serve):
        leaver = world.ask(model="d", stream=True)
        await asked.wait()
        leaver.cancel()
        await _seen(world, "disconnected_total", 1)
        await world.gate.close("e2", HOLD)
        await world.gate.abort("e2")
        assert await world.gate.wait_drained("e2", 5) == 0
        gone.set()


async def test_connection_on_which_a_request_was_not_taken_whole_is_not_kept(world: Any) -> None:
    """The engine has answered without reading the body, which would be kept for as long."""
    ended = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 413 No\r\nContent-Length: 0\r\n\r\n")
        await ended.wait()

    async with _engine(world, serve):
        async with _client(world, 12 * 2**20) as (reader, _):
            assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 413 ")
        pool = world.gateway.routes.get("e2").pool
        assert pool is not None
        assert pool.idle == 0
        ended.set()
