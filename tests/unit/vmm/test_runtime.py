from __future__ import annotations

import gc
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest

from lull.vmm.errors import (
    AdmissionClosed,
    AlreadyParked,
    ContentsLost,
    DrainTimeout,
    DriverError,
    OutOfDeviceMemory,
    OutOfHostMemory,
    PoolClosed,
    RuntimeFailed,
    TransitionInProgress,
    TransitionRefused,
)
from lull.vmm.host_driver import HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import MemoryStatus, Runtime
from lull.vmm.tags import TRTLLM_TAGS, InvalidTag, RestoreMode
from tests.memory import GRANULE_BYTES, in_thread, read, small_driver, write
from tests.waiting import wait_until

RUNNING = MemoryStatus(MemoryState.RUNNING, ())


def pool_of(runtime: Runtime, number: int = 0) -> Pool:
    pool = runtime.pools[number]
    assert isinstance(pool, Pool)
    return pool


def parked(*tags: str) -> MemoryStatus:
    return MemoryStatus(MemoryState.PARKED, tags)


def test_release_and_resume_of_everything(runtime: Runtime, driver: HostDriver) -> None:
    runtime.release()
    assert runtime.status() == parked(*sorted(TRTLLM_TAGS))
    assert driver.free_bytes() == driver.capacity_bytes
    runtime.resume()
    assert runtime.status() == RUNNING
    assert read(pool_of(runtime).allocations("model")[0])[:7] == b"weights"


def test_repeats_and_subsets_are_no_change(runtime: Runtime, driver: HostDriver) -> None:
    runtime.release(["model", "kv_cache"])
    calls = driver.calls("unmap")
    runtime.release(["model"])
    runtime.release(["kv_cache", "model"])
    runtime.resume(["sampler"])  # is not parked
    assert driver.calls("unmap") == calls
    assert runtime.status() == parked("kv_cache", "model")
    runtime.resume(["model"])
    assert runtime.status() == parked("kv_cache")
    runtime.resume(["model"])
    assert runtime.status() == parked("kv_cache")
    runtime.resume(["kv_cache", "model"])
    assert runtime.status() == RUNNING
    runtime.resume()
    runtime.resume(["model"])
    assert runtime.status() == RUNNING


def test_more_than_what_is_parked_is_refused(runtime: Runtime) -> None:
    runtime.release(["kv_cache"])
    with pytest.raises(AlreadyParked, match="already parked"):
        runtime.release(["kv_cache", "model"])
    with pytest.raises(AlreadyParked, match="already parked"):
        runtime.release()
    assert runtime.status() == parked("kv_cache")


@pytest.mark.parametrize("tags", [[], ["bogus"], ["_no_capture_init_kv_cache"]])
def test_bad_tags_change_nothing(runtime: Runtime, tags: list[str]) -> None:
    for call in (runtime.release, runtime.resume):
        with pytest.raises(InvalidTag):
            call(tags)
    assert runtime.status() == RUNNING


def test_tags_of_its_own_are_known(pool: Pool) -> None:
    pool.allocate(1, "adapters")
    runtime = Runtime(pool)
    runtime.release(["adapters"])
    assert runtime.status() == parked("adapters")
    runtime.resume()


def test_admission_closes_first_and_the_drain_waits(runtime: Runtime) -> None:
    admitted, leave = threading.Event(), threading.Event()

    def work() -> None:
        with runtime.step():
            admitted.set()
            assert leave.wait(10)

    working, worked = in_thread(work)
    assert admitted.wait(10)
    assert runtime.in_flight == 1
    hooked = threading.Event()
    runtime.on_release(lambda tags: hooked.set())
    parking, parked_ = in_thread(runtime.release)
    wait_until(lambda: runtime.status().state is MemoryState.PARKING, 10, "parking")
    with pytest.raises(AdmissionClosed) as refused, runtime.step():
        pass
    assert str(refused.value) == "Cannot enqueue requests while executor admission is parking"
    assert runtime.status().parked_tags == ()
    assert not hooked.is_set()
    for call in (runtime.release, runtime.resume):
        with pytest.raises(TransitionInProgress, match="while state is parking"):
            call()
    leave.set()
    for thread in (working, parking):
        thread.join(10)
    assert worked == parked_ == [None]
    assert hooked.is_set()
    assert runtime.status().state is MemoryState.PARKED


def test_a_drain_that_takes_too_long_goes_back_to_running(pool: Pool) -> None:
    runtime = Runtime(pool, drain_seconds_max=0.01)
    with runtime.step():
        with pytest.raises(DrainTimeout, match=r"1 request\(s\) still in flight") as caught:
            runtime.release()
        assert runtime.status() == RUNNING
        with runtime.step():
            pass
    assert (caught.value.in_flight, caught.value.seconds) == (1, 0.01)
    runtime.release()


def test_a_step_that_raises_is_over(runtime: Runtime) -> None:
    with pytest.raises(KeyError), runtime.step():
        raise KeyError
    assert runtime.in_flight == 0


def test_hooks_see_the_tags_in_their_state(runtime: Runtime, driver: HostDriver) -> None:
    seen: list[object] = []
    free_bytes = driver.free_bytes()
    runtime.on_release(lambda tags: seen.append((tags, runtime.status().state, driver.free_bytes())))
    runtime.on_resume(lambda tags: seen.append((tags, runtime.status().state, driver.free_bytes())))
    runtime.release(["kv_cache", "model"])
    runtime.release(["model"])  # no change: no hook
    runtime.resume()
    assert seen == [
        (("kv_cache", "model"), MemoryState.PARKING, free_bytes),
        (("kv_cache", "model"), MemoryState.WAKING, free_bytes),
    ]


def fail(_: tuple[str, ...]) -> None:
    raise ZeroDivisionError("hook")


def test_a_failing_release_hook_releases_nothing(runtime: Runtime, driver: HostDriver) -> None:
    runtime.on_release(fail)
    with pytest.raises(ZeroDivisionError):
        runtime.release()
    assert runtime.status() == RUNNING
    assert driver.calls("unmap") == 0


def test_a_failing_resume_hook_leaves_everything_parked(runtime: Runtime, driver: HostDriver) -> None:
    failing = [True]
    runtime.on_resume(lambda tags: fail(tags) if failing.pop() else failing.append(False))
    runtime.release(["model"])
    with pytest.raises(ZeroDivisionError):
        runtime.resume()
    assert runtime.status() == parked("model")
    assert driver.free_bytes() == driver.capacity_bytes - GRANULE_BYTES
    failing.append(False)
    runtime.resume()
    assert read(pool_of(runtime).allocations("model")[0])[:7] == b"weights"


def test_out_of_host_memory_goes_back_to_running(driver: HostDriver) -> None:
    pool = Pool(driver, host_bytes_available=lambda: 0)
    pool.allocate(1, "model")
    runtime = Runtime(pool)
    with pytest.raises(OutOfHostMemory):
        runtime.release(["model"])
    assert runtime.status() == RUNNING
    with runtime.step():
        pass


def test_out_of_device_memory_stays_parked_and_can_be_repeated(runtime: Runtime, driver: HostDriver) -> None:
    runtime.release(["model", "kv_cache"])
    borrowed = driver.create(driver.capacity_bytes - GRANULE_BYTES)
    with pytest.raises(OutOfDeviceMemory):
        runtime.resume()
    assert runtime.status() == parked("kv_cache", "model")
    runtime.resume(["kv_cache"])  # there is room for this one
    driver.release(borrowed)
    runtime.resume()
    assert runtime.status() == RUNNING
    assert read(pool_of(runtime).allocations("model")[0])[:7] == b"weights"


def test_failed_is_for_good(runtime: Runtime, driver: HostDriver) -> None:
    driver.inject("unmap", DriverError("unmap", "injected"), nth_call=2)
    driver.inject("create", DriverError("create", "injected"))
    with pytest.raises(ContentsLost):
        runtime.release(["model", "kv_cache"])
    assert runtime.status() == MemoryStatus(MemoryState.FAILED, ())
    assert runtime.failure is not None
    for call in (runtime.release, runtime.resume):
        with pytest.raises(RuntimeFailed, match="while state is failed"):
            call()
    with pytest.raises(AdmissionClosed, match="is failed"), runtime.step():
        pass


def test_of_two_releases_at_once_one_parks(runtime: Runtime) -> None:
    reached, go_on = threading.Event(), threading.Event()

    def hold(_: tuple[str, ...]) -> None:
        reached.set()
        assert go_on.wait(10)

    runtime.on_release(hold)
    first, outcome = in_thread(runtime.release)
    assert reached.wait(10)
    with pytest.raises(TransitionInProgress):
        runtime.release()
    go_on.set()
    first.join(10)
    assert outcome == [None]


def test_a_pool_belongs_to_one_runtime(runtime: Runtime, pool: Pool, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="pool 0 belongs to another runtime"):
        Runtime(pool)
    other = Pool(small_driver(tmp_path / "other"))
    with pytest.raises(ValueError, match="pools names pool 1 twice"):
        Runtime([other, other])
    with pytest.raises(ValueError, match="pool 1 belongs to another runtime"):
        Runtime([other, pool])
    with Runtime(other).step():  # what was refused took nothing
        assert runtime.status() == RUNNING
    other.close()


def test_a_pool_is_free_once_its_runtime_is_no_more(pool: Pool) -> None:
    first = Runtime(pool)
    reference = weakref.ref(first)
    del first
    gc.collect()
    assert reference() is None
    assert Runtime(pool).status() == RUNNING


def test_a_pool_is_not_closed_under_the_work_on_it(runtime: Runtime, pool: Pool) -> None:
    with runtime.step():
        with pytest.raises(TransitionRefused, match=r"1 step\(s\) of the runtime work on this pool"):
            pool.close()
        assert read(pool.allocations("model")[0])[:7] == b"weights"
    pool.close()


def test_a_closed_pool_is_of_no_use_and_its_runtime_is_failed(runtime: Runtime, pool: Pool) -> None:
    runtime.release(["model"])
    pool.close()
    assert runtime.status().state is MemoryState.FAILED
    assert runtime.failure == "the pool is closed"
    with pytest.raises(RuntimeFailed, match="the pool is closed"):
        runtime.resume()
    with pytest.raises(AdmissionClosed), runtime.step():
        pass
    for call in (lambda: pool.allocate(1, "model"), lambda: pool.release(["kv_cache"]), lambda: pool.resume(["model"])):
        with pytest.raises(PoolClosed, match="this pool is closed"):
            call()
    pool.close()  # again is no change


def test_a_pool_in_transition_is_not_closed(pool: Pool) -> None:
    kept = pool.allocate(GRANULE_BYTES, "model")
    pool.prepare_release(["model"])
    with pytest.raises(TransitionInProgress):
        pool.close()
    pool.abort_release()
    assert pool.failed is None
    assert pool.allocations() == (kept,)


@pytest.mark.parametrize("seconds", [-1, float("nan"), "x", True])
def test_a_drain_has_a_bound(pool: Pool, seconds: Any) -> None:
    with pytest.raises(ValueError, match="drain_seconds_max is"):
        Runtime(pool, drain_seconds_max=seconds)


def test_bad_arguments_are_named(runtime: Runtime) -> None:
    nothing: Any = None
    text: Any = "xy"
    with pytest.raises(TypeError, match="pools is None"):
        Runtime(nothing)
    for hook in (runtime.on_release, runtime.on_resume):
        with pytest.raises(TypeError, match="hook is None"):
            hook(nothing)
        with pytest.raises(InvalidTag, match="tags is 'xy'; it must be a list"):
            hook(print, tags=text)
    with pytest.raises(InvalidTag, match="tags is 'xy'; it must be a list"):
        runtime.release(text)
    spelled_badly: tuple[Any, ...] = (text, [None], ["A b"])
    for tags in spelled_badly:
        with pytest.raises(InvalidTag, match="tags is"):
            pool_of(runtime).release(tags)
    assert pool_of(runtime).parked_tags() == frozenset()
    assert runtime.status() == RUNNING
    runtime.fail("")
    assert runtime.failure == "no reason was given"


def test_a_runtime_needs_a_pool() -> None:
    with pytest.raises(ValueError, match="at least one pool"):
        Runtime([])


# -- several devices


@pytest.fixture
def pair(tmp_path: Path) -> list[HostDriver]:
    return [small_driver(tmp_path / name) for name in ("one", "two")]


@pytest.fixture
def both(pair: list[HostDriver]) -> Runtime:
    pools = [Pool(driver) for driver in pair]
    runtime = Runtime(pools)
    for number, pool in enumerate(pools):
        write(pool.allocate(GRANULE_BYTES, "model"), f"device {number}".encode())
        pool.allocate(GRANULE_BYTES, "kv_cache", RestoreMode.NONE)
    return runtime


def contents(runtime: Runtime) -> list[bytes]:
    return [read(pool_of(runtime, number).allocations("model")[0])[:8] for number in range(len(runtime.pools))]


def test_all_devices_park_and_wake_together(both: Runtime, pair: list[HostDriver]) -> None:
    both.release()
    assert [driver.free_bytes() for driver in pair] == [driver.capacity_bytes for driver in pair]
    both.resume()
    assert contents(both) == [b"device 0", b"device 1"]


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("verb", ["copy", "unmap", "release"])
def test_one_device_that_cannot_park_keeps_all_running(
    both: Runtime, pair: list[HostDriver], verb: str, device: int
) -> None:
    free_bytes = [driver.free_bytes() for driver in pair]
    pair[device].inject(verb, DriverError(verb, "injected"))
    with pytest.raises(DriverError):
        both.release()
    assert both.status() == RUNNING
    assert contents(both) == [b"device 0", b"device 1"]
    assert [driver.free_bytes() for driver in pair] == free_bytes
    if verb == "copy":
        assert [driver.calls("unmap") for driver in pair] == [0, 0]
    both.release()
    both.resume()


@pytest.mark.parametrize("device", [0, 1])
@pytest.mark.parametrize("verb", ["create", "map", "copy"])
def test_one_device_that_cannot_wake_keeps_all_parked(
    both: Runtime, pair: list[HostDriver], verb: str, device: int
) -> None:
    both.release(["model", "kv_cache"])
    pair[device].inject(verb, DriverError(verb, "injected"))
    with pytest.raises(DriverError):
        both.resume()
    assert both.status() == parked("kv_cache", "model")
    assert [driver.free_bytes() for driver in pair] == [driver.capacity_bytes for driver in pair]
    both.resume()
    assert contents(both) == [b"device 0", b"device 1"]


def test_a_parked_device_that_cannot_come_back_is_a_failure(both: Runtime, pair: list[HostDriver]) -> None:
    pair[1].inject("unmap", DriverError("unmap", "injected"))
    pair[0].inject("create", OutOfDeviceMemory(1, 0, 1))
    with pytest.raises(ContentsLost, match=r"still parked \[kv_cache, model\]"):
        both.release()
    assert both.status().state is MemoryState.FAILED
    assert bytes(pool_of(both).backup_views("model")[0][:8]) == b"device 0"


def test_a_wake_that_can_be_undone_on_one_device_only_is_a_failure(both: Runtime, pair: list[HostDriver]) -> None:
    both.release()
    pair[0].inject("create", DriverError("create", "injected"))
    pair[1].inject("unmap", DriverError("unmap", "injected"))
    with pytest.raises(ContentsLost, match="the wake failed"):
        both.resume()
    assert both.status().state is MemoryState.FAILED
