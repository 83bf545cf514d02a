"""A park that leaves the contents of some tags behind this once, whatever their mode: vLLM's level 2."""

from __future__ import annotations

import pytest

from lull.vmm.errors import ContentsLost, DriverError
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, pattern, read, write

CONTENT = pattern(1, GRANULE_BYTES)


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED])
def test_dropped_contents_are_neither_copied_nor_kept_and_the_next_park_keeps_them(
    pool: Pool, mode: RestoreMode
) -> None:
    weights = pool.allocate(GRANULE_BYTES, "model_weights", mode)
    other = pool.allocate(GRANULE_BYTES, "model", mode)
    write(weights, CONTENT)
    write(other, CONTENT)
    pool.warm_backups()
    pool.release(["model_weights", "model"], drop=["model_weights"])
    assert pool.backup_bytes() == GRANULE_BYTES, "only that of the tag that keeps its contents"
    pool.resume(["model_weights", "model"])
    assert read(weights) == bytes(GRANULE_BYTES)
    assert read(other) == CONTENT
    write(weights, CONTENT)
    pool.release(["model_weights"])
    pool.resume(["model_weights"])
    assert read(weights) == CONTENT


def test_immutable_contents_that_were_dropped_can_be_written_again(driver: HostDriver) -> None:
    pool = Pool(driver, immutable_tags={"model_weights"})
    weights = pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    pool.release(["model_weights"])
    pool.resume(["model_weights"])
    assert pool.is_sealed(weights)
    pool.release(["model_weights"], drop=["model_weights"])
    assert pool.backup_bytes() == 0
    pool.resume(["model_weights"])
    write(weights, CONTENT)
    assert read(weights) == CONTENT
    pool.close()


def test_a_park_that_is_aborted_drops_nothing(pool: Pool) -> None:
    weights = pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    write(weights, CONTENT)
    pool.prepare_release(["model_weights"], drop=["model_weights"])
    pool.abort_release()
    pool.release(["model_weights"])
    pool.resume(["model_weights"])
    assert read(weights) == CONTENT


def test_a_park_that_cannot_be_undone_says_that_dropped_contents_are_lost(pool: Pool, driver: HostDriver) -> None:
    first = pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    pool.allocate(GRANULE_BYTES, "model_weights", RestoreMode.CPU)
    write(first, CONTENT)
    driver.inject("unmap", DriverError("unmap", "injected"), nth_call=2)
    with pytest.raises(ContentsLost) as caught:
        pool.release(["model_weights"], drop=["model_weights"])
    assert caught.value.lost == ("model_weights",)
