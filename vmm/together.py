"""Drivers whose bookkeeping costs time of its own do it once for many handles: the host device writes its ledger so."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol, runtime_checkable

from .driver import Driver


@runtime_checkable
class TogetherDriver(Protocol):
    def together(self, create_bytes: Sequence[int] = ()) -> AbstractContextManager[None]:
        """Inside, handles of these sizes are created, others are released, and both are booked at once.

        OutOfDeviceMemory where they do not all fit. Nothing else of the driver is different inside.
        """
        ...


def together(driver: Driver, create_bytes: Sequence[int] = ()) -> AbstractContextManager[None]:
    """No difference for a driver that books nothing."""
    return driver.together(create_bytes) if isinstance(driver, TogetherDriver) else nullcontext()
