"""The CopyLane of the host device: copies at once, in the calling thread."""

from __future__ import annotations

from .driver import Driver
from .errors import DriverError


class HostLane:
    def __init__(self, driver: Driver) -> None:
        self._driver = driver
        self._closed = False

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._require_open("copy")
        self._driver.copy(destination, source, nbytes)

    def set(self, address: int, value: int, nbytes: int) -> None:
        self._require_open("set")
        self._driver.set(address, value, nbytes)

    def synchronize(self) -> None:
        self._require_open("synchronize")

    def close(self) -> None:
        self._closed = True

    def _require_open(self, verb: str) -> None:
        if self._closed:
            raise DriverError(verb, "the lane is closed; open another")
