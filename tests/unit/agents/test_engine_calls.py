"""One call to an engine: a connection that does not come at once is tried again, since nothing was sent; all of it has
a bound in time, and the answer one in bytes."""

from __future__ import annotations

import asyncio
import contextlib
import gzip
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lull.agents.engines import http_call
from lull.agents.engines.http_call import call, json_object
from lull.agents.errors import EngineRefused, EngineTimedOut, EngineUnreachable
from tests.agent_node import free_port
from tests.waiting import wait_until_async

_SYN_SENT = "02"
_REPLY = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}"


@contextmanager
def _takes_nobody() -> Iterator[tuple[socket.socket, int, list[socket.socket]]]:
    """A listener whose backlog is full: the kernel leaves whoever connects without an answer."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as listener, contextlib.ExitStack() as stack:
        port = int(listener.getsockname()[1])
        waiting: list[socket.socket] = []
        for _ in range(8):
            one = stack.enter_context(socket.socket())
            one.settimeout(0.1)
            try:
                one.connect(("127.0.0.1", port))
            except TimeoutError:
                break
            waiting.append(one)
        yield listener, port, waiting


def _tries(port: int, seen: set[str]) -> set[str]:
    """The addresses from which somebody connects to ``port`` and has no answer, with those of earlier looks."""
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        _, local, remote, state, *_ = line.split()
        if state == _SYN_SENT and remote.endswith(f":{port:04X}"):
            seen.add(local)
    return seen


async def test_a_slow_connection_is_tried_again_and_the_call_is_sent_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "_CONNECT_SECONDS", 0.2)
    with _takes_nobody() as (listener, port, waiting):
        asked = asyncio.create_task(call("POST", f"http://127.0.0.1:{port}/v1/completions", 30, body={}))
        seen: set[str] = set()
        await wait_until_async(lambda: len(_tries(port, seen)) >= 2, 20, "a second try to connect")
        for one in waiting:
            one.close()
        listener.setblocking(False)
        loop, requests = asyncio.get_running_loop(), 0
        while not requests:
            one, _ = await asyncio.wait_for(loop.sock_accept(listener), 20)
            with one:
                if b"POST" in await asyncio.wait_for(loop.sock_recv(one, 4096), 20):
                    requests += 1
                    await loop.sock_sendall(one, _REPLY)
        assert (await asked).status_code == 200


async def test_no_connection_ends_with_the_call_s_own_bound_and_is_no_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "_CONNECT_SECONDS", 0.2)
    with _takes_nobody() as (_, port, _):
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineUnreachable, match=r"no connection within 0\.9 s"):
            await call("GET", f"http://127.0.0.1:{port}/", 1.0)
        assert asyncio.get_running_loop().time() - began >= 0.9


async def test_a_refused_connection_ends_at_once() -> None:
    began = asyncio.get_running_loop().time()
    with pytest.raises(EngineUnreachable):
        await call("GET", f"http://127.0.0.1:{free_port()}/", 60)
    assert asyncio.get_running_loop().time() - began < 30


@contextmanager
def _answers(head: bytes, chunk: bytes, pause_seconds: float = 0.0) -> Iterator[int]:
    """Sends ``head``, then ``chunk`` again and again for as long as anybody reads; yields its port."""
    gone = threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with contextlib.suppress(OSError):
                one, _ = listener.accept()
                with one:
                    one.recv(1 << 16)
                    one.sendall(head)
                    while not gone.wait(pause_seconds):
                        one.sendall(chunk)

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield int(listener.getsockname()[1])
        finally:
            gone.set()
            thread.join(20)
            assert not thread.is_alive()


_ENDLESS = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n\r\n"


async def test_an_answer_without_end_is_given_up_after_some_bytes() -> None:
    with _answers(_ENDLESS, b"x" * (1 << 20)) as port:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimedOut, match="not read whole: the answer is larger than"):
            await call("GET", f"http://127.0.0.1:{port}/is_sleeping", 60)
        assert asyncio.get_running_loop().time() - began < 30


async def test_an_answer_that_trickles_is_given_up_at_the_call_s_own_bound() -> None:
    with _answers(_ENDLESS, b"x", 0.05) as port:
        began = asyncio.get_running_loop().time()
        with pytest.raises(EngineTimedOut, match=r"not answered whole within 1\.0 s"):
            await call("GET", f"http://127.0.0.1:{port}/is_sleeping", 1.0)
        assert 0.9 <= asyncio.get_running_loop().time() - began < 5


async def test_a_packed_answer_is_not_unpacked() -> None:
    """A few bytes of gzip are a gigabyte; it was not asked for."""
    packed = gzip.compress(b"[" * (64 << 20))
    head = b"HTTP/1.1 200 OK\r\ncontent-encoding: gzip\r\ncontent-length: %d\r\n\r\n" % len(packed)
    with _answers(head + packed, b"") as port:
        reply = await call("GET", f"http://127.0.0.1:{port}/openapi.json", 20)
    assert len(reply.content) == len(packed)
    with pytest.raises(EngineRefused, match="not JSON"):
        json_object(reply)
