"""The least that a proxy on asyncio, uvloop and httptools has to do: both heads parsed, hop-by-hop headers dropped.

No gate, no filter, no bounds, no time-outs, no second engine. It is the yardstick for what `lull gateway` adds to that,
and nothing to run: what `lull gateway` refuses, it passes on.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import Any, Final, cast

import httptools

_HOP: Final = frozenset({b"connection", b"keep-alive", b"proxy-connection", b"te", b"trailer", b"upgrade"})


class _Back(asyncio.Protocol):
    """A connection to the engine, used for one request after the other."""

    def __init__(self, proxy: _Proxy) -> None:
        self._proxy = proxy
        self.transport: Any = None
        self.front: _Front | None = None
        self._parser: Any = None
        self._headers: list[tuple[bytes, bytes]] = []
        self._head_done = self._complete = self._keep = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpResponseParser(self)

    def send(self, front: _Front, data: bytes) -> None:
        self.front, self._headers, self._head_done, self._complete = front, [], False, False
        self.transport.write(data)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_headers_complete(self) -> None:
        self._head_done = True

    def on_message_complete(self) -> None:
        self._complete, self._keep = True, self._parser.should_keep_alive()

    def data_received(self, data: bytes) -> None:
        front, passed_head = self.front, self._head_done
        if front is None:
            self.transport.abort()
            return
        self._parser.feed_data(data)
        if passed_head:
            front.transport.write(data)
        else:
            end = data.index(b"\r\n\r\n")
            lines = [b"%s: %s\r\n" % item for item in self._headers if item[0].lower() not in _HOP]
            head = b"HTTP/1.1 %d OK\r\n%s" % (self._parser.get_status_code(), b"".join(lines))
            front.transport.write(head + data[end + 2 :])
        if self._complete:
            self.front = front.back = None
            if self._keep:
                self._proxy.idle.append(self)
            else:
                self.transport.close()

    def pause_writing(self) -> None:
        if self.front is not None:
            self.front.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.front is not None:
            self.front.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        if self in self._proxy.idle:
            self._proxy.idle.remove(self)
        if self.front is not None:
            self.front.transport.abort()


class _Front(asyncio.Protocol):
    """A client's connection; one request at a time."""

    def __init__(self, proxy: _Proxy) -> None:
        self._proxy = proxy
        self.transport: Any = None
        self.back: _Back | None = None
        self._parser: Any = None
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self._task: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self._parser = httptools.HttpRequestParser(self)

    def data_received(self, data: bytes) -> None:
        self._parser.feed_data(data)

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body = b"", [], []

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name, value))

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        lines = [b"%s: %s\r\n" % item for item in self._headers if item[0].lower() not in _HOP]
        head = b"%s %s HTTP/1.1\r\n%s\r\n" % (self._parser.get_method(), self._url, b"".join(lines))
        data = head + b"".join(self._body)
        idle = self._proxy.idle
        if idle:
            self.back = idle.pop()
            self.back.send(self, data)
        else:
            self._task = asyncio.ensure_future(self._connect(data))

    async def _connect(self, data: bytes) -> None:
        proxy = self._proxy
        _, back = await asyncio.get_running_loop().create_connection(lambda: _Back(proxy), proxy.host, proxy.port)
        self.back = back
        back.send(self, data)

    def pause_writing(self) -> None:
        if self.back is not None:
            self.back.transport.pause_reading()

    def resume_writing(self) -> None:
        if self.back is not None:
            self.back.transport.resume_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        back, self.back = self.back, None
        if back is not None:
            back.front = None
            back.transport.abort()


class _Proxy:
    def __init__(self, host: str, port: int) -> None:
        self.host = host
        self.port = port
        self.idle: list[_Back] = []

    async def serve(self) -> None:
        server = await asyncio.get_running_loop().create_server(lambda: _Front(self), "127.0.0.1", 0, backlog=1024)
        print(server.sockets[0].getsockname()[1], flush=True)
        async with server:
            await server.serve_forever()


def main(words: Sequence[str]) -> int:
    """The engine's HOST:PORT."""
    import uvloop

    host, _, port = words[0].rpartition(":")
    uvloop.run(_Proxy(host, int(port)).serve())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
