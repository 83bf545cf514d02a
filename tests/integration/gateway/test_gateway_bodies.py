from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", "invalid_json"),
        (b"{", "invalid_json"),
        (b"[1]", "invalid_json"),
        (b"\xff\xfe", "invalid_json"),
        (b"[" * 100_000, "invalid_json"),
        (b"{}", "model_missing"),
        (b'{"model": 3}', "model_missing"),
        (b'{"model": ""}', "model_missing"),
    ],
)
async def test_bad_bodies_are_400(world: Any, body: bytes, code: str) -> None:
    async with world.client.post(f"{world.url}/v1/completions", data=body) as answer:
        assert answer.status == 400
        assert (await answer.json(content_type=None))["code"] == code
    assert not world.engine.arrivals


async def test_body_bound(start: Any) -> None:
    world = await start(body_bytes_max=1000)
    async with world.request(pad="x" * 1000) as answer:
        assert answer.status == 413
    chunked = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
    text = await world.raw(chunked + b"800\r\n" + b"x" * 0x800 + b"\r\n0\r\n\r\n")
    assert text.startswith(b"HTTP/1.1 413")
    async with world.request(pad="x" * 900) as answer:
        assert answer.status == 200
    assert len(world.engine.arrivals) == 1


async def test_bodies_have_a_bound_together(start: Any) -> None:
    world = await start(buffered_bytes_max=3000)
    first = world.ask(do="wait", pad="x" * 2000)
    await world.in_flight(1)
    async with world.request(pad="x" * 2000) as answer:
        assert answer.status == 503
        assert answer.headers["Retry-After"] == "5"
        assert (await answer.json(content_type=None))["code"] == "gateway_full"
    world.engine.go.set()
    assert (await first)[0] == 200
    async with world.request(pad="x" * 2000) as answer:
        assert answer.status == 200


async def test_slow_upload_is_not_in_flight_and_meets_the_gate_as_it_is_then(world: Any) -> None:
    body = json.dumps({"model": "m", "n": 1}).encode()
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body[:5]))
    await world.requests(1)
    assert await world.close() == 0
    assert await world.gate.wait_drained("e1", 5) == 0
    writer.write(body[5:])
    await world.held(1)
    assert not world.engine.arrivals
    await world.gate.open("e1")
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_upload_that_never_ends_is_408(start: Any) -> None:
    world = await start(body_seconds_max=0.1)
    text = await world.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n{")
    assert text.startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("headers", [b"Content-Length: 14\r\n", b"Transfer-Encoding: chunked\r\n"])
async def test_a_body_has_its_own_time_whatever_its_connection_waited_before(start: Any, headers: bytes) -> None:
    """Head and a part of the body in one segment: what was left of the idle connection's time was its deadline once."""
    world = await start(idle_seconds_max=0.2, body_seconds_max=30.0)
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    body, chunked = b'{"model": "m"}', b"chunked" in headers
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n"
    writer.write(head + (b"e\r\n" if chunked else b"") + body[:5])
    # As long as another connection takes that says nothing: the time of this one would be over as well.
    assert await world.raw(b"") == b""
    await world.requests(1)
    writer.write(body[5:] + (b"\r\n0\r\n\r\n" if chunked else b""))
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()


async def test_head_that_never_ends_is_cut_off(start: Any) -> None:
    world = await start(idle_seconds_max=0.2)
    assert await world.raw(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n") == b""


async def test_expect_continue(world: Any) -> None:
    body = b'{"model": "m"}'
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    writer.write(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nContent-Length: %d\r\n\r\n" % len(body)
    )
    assert await reader.readuntil(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
    writer.write(body)
    assert (await reader.readuntil(b"\r\n")).startswith(b"HTTP/1.1 200")
    writer.close()
    assert "Expect" not in world.engine.arrivals[0].headers


async def test_compressed_bodies_are_refused(world: Any) -> None:
    async with world.client.post(
        f"{world.url}/v1/completions", data=b"x", headers={"Content-Encoding": "gzip"}
    ) as answer:
        assert answer.status == 415
