"""Keys, tokens and secrets that stand in files of their own: read again at every use, so that they can be rotated.

A file may be empty or half written just then. That is told as such, and never sent.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

_BYTES_MAX: Final = 64 << 10


class KeyUnusable(Exception):
    """The text says why, and names neither the file nor anything of the key."""


def read_key(path: Path) -> bytes:
    """The bytes of a key that only signs, without the white space around them. Raises KeyUnusable."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a FIFO must not block
    except OSError as error:
        raise KeyUnusable(f"cannot be read: {error.strerror}") from error
    try:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise KeyUnusable("is no file")
        content = os.read(fd, _BYTES_MAX + 1)
    except OSError as error:
        raise KeyUnusable(f"cannot be read: {error.strerror}") from error
    finally:
        os.close(fd)
    if len(content) > _BYTES_MAX:
        raise KeyUnusable(f"is larger than {_BYTES_MAX} bytes")
    key = content.strip()
    if not key:
        raise KeyUnusable("is empty")
    return key


def read_header_key(path: Path) -> str:
    """A key that is sent in a header, which takes one line of printable ASCII. Raises KeyUnusable."""
    key = read_key(path).decode("latin-1")
    if not (key.isascii() and key.isprintable()):
        raise KeyUnusable("holds more than one line, or what is not printable ASCII")
    return key
