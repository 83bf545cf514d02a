"""One client's connection, as far as it is about requests: their heads, their bodies, what needs no engine, the end.

The body is read whole (bounded) before anything else is asked, so a slow upload neither counts as in flight nor reaches
an engine whose gate has closed meanwhile. No task is made for a request: everything happens in callbacks, and one timer
bounds whatever the connection waits for.
"""

from __future__ import annotations

import asyncio
import json
import math
import select
from abc import ABC, abstractmethod
from enum import Enum
from typing import TYPE_CHECKING, Any, Final, cast

from .bodies import BadBody, BodyTooLong, ChunkedBody, SizedBody
from .filtering import INFERENCE_PATHS, LIVE_PATH, MODELS_PATH, check_query, inference_path, split_target
from .heads import END, REQUEST_HEAD_BYTES_MAX, BadHead, Memo, RequestHead, memo_of
from .problems import CONTENT_TYPE, Problem, plain_answer
from .routes import HOP_MARK

if TYPE_CHECKING:
    from .relay import Relay

# Of requests that a client sends before the one in work is answered; more is read when that one is over.
_PIPELINED_BYTES_MAX: Final = 64 * 1024
_LINGERING_SECONDS: Final = 2.0  # for a client to stop sending a body that was refused
_LOOK_SECONDS: Final = 1.0  # between looks whether a client that is not read from is still there
_LINE_END: Final = b"\r\n"
_EXACT_TARGETS: Final = {path.encode(): path for path in INFERENCE_PATHS}


class State(Enum):
    HEAD = "head"  # nothing of a request, or a part of its head
    BODY = "body"
    BUSY = "busy"  # a whole request is here and not answered yet
    ENDING = "ending"  # what still comes is thrown away


_HEAD, _BODY, _BUSY, _ENDING = State.HEAD, State.BODY, State.BUSY, State.ENDING


class RequestConnection(asyncio.Protocol, ABC):
    _paused = False  # the client does not take what is written
    _reading_paused = False
    _looking: asyncio.TimerHandle | None = None
    _memo: Memo[RequestHead] | None = None  # of requests that go straight on to the gate
    _timer: asyncio.TimerHandle | None = None

    def __init__(self, relay: Relay) -> None:
        self._relay = relay
        self._limits = relay.limits
        self._loop = relay.loop
        self._transport: Any = None
        self._state = _HEAD
        self._buffer = b""
        self._deadline = self._timer_at = math.inf
        # Of the request in work:
        self._head: RequestHead | None = None
        self._incoming: SizedBody | ChunkedBody | None = None
        self._whole = True  # nothing of it is still to come
        self._counted = False
        self._reserved_bytes = 0
        self._body: bytes | bytearray = b""
        self._path = self._query = ""
        self._keep = True  # the connection, after its answer

    @abstractmethod
    def _dispatch(self) -> None:
        """A whole request is here."""

    @abstractmethod
    def _give_up(self) -> None:
        """The client is gone."""

    @abstractmethod
    def _overdue(self) -> None:
        """The engine was waited for too long."""

    # ---- asyncio ------------------------------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)
        try:
            self._relay.connect(self)
        except Problem as problem:
            self._answer_problem(problem)
            return
        self._until(self._limits.idle_seconds_max)

    def data_received(self, data: bytes) -> None:
        state = self._state
        if state is _HEAD or state is _BODY:
            if state is _HEAD and self._memo is not None and not self._buffer:
                found = self._memo.match(data)
                if found is not None and found[1] + found[0] == len(data):
                    self._take_known(self._memo.head, data[found[1] :])
                    return
            if self._buffer:
                data, self._buffer = self._buffer + data, b""
            self._take(data)
        elif state is _BUSY:
            self._buffer += data
            if len(self._buffer) > _PIPELINED_BYTES_MAX:
                self._stop_reading()

    def connection_lost(self, exc: Exception | None) -> None:
        self._relay.disconnect(self)
        for timer in (self._timer, self._looking):
            if timer is not None:
                timer.cancel()
        self._give_up()
        self._end_request()
        self._state = _ENDING

    # ---- time ---------------------------------------------------------------------------------------------------

    def _until(self, seconds: float) -> None:
        """What the connection waits for now may take so long. A later deadline leaves the timer as it is."""
        self._deadline = at = self._loop.time() + seconds
        if at < self._timer_at:
            if self._timer is not None:
                self._timer.cancel()
            self._timer_at, self._timer = at, self._loop.call_at(at, self._on_timer)

    def _on_timer(self) -> None:
        self._timer, self._timer_at = None, math.inf
        left = self._deadline - self._loop.time()
        if left > 0:
            if left < math.inf:
                self._until(left)
        elif self._state is _HEAD:
            self._end_idle()
        elif self._state is _BODY:
            detail = f"The body took longer than {self._limits.body_seconds_max:g} s."
            self._answer_problem(Problem(408, "body_too_slow", detail, close=True))
        elif self._state is _BUSY:
            self._overdue()
        else:
            self._transport.abort()

    # ---- reading ------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> None:
        while data:
            if self._state is _HEAD:
                if self._paused:
                    self._buffer = data
                    return
                data = self._take_head(data)
            elif self._state is _BODY:
                data = self._take_body(data)
            else:
                if self._state is _BUSY:
                    self._buffer = data
                return

    def _stop_reading(self) -> None:
        """Until ``_go_on``: more than enough is here. The end of the connection is not told meanwhile, so it is looked
        for."""
        if not self._reading_paused:
            self._reading_paused = True
            self._transport.pause_reading()
            if self._looking is None:
                self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)

    def _look(self) -> None:
        self._looking = None
        if not self._reading_paused or self._state is _ENDING:
            return
        if not self._has_left():
            self._looking = self._loop.call_later(_LOOK_SECONDS, self._look)
        elif self._state is _HEAD:
            self._end_idle()
        else:
            self._transport.abort()

    def _has_left(self) -> bool:
        """Whether the client has shut its side down, behind whatever was not read."""
        if self._transport.is_closing():
            return True
        poll = select.poll()
        poll.register(self._transport.get_extra_info("socket").fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    def _go_on(self) -> None:
        """With what came while a request was in work, or while its answer was not taken."""
        if self._reading_paused:
            self._reading_paused = False
            self._transport.resume_reading()
        if self._buffer:
            data, self._buffer = self._buffer, b""
            self._take(data)

    def _take_known(self, head: RequestHead, body: bytes) -> None:
        """A whole request with a head like one before, and nothing behind it."""
        self._head = head
        self._keep = self._whole = True
        try:
            self._relay.enter()
            self._counted = True
            if len(body) > self._limits.body_bytes_max:
                raise self._too_large()
            self._relay.reserve(len(body))
        except Problem as problem:
            self._answer_problem(problem)
            return
        self._reserved_bytes = len(body)
        self._body = body
        self._dispatch()

    def _take_head(self, data: bytes) -> bytes:
        """What follows the head."""
        start = 0
        while data.startswith(_LINE_END, start):  # an empty line before a request is no request
            start += len(_LINE_END)
        if start:
            data = data[start:]
        end = data.find(END)
        if end < 0:
            if len(data) > REQUEST_HEAD_BYTES_MAX:
                self._bad_request(f"the head is longer than {REQUEST_HEAD_BYTES_MAX} bytes")
            elif data.count(b"\n") != data.count(_LINE_END):
                self._bad_request("a line ends with a bare LF")  # no end of this head would ever be found
            else:
                self._buffer = data
            return b""
        end += len(END)
        raw, rest = data[:end], data[end:]
        try:
            head = RequestHead(raw)
        except BadHead as error:
            self._bad_request(str(error))
            return b""
        self._head = head
        self._keep = head.keep_alive
        self._whole = not head.has_body
        self._memo = None
        try:
            self._begin(head, raw)
        except Problem as problem:
            self._answer_problem(problem)
        if self._state is _BODY:
            if rest:
                self._deadline = math.inf  # the body has its own, if this is not all of it
            else:
                self._until(self._limits.body_seconds_max)
        return rest

    def _begin(self, head: RequestHead, raw: bytes) -> None:
        """Raises Problem."""
        path = _EXACT_TARGETS.get(head.target) if head.method == b"POST" else None
        if path is None:
            path = self._look_at_target(head)
            if not path:
                return
        if HOP_MARK in head.joined:
            detail = "This request was here before: the address of an engine leads back to this gateway."
            raise Problem(508, "loop", detail)
        self._path = path
        self._relay.enter()
        self._counted = True
        bytes_max = self._limits.body_bytes_max
        if head.expect or head.content_encoding or head.content_length > bytes_max:
            self._look_at_body_headers(head)
        if self._whole:
            self._dispatch()
            return
        self._state = _BODY
        self._incoming = ChunkedBody(bytes_max) if head.chunked else SizedBody(head.content_length)
        if not self._query and head.is_plain:
            self._memo = memo_of(raw, head)

    def _look_at_target(self, head: RequestHead) -> str:
        """The path of the engine, or "" if the request is answered already. Raises Problem."""
        path, self._query = split_target(head.target.decode("latin-1"))
        if path in (LIVE_PATH, MODELS_PATH) or path.startswith(MODELS_PATH + "/"):
            content_type, body = self._relay.own_answer(head.method, path)
            self._write_own(200, content_type, body, {})
            return ""
        path = inference_path(head.method.decode("latin-1"), path)
        check_query(self._query)
        return path

    def _look_at_body_headers(self, head: RequestHead) -> None:
        """Raises Problem."""
        if head.content_encoding not in (None, b"identity"):
            raise Problem(415, "content_encoding", "Content-Encoding: send the body uncompressed.", close=True)
        if head.content_length > self._limits.body_bytes_max:
            raise self._too_large()
        if head.expect is not None and head.is_http11:
            if head.expect != b"100-continue":
                detail = f"Expect: {head.expect[:100].decode('latin-1')!r} is not known."
                raise Problem(417, "expectation_failed", detail, close=True)
            self._transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def _too_large(self) -> Problem:
        detail = f"The body is longer than {self._limits.body_bytes_max} bytes, the bound of this gateway."
        return Problem(413, "body_too_large", detail, close=True)

    def _take_body(self, data: bytes) -> bytes:
        """What follows the body."""
        incoming = self._incoming
        assert incoming is not None
        try:
            piece, rest = incoming.take(data)
            self._relay.reserve(len(piece))
        except BadBody as error:
            self._bad_request(f"the body could not be read: {error}")
            return b""
        except BodyTooLong:
            self._answer_problem(self._too_large())
            return b""
        except Problem as problem:
            self._answer_problem(problem)
            return b""
        self._reserved_bytes += len(piece)
        if not self._body:
            self._body = piece
        elif isinstance(self._body, bytearray):
            self._body += piece
        else:
            self._body = bytearray(self._body + piece)
        if incoming.complete:
            self._incoming, self._whole = None, True
            self._dispatch()
        elif self._deadline == math.inf:
            self._until(self._limits.body_seconds_max)
        return rest

    # ---- answers of the gateway's own -------------------------------------------------------------------------------

    def _bad_request(self, text: str) -> None:
        self._whole = False
        self._answer_problem(Problem(400, "bad_request", f"This is no request: {text[:200]}", close=True))

    def _answer_problem(self, problem: Problem) -> None:
        self._keep = self._keep and not problem.close
        self._write_own(problem.status, CONTENT_TYPE, json.dumps(problem.document()).encode(), problem.headers())

    def _write_own(self, status: int, content_type: str, body: bytes, headers: dict[str, str]) -> None:
        self._keep = self._keep and self._whole and not self._relay.stopping
        without_body = self._head is not None and self._head.method == b"HEAD"
        self._transport.write(
            plain_answer(status, content_type, body, headers, close=not self._keep, without_body=without_body)
        )
        self._end_answer()

    # ---- ends -----------------------------------------------------------------------------------------------------

    def _end_answer(self) -> None:
        """The answer is written, whole. Behind a request that was not read to its end no other is looked for."""
        whole = self._whole
        keep = self._keep and whole and not self._relay.stopping
        self._end_request()
        if keep:
            self._state = _HEAD
            self._deadline = at = self._loop.time() + self._limits.idle_seconds_max
            if at < self._timer_at:
                self._until(self._limits.idle_seconds_max)
            if self._paused:
                self._stop_reading()  # no further answer is written before the client takes this one
            elif self._reading_paused or self._buffer:
                self._go_on()
            return
        self._state, self._buffer = _ENDING, b""
        if whole:
            self._until(self._limits.silence_seconds_max)
            self._transport.close()
            return
        # To close with unread bytes resets the connection, and the answer may be lost: let the client stop first.
        self._until(_LINGERING_SECONDS)
        if not self._transport.is_closing():
            self._transport.write_eof()

    def _end_request(self) -> None:
        if self._counted:
            self._relay.leave(self._reserved_bytes)
            self._counted = False
        self._head = self._incoming = None
        self._reserved_bytes = 0
        self._body = b""
        self._query = ""

    def close_if_idle(self) -> None:
        if self._state is _HEAD:
            self._end_idle()

    def _end_idle(self) -> None:
        """No request is in work; what was answered is still sent."""
        self._state, self._buffer = _ENDING, b""
        self._until(self._limits.silence_seconds_max)
        self._transport.close()

    def abort(self) -> None:
        self._transport.abort()
