"""SIGTERM: what is still here gets its end, and no longer than the bound."""

from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import pytest

from tests.waiting import wait_until_async

ON_BOTH_LOOPS = True  # see conftest.py


def _request(**body: Any) -> bytes:
    text = json.dumps({"model": "m", **body}).encode()
    return b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(text), text)


@pytest.mark.parametrize("stream", [False, True])
async def test_upload_that_ends_during_the_stop_is_refused_at_once(start: Any, stream: bool) -> None:
    """Nobody opens its gate any more."""
    world = await start(stop_seconds_max=30.0, keepalive_seconds=0.05)
    await world.close()
    text = _request(stream=stream)
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(text[:-5])
    await world.requests(1)
    stopping = asyncio.create_task(world.gateway.stop(asyncio.Event()))
    await wait_until_async(lambda: world.gateway.relay.stopping, 5, "the gateway is stopping")
    writer.write(text[-5:])
    async with asyncio.timeout(10):
        answer = await reader.read()
        await stopping
    writer.close()
    assert answer.startswith(b"HTTP/1.1 503 ")
    assert b"Connection: close\r\n" in answer
    assert json.loads(answer.partition(b"\r\n\r\n")[2])["code"] == "gateway_stopping"


async def test_connection_that_was_accepted_right_before_holds_nothing_up(start: Any) -> None:
    world = await start(stop_seconds_max=30.0)
    loop = asyncio.get_running_loop()
    asking = world.ask(do="wait")
    await world.in_flight(1)
    stopping = asyncio.create_task(world.gateway.stop(asyncio.Event()))
    await wait_until_async(lambda: world.gateway.relay.stopping, 5, "the gateway is stopping")
    here, there = socket.socketpair()
    with here:
        here.setblocking(False)
        await loop.connect_accepted_socket(world.gateway.relay.protocol, there)
        async with asyncio.timeout(10):
            answer = await loop.sock_recv(here, 2**16)
            assert b'"code": "gateway_stopping"' in answer
            world.engine.go.set()
            assert (await asking)[0] == 200
            await stopping


BLOCKS = 16  # of 64 KiB: more than the kernel keeps for these sockets


async def _answered_with_a_tail(world: Any, client: socket.socket) -> None:
    """The client has taken no byte of an answer that the engine has given whole, and the gateway still has some."""
    loop = asyncio.get_running_loop()
    host, port = world.gateway.listen.split(":")
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 16 * 1024)
    client.setblocking(False)
    await loop.sock_connect(client, (host, int(port)))
    await wait_until_async(lambda: world.gateway.relay.connections, 5, "the client is connected")
    (connection,) = world.gateway.relay.connections
    connection._transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 16 * 1024)
    connection._transport.set_write_buffer_limits(high=4 * 2**20)  # so that all of it is read from the engine
    await loop.sock_sendall(client, _request(do="flood", blocks=BLOCKS))
    await world.seen("answered_total", 1)
    assert connection._transport.get_write_buffer_size() > 0


async def test_tail_of_an_answer_is_still_taken(start: Any) -> None:
    world = await start(stop_seconds_max=30.0)
    loop = asyncio.get_running_loop()
    with socket.socket() as client:
        await _answered_with_a_tail(world, client)
        stopping = asyncio.create_task(world.gateway.stop(asyncio.Event()))
        await wait_until_async(lambda: world.gateway.relay.stopping, 5, "the gateway is stopping")
        taken = b""
        async with asyncio.timeout(20):
            while data := await loop.sock_recv(client, 2**20):
                taken += data
            await stopping
    assert taken.count(b"x") >= BLOCKS * 65536
    assert taken.endswith(b"\r\n0\r\n\r\n")


async def test_client_that_takes_nothing_holds_the_end_up_no_longer_than_its_bound(start: Any) -> None:
    world = await start(stop_seconds_max=0.3)
    with socket.socket() as client:
        await _answered_with_a_tail(world, client)
        async with asyncio.timeout(10):
            await world.gateway.stop(asyncio.Event())
    assert not world.gateway.relay.connections
    assert not world.control.exists()
