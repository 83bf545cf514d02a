"""Clients that ask a gateway as fast as one core does, or at a steady pace; one JSON line says what came of it.

`python -m lull.bench.gateway_load MODE HOST:PORT CONNECTIONS SECONDS`, where MODE is one of ``MODES``.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import Any, Final, Literal, cast, get_args

from .gateway_engine import DONE, END, VARIANTS, body

Mode = Literal["small", "paced", "fast", "first"]
MODES: Final[tuple[Mode, ...]] = get_args(Mode)
# A part of the time goes by before anything counts: connections are made and caches filled.
WARM_UP_SHARE: Final = 0.25
PACED_PER_SECOND: Final = 200.0
_OK: Final = b"HTTP/1.1 200"
_DO: Final[dict[Mode, str]] = {"small": "small", "paced": "small", "fast": "fast", "first": "paced"}


def request(mode: Mode, host: str, variant: int = 0) -> bytes:
    """Head and body as an OpenAI client sends them."""
    text = body(_DO[mode], variant)
    return (
        b"POST /v1/chat/completions HTTP/1.1\r\nHost: %s\r\n"
        b"Accept: application/json\r\nContent-Type: application/json\r\n"
        b"User-Agent: OpenAI/Python 2.8.1\r\nX-Stainless-Lang: python\r\nAuthorization: Bearer sk-0123456789abcdef\r\n"
        b"Content-Length: %d\r\n\r\n%s" % (host.encode(), len(text), text)
    )


class _Load:
    """What all connections of one run share."""

    def __init__(self, mode: Mode, host: str) -> None:
        self.mode = mode
        self.requests = [request(mode, host, variant) for variant in range(VARIANTS)]
        self.number = 0
        self.counting = False
        self.done = 0
        self.errors = 0
        self.seconds: list[float] = []
        self.said = b""

    def next_request(self) -> bytes:
        self.number += 1
        return self.requests[self.number % VARIANTS]


class _Client(asyncio.Protocol):
    """``small``: again as soon as the answer is there. ``fast``: counts events. ``first``: times the first event."""

    def __init__(self, load: _Load) -> None:
        self._load = load
        self._transport: Any = None
        self._sent_at = 0.0
        self._first = True  # nothing of the answer is here yet
        self._waits_for_event = True
        self._tail = b""
        self.idle = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        if self._load.mode != "paced":
            self.ask()

    def ask(self) -> None:
        self.idle, self._first, self._waits_for_event = False, True, True
        self._sent_at = time.perf_counter()
        self._transport.write(self._load.next_request())

    def data_received(self, data: bytes) -> None:
        load = self._load
        if self._first:
            if not data.startswith(_OK):
                load.errors += 1
                load.said = load.said or data[:300]
                self._transport.abort()
                return
            self._first = False
        if load.mode == "small":
            if data.endswith(END):
                load.done += load.counting
                self._first = True
                self._transport.write(load.next_request())
        elif load.mode == "paced":
            if data.endswith(END):
                self.idle = True
                if load.counting:
                    load.seconds.append(time.perf_counter() - self._sent_at)
        elif load.mode == "fast":
            if load.counting:
                load.done += data.count(b"data: ")
        else:
            self._on_stream(data)

    def _on_stream(self, data: bytes) -> None:
        load = self._load
        if self._waits_for_event:
            # The head may come before the first event.
            if b"data: " not in data:
                return
            self._waits_for_event = False
            if load.counting:
                load.seconds.append(time.perf_counter() - self._sent_at)
        joined = self._tail + data
        if DONE in joined and joined.endswith(b"0\r\n\r\n"):
            self._tail = b""
            load.done += load.counting
            self.ask()
        else:
            self._tail = joined[-40:]

    def connection_lost(self, exc: Exception | None) -> None:
        if self._load.counting:
            self._load.errors += 1


async def _pace(clients: Sequence[_Client], load: _Load, seconds: float) -> None:
    """Starts requests by the clock, whether or not earlier ones are answered."""
    loop = asyncio.get_running_loop()
    begun, number = loop.time(), 0
    while (at := begun + number / PACED_PER_SECOND) < begun + seconds:
        await asyncio.sleep(max(0.0, at - loop.time()))
        free = next((client for client in clients if client.idle), None)
        if free is None:
            load.errors += load.counting  # cannot hold the pace
        else:
            free.ask()
        number += 1


async def _run(mode: Mode, host: str, port: int, connections: int, seconds: float) -> dict[str, Any]:
    loop = asyncio.get_running_loop()
    load = _Load(mode, f"{host}:{port}")
    made = [await loop.create_connection(lambda: _Client(load), host, port) for _ in range(connections)]
    clients = [client for _, client in made]
    pacing = asyncio.ensure_future(_pace(clients, load, seconds)) if mode == "paced" else None
    await asyncio.sleep(seconds * WARM_UP_SHARE)
    print("counting", flush=True)
    load.counting, begun = True, time.perf_counter()
    await asyncio.sleep(seconds * (1 - WARM_UP_SHARE))
    load.counting, taken = False, time.perf_counter() - begun
    print("counted", flush=True)
    if pacing is not None:
        await pacing
    for transport, _ in made:
        transport.abort()
    times = sorted(load.seconds)
    return {
        "seconds": taken,
        "done": load.done if mode != "paced" else len(times),
        "errors": load.errors,
        "said": load.said.decode("latin-1"),
        "p50_seconds": times[len(times) // 2] if times else None,
        "p99_seconds": times[int(len(times) * 0.99)] if times else None,
    }


def main(words: Sequence[str]) -> int:
    import uvloop

    mode, address, connections, seconds = words
    if mode not in MODES:
        print(f"MODE: {mode!r} is not one of {', '.join(MODES)}", file=sys.stderr)
        return 2
    host, _, port = address.rpartition(":")
    result = uvloop.run(_run(mode, host, int(port), int(connections), float(seconds)))
    print(json.dumps(result), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
