"""vLLM's levels and tags on a pool, without vLLM."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.errors import AdmissionClosed, OutOfDeviceMemory, UnsupportedMode
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from lull.vmm.vllm.levels import lost_at, woken_by
from lull.vmm.vllm.pool_sleep import PoolSleep, StepInFlight
from tests.memory import GRANULE_BYTES, pattern, read, small_driver, write

CONTENT = pattern(1, GRANULE_BYTES)
TAGS = ("model_weights", "model", "kv_cache", "cudagraph")


@pytest.fixture
def sleep(tmp_path: Path) -> Iterator[PoolSleep]:
    """One piece of each tag, all with the same contents."""
    pool = Pool(small_driver(tmp_path / "device"))
    for tag in TAGS:
        write(pool.allocate(GRANULE_BYTES, tag), CONTENT)
    yield PoolSleep(pool)
    pool.close()


def kept(sleep: PoolSleep) -> set[str]:
    return {one.tag for one in sleep.pool.allocations() if read(one) == CONTENT}


def test_level_1_loses_the_kv_cache_and_level_2_the_weights_too(sleep: PoolSleep) -> None:
    sleep.park(1)
    assert sleep.pool.device_bytes() == 0
    assert sleep.asleep() == tuple(sorted(TAGS))
    sleep.wake()
    assert kept(sleep) == {"model_weights", "model", "cudagraph"}
    sleep.park(2)
    assert sleep.pool.backup_bytes() == 2 * GRANULE_BYTES, "buffers and graphs, which no checkpoint holds"
    sleep.wake()
    assert kept(sleep) == {"model", "cudagraph"}


@pytest.mark.parametrize("level", [0, 3])
def test_other_levels_are_refused(sleep: PoolSleep, level: int) -> None:
    with pytest.raises(ValueError, match=f"level is {level}"):
        sleep.park(level)
    assert sleep.asleep() == ()


def test_a_wake_may_leave_weights_and_kv_cache_asleep_and_nothing_else(sleep: PoolSleep) -> None:
    sleep.park(1)
    sleep.wake(["kv_cache"])
    assert sleep.asleep() == ("model_weights",)
    sleep.wake(["weights"])
    assert sleep.asleep() == ()
    assert "model_weights" in kept(sleep)


def test_the_kv_cache_goes_alone_and_then_the_rest(sleep: PoolSleep) -> None:
    sleep.discard(["kv_cache"])
    assert sleep.asleep() == ("kv_cache",)
    sleep.park(1)
    assert sleep.asleep() == tuple(sorted(TAGS))


def test_nothing_sleeps_while_a_step_is_in_flight(sleep: PoolSleep) -> None:
    with sleep.step():
        for change in (lambda: sleep.park(1), lambda: sleep.discard(["kv_cache"]), sleep.wake):
            with pytest.raises(StepInFlight, match="1 step"):
                change()
        assert sleep.asleep() == ()
    assert sleep.in_flight == 0
    assert kept(sleep) == set(TAGS)
    sleep.park(1)


def test_no_step_begins_while_anything_sleeps(sleep: PoolSleep) -> None:
    sleep.discard(["kv_cache"])
    with pytest.raises(AdmissionClosed), sleep.step():
        pass
    sleep.wake()
    with sleep.step():
        pass


def test_a_wake_without_room_leaves_everything_asleep_and_can_be_asked_again(sleep: PoolSleep) -> None:
    """Where vLLM's own allocator stays halfway (vllm-project/vllm#34600)."""
    sleep.park(1)
    driver = sleep.pool.driver
    others = driver.create(driver.free_bytes() - GRANULE_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        sleep.wake()
    assert sleep.asleep() == tuple(sorted(TAGS))
    driver.release(others)
    sleep.wake()
    assert "model_weights" in kept(sleep)


def test_weights_without_a_backup_go_at_level_2_only(tmp_path: Path) -> None:
    """As on a device that shares its memory with the host, where a copy would free nothing."""
    pool = Pool(small_driver(tmp_path / "device", kind="unified"), restore_modes={"model_weights": RestoreMode.NONE})
    pool.allocate(GRANULE_BYTES, "model_weights")
    sleep = PoolSleep(pool)
    with pytest.raises(UnsupportedMode, match="sleep at level 2"):
        sleep.park(1)
    assert sleep.asleep() == ()
    sleep.park(2)
    assert pool.device_bytes() == 0
    pool.close()


def test_what_is_lost_and_woken_by_name() -> None:
    tags = ("model_weights", "draft_model_weights", "draft_model", "kv_cache", "workspace", "runtime")
    assert lost_at(1, tags) == ("kv_cache", "workspace")
    assert lost_at(2, tags) == ("model_weights", "draft_model_weights", "kv_cache", "workspace")
    assert woken_by(["weights"], tags) == (
        "model_weights",
        "draft_model_weights",
        "draft_model",
        "workspace",
        "runtime",
    )
    assert woken_by(None, tags) == tags
    assert woken_by(["nothing"], ("kv_cache",)) == ()
