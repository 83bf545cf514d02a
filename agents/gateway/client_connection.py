"""One client's connection, as far as it is about answers: passes the gate, relays what the engine says as it comes.

Between admission and the engine's socket there is no further queue.
"""

from __future__ import annotations

import asyncio
import json
import math
import socket
import struct
import time
from typing import TYPE_CHECKING, Final

from .admission import Admission, Outcome, Refusal, Ticket, TicketState
from .exchange import Exchange
from .filtering import Asked, read_body
from .heads import AnswerHead
from .problems import Problem
from .request_connection import RequestConnection, State
from .routes import HOP_MARK

if TYPE_CHECKING:
    from .relay import Relay
    from .routes import Route

_SSE: Final = b"text/event-stream"
_KEEPALIVE: Final = b": keepalive\n\n"
_BEGUN: Final = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-cache\r\n"
_CHUNKED: Final = b"Transfer-Encoding: chunked\r\n"
_CLOSE: Final = b"Connection: close\r\n"
_LAST_CHUNK: Final = b"0\r\n\r\n"
_ERROR_BODY_BYTES_MAX: Final = 64 * 1024
_RESET_ON_CLOSE: Final = struct.pack("ii", 1, 0)
_OURS: Final = b"Via: 1.1 %s\r\nContent-Length: " % HOP_MARK
_ADMITTED: Final = TicketState.ADMITTED


class ClientConnection(RequestConnection):
    def __init__(self, relay: Relay) -> None:
        super().__init__(relay)
        # Of the request in work:
        self._asked: Asked | None = None
        self._ticket: Ticket | None = None
        self._tried: set[Admission] | None = None
        self._hold_timer: asyncio.TimerHandle | None = None  # while it counts among those that are held
        self._exchange: Exchange | None = None
        self._route: Route | None = None
        self._begun = False  # a 200 of our own, with comments
        self._started = False  # something of the engine's answer
        self._reframe = False
        self._refusal: tuple[int, bytearray] | None = None  # of an engine, after _begun

    def pause_writing(self) -> None:
        """A client that reads slowly slows the engine down."""
        self._paused = True
        if self._exchange is not None:
            self._exchange.pause()

    def resume_writing(self) -> None:
        self._paused = False
        if self._exchange is not None:
            self._exchange.resume()
        elif self._state is State.HEAD:
            self._until(self._limits.idle_seconds_max)
            self._go_on()

    def _give_up(self) -> None:
        self._hang_up(Outcome.DISCONNECTED, self._limits.silence_seconds_max, of_silence=True)

    def _overdue(self) -> None:
        assert self._route is not None
        self._hang_up(Outcome.FAILED, self._limits.abort_seconds_max)
        self._fail(self._relay.silent(self._route))

    # ---- the gate -----------------------------------------------------------------------------------------------

    def _dispatch(self) -> None:
        self._state, self._deadline = State.BUSY, math.inf
        try:
            self._asked = asked = read_body(self._body)
            siblings = self._relay.routes.find(asked[0])
        except Problem as problem:
            self._answer_problem(problem)
            return
        self._ticket = ticket = siblings.arrive(time.monotonic(), self._on_change, patient=asked[1])
        if ticket.state is _ADMITTED:
            self._go()
        elif ticket.state is TicketState.HELD:
            self._hold(ticket)
        else:
            self._fail(self._relay.refused(ticket, time.monotonic()))

    def _hold(self, ticket: Ticket) -> None:
        """The gate would have the request wait; the gateway may have to refuse it all the same."""
        relay = self._relay
        if relay.stopping:  # nobody will open the gate
            ticket.gate.refuse_arrival(ticket, Refusal.STOPPING)
            self._fail(relay.refused(ticket, time.monotonic()))
        elif not ticket.gate.is_open and not relay.has_room_to_hold(self._reserved_bytes):
            ticket.gate.refuse_arrival(ticket, Refusal.HOLD_FULL)
            self._fail(relay.not_held(ticket, time.monotonic()))
        else:
            relay.hold(self._reserved_bytes)
            self._wait_on()

    def _release(self, timer: asyncio.TimerHandle) -> None:
        timer.cancel()
        self._hold_timer = None
        self._relay.release(self._reserved_bytes)

    def _on_change(self) -> None:
        assert self._ticket is not None
        # In a turn of the loop of its own: what was released before is written by then, and no call nests.
        self._loop.call_soon(self._proceed, self._ticket)

    def _proceed(self, ticket: Ticket) -> None:
        if ticket is not self._ticket:
            return  # its client went away
        if self._hold_timer is not None:
            self._release(self._hold_timer)
        if self._reading_paused and self._has_left():
            self._transport.abort()
        elif ticket.state is _ADMITTED:
            self._go()
        elif ticket.state is TicketState.REFUSED:
            self._fail(self._relay.refused(ticket, time.monotonic()))

    def _wait_on(self) -> None:
        assert self._ticket is not None
        left = self._ticket.siblings.seconds_left(self._ticket, time.monotonic())
        seconds = max(0.0, min(left, self._limits.keepalive_seconds))
        self._hold_timer = self._loop.call_later(seconds, self._on_hold_timer)

    def _on_hold_timer(self) -> None:
        """A streaming client that waits long gets comments, so that its read time-out does not fire; its answer has
        then begun."""
        ticket = self._ticket
        assert ticket is not None
        assert self._head is not None
        ticket.gate.expire(ticket, time.monotonic())
        if ticket.state is not TicketState.HELD:
            return  # now, or earlier in this turn: `_on_change` has been told, and acting here too would send it twice
        if self._asked is not None and self._asked[1]:
            if not self._begun:
                self._begun, self._reframe = True, self._head.is_http11
                self._transport.write(_BEGUN + (_CHUNKED if self._reframe else _CLOSE) + b"\r\n")
            # A client that does not read gets none: what is written for it would pile up here.
            if not self._paused:
                self._transport.write(self._framed(_KEEPALIVE))
        self._wait_on()

    def _go(self) -> None:
        """An open gate let the request through: it goes to that engine now."""
        ticket, head, body = self._ticket, self._head, self._body
        assert ticket is not None
        assert head is not None
        self._route = route = self._relay.routes.of_gate(ticket.gate)
        self._exchange = exchange = route.begin(ticket)
        self._until(self._limits.silence_seconds_max)
        start = route.head_start(self._path, self._query)
        data = b"%s%s%s%d\r\n\r\n%s" % (start, head.joined, _OURS, len(body), body)
        exchange.start(self, data, unframe=self._begun or not head.is_http11)

    # ---- what the exchange tells ----------------------------------------------------------------------------------

    def on_head(self, head: AnswerHead, raw: bytes, piece: bytes, complete: bool) -> None:
        self._deadline = self._loop.time() + self._limits.silence_seconds_max
        request, ticket = self._head, self._ticket
        assert request is not None
        assert ticket is not None
        self._started = True
        if self._begun:
            self._on_head_of_stream(head, piece, complete)
            return
        if head.verbatim and head.framed and request.is_http11 and self._keep and not self._relay.stopping:
            self._transport.write(raw + piece)
        else:
            self._transport.write(self._head_of_ours(head, request.is_http11) + self._last_framed(piece, complete))
        if ticket.has_waited:
            ticket.gate.first_byte(ticket, time.monotonic())
        if complete:
            self._end_exchange()
        elif self._paused and self._exchange is not None:
            self._exchange.pause()

    def _head_of_ours(self, head: AnswerHead, is_http11: bool) -> bytes:
        lines = [b"HTTP/1.1 %d %s" % (head.status, head.reason), *head.lines]
        if head.content_length is not None and not head.chunked:
            lines.append(b"Content-Length: %d" % head.content_length)
        elif is_http11 and (head.chunked or not head.framed):
            self._reframe = not head.chunked
            lines.append(b"Transfer-Encoding: chunked")
        self._keep = self._keep and not self._relay.stopping
        if not self._keep:
            lines.append(b"Connection: close")
        return b"\r\n".join(lines) + b"\r\n\r\n"

    def on_piece(self, piece: bytes, complete: bool) -> None:
        self._deadline = self._loop.time() + self._limits.silence_seconds_max
        if self._refusal is not None:
            self._collect(piece, complete)
            return
        if self._reframe:
            piece = self._last_framed(piece, complete)
        if piece:
            self._transport.write(piece)
        if complete:
            self._end_exchange()

    def on_lost(self, text: str) -> None:
        assert self._route is not None
        self._exchange = None
        self._fail(self._relay.lost(self._route, text))

    def on_broken(self, text: str) -> None:
        assert self._route is not None
        self._hang_up(Outcome.FAILED, self._limits.abort_seconds_max)
        self._fail(self._relay.lost(self._route, text))

    def on_not_sent(self, text: str) -> None:
        """Nothing left the gateway, so a sibling that is open may have the request."""
        ticket, route, now = self._ticket, self._route, time.monotonic()
        assert ticket is not None
        assert route is not None
        self._exchange = None
        self._tried = {*(self._tried or ()), ticket.gate}
        other = ticket.siblings.open_gate_but(self._tried)
        if other is not None:
            ticket.gate.pass_on(ticket, other, now)
            self._go()
            return
        ticket.gate.finish(ticket, now, Outcome.FAILED)
        self._fail(self._relay.unreachable(route, text))

    def on_aborted(self) -> None:
        ticket, route = self._ticket, self._route
        assert ticket is not None
        assert route is not None
        self._hang_up(Outcome.FAILED, self._limits.abort_seconds_max)
        self._fail(self._relay.aborted(ticket, route, time.monotonic()))

    # ---- relaying -------------------------------------------------------------------------------------------------

    def _framed(self, piece: bytes) -> bytes:
        return b"%x\r\n%s\r\n" % (len(piece), piece) if self._reframe and piece else piece

    def _last_framed(self, piece: bytes, complete: bool) -> bytes:
        framed = self._framed(piece)
        return framed + _LAST_CHUNK if complete and self._reframe else framed

    def _on_head_of_stream(self, head: AnswerHead, piece: bytes, complete: bool) -> None:
        """A client that was kept waiting has its 200 and its content type: an answer of another kind is an event."""
        ticket = self._ticket
        assert ticket is not None
        if head.status == 200 and head.content_type == _SSE and head.content_encoding is None:
            ticket.gate.first_byte(ticket, time.monotonic())
            self.on_piece(piece, complete)
            if self._paused and self._exchange is not None:
                self._exchange.pause()
            return
        ticket.gate.settle(ticket, Outcome.FAILED)
        self._refusal = (head.status, bytearray())
        self._collect(piece, complete)

    def _collect(self, piece: bytes, complete: bool) -> None:
        assert self._refusal is not None
        status, body = self._refusal
        body += piece
        if not complete and len(body) < _ERROR_BODY_BYTES_MAX:
            return
        self._hang_up(Outcome.FAILED, self._limits.abort_seconds_max)
        text = body[:_ERROR_BODY_BYTES_MAX].decode("utf-8", "replace")
        try:
            text = str(json.loads(text)["error"]["message"])
        except (ValueError, KeyError, TypeError, RecursionError):
            text = text[:1000]
        self._fail(Problem(status if status >= 400 else 502, "engine_refused", text))

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _hang_up(self, outcome: Outcome, seconds_max: float, *, of_silence: bool = False) -> None:
        """Gives up what may be at the engine, or what waits. For the times see Exchange.hang_up."""
        exchange, self._exchange = self._exchange, None
        if exchange is not None:
            exchange.hang_up(outcome, seconds_max, of_silence=of_silence)
            if not exchange.is_over:
                self._relay.linger(exchange, self._reserved_bytes)
                self._counted, self._reserved_bytes = False, 0
        elif self._ticket is not None:
            self._ticket.gate.finish(self._ticket, time.monotonic(), outcome)

    def _fail(self, problem: Problem) -> None:
        """Tells the client in the way that is left."""
        if self._begun:
            self._transport.write(self._framed(problem.event()))
            self._cut()
        elif self._started:
            self._cut()
        else:
            self._answer_problem(problem)

    def _cut(self) -> None:
        """Ends the connection without the end of the message."""
        http10 = self._head is not None and not self._head.is_http11
        self._end_request()
        self._state = State.ENDING
        self._until(self._limits.silence_seconds_max)
        if http10:
            # A connection's end is the end of an HTTP/1.0 message: there only a reset shows that it is not whole.
            raw = self._transport.get_extra_info("socket")
            raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RESET_ON_CLOSE)
            self._transport.abort()
        else:
            self._transport.close()

    def _end_exchange(self) -> None:
        self._exchange = None
        self._end_answer()

    def _end_request(self) -> None:
        if self._hold_timer is not None:
            self._release(self._hold_timer)
        self._ticket = self._tried = self._exchange = self._refusal = None
        self._begun = self._started = self._reframe = False
        super()._end_request()
