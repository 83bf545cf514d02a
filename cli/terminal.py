"""Text that others wrote, made safe for the reader's terminal. Pure."""

from __future__ import annotations

import codecs
import re
from typing import Final

# CSI and OSC sequences, other escapes, and the control characters that move a terminal's cursor.
_ESCAPES: Final = re.compile(
    r"\x1b\[[0-?]*[ -/]*[@-~]?|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)?|\x1b[@-_]?|[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]"
)
_WHOLE_SEQUENCE: Final = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[^\[\]])", re.DOTALL)
_SEQUENCE_CHARACTERS_MAX: Final = 256


def strip_escapes(text: str) -> str:
    """Without what could drive a terminal: a job's log is not trusted with the reader's screen."""
    return _ESCAPES.sub("", text)


class EscapeFilter:
    """The same for a stream of bytes: a character or a sequence that a chunk cuts in two waits for the next chunk."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""

    def feed(self, chunk: bytes) -> str:
        text = self._held + self._decoder.decode(chunk)
        start = text.rfind("\x1b", max(0, len(text) - _SEQUENCE_CHARACTERS_MAX))
        cut = start if start >= 0 and not _WHOLE_SEQUENCE.match(text, start) else len(text)
        self._held = text[cut:]
        return strip_escapes(text[:cut])

    def finish(self) -> str:
        text, self._held = self._held + self._decoder.decode(b"", final=True), ""
        return strip_escapes(text)
