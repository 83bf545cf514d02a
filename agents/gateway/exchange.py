"""One request at an engine: its connection, and the proof that nothing of it is left there.

The law: a request counts as in flight until the engine has answered it whole or has closed its side of the connection.
A client that goes away is no such proof: bytes that were sent may still lie unread in the engine's socket. So a request
that is given up is hung up: our side is shut, the engine reads the end of it, and what it still sends is thrown away
until it closes.

Nothing is sent twice: a stale connection is found before a byte is written to it, and what broke after that is told.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Final, Protocol

from .admission import Outcome, Ticket
from .engine_connection import EngineConnection, Pool
from .heads import AnswerHead

# A released request that is not sent by then does not hold back the next one.
RELEASE_SECONDS_MAX: Final = 0.05


class Client(Protocol):
    """Who gets the answer."""

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None: ...
    def on_piece(self, piece: bytes, complete: bool) -> None: ...

    def on_lost(self, text: str) -> None:
        """The connection broke after bytes may have reached the engine; the exchange is over."""
        ...

    def on_broken(self, text: str) -> None:
        """What came is no answer, and the engine may be at it still; who gets the answer hangs up."""
        ...

    def on_not_sent(self, text: str) -> None:
        """No byte of the request left the gateway; the exchange is over, its ticket is not."""
        ...

    def on_aborted(self) -> None:
        """By policy; who gets the answer hangs up."""
        ...


class Exchange:
    """One admitted ticket on its way. Ends exactly once."""

    _client: Client | None = None
    _connection: EngineConnection | None = None
    _connecting: asyncio.Task[None] | None = None
    _timer: asyncio.TimerHandle | None = None  # the bound of a release or of a hang-up
    _over = False
    sent = False
    lingers = False
    _heard_at = 0.0  # by time.monotonic, while it lingers
    on_over: Callable[[Exchange], None] | None = None

    def __init__(self, ticket: Ticket, pool: Pool, live: set[Exchange]) -> None:
        self._ticket = ticket
        self._pool = pool
        self._live = live
        live.add(self)

    @property
    def is_over(self) -> bool:
        return self._over

    def start(self, client: Client, data: bytes, *, unframe: bool) -> None:
        """Sends the request; the client is told what comes of it. ``unframe``: see EngineConnection.send."""
        self._client = client
        connection = self._pool.take()
        if connection is not None:
            self._send(connection, data, unframe)
            return
        if self._ticket.has_waited:
            # Admitted from the queue, its successor waits for it to be sent: not for ever.
            self._timer = asyncio.get_running_loop().call_later(RELEASE_SECONDS_MAX, self._make_way)
        self._connecting = asyncio.ensure_future(self._connect(data, unframe))

    def _make_way(self) -> None:
        self._ticket.gate.sent(self._ticket)

    async def _connect(self, data: bytes, unframe: bool) -> None:
        try:
            connection = await self._pool.connect()
        except OSError as error:
            self._connecting = None
            self._not_sent(str(error) or "no connection within the time")
            return
        self._connecting = None
        if self._over:
            connection.abort()
        elif connection.is_stale():
            connection.abort()
            self._not_sent("the engine closed a new connection at once")
        else:
            self._send(connection, data, unframe)

    def _send(self, connection: EngineConnection, data: bytes, unframe: bool) -> None:
        self._connection, self.sent = connection, True
        connection.send(self, data, unframe=unframe)
        ticket = self._ticket
        if ticket.has_waited:
            self._cancel_timer()
            ticket.gate.sent(ticket)

    def _not_sent(self, text: str) -> None:
        client, self._client = self._client, None
        self._leave()
        if client is not None:
            client.on_not_sent(text)

    # ---- what the connection calls --------------------------------------------------------------------------------

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None:
        if complete:
            self._connection = None  # it may be another request's by now
        if self._client is not None:
            self._client.on_head(head, raw, piece, complete)
        else:
            self._heard_at = time.monotonic()
        if complete:
            self._finish(Outcome.ANSWERED)

    def on_piece(self, piece: bytes, complete: bool) -> None:
        if complete:
            self._connection = None  # it may be another request's by now
        if self._client is not None:
            self._client.on_piece(piece, complete)
        else:
            self._heard_at = time.monotonic()
        if complete:
            self._finish(Outcome.ANSWERED)

    def on_lost(self, text: str) -> None:
        client, self._client = self._client, None
        self._finish(Outcome.FAILED)
        if client is not None:
            client.on_lost(text)

    def on_broken(self, text: str) -> None:
        if self._client is not None:
            self._client.on_broken(text)

    # ---- what the client's side calls -----------------------------------------------------------------------------

    def pause(self) -> None:
        if self._connection is not None:
            self._connection.pause_reading()

    def resume(self) -> None:
        if self._connection is not None:
            self._connection.resume_reading()

    def abort(self, seconds_max: float) -> None:
        """By policy: the client is told now, and the engine has ``seconds_max`` to let go."""
        if self.lingers:
            self._cancel_timer()
            self._timer = asyncio.get_running_loop().call_later(seconds_max, self.cut)
        elif self._client is not None:
            self._client.on_aborted()

    def hang_up(self, outcome: Outcome, seconds_max: float, *, of_silence: bool = False) -> None:
        """Gives the exchange up. It stays in flight until the engine closes its side, at most ``seconds_max`` in all,
        or ``of_silence``."""
        self._client = None
        if self._over:
            return
        if self._connection is None:
            self._finish(outcome)
            return
        self._ticket.gate.settle(self._ticket, outcome)
        self.lingers = True
        self._heard_at = time.monotonic()
        self._cancel_timer()
        loop = asyncio.get_running_loop()
        if of_silence:
            self._timer = loop.call_later(seconds_max, self._on_silence, seconds_max)
        else:
            self._timer = loop.call_later(seconds_max, self.cut)
        self._connection.shut()

    def _on_silence(self, seconds_max: float) -> None:
        left = self._heard_at + seconds_max - time.monotonic()
        if left > 0:
            self._timer = asyncio.get_running_loop().call_later(left, self._on_silence, seconds_max)
        else:
            self.cut()

    def cut(self) -> None:
        """Ends a lingering exchange now; the engine may still be at it."""
        if self.lingers and self._connection is not None:
            self._connection.abort()
            self._finish(Outcome.FAILED)

    # ---- the end --------------------------------------------------------------------------------------------------

    def _cancel_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _leave(self) -> None:
        """Nothing of it is at the engine, or ever will be."""
        self._over = True
        self._connection = None
        if self._timer is not None:
            self._cancel_timer()
        if self._connecting is not None:
            self._connecting.cancel()
            self._connecting = None
        self._live.discard(self)
        if self.on_over is not None:
            self.on_over(self)

    def _finish(self, outcome: Outcome) -> None:
        if not self._over:
            self._leave()
            ticket = self._ticket
            ticket.gate.finish(ticket, time.monotonic(), outcome)
