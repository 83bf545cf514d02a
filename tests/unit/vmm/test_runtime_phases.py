"""Park and wake in two phases, from threads and from event loops, and failure from outside."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path

import pytest

from lull.vmm.errors import (
    AdmissionClosed,
    ContentsLost,
    DeviceFailed,
    DriverError,
    RuntimeFailed,
    TransitionInProgress,
)
from lull.vmm.host_driver import HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import MemoryStatus, Runtime
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, in_thread, small_driver, write
from tests.waiting import wait_until

RUNNING = MemoryStatus(MemoryState.RUNNING, ())


def parked(*tags: str) -> MemoryStatus:
    return MemoryStatus(MemoryState.PARKED, tags)


# -- phases


def test_a_prepared_release_changes_nothing_yet_and_can_be_aborted(runtime: Runtime, driver: HostDriver) -> None:
    free_bytes = driver.free_bytes()
    assert runtime.prepare_release(["model"])
    assert runtime.status() == MemoryStatus(MemoryState.PARKING, ())
    assert driver.free_bytes() == free_bytes
    for call in (runtime.release, runtime.resume, runtime.prepare_release, runtime.commit_resume):
        with pytest.raises(TransitionInProgress, match="while state is parking"):
            call()
    runtime.abort_resume()  # of another phase: no change
    assert runtime.status().state is MemoryState.PARKING
    runtime.abort_release()
    runtime.abort_release()
    assert runtime.status() == RUNNING
    with pytest.raises(TransitionInProgress, match="prepare it first"):
        runtime.commit_release()


def test_a_prepared_resume_keeps_admission_closed_and_can_be_aborted(runtime: Runtime, driver: HostDriver) -> None:
    assert not runtime.prepare_resume()
    runtime.release(["model"])
    assert not runtime.prepare_release(["model"])
    free_bytes = driver.free_bytes()
    assert runtime.prepare_resume()
    assert runtime.status() == MemoryStatus(MemoryState.WAKING, ("model",))
    with pytest.raises(AdmissionClosed), runtime.step():
        pass
    runtime.abort_resume()
    assert runtime.status() == parked("model")
    assert driver.free_bytes() == free_bytes
    assert runtime.prepare_resume(["model"])
    runtime.commit_resume()
    assert runtime.status() == RUNNING


def test_fail_is_said_once_and_ends_every_phase(runtime: Runtime, driver: HostDriver) -> None:
    runtime.prepare_release(["model"])
    runtime.fail("rank 3 is gone")
    runtime.fail("rank 4 as well")
    assert runtime.failure == "rank 3 is gone"
    with pytest.raises(RuntimeFailed, match="rank 3 is gone"):
        runtime.commit_release()
    runtime.abort_release()  # gives the backups back
    assert runtime.pools[0].parked_tags() == frozenset()
    assert runtime.status().state is MemoryState.FAILED
    assert driver.calls("unmap") == 0


def test_fail_ends_a_drain(runtime: Runtime) -> None:
    with runtime.step():
        parking, outcome = in_thread(runtime.release)
        wait_until(lambda: runtime.status().state is MemoryState.PARKING, 10, "parking")
        runtime.fail("a peer is gone")
        parking.join(10)
    assert [type(error) for error in outcome] == [RuntimeFailed]


def test_fail_during_the_backups_gives_nothing_back(runtime: Runtime, driver: HostDriver) -> None:
    runtime.on_release(lambda _: runtime.fail("a peer is gone"))
    with pytest.raises(RuntimeFailed, match="a peer is gone"):
        runtime.release()
    assert driver.calls("unmap") == 0
    assert runtime.status().state is MemoryState.FAILED


def test_a_lost_device_fails_the_runtime(driver: HostDriver) -> None:
    runtime = Runtime(Pool(driver))
    driver.inject("synchronize", DeviceFailed("synchronize", "an illegal address was met"))
    with pytest.raises(DeviceFailed):
        driver.synchronize()
    assert runtime.status().state is MemoryState.FAILED
    assert runtime.failure == "an illegal address was met"
    with pytest.raises(AdmissionClosed), runtime.step():
        pass
    with pytest.raises(RuntimeFailed, match="illegal address"):
        runtime.release()


def test_hooks_of_a_tag_are_called_for_it_alone(runtime: Runtime) -> None:
    seen: list[object] = []
    runtime.on_release(lambda tags: seen.append(("released", tags)), tags=["kv_cache", "sampler"])
    runtime.on_resume(lambda tags: seen.append(("resumed", tags)), tags={"kv_cache"})
    runtime.release(["model"])
    runtime.resume()
    assert seen == []
    runtime.release(["model", "kv_cache"])
    runtime.resume(["model"])
    runtime.resume()
    assert seen == [("released", ("kv_cache",)), ("resumed", ("kv_cache",))]


# -- asyncio


def test_the_event_loop_goes_on_while_it_waits(runtime: Runtime) -> None:
    turned = threading.Event()

    def await_a_turn(_: tuple[str, ...]) -> None:
        assert turned.wait(10)

    runtime.on_release(await_a_turn)

    async def park() -> None:
        async def turn() -> None:
            while runtime.status().state is not MemoryState.PARKED:
                turned.set()
                await asyncio.sleep(0)

        await asyncio.gather(runtime.release_async(["model"]), turn())
        await runtime.resume_async()

    asyncio.run(park())
    assert runtime.status() == RUNNING


def test_a_cancelled_wait_does_not_cut_a_park_off(runtime: Runtime) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: tuple[str, ...]) -> None:
        reached.set()
        assert go_on.wait(10)

    runtime.on_release(hold)

    async def park() -> None:
        waiting = asyncio.create_task(runtime.release_async())
        await asyncio.to_thread(reached.wait, 10)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    asyncio.run(park())
    assert runtime.status().state is MemoryState.PARKING
    go_on.set()
    wait_until(lambda: runtime.status().state is MemoryState.PARKED, 10, "parked")


# -- a device that is lost


@pytest.mark.parametrize("verb", ["synchronize", "pin_host", "copy", "unmap", "release"])
def test_a_device_that_is_lost_during_a_park_fails_the_runtime(driver: HostDriver, verb: str) -> None:
    pool = Pool(driver, restore_modes={"model": RestoreMode.PINNED})
    pool.allocate(GRANULE_BYTES, "model")
    runtime = Runtime(pool)
    driver.inject(verb, DeviceFailed(verb, "it fell off the bus"))
    with pytest.raises((DeviceFailed, ContentsLost)):
        runtime.release(["model"])
    assert runtime.status().state is MemoryState.FAILED
    assert runtime.failure is not None
    with pytest.raises(RuntimeFailed):
        runtime.resume()


@pytest.mark.parametrize("verb", ["free_bytes", "create", "map", "set_access", "copy", "synchronize"])
def test_a_device_that_is_lost_during_a_wake_fails_the_runtime(driver: HostDriver, verb: str) -> None:
    pool = Pool(driver)
    write(pool.allocate(GRANULE_BYTES, "model"), b"weights")
    runtime = Runtime(pool)
    runtime.release(["model"])
    driver.inject(verb, DeviceFailed(verb, "it fell off the bus"))
    with pytest.raises((DeviceFailed, ContentsLost)):
        runtime.resume()
    assert runtime.status().state is MemoryState.FAILED
    assert bytes(pool.backup_views("model")[0][:7]) == b"weights"  # what is left of it


# -- pools that are only like ours


class Stubborn(Pool):
    """Cannot undo what it has prepared."""

    def abort_release(self) -> None:
        raise OSError("its service is gone")

    def abort_resume(self) -> None:
        raise OSError("its service is gone")


@pytest.mark.parametrize("stubborn_first", [True, False])
def test_a_pool_that_cannot_undo_fails_the_runtime_and_keeps_no_other_back(
    tmp_path: Path, stubborn_first: bool
) -> None:
    stubborn, plain = Stubborn(small_driver(tmp_path / "one")), Pool(small_driver(tmp_path / "two"))
    failing = small_driver(tmp_path / "three")
    last = Pool(failing)
    for pool in (stubborn, plain, last):
        pool.allocate(1, "model")
    first, second = (stubborn, plain) if stubborn_first else (plain, stubborn)
    runtime = Runtime([first, second, last])
    failing.inject("synchronize", DriverError("synchronize", "injected"))
    with pytest.raises(ContentsLost, match="undoing a park or wake failed") as caught:
        runtime.release(["model"])
    assert isinstance(caught.value.__cause__, OSError)
    assert runtime.status().state is MemoryState.FAILED
    plain.release(["model"])  # it was undone, so it can begin anew
