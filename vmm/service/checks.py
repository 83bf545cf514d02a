"""What an engine asks for, looked at before anything is sent: what is wrong here costs no lock and no memory."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from typing import Any, Protocol

from ..blocks import Allocation
from .errors import LayoutInvalid
from .protocol import ALLOCATION_BYTES_MAX, KEY_PATTERN, POOL_PATTERN, VALUE_BYTES_MAX, WAIT_SECONDS_MAX
from .state import Lock


class _Piece(Protocol):
    @property
    def nbytes(self) -> int: ...

    @property
    def value(self) -> Any: ...


def require_use(
    name: object,
    lock: object,
    locks: Collection[Lock],
    wait_seconds: object,
    oom_wait_seconds: object,
    park_seconds_max: object,
) -> None:
    """What a ServicePool is made with."""
    _require_name(name)
    if lock not in locks:
        raise ValueError(f"lock is {lock!r}; use one of {', '.join(f'Lock.{one.name}' for one in locks)} here")
    _require_seconds("wait_seconds", wait_seconds)
    _require_seconds("oom_wait_seconds", oom_wait_seconds)
    _require_seconds("park_seconds_max", park_seconds_max)
    if not park_seconds_max:
        raise ValueError("park_seconds_max is 0; no park or wake would end in time")


def _require_name(name: object) -> None:
    if not (isinstance(name, str) and POOL_PATTERN.fullmatch(name)):
        raise ValueError(f"name is {name!r}; use 1 to 128 letters, digits and . _ : @ / -, a letter or a digit first")


def _require_seconds(field: str, seconds: object) -> None:
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 <= seconds <= WAIT_SECONDS_MAX:
        raise ValueError(f"{field} is {seconds!r}; it must be from 0 to {WAIT_SECONDS_MAX:.0f} seconds")


def require_nbytes(field: str, nbytes: object) -> None:
    if not _is_count(nbytes, 1):
        raise ValueError(f"{field} is {nbytes!r}; a whole number from 1 to {ALLOCATION_BYTES_MAX} is needed")


def require_pieces(pieces: Mapping[str, _Piece], slab_bytes: int) -> None:
    """All of them, before the first byte is asked for."""
    require_nbytes("slab_bytes", slab_bytes)
    for key, piece in pieces.items():
        require_entry(key, piece.nbytes, piece.value)


def require_entry(key: object, nbytes: object, value: object) -> None:
    if not (isinstance(key, str) and KEY_PATTERN.fullmatch(key)):
        raise LayoutInvalid(f"entry {_shown(key)}: its name must be 1 to 512 printable ASCII characters without spaces")
    if not _is_count(nbytes, 1):
        raise LayoutInvalid(
            f"entry {key}: nbytes is {nbytes!r}; a whole number from 1 to {ALLOCATION_BYTES_MAX} is needed"
        )
    try:
        value_bytes = len(json.dumps(value, allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise LayoutInvalid(f"entry {key}: its value is no JSON: {str(error)[:200]}") from None
    if value_bytes > VALUE_BYTES_MAX:
        raise LayoutInvalid(
            f"entry {key}: its value has {value_bytes} bytes as JSON; at most {VALUE_BYTES_MAX} are allowed, so keep "
            "larger things in bytes of the pool"
        )


def require_place(key: str, allocation: Allocation, offset: int, nbytes: int) -> None:
    """After `require_entry`."""
    if not _is_count(offset, 0) or offset + nbytes > allocation.nbytes:
        raise LayoutInvalid(
            f"entry {key}: {nbytes} bytes at offset {offset!r} are not within the {allocation.nbytes} bytes of its "
            "allocation"
        )


def _is_count(number: object, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and least <= number <= ALLOCATION_BYTES_MAX


def _shown(key: object) -> str:
    return repr(key)[:80]
