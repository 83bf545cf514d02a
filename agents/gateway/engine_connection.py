"""One TCP connection to an engine, and the pool of those that are idle. Requests go one after the other.

What the engine sends is judged before any of it is passed on, so broken framing breaks the answer and never becomes
another one's: each head by both judges of heads; then its length is counted here, and chunks are read by the llhttp
that took this head and nothing before it. A connection is used again only if its answer ended where its framing said,
nothing followed, and nothing is there to be read when it is taken: its end, or bytes that nobody asked for.
"""

from __future__ import annotations

import asyncio
import select
from typing import Any, Final, Protocol, cast

import httptools

from .heads import ANSWER_HEAD_BYTES_MAX, END, AnswerHead, BadHead, Bodies, Ends, Memo, at_ends, memo_of
from .settings import Limits

# Servers drop idle connections: uvicorn after 5 s. Ours are left alone long before that.
REUSE_SECONDS_MAX: Final = 2.0
_LINE_ENDS: Final = b"\r\n"


class Asker(Protocol):
    """Whose request a connection serves."""

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None:
        """The head of the answer, also as it came, with what of its body is here already."""
        ...

    def on_piece(self, piece: bytes, complete: bool) -> None: ...

    def on_lost(self, text: str) -> None:
        """The connection is gone."""
        ...

    def on_broken(self, text: str) -> None:
        """What came is no answer. The connection is shut, and nothing but its loss is told any more."""
        ...


class EngineConnection(asyncio.Protocol):
    _paused = False
    _shut = False
    _broken: Asker | None = None  # whose answer was none; what still comes is thrown away
    _unsent = False  # much of the request is not taken yet
    _memo: Memo[AnswerHead] | None = None  # of answers with a length, after which the connection is kept

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._transport: Any = None
        self._poll = select.poll().poll
        self._asker: Asker | None = None
        self._parser: Any = None  # of a chunked answer
        self._ends = Ends()
        self._unframe: bool = False
        self._buffer = b""
        self._tail = b""
        self._head: AnswerHead | None = None
        self._remaining: int | None = None  # of a body with a length
        self._complete = self._keep = self._excess = False
        self.idle_since = 0.0

    # ---- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        poll = select.poll()
        poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN | select.POLLRDHUP)
        self._poll = poll.poll

    def data_received(self, data: bytes) -> None:
        if self._asker is None:
            if self._broken is None:
                self.close()  # nobody asked
            return
        try:
            if self._head is None:
                if self._memo is not None and not self._buffer and not self._unframe:
                    found = self._memo.match(data)
                    if found is not None and found[1] + found[0] == len(data):
                        self._read_known(self._memo.head, data, found)
                        return
                self._read_head(data)
            else:
                piece = self._take(data)
                self._asker_of_piece().on_piece(piece, self._complete)
        except (BadHead, httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._break(str(error) or type(error).__name__)

    def eof_received(self) -> None:
        head = self._head
        if head is not None and not head.framed and self._asker is not None:
            self._complete = True  # the end of the connection is the end of the message
            self._asker_of_piece().on_piece(b"", True)

    def connection_lost(self, exc: Exception | None) -> None:
        self._pool.forget(self)
        asker, self._asker, self._broken = self._asker or self._broken, None, None
        if asker is not None:
            asker.on_lost(str(exc) if exc is not None else "the engine closed the connection")

    def pause_writing(self) -> None:
        self._unsent = True

    def resume_writing(self) -> None:
        self._unsent = False

    # ---- what pool and exchange call ----------------------------------------------------------------------------

    def is_stale(self) -> bool:
        """Whether it has something to read while nothing was asked, or is closing."""
        return bool(self._poll(0)) or self._transport.is_closing()

    def send(self, asker: Asker, data: bytes, *, unframe: bool) -> None:
        """``unframe``: pieces of the answer are then its body alone, else they are framed as the head says."""
        self._asker = asker
        self._unframe = unframe
        self._head = self._parser = None
        self._buffer = self._tail = b""
        self._complete = self._keep = self._excess = False
        self._transport.write(data)

    def pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self._transport.pause_reading()

    def resume_reading(self) -> None:
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def shut(self) -> None:
        """Tells the engine that nothing follows; the connection is never used again."""
        self._shut = True
        self.resume_reading()
        if not self._transport.is_closing():
            self._transport.write_eof()

    def close(self) -> None:
        """At once, too, if the engine does not take what was sent: it would be kept here for as long."""
        if self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self._transport.close()

    def abort(self) -> None:
        self._asker = self._broken = None
        self._transport.abort()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _read_head(self, data: bytes) -> None:
        if self._buffer:
            data = self._buffer + data
        while (end := data.find(END)) >= 0 and end <= ANSWER_HEAD_BYTES_MAX:
            end += len(END)
            raw, rest = (data, b"") if end == len(data) else (data[:end], data[end:])
            ends = Bodies() if self._unframe else Ends()
            parser = httptools.HttpResponseParser(ends)
            head = AnswerHead(raw, parser, ends)
            if head.status >= 200:
                self._begin(head, raw, rest, parser, ends)
                return
            if head.status == 101:
                raise BadHead("it switches protocols, which nobody asked for")
            data = rest
        if len(data) > ANSWER_HEAD_BYTES_MAX:
            raise BadHead(f"the head is longer than {ANSWER_HEAD_BYTES_MAX} bytes")
        if data.count(b"\n") != data.count(b"\r\n"):
            raise BadHead("a line ends with a bare LF")  # no end of this head would ever be found
        self._buffer = data

    def _begin(self, head: AnswerHead, raw: bytes, rest: bytes, parser: Any, ends: Ends) -> None:
        self._head, self._buffer = head, b""
        self._keep = head.keep_alive and head.framed
        if head.chunked:
            self._parser, self._ends = parser, ends
        self._complete = not head.has_body
        self._remaining = head.content_length
        piece = self._take(rest) if rest else b""
        if self._complete and self._keep and head.verbatim and head.content_length is not None:
            self._memo = memo_of(raw, head)
        self._asker_of_piece().on_head(head, raw, piece, self._complete)

    def _read_known(self, head: AnswerHead, data: bytes, found: tuple[int, int]) -> None:
        """A whole answer with a head like one before, and nothing behind it."""
        head.content_length = found[0]
        self._head = head
        self._complete = self._keep = True
        self._asker_of_piece().on_head(head, data[: found[1]], data[found[1] :], True)

    def _take(self, data: bytes) -> bytes:
        """What is passed on of what came; never a byte behind the message's end."""
        head = self._head
        assert head is not None
        if self._complete:
            self._excess = True
            return b""
        if head.chunked:
            passed = self._take_chunks(data)
            if isinstance(self._ends, Bodies):
                pieces, self._ends.pieces = self._ends.pieces, []
                return b"".join(pieces)
            return passed
        remaining = self._remaining
        if remaining is None:
            return data
        if len(data) > remaining:
            self._excess, data = True, data[:remaining]
        self._remaining = remaining = remaining - len(data)
        self._complete = not remaining
        return data

    def _take_chunks(self, data: bytes) -> bytes:
        end = data.find(END)
        if data[0] not in _LINE_ENDS and (end < 0 or end + len(END) == len(data)):
            self._parser.feed_data(data)  # the message can end nowhere but at the end of this
            self._end_chunks(end >= 0)
            self._tail = data[-3:]
            return data
        passed = 0
        for piece in at_ends(self._tail, data):
            self._parser.feed_data(piece)
            passed += len(piece)
            self._end_chunks((self._tail + data[:passed]).endswith(END))
            if self._complete:
                self._excess = passed < len(data)
                return data[:passed]
        self._tail = (self._tail + data)[-3:]
        return data

    def _end_chunks(self, may_end: bool) -> None:
        """Raises BadHead if llhttp found an end where none can be: what is behind it would pass as part of it."""
        if self._ends.message:
            if not may_end:
                raise BadHead("its chunks end without an empty line")
            self._complete = True

    def _asker_of_piece(self) -> Asker:
        """Who gets the piece; after the last one the connection is free for others, or closed."""
        asker = self._asker
        assert asker is not None
        if self._complete:
            self._asker = None
            free = self._keep and not self._excess and not self._shut and not self._unsent
            if free and not self._transport.is_closing():
                if self._paused:
                    self.resume_reading()
                self._pool.give_back(self)
            else:
                self.close()
        return asker

    def _break(self, text: str) -> None:
        """The engine may be at it still: only its closing proves that it is not."""
        asker, self._asker = self._asker, None
        assert asker is not None
        self._broken = asker
        self.shut()
        asker.on_broken(text)


class Pool:
    """Connections to one engine, for one time that its gate is open. None outlives it idle: a parked or restarted
    engine is met on new connections."""

    def __init__(self, host: str, port: int, limits: Limits, *, reuse: bool) -> None:
        self._host = host
        self._port = port
        self._limits = limits
        self._loop = asyncio.get_running_loop()
        self._keeps = reuse
        self._idle: list[EngineConnection] = []
        self._sweeping: asyncio.TimerHandle | None = None

    @property
    def idle(self) -> int:
        return len(self._idle)

    def take(self) -> EngineConnection | None:
        """An idle connection that can be used; what cannot is closed."""
        idle = self._idle
        while idle:
            connection = idle.pop()
            if not connection.is_stale():
                return connection
            connection.close()
        return None

    async def connect(self) -> EngineConnection:
        """A new one. Raises OSError (a TimeoutError is one)."""
        async with asyncio.timeout(self._limits.connect_seconds_max):
            _, connection = await self._loop.create_connection(lambda: EngineConnection(self), self._host, self._port)
        return connection

    def give_back(self, connection: EngineConnection) -> None:
        if not self._keeps:
            connection.close()
            return
        connection.idle_since = self._loop.time()
        self._idle.append(connection)
        if self._sweeping is None:
            self._sweeping = self._loop.call_later(REUSE_SECONDS_MAX, self._sweep)

    def forget(self, connection: EngineConnection) -> None:
        if connection in self._idle:
            self._idle.remove(connection)

    def retire(self) -> None:
        """What is idle is closed, and what is in use will be."""
        self._keeps = False
        self._close_idle(self._idle)
        if self._sweeping is not None:
            self._sweeping.cancel()
            self._sweeping = None

    def _sweep(self) -> None:
        self._sweeping = None
        now = self._loop.time()
        self._close_idle([each for each in self._idle if now - each.idle_since >= REUSE_SECONDS_MAX])
        if self._idle:
            oldest_at = min(each.idle_since for each in self._idle)
            self._sweeping = self._loop.call_at(oldest_at + REUSE_SECONDS_MAX, self._sweep)

    def _close_idle(self, old: list[EngineConnection]) -> None:
        self._idle = [each for each in self._idle if each not in old]
        for connection in old:
            connection.close()
