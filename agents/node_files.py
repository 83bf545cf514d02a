"""Facts of a node that have to outlive its journal: who the node is, and what is known of each engine.

Small JSON files, replaced whole. A journal that cannot be read costs the record of loans, never the golden answers and
the footprints without which an engine could not be brought back safely.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from .disk_reserve import FULL, release_above


def replace_json(path: Path, value: dict[str, Any], *, flush: bool = True) -> None:
    """Mode 0600; whoever reads it finds the old content or the new one, and with ``flush`` also after a power cut.

    On a full disk it takes from the reserve. Raises OSError: then the old content is there and nothing else is left.
    """
    data = json.dumps(value).encode()
    try:
        _replace(path, data, flush)
    except OSError as error:
        if error.errno not in FULL or not release_above(path):
            raise
        _replace(path, data, flush)


def _replace(path: Path, data: bytes, flush: bool) -> None:
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        try:
            _write_all(fd, data)
            if flush:
                os.fsync(fd)
        finally:
            os.close(fd)
        temporary.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise


def _write_all(fd: int, data: bytes) -> None:
    """A disk that fills up takes a part of a write first, without an error."""
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def read_json(path: Path) -> dict[str, Any]:
    """Empty if there is no such file or if it holds no object: both mean that nothing is known."""
    try:
        value: Any = json.loads(path.read_bytes())
    except (OSError, ValueError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}


class NodeFile:
    """The ids of the node and of its engines, given once and kept."""

    def __init__(self, path: Path, new_id: Callable[[], str]) -> None:
        self._path = path
        self._new_id = new_id
        self._value = read_json(path)

    def id_of(self, what: str) -> str:
        """``what``: ``node``, ``machine`` or ``engine:NAME``. Raises OSError: an id that is not kept is none."""
        if what not in self._value:
            value = {**self._value, what: self._new_id()}
            replace_json(self._path, value)
            self._value = value
        return str(self._value[what])
