from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from tests.memory import GRANULE_BYTES, small_driver, write


@pytest.fixture
def driver(tmp_path: Path) -> HostDriver:
    return small_driver(tmp_path / "device")


@pytest.fixture
def pool(driver: HostDriver) -> Iterator[Pool]:
    pool = Pool(driver)
    yield pool
    driver.clear_faults()
    pool.close()
    assert driver.free_bytes() == driver.capacity_bytes


@pytest.fixture
def runtime(pool: Pool) -> Runtime:
    write(pool.allocate(GRANULE_BYTES, "model"), b"weights")
    write(pool.allocate(GRANULE_BYTES, "kv_cache"), b"cache")
    return Runtime(pool, drain_seconds_max=10)
