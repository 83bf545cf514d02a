"""Which runtime a pool belongs to: two of them would let work in while the other has the memory away."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from typing import Final, Protocol

from .pool_like import PoolLike


class Owner(Protocol):
    @property
    def in_flight(self) -> int:
        """Steps that work on the memory now."""
        ...


_lock: Final = threading.Lock()  # guards the table
_owners: Final[weakref.WeakKeyDictionary[PoolLike, weakref.ref[Owner]]] = weakref.WeakKeyDictionary()


def claim(pools: Sequence[PoolLike], owner: Owner) -> None:
    """All of them or, with a ValueError, none. A pool is free again once its owner is no more."""
    with _lock:
        for position, pool in enumerate(pools):
            if any(pool is other for other in pools[:position]):
                raise ValueError(f"pools names pool {position} twice; name each pool once")
            if (known := _owners.get(pool)) is not None and known() is not None:
                raise ValueError(f"pool {position} belongs to another runtime; park and wake it by that one")
        for pool in pools:
            _owners[pool] = weakref.ref(owner)


def steps_in_flight(pool: PoolLike) -> int:
    """0 for a pool without a runtime."""
    with _lock:
        known = _owners.get(pool)
        owner = None if known is None else known()
    return 0 if owner is None else owner.in_flight
