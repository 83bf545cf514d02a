from __future__ import annotations

import asyncio
import json
import socket
from typing import Any

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms
from tests.recording_engine import CHUNK, RecordingEngine
from tests.waiting import wait_until_async


async def test_relays_request_and_answer(world: Any) -> None:
    async with world.client.post(
        f"{world.url}/v1/chat/completions?trace=a%20b",
        json={"model": "m", "messages": []},
        headers={"Authorization": "Bearer k", "X-Mine": "ü"},
    ) as answer:
        assert answer.status == 200
        assert answer.headers["X-Engine"] == "yes"
        assert "Keep-Alive" not in answer.headers
        assert await answer.json() == {"model": "m", "messages": []}
    (arrival,) = world.engine.arrivals
    assert (arrival.method, arrival.path) == ("POST", "/v1/chat/completions?trace=a%20b")
    assert arrival.headers["Authorization"] == "Bearer k"
    assert arrival.headers["Host"] == f"127.0.0.1:{world.engine.port}"
    seen = await world.gate.observe("e1")
    assert (seen.requests_total, seen.answered_total, seen.in_flight) == (1, 1, 0)
    assert seen.last_request_seconds_ago is not None
    assert seen.last_request_seconds_ago < 10


async def test_strips_headers_that_are_not_the_clients_to_set(world: Any) -> None:
    async with world.client.post(
        f"{world.url}/v1/completions",
        json={"model": "m"},
        headers={
            "X-Lull-Canary": "1",
            "x_lull_canary": "1",
            "X-LULL-Other": "1",
            "Connection": "keep-alive, X-Hop",
            "X-Hop": "1",
            "TE": "trailers",
            "Upgrade": "h2c",
            "Proxy-Authorization": "x",
            "X-Kept": "1",
        },
    ) as answer:
        assert answer.status == 200
    names = {name.lower() for name in world.engine.arrivals[0].headers}
    assert "x-kept" in names
    assert not {n for n in names if n.replace("_", "-").startswith("x-lull")}
    assert not names & {"x-hop", "te", "upgrade", "proxy-authorization"}


async def test_streams_chunk_by_chunk(world: Any) -> None:
    async with world.request(do="steps", stream=True) as answer:
        assert answer.content_type == "text/event-stream"
        for n in range(3):
            chunk = b"data: %d\n\n" % n
            world.engine.step.put_nowait(chunk)
            async with asyncio.timeout(5):
                assert await answer.content.readany() == chunk
        assert (await world.gate.observe("e1")).in_flight == 1
        world.engine.step.put_nowait(None)
        assert await answer.content.read() == b""
    await world.in_flight(0)


async def test_engine_errors_pass_as_they_are(world: Any) -> None:
    async with world.request(do="status", status=400) as answer:
        assert answer.status == 400
        assert (await answer.json())["error"]["message"] == "no such token"
    seen = await world.gate.observe("e1")
    assert (seen.answered_total, seen.failed_total) == (1, 0)


async def test_slow_client_slows_the_engine_down(world: Any) -> None:
    blocks = 1024  # 64 MiB
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"), limit=1024)
    body = json.dumps({"model": "m", "do": "flood", "blocks": blocks}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b"\r\n\r\n")
    last = -1

    def stuck() -> bool:
        nonlocal last
        before, last = last, world.engine.flooded_bytes
        return bool(before == last > 0)

    await wait_until_async(stuck, 10, "the engine stops writing")
    # Socket buffers of four ends and the relay's own: far from all of it.
    assert last < 32 * 2**20
    assert (await world.gate.observe("e1")).in_flight == 1
    writer.close()
    await world.in_flight(0)


@pytest.mark.parametrize("where", ["chunked", "length"])
async def test_engine_dying_in_its_answer_breaks_the_clients_stream(world: Any, where: str) -> None:
    async with world.request(do="die", where=where, stream=True) as answer:
        assert answer.status == 200
        with pytest.raises(aiohttp.ClientPayloadError):
            await answer.content.read()
    await world.in_flight(0)
    seen = await world.gate.observe("e1")
    assert (seen.failed_total, seen.answered_total, seen.in_flight) == (1, 0, 0)


async def test_engine_dying_in_its_answer_resets_an_http10_client(world: Any) -> None:
    """There the end of the connection is the end of the message."""
    body = json.dumps({"model": "m", "do": "die", "where": "chunked"}).encode()
    head = b"POST /v1/completions HTTP/1.0\r\nContent-Length: %d\r\n\r\n" % len(body)
    with pytest.raises(ConnectionResetError):
        await world.raw(head + body)


async def test_engine_dying_before_its_answer_is_502_and_not_repeated(world: Any) -> None:
    async with world.request(do="die", where="head") as answer:
        assert answer.status == 502
        assert (await answer.json(content_type=None))["code"] == "engine_lost"
    assert len(world.engine.arrivals) == 1


async def test_engine_without_listener_is_502_and_nothing_was_sent(world: Any) -> None:
    await world.engine.stop()
    async with world.request() as answer:
        assert answer.status == 502
        assert answer.content_type == "application/problem+json"
        assert (await answer.json(content_type=None))["code"] == "engine_unreachable"
    assert (await world.gate.observe("e1")).in_flight == 0


async def test_connection_is_reused_and_a_stale_one_is_no_failure(world: Any) -> None:
    """The engine is restarted behind an open gate: its old connections are found dead before a byte is sent."""
    for _ in range(3):
        async with world.request() as answer:
            assert answer.status == 200
    await world.engine.stop()
    await world.engine.start()
    async with world.request(after="restart") as answer:
        assert answer.status == 200
    assert world.engine.bodies("after") == [None, None, None, "restart"]
    assert (await world.gate.observe("e1")).failed_total == 0


async def _raw_engine(replies: list[bytes], seen: list[bytes]) -> asyncio.Server:
    """Answers each request on one connection with the next reply."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length:")[1].split(b"\r\n")[0])
                seen.append(head + await reader.readexactly(length))
                reply = replies[min(len(seen), len(replies)) - 1]
                writer.write(reply)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    return await asyncio.start_server(serve, "127.0.0.1", 0)


OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def _with_raw(world: Any, replies: list[bytes]) -> tuple[asyncio.Server, list[bytes]]:
    seen: list[bytes] = []
    server = await _raw_engine(replies, seen)
    await world.gate.ensure_route("e2", "raw", ["r"], f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    await world.gate.open("e2")
    return server, seen


async def test_connection_with_unasked_bytes_is_not_used_again(world: Any) -> None:
    """A second answer that follows the first would be taken for the next client's."""
    poison = b'HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\n"evil"'
    server, seen = await _with_raw(world, [OK + poison, OK])
    async with server:
        for _ in range(3):
            async with world.request(model="r") as answer:
                assert await answer.read() == b"{}"
        assert len(seen) == 3


@pytest.mark.parametrize(
    "reply",
    [
        b"not http at all\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\nContent-Length: 7\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\nX: " + b"a" * 100_000 + b"\r\nContent-Length: 2\r\n\r\n{}",
    ],
    ids=["garbage", "two lengths", "long header"],
)
async def test_engine_that_talks_nonsense_is_502(world: Any, reply: bytes) -> None:
    server, _ = await _with_raw(world, [reply])
    async with server:
        async with world.request(model="r") as answer:
            assert answer.status == 502
        assert (await world.gate.wait_drained("e2", 5)) == 0


async def test_bad_chunk_in_an_answer_breaks_the_clients_stream(world: Any) -> None:
    relayed = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n")
        await relayed.wait()
        writer.write(b"ZZ\r\n")
        await reader.read()
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await world.gate.ensure_route("e2", "raw", ["r"], f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await world.gate.open("e2")
        async with world.request(model="r") as answer:
            assert await answer.content.readany() == b"abc"
            relayed.set()
            with pytest.raises(aiohttp.ClientPayloadError):
                await answer.read()
        assert (await world.gate.wait_drained("e2", 5)) == 0


async def test_redirects_and_cookies_are_not_followed(world: Any) -> None:
    redirect = b"HTTP/1.1 307 T\r\nLocation: /release_memory\r\nSet-Cookie: s=1\r\nContent-Length: 0\r\n\r\n"
    server, seen = await _with_raw(world, [redirect, OK])
    async with server:
        async with world.client.post(
            f"{world.url}/v1/completions", json={"model": "r"}, allow_redirects=False
        ) as answer:
            assert answer.status == 307
        async with world.request(model="r") as answer:
            assert answer.status == 200
        assert len(seen) == 2
        assert b"release_memory" not in b"".join(seen)
        assert not any(line.lower().startswith(b"cookie") for line in seen[1].split(b"\r\n"))


async def test_silent_engine_is_504(start: Any) -> None:
    world = await start(silence_seconds_max=0.2)
    async with world.request(do="wait") as answer:
        assert answer.status == 504
    await world.in_flight(0)


async def test_client_that_goes_away_cancels_the_engines_work(world: Any) -> None:
    asking = world.ask(do="wait", n=1)
    await world.in_flight(1)
    asking.cancel()
    await wait_until_async(lambda: world.engine.cancelled, 5, "the engine's handler is cancelled")
    await world.in_flight(0)
    seen = await world.gate.observe("e1")
    assert (seen.disconnected_total, seen.answered_total, seen.failed_total) == (1, 0, 0)


async def test_client_that_leaves_in_a_stream_cancels_the_engines_work(world: Any) -> None:
    async with world.request(do="steps", stream=True) as answer:
        world.engine.step.put_nowait(CHUNK)
        assert await answer.content.readany() == CHUNK
        answer.close()
    await wait_until_async(lambda: world.engine.cancelled, 5, "the engine's handler is cancelled")
    await world.in_flight(0)


async def test_abandoned_request_is_in_flight_until_the_engine_lets_go(start: Any) -> None:
    """A client's absence proves nothing: this engine works on, and the gate has to say so."""
    seen: list[bytes] = []
    let_go = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        seen.append(await reader.readuntil(b"\r\n\r\n"))
        await let_go.wait()
        writer.close()

    world = await start()
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await world.gate.ensure_route("e2", "deaf", ["d"], f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await world.gate.open("e2")
        asking = world.ask(model="d")
        await wait_until_async(lambda: seen, 5, "the request arrives")
        asking.cancel()

        async def disconnected() -> bool:
            return bool((await world.gate.observe("e2")).disconnected_total)

        await wait_until_async(disconnected, 5, "the gateway sees its client go")
        assert await world.gate.close("e2", ClosedTerms("hold", 10, 60)) == 1
        assert await world.gate.wait_drained("e2", 0.1) == 1
        let_go.set()
        assert await world.gate.wait_drained("e2", 5) == 0


async def test_two_engines_each_get_their_model(world: Any) -> None:
    other = await RecordingEngine().start()
    try:
        await world.gate.ensure_route("e2", "two", ["n", "org/n2"], other.url)
        await world.gate.open("e2")
        for model in ("m", "n", "org/n2"):
            async with world.request(model=model) as answer:
                assert answer.status == 200
        assert world.engine.bodies("model") == ["m"]
        assert other.bodies("model") == ["n", "org/n2"]
        # The other engine's gate is its own.
        await world.close("refuse")
        async with world.request(model="n") as answer:
            assert answer.status == 200
        async with world.request() as answer:
            assert answer.status == 503
    finally:
        await other.stop()


async def test_unknown_model_is_404_and_reaches_no_engine(world: Any) -> None:
    async with world.request(model="nobody") as answer:
        assert answer.status == 404
        document = await answer.json(content_type=None)
        assert document["code"] == document["error"]["code"] == "model_not_found"
        assert "known: m" in document["detail"]
    assert not world.engine.arrivals


async def test_models_are_listed_also_while_closed(world: Any) -> None:
    await world.close()
    async with world.client.get(f"{world.url}/v1/models") as answer:
        document = await answer.json()
    assert [(entry["id"], entry["object"]) for entry in document["data"]] == [("m", "model")]
    async with world.client.get(f"{world.url}/v1/models/m") as answer:
        assert (await answer.json())["id"] == "m"
    async with world.client.get(f"{world.url}/v1/models/x") as answer:
        assert answer.status == 404
    async with world.client.get(f"{world.url}/livez") as answer:
        assert answer.status == 200
    async with world.client.post(f"{world.url}/livez") as answer:
        assert (answer.status, answer.headers["Allow"]) == (405, "GET, HEAD")
    assert not world.engine.arrivals


async def test_requests_at_once_have_a_bound(start: Any) -> None:
    world = await start(requests_max=1)
    first = world.ask(do="wait")
    await world.in_flight(1)
    async with world.request() as answer:
        assert answer.status == 503
        assert "Retry-After" in answer.headers
    world.engine.go.set()
    assert (await first)[0] == 200


async def test_fresh_connections_when_reuse_is_off(start: Any) -> None:
    world = await start(reuse=False)
    for _ in range(2):
        async with world.request() as answer:
            assert answer.status == 200
    assert [arrival.headers.get("Connection") for arrival in world.engine.arrivals] == ["close", "close"]


async def test_engine_with_a_full_backlog_is_502_in_bounded_time(start: Any) -> None:
    world = await start(connect_seconds_max=0.2)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(0)
        address = listener.getsockname()
        fillers = [socket.socket() for _ in range(3)]
        for filler in fillers:
            filler.setblocking(False)
            filler.connect_ex(address)
        await world.gate.ensure_route("e2", "full", ["f"], f"http://127.0.0.1:{address[1]}")
        await world.gate.open("e2")
        async with world.request(model="f") as answer:
            assert answer.status == 502
            assert (await answer.json(content_type=None))["code"] == "engine_unreachable"
        for filler in fillers:
            filler.close()
