"""What stands where an engine would while gateways are measured: answers as fast as one core does, parses nothing.

A request's body says what to do and ends with ``END``; whatever a proxy does to the head, that stays.
"""

from __future__ import annotations

import asyncio
import sys
from typing import Any, Final, cast

END: Final = b'"end":1}'
EVENT: Final = b'data: {"choices":[{"index":0,"delta":{"content":"abcdefgh"}}]}\n\n'
DONE: Final = b"data: [DONE]\n\n"
PACED_SECONDS: Final = 0.005
PACED_EVENTS: Final = 20
VARIANTS: Final = 8  # of requests and answers, each of a length of its own


def _small(variant: int) -> bytes:
    text = b'{"object":"chat.completion","choices":[{"index":0,"message":{"content":"abcdefgh%s"}}],' % (b"i" * variant)
    head = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"
    return head % len(text + END) + text + END


_SMALL: Final = [_small(variant) for variant in range(VARIANTS)]
_STREAM: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
_CHUNK: Final = b"%x\r\n%s\r\n" % (len(EVENT), EVENT)
_LAST: Final = b"%x\r\n%s\r\n0\r\n\r\n" % (len(DONE), DONE)


def body(do: str, variant: int = 0) -> bytes:
    """A request for ``small`` (one short answer), ``fast`` (events without end) or ``paced`` (20, one every 5 ms)."""
    stream = b"false" if do == "small" else b"true"
    said = b"Say abcdefgh." + b"." * variant
    text = b'{"model":"m","messages":[{"role":"user","content":"%s"}],"max_tokens":8,"temperature":0,' % said
    return b'%s"stream":%s,"do":"%s",%s' % (text, stream, do.encode(), END)


class _Connection(asyncio.Protocol):
    def __init__(self) -> None:
        self._transport: Any = None
        self._seen = b""
        self._writable = True
        self._fast = False
        self._timer: asyncio.TimerHandle | None = None
        self._left = self._answers = 0
        self._at = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        self._loop = asyncio.get_running_loop()

    def data_received(self, data: bytes) -> None:
        if self._seen:
            data = self._seen + data
        if not data.endswith(END):
            self._seen = data
            return
        self._seen = b""
        if b'"do":"small"' in data:
            self._answers += 1
            self._transport.write(_SMALL[self._answers % VARIANTS])
            return
        self._transport.write(_STREAM)
        if b'"do":"fast"' in data:
            self._fast = True
            self._loop.call_soon(self._more)
        else:
            self._left, self._at = PACED_EVENTS, self._loop.time()
            self._step()

    def _more(self) -> None:
        """One event a turn of the loop, so that each is written by itself."""
        if self._fast and self._writable and not self._transport.is_closing():
            self._transport.write(_CHUNK)
            self._loop.call_soon(self._more)

    def _step(self) -> None:
        self._left -= 1
        if self._left < 0 or self._transport.is_closing():
            self._transport.write(_LAST)
            return
        self._transport.write(_CHUNK)
        self._at += PACED_SECONDS
        self._timer = self._loop.call_at(self._at, self._step)

    def pause_writing(self) -> None:
        self._writable = False

    def resume_writing(self) -> None:
        self._writable = True
        if self._fast:
            self._loop.call_soon(self._more)

    def connection_lost(self, exc: Exception | None) -> None:
        self._fast = False
        if self._timer is not None:
            self._timer.cancel()


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(_Connection, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    async with server:
        await server.serve_forever()


if __name__ == "__main__":
    import uvloop

    sys.exit(uvloop.run(_serve()))
