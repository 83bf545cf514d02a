"""Heads of HTTP/1 messages: two judges have to take each, then it is sorted into what passes and what frames. No I/O.

One judge is a grammar of our own, over all bytes of the head; it allows less than RFC 9112: no folded lines, bare CR or
LF, control characters or odd names, and one framing header at most. The other is llhttp in its strict mode. Each
head meets an llhttp that has read nothing before, so what one message did to it cannot decide about the next, and both
have to say whether a body follows. Refused besides: any transfer coding but `chunked`, versions other than 1.0 and 1.1,
heads that are too long. An `Upgrade` is not taken up, as RFC 9110 allows: the request is served as it is.

A head that was taken has one header on each line, so lines pass as they came, and nothing else of it does.
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

_TOKEN: Final = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]++"
FIELD: Final = _TOKEN + rb":[\t\x20-\x7e\x80-\xff]*+"
_FIELDS: Final = rb"(?:" + FIELD + rb"\r\n)*+"
_LINES: Final = re.compile(_FIELDS)
_FRAMING: Final = re.compile(rb"(?:^|\n)(?:content[-_]length|transfer[-_]encoding)[^\n]*:", re.IGNORECASE)
_REQUEST: Final = re.compile(_TOKEN + rb" [\x21-\x7e]++ HTTP/1\.[01]\r\n" + _FIELDS + rb"\r\n")
_ANSWER: Final = re.compile(rb"HTTP/1\.[01] [1-9][0-9][0-9](?: [\t\x20-\x7e\x80-\xff]*+)?\r\n" + _FIELDS + rb"\r\n")

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
_BODILESS: Final = (204, 304)

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
    plain = name.replace(b"_", b"-")
    kind = _DROP if plain in _HOP_BY_HOP or plain == b"content-length" or plain.startswith(b"x-lull-") else _PASS
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


class Ends:
    """What llhttp says of one message."""

    head = message = False

    def on_headers_complete(self) -> None:
        self.head = True

    def on_message_complete(self) -> None:
        self.message = True


class Bodies(Ends):
    """And what its chunks hold."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []

    def on_body(self, body: bytes) -> None:
        self.pieces.append(body)


def _judge(data: bytes, grammar: re.Pattern[bytes], parser: Any, ends: Ends) -> bool:
    """Whether llhttp, which has read nothing before, would switch protocols here. Raises BadHead."""
    if grammar.fullmatch(data) is None:
        raise BadHead(_what_is_odd(data))
    upgrades = False
    try:
        parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        upgrades = upgrade.args == (len(data),)
    except httptools.HttpParserError as error:
        raise BadHead(str(error) or type(error).__name__) from None
    if not ends.head:
        raise BadHead("its head does not end where it should")
    return upgrades


def _what_is_odd(data: bytes) -> str:
    start, _, rest = data.partition(b"\r\n")
    taken = _LINES.match(rest)
    stop = 0 if taken is None else taken.end()
    if rest[stop:] == b"\r\n":
        return f"{start[:100]!r} is no first line of HTTP/1.1 or HTTP/1.0"
    return f"{rest[stop : stop + 100].partition(END[:2])[0]!r} is no header: name, colon, value, in one line"


def _length_in(value: bytes) -> int:
    """Raises BadHead."""
    if not value.isdigit() or len(value) > _LENGTH_DIGITS_MAX:
        raise BadHead(f"Content-Length: {value[:100]!r} is not a number of at most {_LENGTH_DIGITS_MAX} digits")
    return int(value)


class RequestHead:
    """What the gateway needs to know of a request, and the header lines that pass: no hop-by-hop headers, no length,
    nothing that is ours to say."""

    __slots__ = (
        "_lengths",
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
        """``data``: from the first byte of a request to the empty line. Raises BadHead."""
        if len(data) > REQUEST_HEAD_BYTES_MAX:
            raise BadHead(f"the head is longer than {REQUEST_HEAD_BYTES_MAX} bytes")
        ends = Ends()
        upgrades = _judge(data, _REQUEST, httptools.HttpRequestParser(ends), ends)
        lines = data[: -len(END)].split(b"\r\n")
        if len(lines) > HEADERS_MAX + 1:
            raise BadHead(f"a head has at most {HEADERS_MAX} headers")
        self.method, self.target, version = lines[0].split(b" ")
        if self.method == b"CONNECT":
            raise BadHead("this is no tunnel")
        self.is_http11 = self.keep_alive = version == b"HTTP/1.1"
        self.content_length = 0
        self._lengths = 0
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
        if self.chunked + self._lengths > 1:
            raise BadHead("the length of its body is given more than once")
        if not upgrades and ends.message is self.has_body:
            raise BadHead("whether a body follows is not clear")
        # What leaves here is looked at once more, as it will leave: it says nothing of a length, which is ours to say.
        if _LINES.fullmatch(self.joined) is None or _FRAMING.search(self.joined) is not None:
            raise BadHead("what would be passed on is no head")

    @property
    def has_body(self) -> bool:
        return self.chunked or self.content_length > 0

    @property
    def is_plain(self) -> bool:
        """Nothing but its length has to be minded."""
        return self.keep_alive and not (self.chunked or self.expect or self.content_encoding)

    def _look_at(self, lower: bytes, value: bytes) -> None:
        if lower == b"content-length":
            self.content_length = _length_in(value)
            self._lengths += 1
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


class Memo(Generic[H]):
    """A head that came before: one that differs from it in its Content-Length alone need not be read again.

    Clients and engines say the same heads again and again. What is skipped was judged already, byte by byte: all that
    may differ is the run of digits between two line ends that are compared, in the one header that frames the message.
    No parser keeps a state from one message to the next, so none misses what is skipped.
    """

    __slots__ = ("_prefix", "_suffix", "head")

    def __init__(self, raw: bytes, head: H) -> None:
        """``raw``: a head that was taken, with one Content-Length."""
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
        "_framings",
        "chunked",
        "content_encoding",
        "content_length",
        "content_type",
        "framed",
        "has_body",
        "keep_alive",
        "lines",
        "reason",
        "status",
        "verbatim",
    )

    def __init__(self, data: bytes, parser: Any = None, ends: Ends | None = None) -> None:
        """``data``: from the first byte of an answer to the empty line. Raises BadHead.

        ``parser``: an llhttp that has read nothing, and what it calls, if it shall read the body too.
        """
        if parser is None or ends is None:
            ends = Ends()
            parser = httptools.HttpResponseParser(ends)
        if _judge(data, _ANSWER, parser, ends):
            raise BadHead("it switches protocols, which nobody asked for")
        lines = data[: -len(END)].split(b"\r\n")
        if len(lines) > HEADERS_MAX + 1:
            raise BadHead(f"a head has at most {HEADERS_MAX} headers")
        start = lines[0]
        self.status = int(start[9:12])
        self.reason = start[13:]
        self.chunked = False
        self.content_length: int | None = None
        self.content_type = b""
        self.content_encoding: bytes | None = None
        self._framings = 0
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
        is_http11 = start.startswith(b"HTTP/1.1 ")
        self.keep_alive = is_http11
        if connection:
            named = _named_by_connection(connection)
            self.keep_alive = is_http11 and b"close" not in named
            self.lines = _without(self.lines, named)
        # Whether a client that speaks HTTP/1.1 may have the head as it came: nothing of it was dropped.
        self.verbatim = len(self.lines) + self._framings == len(lines) and is_http11
        self._frame(ends)

    def _frame(self, ends: Ends) -> None:
        """Where its end is. Raises BadHead."""
        if self._framings > 1:
            raise BadHead("the length of its body is given more than once")
        if self.status in _BODILESS or self.status < 200:
            self.verbatim = self.verbatim and not self._framings
            self.chunked, self.content_length = False, None
            self.framed, self.has_body = True, False
        else:
            # Whether its end is known by anything but the end of the connection.
            self.framed = self._framings == 1
            self.has_body = self.content_length != 0
        if ends.message is self.has_body:
            raise BadHead("whether a body follows is not clear")

    def _look_at(self, lower: bytes, line: bytes, value: bytes, connection: list[bytes]) -> None:
        if lower == b"content-length":
            self.content_length = _length_in(value)
            self._framings += 1
        elif lower == b"content-type":
            self.content_type = value.partition(b";")[0].strip().lower()
            self.lines.append(line)
        elif lower == b"connection":
            connection.append(value)
        elif lower == b"content-encoding":
            self.content_encoding = value
            self.lines.append(line)
        elif value.lower() != b"chunked":
            raise BadHead(f"Transfer-Encoding: {value[:100]!r} is not known")
        else:
            self.chunked = True
            self._framings += 1
