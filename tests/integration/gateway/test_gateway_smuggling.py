"""Nothing that a client writes becomes a path, a header of ours or a second request at the engine."""

from __future__ import annotations

import asyncio
import json
import re
from typing import Any

import pytest

BODY = json.dumps({"model": "m"}).encode()
CONTROL = ["release_memory", "resume_memory", "memory_status", "sleep", "wake_up", "collective_rpc", "lull/addresses"]


def _request(target: bytes, method: bytes = b"POST", headers: bytes = b"") -> bytes:
    return b"%s %s HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n%s\r\n%s" % (
        method,
        target,
        len(BODY),
        headers,
        BODY,
    )


def _statuses(text: bytes) -> list[int]:
    return [int(found) for found in re.findall(rb"HTTP/1\.[01] (\d{3})", text)]


async def _nothing_came(world: Any) -> None:
    """The engine's record after one more request that does arrive."""
    assert (await world.ask(n="probe"))[0] == 200
    assert world.engine.bodies("n") == ["probe"]


@pytest.mark.parametrize("name", CONTROL)
async def test_control_paths_in_every_spelling(world: Any, name: str) -> None:
    n = name.encode()
    for target in (
        b"/" + n,
        b"//" + n,
        b"/" + n + b"/",
        b"/./" + n,
        b"/v1/../" + n,
        b"/v1/completions/../../" + n,
        b"/v1/%2e%2e/" + n,
        b"/v1/..%2f" + n,
        b"/v1/%2E%2E%2F" + n,
        b"/%2f" + n,
        b"/%" + b"%02x" % n[0] + n[1:],
        b"/" + n.upper(),
        b"/v1/" + n,
        b"/v1/completions/" + n,
        b"/v1/completions/..;/" + n,
        b"/v1/completions\\..\\..\\" + n,
        b"http://127.0.0.1:%d/" % world.engine.port + n,
        b"http://x/v1/completions/../../" + n,
        b"/" + n + b"?x=/v1/completions",
        b"/" + n + b"#/v1/completions",
        b"/v1/completions%3f/../" + n,
        b"/v1/completions%00/" + n,
    ):
        for method in (b"POST", b"GET"):
            statuses = _statuses(await world.raw(_request(target, method)))
            assert len(statuses) == 1, target
            assert statuses[0] in (400, 404, 405), target
    await _nothing_came(world)


@pytest.mark.parametrize(
    "target", [b"/v1/completions/", b"//v1/completions", b"http://x/v1/completions", b"/v1/./completions", b"*"]
)
async def test_other_spellings_of_inference_are_unknown(world: Any, target: bytes) -> None:
    assert _statuses(await world.raw(_request(target))) in ([400], [404])
    await _nothing_came(world)


async def test_query_cannot_change_the_path(world: Any) -> None:
    assert _statuses(await world.raw(_request(b"/v1/completions?/../../release_memory#x"))) == [200]
    assert world.engine.arrivals[0].path == "/v1/completions?/../../release_memory"


SMUGGLED = b"POST /release_memory HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n"


@pytest.mark.parametrize(
    "headers",
    [
        b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"Content-Length: 4\r\nContent-Length: 400\r\n",
        b"Content-Length: 4, 400\r\n",
        b"Content-Length: +4\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length: 0x4\r\n",
        b"Content-Length: 4 4\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding : chunked\r\nContent-Length: 4\r\n",
        b" Transfer-Encoding: chunked\r\nContent-Length: 4\r\n",
        b"X: y\r\n Content-Length: 4\r\n",
        b"Transfer-Encoding:\x0bchunked\r\n",
        b"X: a\x00b\r\nContent-Length: 4\r\n",
        b"X: a\nContent-Length: 4\r\n",
        b"X: a\rContent-Length: 4\r\n",
    ],
)
async def test_conflicting_or_odd_framing_is_rejected(world: Any, headers: bytes) -> None:
    text = await world.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n" + headers + b"\r\n" + b"0\r\n\r\n" + SMUGGLED
    )
    assert _statuses(text) == [400]
    await _nothing_came(world)


async def test_chunked_body_and_its_trailers_are_sent_with_a_length(world: Any) -> None:
    text = await world.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nTransfer-Encoding: chunked\r\n\r\n"
        b"%x;ext=1\r\n%s\r\n0\r\nX-Lull-Canary: 1\r\n\r\n" % (len(BODY), BODY)
    )
    assert _statuses(text) == [200]
    (arrival,) = world.engine.arrivals
    names = {name.lower() for name in arrival.headers}
    assert arrival.headers["Content-Length"] == str(len(BODY))
    assert not names & {"transfer-encoding", "x-lull-canary", "trailer"}


@pytest.mark.parametrize("chunk", [b"zz\r\n", b"-1\r\n", b"fffffffffffffffff\r\n", b"3\r\nabcd\r\n"])
async def test_bad_chunks_never_reach_the_engine(start: Any, chunk: bytes) -> None:
    world = await start(body_seconds_max=0.2)
    text = await world.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + chunk + SMUGGLED
    )
    assert set(_statuses(text)) <= {400, 408}
    assert _statuses(text)
    await _nothing_came(world)


async def test_request_hidden_in_a_body_stays_a_body(world: Any) -> None:
    body = json.dumps({"model": "m", "text": SMUGGLED.decode()}).encode()
    text = await world.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nConnection: close\r\nContent-Length: %d\r\n\r\n%s"
        % (len(body), body)
    )
    assert _statuses(text) == [200]
    assert [arrival.path for arrival in world.engine.arrivals] == ["/v1/completions"]


async def test_pipelined_requests_are_each_judged(world: Any) -> None:
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    text = await world.raw(plain + SMUGGLED + _request(b"/v1/completions"))
    assert _statuses(text) == [200, 404, 200]
    assert [arrival.path for arrival in world.engine.arrivals] == ["/v1/completions"] * 2


@pytest.mark.parametrize("segments", [1, 2])
async def test_empty_lines_before_a_request_are_no_request(world: Any, segments: int) -> None:
    """Some clients send one behind a POST; RFC 9112 section 2.2 says to ignore it."""
    plain = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    for _ in range(3):
        if segments == 1:
            writer.write(b"\r\n\r\n" + plain)
        else:
            writer.write(b"\r\n\r")
            await writer.drain()
            writer.write(b"\n" + plain)
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 200")
        await reader.readexactly(len(BODY))
    writer.close()
    assert len(world.engine.arrivals) == 3


async def test_a_refused_body_that_looks_like_a_head_decides_about_nothing(world: Any) -> None:
    """It once did: a parser that was fed a head twice took the end of the body for a head, and the rest was judged by
    nobody."""
    hidden = b"POST / HTTP/1.1\r\nHost: y\r\nContent-Length: 10000000\r\n\r\n"
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX-Pad: %s\r\nContent-Length: 4000\r\n\r\n"
    head %= b"p" * (len(hidden) + 50 - len(head % b""))
    body = b"z" * (4000 - len(head)) + hidden + b"z" * (len(head) - len(hidden))
    odd = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nX: a\nY: b\r\nContent-Length: %d\r\n\r\n%s" % (len(BODY), BODY)
    assert _statuses(await world.raw(b"\r\n" + head + body + odd)) == [400, 400]
    await _nothing_came(world)


@pytest.mark.parametrize(
    "request_text",
    [
        b"POST /sleep HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
        b"GET /livez HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
        b"POST /livez HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
        b"GET /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nExpect: more\r\nContent-Length: %d\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Encoding: br\r\nContent-Length: %d\r\n\r\n",
    ],
)
async def test_nothing_is_looked_for_behind_a_body_that_was_not_read(world: Any, request_text: bytes) -> None:
    inner = _request(b"/v1/completions")
    assert len(_statuses(await world.raw(request_text % len(inner) + inner))) == 1
    await _nothing_came(world)


async def test_oversized_heads_are_rejected(world: Any) -> None:
    for head in (b"X: " + b"a" * 100_000 + b"\r\n", b"".join(b"X-%d: a\r\n" % n for n in range(5000))):
        assert _statuses(await world.raw(_request(b"/v1/completions", headers=head))) == [400]
    assert _statuses(await world.raw(_request(b"/v1/completions?" + b"a" * 100_000))) == [400]
    await _nothing_came(world)


async def test_header_bytes_beyond_ascii_pass_as_they_are(world: Any) -> None:
    """RFC 9110 section 5.5: obs-text is opaque. A header's name is no text."""
    text = await world.raw(_request(b"/v1/completions", headers=b"X-Odd: caf\xe9\r\n"))
    assert _statuses(text) == [200]
    (arrival,) = world.engine.arrivals
    assert arrival.headers["X-Odd"].encode("utf-8", "surrogateescape") == b"caf\xe9"
    assert _statuses(await world.raw(_request(b"/v1/completions", headers=b"X-Caf\xe9: odd\r\n"))) == [400]
    assert len(world.engine.arrivals) == 1


@pytest.mark.parametrize(
    "data",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET / HTTP/1.1\n\n",
        b"GET / HTTP/0.9\r\n\r\n",
    ],
    ids=["TLS", "HTTP/2", "no target", "bare LF", "HTTP/0.9"],
)
async def test_what_is_not_http1_gets_400_and_no_second_look(world: Any, data: bytes) -> None:
    text = await world.raw(data + b"\r\n\r\n" + _request(b"/v1/completions"))
    assert _statuses(text) == [400]
    assert b'"code": "bad_request"' in text
    assert b"\r\nConnection: close\r\n" in text
    await _nothing_came(world)
