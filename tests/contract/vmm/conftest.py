"""A driver joins the contract by a line in DRIVERS."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm.driver import Driver
from tests.memory import small_driver

DRIVERS: dict[str, Callable[[Path], Driver]] = {
    "host-discrete": lambda path: small_driver(path / "device", granules=32),
    "host-unified": lambda path: small_driver(path / "device", granules=32, kind="unified"),
}


@pytest.fixture(params=sorted(DRIVERS))
def driver(request: pytest.FixtureRequest, tmp_path: Path) -> Driver:
    """A driver of a device with room for 32 granules that nobody else uses."""
    return DRIVERS[str(request.param)](tmp_path)
