"""Heads of HTTP/1 messages: taken by llhttp in its strict mode, then sorted into what passes and what frames. No I/O.

llhttp refuses what request smuggling is made of: two lengths, a length beside an encoding, folded lines, bare CR or LF,
control characters, odd names and numbers. Refused here besides: any transfer coding but `chunked`, versions other than
1.0 and 1.1, heads that are too long. An `Upgrade` is not taken up, as RFC 9110 allows: the request is served as it is.

A head that llhttp took has one header on each line, so lines pass as they came.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Final, Generic, TypeVar

import httptools

REQUEST_HEAD_BYTES_MAX: Final = 32 * 1024
ANSWER_HEAD_BYTES_MAX: Final = 64 * 1024
HEADERS_MAX: Final = 128
END: Final = b"\r\n\r\n"

# RFC 9110 section 7.6.1, with what the two sides of a proxy negotiate each for itself.
_HOP_BY_HOP: Final = frozenset(
    {
        b"connection",
        b"expect",
        b"host",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
        b"http2-settings",
    }
)
_UPGRADE: Final = re.compile(rb"\r\nupgrade[ \t]*:[^\r\n]*", re.IGNORECASE)
# What to do with a header.
_PASS, _DROP, _LOOK = range(3)
# Clients and engines say the same lines again and again: short ones without secrets are known by the whole line.
_LINES_MAX: Final = 1024
_LINE_BYTES_MAX: Final = 80
_SECRET: Final = re.compile(rb"auth|cookie|key|token|secret|session", re.IGNORECASE)
_request_lines: dict[bytes, int] = {}
_answer_lines: dict[bytes, int] = {}


_LENGTH: Final = b"\r\ncontent-length: "
_LENGTH_DIGITS_MAX: Final = 15

H = TypeVar("H")


class BadHead(ValueError):
    """Not a message that is understood; the connection is of no further use."""


def _name_of(line: bytes) -> bytes:
    return line[: line.index(b":")].lower()


def _remember(lines: dict[bytes, int], line: bytes, kind: int) -> None:
    if len(line) <= _LINE_BYTES_MAX and kind != _LOOK and not _SECRET.search(line):
        if len(lines) >= _LINES_MAX:
            lines.clear()
        lines[line] = kind


def _kind_in_request(line: bytes) -> int:
    """``x-lull-`` marks canaries and other words of the agent; some servers read ``_`` as ``-``."""
    name = _name_of(line)
    if name in (b"connection", b"transfer-encoding", b"content-length", b"expect", b"content-encoding"):
        return _LOOK
    kind = _DROP if name in _HOP_BY_HOP or name.replace(b"_", b"-").startswith(b"x-lull-") else _PASS
    _remember(_request_lines, line, kind)
    return kind


def _kind_in_answer(line: bytes) -> int:
    name = _name_of(line)
    if name in (b"connection", b"transfer-encoding", b"content-length", b"content-type", b"content-encoding"):
        return _LOOK
    kind = _DROP if name in _HOP_BY_HOP else _PASS
    _remember(_answer_lines, line, kind)
    return kind


def _named_by_connection(values: Iterable[bytes]) -> set[bytes]:
    return {name.strip().lower() for value in values for name in value.split(b",")}


def _without(lines: list[bytes], names: set[bytes]) -> list[bytes]:
    return [line for line in lines if _name_of(line) not in names]


class RequestHead:
    """What the gateway needs to know of a request, and the header lines that pass: no hop-by-hop headers, no length,
    nothing that is ours to say."""

    __slots__ = (
        "chunked",
        "connection",
        "content_encoding",
        "content_length",
        "expect",
        "is_http11",
        "joined",
        "keep_alive",
        "lines",
        "method",
        "target",
    )

    def __init__(self, data: bytes) -> None:
        """``data``: a whole head that llhttp took. Raises BadHead."""
        lines = data[: -len(END)].split(b"\r\n")
        if len(lines) > HEADERS_MAX + 1:
            raise BadHead(f"a head has at most {HEADERS_MAX} headers")
        words = lines[0].split(b" ")
        if len(words) != 3 or words[2] not in (b"HTTP/1.1", b"HTTP/1.0"):
            raise BadHead("this is not HTTP/1.1 or HTTP/1.0")
        self.method, self.target, version = words
        self.is_http11 = self.keep_alive = version == b"HTTP/1.1"
        self.content_length = 0
        self.chunked = False
        self.expect: bytes | None = None
        self.content_encoding: bytes | None = None
        self.connection: list[bytes] = []
        self.lines = passed = list[bytes]()
        known = _request_lines.get
        del lines[0]
        for line in lines:
            kind = known(line)
            if kind is None:
                kind = _kind_in_request(line)
            if not kind:
                passed.append(line)
            elif kind == _LOOK:
                name, _, value = line.partition(b":")
                self._look_at(name.lower(), value.strip())
        if self.connection:
            named = _named_by_connection(self.connection)
            self.keep_alive = self.is_http11 and b"close" not in named
            self.lines = _without(passed, named)
        self.joined = b"".join([line + b"\r\n" for line in self.lines])
        if self.chunked and not self.is_http11:
            raise BadHead("Transfer-Encoding in HTTP/1.0")

    @property
    def is_plain(self) -> bool:
        """Nothing but its length has to be minded."""
        return self.keep_alive and not (self.chunked or self.expect or self.content_encoding)

    def _look_at(self, lower: bytes, value: bytes) -> None:
        if lower == b"content-length":
            self.content_length = int(value)  # llhttp took it: digits, once
        elif lower == b"connection":
            self.connection.append(value)
        elif lower == b"expect":
            self.expect = value.lower()
        elif lower == b"content-encoding":
            self.content_encoding = value.lower()
            self.lines.append(b"Content-Encoding: " + value)
        elif value.lower() != b"chunked":
            raise BadHead("Transfer-Encoding: only chunked is known")
        elif self.chunked:
            raise BadHead("Transfer-Encoding is given twice")
        else:
            self.chunked = True


class RequestReader:
    """Takes the requests of one client's connection, one after the other: a head, then a body until ``complete``."""

    __slots__ = ("_chunks", "_head", "_missing_bytes", "_parser", "_tail", "complete")

    def __init__(self) -> None:
        self.complete = False
        self._missing_bytes = 0
        self._head = b""
        self._tail = b""
        self._chunks: _Chunks | None = None
        # Without callbacks: it says by an error what is wrong, and the rest is read here.
        self._parser: Any = httptools.HttpRequestParser(None)

    def head(self, data: bytes) -> RequestHead:
        """``data``: one head with the empty line that ends it. Raises BadHead."""
        self.complete = False
        if len(data) > REQUEST_HEAD_BYTES_MAX:
            raise BadHead(f"the head is longer than {REQUEST_HEAD_BYTES_MAX} bytes")
        if b"pgrade" in data or b"PGRADE" in data:
            data = _UPGRADE.sub(b"", data)
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            raise BadHead(str(error)) from None
        head = RequestHead(data)
        if head.chunked:
            self._chunks, self._tail = _Chunks(), b""
            self._feed_chunks(data)
        else:
            self._missing_bytes = head.content_length
            self.complete = not head.content_length
        return head

    def plain_body(self, data: bytes) -> tuple[bytes, bytes]:
        """Of a body with a length: what belongs to it, and what follows it. Raises BadHead."""
        missing = self._missing_bytes
        rest = b""
        if len(data) > missing:
            data, rest = data[:missing], data[missing:]
        self._missing_bytes = missing = missing - len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadHead(str(error)) from None
        self.complete = not missing
        return data, rest

    def chunked_body(self, data: bytes) -> tuple[bytes, bytes]:
        """Of a chunked body: what it holds, and what follows it. Trailers are dropped. Raises BadHead."""
        assert self._chunks is not None
        rest = data
        for piece in at_ends(self._tail, data):
            self._feed_chunks(piece)
            rest = rest[len(piece) :]
            if self._chunks.complete:
                break
        self._tail = (self._tail + data)[-3:]
        pieces, self._chunks.pieces = self._chunks.pieces, []
        if self._chunks.complete:
            self.complete, self._chunks = True, None
            self._parser = httptools.HttpRequestParser(None)  # the other one read this body
        return b"".join(pieces), rest

    def _feed_chunks(self, data: bytes) -> None:
        assert self._chunks is not None
        try:
            self._chunks.parser.feed_data(data)
        except httptools.HttpParserError as error:
            raise BadHead(str(error)) from None


class _Chunks:
    """What llhttp finds in a chunked request."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.complete = False
        self.parser: Any = httptools.HttpRequestParser(self)

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)

    def on_message_complete(self) -> None:
        self.complete = True


class Memo(Generic[H]):
    """A head that came before: one that differs from it in its Content-Length alone need not be read again.

    Clients and engines say the same heads again and again. What is skipped was judged already, byte by byte.
    """

    __slots__ = ("_prefix", "_suffix", "head")

    def __init__(self, raw: bytes, head: H) -> None:
        """``raw``: with one Content-Length, as llhttp took it."""
        at = raw.lower().index(_LENGTH) + len(_LENGTH)
        self._prefix = raw[:at]
        self._suffix = raw[raw.index(b"\r\n", at) :]
        self.head = head

    def match(self, data: bytes) -> tuple[int, int] | None:
        """The Content-Length and where the head ends, if ``data`` begins with such a head."""
        if not data.startswith(self._prefix):
            return None
        at = len(self._prefix)
        stop = data.find(b"\r", at, at + _LENGTH_DIGITS_MAX + 1)
        if not data.startswith(self._suffix, stop):
            return None
        digits = data[at:stop]
        return (int(digits), stop + len(self._suffix)) if digits.isdigit() else None


def memo_of(raw: bytes, head: H) -> Memo[H] | None:
    """None for a head with no length that can be exchanged for another."""
    return Memo(raw, head) if raw.lower().count(_LENGTH) == 1 else None


def at_ends(tail: bytes, data: bytes) -> Iterable[bytes]:
    """``data`` cut wherever a chunked message may end, which is behind an empty line.

    ``tail``: up to 3 bytes that came before it.
    """
    joined, fed, position = tail + data, len(tail), 0
    while (found := joined.find(END, position)) >= 0:
        stop = found + len(END)
        if stop > fed:
            yield joined[fed:stop]
            fed = stop
        position = found + 1
    if fed < len(joined):
        yield joined[fed:]


class AnswerHead:
    """What the gateway needs to know of an engine's answer, and the header lines that pass, without framing."""

    __slots__ = (
        "chunked",
        "content_encoding",
        "content_length",
        "content_type",
        "framed",
        "lines",
        "reason",
        "status",
        "verbatim",
    )

    def __init__(self, data: bytes, status: int) -> None:
        """``data``: a whole head that llhttp took. Raises BadHead."""
        lines = data[: -len(END)].split(b"\r\n")
        if len(lines) > HEADERS_MAX + 1:
            raise BadHead(f"a head has at most {HEADERS_MAX} headers")
        start = lines[0]
        self.status = status
        self.reason = start[13:]
        self.chunked = False
        self.content_length: int | None = None
        self.content_type = b""
        self.content_encoding: bytes | None = None
        self.lines = passed = list[bytes]()
        connection: list[bytes] = []
        known = _answer_lines.get
        del lines[0]
        for line in lines:
            kind = known(line)
            if kind is None:
                kind = _kind_in_answer(line)
            if not kind:
                passed.append(line)
            elif kind == _LOOK:
                name, _, value = line.partition(b":")
                self._look_at(name.lower(), line, value.strip(), connection)
        if connection:
            self.lines = _without(self.lines, _named_by_connection(connection))
        # Whether a client that speaks HTTP/1.1 may have the head as it came: nothing of it was dropped.
        framing = self.chunked + (self.content_length is not None)
        self.verbatim = len(self.lines) + framing == len(lines) and start.startswith(b"HTTP/1.1 ")
        # Whether its end is known by anything but the end of the connection.
        self.framed = bool(framing) or status in (204, 304)

    def _look_at(self, lower: bytes, line: bytes, value: bytes, connection: list[bytes]) -> None:
        if lower == b"content-length":
            self.content_length = int(value)
        elif lower == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower()
            self.lines.append(line)
        elif lower == b"connection":
            connection.append(value)
        elif lower == b"content-encoding":
            self.content_encoding = value
            self.lines.append(line)
        elif value.lower() != b"chunked" or self.chunked:
            raise BadHead(f"Transfer-Encoding: {value[:100]!r} is not known")
        else:
            self.chunked = True
