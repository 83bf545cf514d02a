"""What clients may make the gateway keep: answers that they do not take, requests that they send ahead, connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import re
import socket
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from lull.agents.gates.base import ClosedTerms
from tests.waiting import wait_until_async

ON_BOTH_LOOPS = True  # see conftest.py


def _request(**body: Any) -> bytes:
    text = json.dumps({"model": "m", **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


@contextlib.asynccontextmanager
async def _small_client(world: Any) -> AsyncIterator[socket.socket]:
    """A socket of which little fits into the kernel."""
    host, port = world.gateway.listen.split(":")
    with socket.socket() as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 64 * 1024)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
        await wait_until_async(lambda: world.gateway.relay.connections, 5, "the client is connected")
        yield client


async def _unmoved(look: Callable[[], Any], what: str) -> None:
    """Returns once ten looks in a row see the same."""
    seen: list[Any] = []

    def still() -> bool:
        seen.append(look())
        return len(seen) > 10 and len(set(seen[-10:])) == 1

    await wait_until_async(still, 20, what)


async def test_answers_that_a_client_does_not_take_are_not_piled_up(world: Any) -> None:
    names = [f"{n:0256}" for n in range(64)]
    await world.gate.ensure_route("e2", "two", names, "http://127.0.0.1:1")
    count = 1000
    loop = asyncio.get_running_loop()
    async with _small_client(world) as client:
        (connection,) = world.gateway.relay.connections
        sending = asyncio.create_task(loop.sock_sendall(client, b"GET /v1/models HTTP/1.1\r\n\r\n" * count))
        await wait_until_async(lambda: connection._paused, 20, "the client does not take what is answered")
        await _unmoved(connection._transport.get_write_buffer_size, "nothing is answered any more")
        assert 0 < connection._transport.get_write_buffer_size() < 2**20
        # It goes on where it stopped, once they are taken: some 25 MB in all.
        answers, tail = 0, b""
        async with asyncio.timeout(60):
            while answers < count:
                data = await loop.sock_recv(client, 2**20)
                assert data
                tail = tail[-8:] + data
                answers += tail.count(b"HTTP/1.1 ")
        await sending
        assert answers == count
    await wait_until_async(lambda: not world.gateway.relay.connections, 5, "the client is seen to leave")


async def test_client_that_takes_nothing_is_idle_and_its_connection_ends(start: Any) -> None:
    world = await start(idle_seconds_max=0.2, silence_seconds_max=0.3)
    loop = asyncio.get_running_loop()
    async with _small_client(world) as client:
        sending = asyncio.create_task(loop.sock_sendall(client, b"GET /v1/models HTTP/1.1\r\n\r\n" * 200_000))
        await wait_until_async(lambda: not world.gateway.relay.connections, 20, "its connection ends")
        sending.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await sending


async def test_client_that_leaves_behind_much_that_it_sent_ahead_is_seen_to_leave(world: Any) -> None:
    await world.close()
    _, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(_request(n=1) + _request(n=2, pad="x" * 300_000))
    await world.held(1)
    (connection,) = world.gateway.relay.connections
    await wait_until_async(lambda: connection._reading_paused, 5, "no more is read ahead")
    writer.transport.abort()
    await world.held(0)
    await world.requests(0)
    assert (await world.gate.observe("e1")).disconnected_total == 1
    await world.gate.open("e1")
    assert (await world.ask(n="probe"))[0] == 200
    assert world.engine.bodies("n") == ["probe"]


@pytest.mark.parametrize("how", ["shut", "reset"])
async def test_client_that_left_is_seen_before_its_request_is_sent(
    world: Any, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However long it is until somebody would look."""
    monkeypatch.setattr("lull.agents.gateway.request_connection._LOOK_SECONDS", 3600.0)
    await world.close()
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(_request(n=1) + _request(n=2, pad="x" * 300_000))
    await world.held(1)
    (connection,) = world.gateway.relay.connections
    await wait_until_async(lambda: connection._reading_paused, 5, "no more is read ahead")
    if how == "shut":
        await writer.drain()
        writer.write_eof()
        await wait_until_async(connection._has_left, 5, "the kernel has its end")
    else:
        writer.transport.abort()
    stayer = world.ask(n="stayer")
    await world.held(2)
    await world.gate.open("e1")
    assert (await stayer)[0] == 200
    assert world.engine.bodies("n") == ["stayer"]
    if how == "shut":
        with contextlib.suppress(ConnectionError):
            await reader.read()
    writer.close()


async def test_large_requests_that_are_sent_ahead_are_served_in_turn(world: Any) -> None:
    await world.close()
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"), limit=2**20)
    writer.write(b"".join(_request(n=n, pad="x" * 300_000) for n in range(4)))
    await world.held(1)
    await world.gate.open("e1")
    async with asyncio.timeout(20):
        for n in range(4):
            head = await reader.readuntil(b"\r\n\r\n")
            length = int(re.search(rb"(?i)content-length: (\d+)", head)[1])  # type: ignore[index]
            assert json.loads(await reader.readexactly(length))["n"] == n
    writer.close()


async def _code(asking: Any) -> tuple[int, str, str]:
    status, headers, text = await asking
    return status, headers["Retry-After"], json.loads(text)["code"]


@pytest.mark.parametrize("bound", [{"buffered_bytes_max": 6000}, {"requests_max": 2}], ids=["bytes", "requests"])
async def test_what_a_closed_gate_holds_leaves_room_for_open_engines(start: Any, bound: dict[str, int]) -> None:
    world = await start(**bound)
    await world.gate.ensure_route("parked", "parked", ["p"], "http://127.0.0.1:1")
    await world.gate.close("parked", ClosedTerms("hold", 1000, 60.0))
    held = world.ask(model="p", pad="x" * 2000)
    await world.requests(1)
    assert await _code(world.ask(model="p", pad="x" * 2000)) == (503, "5", "hold_full")
    assert (await world.ask(pad="x" * 2000))[0] == 200
    seen = await world.gate.observe("parked")
    assert (seen.held, seen.refused_total) == (1, 1)
    # The place is free again when the one that waited is gone.
    held.cancel()
    await world.requests(0)
    again = world.ask(model="p", pad="x" * 2000)
    await world.requests(1)
    assert (await world.gate.observe("parked")).held == 1
    await world.gate.remove_route("parked")
    assert (await again)[0] == 503
    await world.close()
    last = world.ask(pad="x" * 2000)
    await world.held(1)
    await world.gate.open("e1")
    assert (await last)[0] == 200


async def test_clients_beyond_the_bound_are_told_so_and_closed(start: Any) -> None:
    world = await start(connections_max=2)
    first = [await asyncio.open_connection(*world.gateway.listen.split(":")) for _ in range(2)]
    await wait_until_async(lambda: len(world.gateway.relay.connections) == 2, 5, "both are connected")
    text = await world.raw(b"")
    assert text.startswith(b"HTTP/1.1 503 ")
    assert b'"code": "gateway_full"' in text
    assert b"Connection: close\r\n" in text
    for reader, writer in first:
        writer.write(_request())
        assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    first[0][1].close()
    await wait_until_async(lambda: len(world.gateway.relay.connections) == 1, 5, "one has left")
    assert (await world.ask())[0] == 200
    first[1][1].close()
