"""Facts of a node that have to outlive its journal: who the node is, and what is known of each engine.

Small JSON files, replaced whole. A journal that cannot be read costs the record of loans, never the golden answers and
the footprints without which an engine could not be brought back safely.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, cast

import structlog
from pydantic import AfterValidator, Field, Strict, TypeAdapter, ValidationError

from .disk_reserve import FULL, release_above
from .protocol.wire import ProcessIdentity

log = structlog.get_logger(__name__)

_DEPTH_MAX: Final = 32  # what is nested deeper was not written here, and could not be written again
_ID_CHARS_MAX: Final = 100


def _encodable(text: str) -> str:
    text.encode()  # half of a surrogate pair cannot be sent or kept
    return text


def _identity(value: dict[str, Any]) -> dict[str, Any]:
    ProcessIdentity.model_validate(value)
    return value


# Of what kind the values are that are read again: see `fitting`.
Text = Annotated[str, AfterValidator(_encodable)]
Bytes = Annotated[int, Strict(), Field(ge=0, lt=2**63)]
Count = Annotated[int, Strict(), Field(ge=0, le=2**31)]
Seconds = Annotated[float, Strict(), Field(allow_inf_nan=False)]
ProcessRecord = Annotated[dict[str, Any], AfterValidator(_identity)]


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
    except (OSError, ValueError, RecursionError):
        return {}
    return cast("dict[str, Any]", value) if isinstance(value, dict) and not _is_deep(value) else {}


def _is_deep(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(_DEPTH_MAX):
        level = [one for each in level for one in _inner(each)]
        if not level:
            return False
    return True


def _inner(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return cast("dict[str, Any]", value).values()
    return cast("Iterable[Any]", value) if isinstance(value, list) else ()


def fitting(path: Path, shapes: Mapping[str, TypeAdapter[Any]], *, whole: bool = False) -> dict[str, Any]:
    """What `read_json` finds, less the values that are not of the kind that is written under their key: they are as
    unknown as if the file were not there. What has no shape is of another version, and nobody here reads it.

    ``whole``: the values belong together, so all of them are as good as the worst one.
    """
    kept: dict[str, Any] = {}
    for key, value in read_json(path).items():
        try:
            if key in shapes:
                shapes[key].validate_python(value)
        except ValidationError as error:
            why = error.errors(include_url=False, include_input=False)[0]
            where = ".".join(str(part) for part in (key, *why["loc"]))[:200]
            log.error("a fact cannot be read and is forgotten", file=str(path), fact=where, error=why["msg"][:200])
            if whole:
                return {}
        else:
            kept[key] = value
    return kept


class IdKeeper(Protocol):
    """The journal: its open loans name engines by their ids, so it has to know them whatever becomes of the file."""

    def meta(self, key: str) -> str | None: ...
    def set_meta(self, key: str, value: str) -> None: ...


class NodeFile:
    """The ids of the node and of its engines, given once and kept: here, and in the journal beside its loans.

    Either one may be lost; both of them only make a new node.
    """

    def __init__(self, path: Path, new_id: Callable[[], str], journal: IdKeeper) -> None:
        self._path = path
        self._new_id = new_id
        self._journal = journal
        self._value = read_json(path)

    def id_of(self, what: str) -> str:
        """``what``: ``node``, ``machine`` or ``engine:NAME``. Raises OSError: an id that is not kept is none."""
        key = f"id_of_{what}"
        known = self._journal.meta(key)
        if not _is_id(self._value.get(what)):
            value = {**self._value, what: known or self._new_id()}
            replace_json(self._path, value)
            self._value = value
        found = str(self._value[what])
        if known != found:
            self._journal.set_meta(key, found)
        return found


def _is_id(value: object) -> bool:
    return isinstance(value, str) and 0 < len(value) <= _ID_CHARS_MAX and value.isascii() and value.isprintable()
