"""Log bytes on their way from an agent's POST to a client's GET: a small buffer and back-pressure, no store.

A relay lives from the client's request until its end. Bytes wait in a bounded buffer; a full one stops the agent.
Both ends have bounds: an agent that never comes, a client that stops reading, a stream that falls silent.
"""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Final

BUFFER_BYTES_MAX: Final = 256 * 1024


class RelayClosed(Exception):
    """The client has gone: the agent should stop sending."""


class AgentSilent(Exception):
    """The agent did not come, or fell silent, within the bound."""


@dataclass(frozen=True, slots=True)
class RelayTimes:
    """Bounds in seconds: until the agent's first POST, between signs of it, and how long a client may not read.

    An agent that follows a silent log says so every few seconds by an empty POST.
    """

    answer_seconds_max: float = 10.0
    silence_seconds_max: float = 30.0
    stalled_seconds_max: float = 60.0


@dataclass(frozen=True, slots=True)
class Part:
    """The head of one POST: where its bytes begin, how many before them were not kept, and what is wrong, if so."""

    offset: int
    gap_bytes: int
    is_last: bool
    problem: str | None = None


class Relay:
    """One client waiting for one stream. ``open`` sides: agent (``begin``, ``put``, ``end``), client (the rest)."""

    def __init__(self, node_id: str, follow: bool, times: RelayTimes) -> None:
        self.request_id = secrets.token_hex(16)
        self.node_id = node_id
        self.follow = follow
        self._times = times
        self._first: asyncio.Future[Part] = asyncio.get_running_loop().create_future()
        self._chunks: deque[bytes] = deque()
        self._buffered_bytes = 0
        self._ended = False
        self._failure: str | None = None
        self._changed = asyncio.Event()
        self._room = asyncio.Event()
        self.closed = asyncio.Event()
        self.sending = asyncio.Lock()  # one POST at a time: the bytes of two would mix

    # ---- the agent's side ----

    def begin(self, part: Part) -> None:
        """The head of a POST. A gap in the middle of the stream is told in the text, since headers are long sent."""
        if not self._first.done():
            self._first.set_result(part)
            return
        if part.gap_bytes:
            self._append(f"\n[lull: {part.gap_bytes} bytes of this log were not kept]\n".encode())
        self._changed.set()

    async def put(self, chunk: bytes) -> None:
        """Queues ``chunk`` once there is room; raises RelayClosed when the client has gone or does not read."""
        while self._buffered_bytes >= BUFFER_BYTES_MAX and not self.closed.is_set():
            self._room.clear()
            try:
                await asyncio.wait_for(self._room.wait(), self._times.stalled_seconds_max)
            except TimeoutError:
                self.fail(f"the client has read nothing for {self._times.stalled_seconds_max:g} s")
                raise RelayClosed from None
        if self.closed.is_set():
            raise RelayClosed
        self._append(chunk)

    def end(self) -> None:
        self._ended = True
        self._changed.set()

    def fail(self, reason: str) -> None:
        self._failure = reason
        self._changed.set()

    def _append(self, chunk: bytes) -> None:
        if chunk:
            self._chunks.append(chunk)
            self._buffered_bytes += len(chunk)
            self._changed.set()

    # ---- the client's side ----

    async def first_part(self, stopping: asyncio.Event) -> Part | None:
        """The head of the first POST; None when the server stops first. Raises AgentSilent after the bound."""
        stop = asyncio.ensure_future(stopping.wait())
        try:
            await asyncio.wait(
                (self._first, stop), timeout=self._times.answer_seconds_max, return_when=asyncio.FIRST_COMPLETED
            )
        finally:
            stop.cancel()
        if self._first.done():
            return self._first.result()
        if stopping.is_set():
            return None
        raise AgentSilent(f"nothing came within {self._times.answer_seconds_max:g} s")

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes until the end; raises AgentSilent when the stream breaks off or falls silent."""
        bound = self._times.silence_seconds_max
        while True:
            while self._chunks:
                chunk = self._chunks.popleft()
                self._buffered_bytes -= len(chunk)
                self._room.set()
                yield chunk
            if self._failure is not None:
                raise AgentSilent(self._failure)
            if self._ended:
                return
            self._changed.clear()
            try:
                await asyncio.wait_for(self._changed.wait(), bound)
            except TimeoutError:
                raise AgentSilent(f"no sign came for {bound:g} s") from None

    def close(self) -> None:
        self.closed.set()
        self._room.set()


class Relays:
    """All relays of this server, by request id."""

    def __init__(self, times: RelayTimes, *, relays_max: int = 256) -> None:
        self._times = times
        self._relays_max = relays_max
        self._open: dict[str, Relay] = {}

    def register(self, node_id: str, *, follow: bool) -> Relay | None:
        """A new relay, or None when there are too many."""
        if len(self._open) >= self._relays_max:
            return None
        relay = Relay(node_id, follow, self._times)
        self._open[relay.request_id] = relay
        return relay

    def get(self, request_id: str) -> Relay | None:
        return self._open.get(request_id)

    def close(self, relay: Relay) -> None:
        self._open.pop(relay.request_id, None)
        relay.close()

    def fail_all(self, reason: str) -> None:
        """Ends every stream, so that a stopping server has none left."""
        for relay in list(self._open.values()):
            relay.fail(reason)

    def __len__(self) -> int:
        return len(self._open)
