"""Bodies of requests: where each ends is decided here and nowhere else, byte by byte, however they are cut. No I/O."""

from __future__ import annotations

import re
from typing import Final

from .heads import FIELD

# Framing may outweigh a chunked body, but not without end.
_FRAMING_BYTES_MAX: Final = 64 * 1024
_LINE_BYTES_MAX: Final = 8 * 1024
_LINE_END: Final = b"\r\n"
_SIZE: Final = re.compile(rb"([0-9A-Fa-f]{1,8})(?:;[\t\x20-\x7e\x80-\xff]*)?")
_TRAILER: Final = re.compile(FIELD)


class BadBody(ValueError):
    """Not a body that is understood; the connection is of no further use."""


class BodyTooLong(Exception):
    """Longer than it may be."""


class SizedBody:
    """A body with a Content-Length."""

    __slots__ = ("_missing_bytes", "complete")

    def __init__(self, length_bytes: int) -> None:
        self._missing_bytes = length_bytes
        self.complete = not length_bytes

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """What belongs to it, and what follows it."""
        missing = self._missing_bytes
        rest = b""
        if len(data) > missing:
            data, rest = data[:missing], data[missing:]
        self._missing_bytes = missing = missing - len(data)
        self.complete = not missing
        return data, rest


class ChunkedBody:
    """A chunked body. Extensions and trailers are dropped."""

    __slots__ = ("_body_bytes", "_bytes_max", "_framing_bytes", "_in_trailers", "_left_bytes", "_partial", "complete")

    def __init__(self, bytes_max: int) -> None:
        """``bytes_max``: of what the chunks hold."""
        self.complete = False
        self._bytes_max = bytes_max
        self._body_bytes = self._framing_bytes = 0
        self._left_bytes: int | None = None  # of the chunk in work; None between chunks
        self._in_trailers = False
        self._partial = b""  # a line, or the end of a chunk, that is not whole yet

    def take(self, data: bytes) -> tuple[bytes, bytes]:
        """What it holds, and what follows it. Raises BadBody and BodyTooLong."""
        if self._partial:
            data, self._partial = self._partial + data, b""
        pieces: list[bytes] = []
        at = 0
        while at < len(data) and not self.complete:
            left = self._left_bytes
            if left:
                piece = data[at : at + left]
                pieces.append(piece)
                self._left_bytes = left - len(piece)
                at += len(piece)
                continue
            stop = self._line_stop(data, at, limit=0 if left == 0 else _LINE_BYTES_MAX)
            if stop < 0:
                self._partial = data[at:]
                return b"".join(pieces), b""
            if left == 0:
                self._left_bytes = None
            else:
                self._take_line(data[at:stop])
            self._count(stop - at + len(_LINE_END))
            at = stop + len(_LINE_END)
        return b"".join(pieces), data[at:]

    @staticmethod
    def _line_stop(data: bytes, at: int, *, limit: int) -> int:
        """Where the line that begins at ``at`` stops; -1 if its end is not here yet.

        Raises BadBody and BodyTooLong.
        """
        stop = data.find(_LINE_END, at, at + limit + len(_LINE_END))
        if stop < 0:
            # All of what is here may be the beginning of such a line, or it never will be one.
            line = data[at : at + limit + len(_LINE_END)].removesuffix(b"\r")
            if b"\n" in line or b"\r" in line or (line and not limit):
                raise BadBody("a chunk or a line of its framing does not end where it should")
            if len(line) > limit:
                raise BodyTooLong
        return stop

    def _take_line(self, line: bytes) -> None:
        if self._in_trailers:
            if not line:
                self.complete = True
            elif _TRAILER.fullmatch(line) is None:
                raise BadBody("a trailer is no header")
            return
        found = _SIZE.fullmatch(line)
        if found is None:
            raise BadBody(f"{line[:100]!r} is no size of a chunk")
        size = int(found[1], 16)
        self._body_bytes += size
        if self._body_bytes > self._bytes_max:
            raise BodyTooLong
        if size:
            self._left_bytes = size
        else:
            self._in_trailers = True

    def _count(self, framing_bytes: int) -> None:
        self._framing_bytes += framing_bytes
        if self._framing_bytes > self._bytes_max + _FRAMING_BYTES_MAX:
            raise BodyTooLong
