"""Address ranges at a wished address: what another process has built on may hold pointers into itself."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from .driver import Driver


@runtime_checkable
class PlacingDriver(Protocol):
    def reserve_at(self, address: int, nbytes: int) -> bool:
        """As `Driver.reserve`, at this address; False, and nothing has changed, where something is there already."""
        ...


def reserve(driver: Driver, nbytes: int, wish: int | None) -> int:
    """At ``wish`` where that is free and the driver can, else anywhere."""
    if wish and isinstance(driver, PlacingDriver) and driver.reserve_at(wish, nbytes):
        return wish
    return driver.reserve(nbytes)
