"""Which pools of which service a driver of this process has: a second use of one would be in the way of the first."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from weakref import WeakKeyDictionary

from ..driver import Driver
from .errors import ServiceRefused

_held: WeakKeyDictionary[Driver, set[tuple[str, str]]] = WeakKeyDictionary()
_guard = threading.Lock()


def claim(driver: Driver, socket_path: Path, name: str) -> None:
    """Until `give_up`. Raises ServiceRefused."""
    with _guard:
        claims = _held.setdefault(driver, set())
        key = (os.path.realpath(socket_path), name)
        if key in claims:
            raise ServiceRefused(
                f"pool {name} of memory service {socket_path} is used with this driver already; use that ServicePool "
                "for both, or close it first"
            )
        claims.add(key)


def give_up(driver: Driver, socket_path: Path, name: str) -> None:
    """Can be asked again."""
    with _guard:
        _held.get(driver, set()).discard((os.path.realpath(socket_path), name))
