"""One request at an engine: its connection, and the proof that nothing of it is left there.

The law: a request counts as in flight until the engine has answered it whole or has closed its side of the connection.
A client that goes away is no such proof: bytes that were sent may still lie unread in the engine's socket. So a request
that is given up is hung up: our side is shut, the engine reads the end of it, and what it still sends is thrown away
until it closes.

Nothing is sent twice. aiohttp repeats idempotent methods on a stale connection; only POST goes to an engine, which
it never repeats, and a stale connection is found before a byte is written to it.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import select
import time
from collections.abc import Callable
from typing import Final

import aiohttp
from aiohttp.client_proto import ResponseHandler
from aiohttp.connector import Connection
from aiohttp.http_exceptions import HttpProcessingError
from multidict import CIMultiDict
from yarl import URL

from .admission import Admission, Outcome, Ticket
from .settings import Limits

# Servers drop idle connections: uvicorn after 5 s. Ours are left alone long before that.
REUSE_SECONDS_MAX: Final = 2.0
# A released request that is not sent by then does not hold back the next one.
RELEASE_SECONDS_MAX: Final = 0.05


class StaleConnection(Exception):
    """The engine's side is closed already, or talks unasked. Nothing was sent."""


class NotSent(Exception):
    """No byte of the request left the gateway."""


class EngineLost(Exception):
    """The connection broke after bytes may have reached the engine."""


class _Leash:
    """What an exchange knows of its own connection."""

    def __init__(self, on_sent: Callable[[], None]) -> None:
        self.on_sent = on_sent
        self.transport: asyncio.Transport | None = None  # set right before the first byte
        self._protocol: ResponseHandler | None = None
        self.response: aiohttp.ClientResponse | None = None
        self._closed: asyncio.Future[None] | None = None

    def fasten(self, transport: asyncio.Transport, protocol: ResponseHandler) -> None:
        self.transport = transport
        self._protocol = protocol
        self._closed = closed = protocol.closed
        if closed is not None:
            closed.remove_done_callback(_retrieve)
            closed.add_done_callback(_retrieve)
            closed.add_done_callback(self._on_closed)

    def answered(self, response: aiohttp.ClientResponse) -> None:
        self.response = response
        if self._closed is not None and self._closed.done():
            self._on_closed(self._closed)

    @property
    def is_ours(self) -> bool:
        """Whether the connection still serves this request. Once the answer is in, it may serve another one."""
        return self.transport is not None and (self.response is None or self.response.connection is not None)

    def shut(self) -> None:
        """Tells the engine that nothing follows; the connection is never used again."""
        assert self.transport is not None
        assert self._protocol is not None
        self._protocol.force_close()
        if self.transport.can_write_eof() and not self.transport.is_closing():
            self.transport.write_eof()

    def unfasten(self) -> None:
        """The connection may serve others now."""
        if self._closed is not None:
            self._closed.remove_done_callback(self._on_closed)

    def _on_closed(self, _: asyncio.Future[None]) -> None:
        """aiohttp (3.14) closes the connection on a bad chunk, but leaves who reads the body waiting for ever."""
        content = None if self.response is None else self.response.content
        if content is not None and not content.is_eof() and content.exception() is None:
            content.set_exception(aiohttp.ClientPayloadError("the engine's answer broke off"))


def _retrieve(closed: asyncio.Future[None]) -> None:
    """Why a connection closed is told by its request; an idle one may close as it likes."""
    if not closed.cancelled():
        closed.exception()


_leash: contextvars.ContextVar[_Leash] = contextvars.ContextVar("lull_gateway_leash")


def is_stale(transport: asyncio.Transport) -> bool:
    """Whether an idle connection has something to read: its end, or bytes that nobody asked for."""
    if transport.is_closing():
        return True
    poll = select.poll()
    poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
    return bool(poll.poll(0))


class _WatchedRequest(aiohttp.ClientRequest):
    async def send(self, conn: Connection) -> aiohttp.ClientResponse:
        leash = _leash.get()
        transport, protocol = conn.transport, conn.protocol
        if transport is None or protocol is None or is_stale(transport):
            raise StaleConnection
        leash.fasten(transport, protocol)
        response = await super().send(conn)
        leash.on_sent()
        return response


class Pool:
    """Connections to one engine, for one time that its gate is open. None outlives it idle: a parked or restarted
    engine is met on new connections."""

    def __init__(self, limits: Limits, *, reuse: bool) -> None:
        self._reuse = reuse
        self._limits = limits
        self._kept = self._session(keep=True) if reuse else None
        self._fresh = self._session(keep=False)
        self._users = 0
        self._retired = False
        self._closing: asyncio.Task[None] | None = None

    def _session(self, *, keep: bool) -> aiohttp.ClientSession:
        connector = (
            aiohttp.TCPConnector(limit=0, keepalive_timeout=REUSE_SECONDS_MAX)
            if keep
            else aiohttp.TCPConnector(limit=0, force_close=True)
        )
        return aiohttp.ClientSession(
            connector=connector,
            request_class=_WatchedRequest,
            cookie_jar=aiohttp.DummyCookieJar(),  # one client's cookies are none of another's
            auto_decompress=False,
            timeout=aiohttp.ClientTimeout(
                total=None, sock_connect=self._limits.connect_seconds_max, sock_read=self._limits.silence_seconds_max
            ),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )

    def enter(self) -> None:
        self._users += 1

    def leave(self) -> None:
        self._users -= 1
        self._close_if_unused()

    def retire(self) -> None:
        self._retired = True
        self._close_if_unused()

    def _close_if_unused(self) -> None:
        if self._retired and self._users == 0 and self._closing is None:
            self._closing = asyncio.create_task(self._close())

    async def _close(self) -> None:
        if self._kept is not None:
            await self._kept.close()
        await self._fresh.close()

    async def closed(self) -> None:
        """Retires the pool and waits for its sockets; only once nothing uses it."""
        self.retire()
        if self._closing is not None:
            await self._closing

    async def post(self, url: URL, headers: CIMultiDict[str], body: bytes) -> aiohttp.ClientResponse:
        if self._kept is not None:
            try:
                return await self._send(self._kept, url, headers, body)
            except StaleConnection:
                pass  # Nothing was sent on it, so this is no repetition.
        try:
            return await self._send(self._fresh, url, headers, body)
        except StaleConnection:
            raise NotSent("the engine closed a new connection at once") from None

    async def _send(
        self, session: aiohttp.ClientSession, url: URL, headers: CIMultiDict[str], body: bytes
    ) -> aiohttp.ClientResponse:
        return await session.request("POST", url, headers=headers, data=body, allow_redirects=False)


class Exchange:
    """One admitted ticket on its way. Ends exactly once, by ``finished`` or by ``hang_up``."""

    def __init__(self, admission: Admission, ticket: Ticket, pool: Pool, live: set[Exchange]) -> None:
        self._admission = admission
        self._ticket = ticket
        self._pool = pool
        self._live = live
        self._leash = _Leash(self._on_sent)
        self._task: asyncio.Task[aiohttp.ClientResponse] | None = None
        self._lingering: asyncio.Task[None] | None = None
        self._on_abort: Callable[[], None] | None = None
        self.aborted = False
        pool.enter()
        live.add(self)
        # Admitted from the queue, its successor waits for it to be sent: not for ever.
        self._pace = asyncio.get_running_loop().call_later(RELEASE_SECONDS_MAX, admission.sent, ticket)

    @property
    def sent(self) -> bool:
        return self._leash.transport is not None

    def _on_sent(self) -> None:
        self._pace.cancel()
        self._admission.sent(self._ticket)

    def first_byte(self) -> None:
        """The client has the first byte of the answer."""
        self._admission.first_byte(self._ticket, time.monotonic())

    async def answer(self, url: URL, headers: CIMultiDict[str], body: bytes) -> aiohttp.ClientResponse:
        """The head of the engine's answer; NotSent or EngineLost otherwise. Cancelling it stops nothing."""

        async def request() -> aiohttp.ClientResponse:
            _leash.set(self._leash)
            response = await self._pool.post(url, headers, body)
            self._leash.answered(response)
            return response

        self._task = asyncio.create_task(request())
        try:
            return await asyncio.shield(self._task)
        except (aiohttp.ClientError, OSError) as error:
            text = str(error) or type(error).__name__
            raise (EngineLost(text) if self.sent else NotSent(text)) from error

    def on_abort(self, callback: Callable[[], None]) -> None:
        """What stops the one who waits for this exchange."""
        self._on_abort = callback

    def abort(self, seconds_max: float) -> None:
        """By policy: the client is told now, and the engine has ``seconds_max`` to let go."""
        self.aborted = True
        if self._lingering is not None:
            asyncio.get_running_loop().call_later(seconds_max, self.cut)
        elif self._on_abort is not None:
            self._on_abort()

    def finished(self, outcome: Outcome) -> None:
        """The engine's answer has come whole, or nothing can be left at it."""
        self._pace.cancel()
        self._leash.unfasten()
        if self in self._live:
            self._live.discard(self)
            self._pool.leave()
            self._admission.finish(self._ticket, time.monotonic(), outcome)

    def hang_up(self, outcome: Outcome, seconds_max: float) -> asyncio.Task[None] | None:
        """Gives the exchange up. It stays in flight until the engine closes its side, at most ``seconds_max``."""
        task, transport = self._task, self._leash.transport
        if task is None or transport is None or not self._leash.is_ours:
            # Nothing was sent, and the cancelled task cannot write any more; or the engine has answered whole.
            if task is not None:
                task.cancel()
            self.finished(outcome)
            return None
        self._admission.settle(self._ticket, outcome)
        self._leash.shut()
        self._lingering = asyncio.create_task(self._linger(task, seconds_max))
        # Not in a `finally` of the task: one that is cancelled before its first step runs none.
        self._lingering.add_done_callback(lambda _: self._let_go(task, transport, outcome))
        return self._lingering

    def cut(self) -> None:
        """Ends a lingering exchange now; the engine may still be at it."""
        if self._lingering is not None:
            self._lingering.cancel()

    async def _linger(self, task: asyncio.Task[aiohttp.ClientResponse], seconds_max: float) -> None:
        # An error means that it closed, which is what is waited for; or the bound passed (TimeoutError is an OSError).
        with contextlib.suppress(aiohttp.ClientError, HttpProcessingError, OSError):
            async with asyncio.timeout(seconds_max):
                response = await task
                async for _ in response.content.iter_any():
                    pass

    def _let_go(
        self, task: asyncio.Task[aiohttp.ClientResponse], transport: asyncio.Transport, outcome: Outcome
    ) -> None:
        transport.abort()
        if not task.done():
            task.cancel()
        elif not task.cancelled() and task.exception() is None:
            task.result().close()
        self.finished(outcome)
