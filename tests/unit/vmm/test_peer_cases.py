"""The cases that other allocators test or have failed at, and where each is covered here.

Cases of TensorRT-LLM's virtual memory tests (virtualMemoryTest.cpp, test_virtual_memory.py):
  materialise and release return the bytes, again and again   test_pool: contents_and_address_survive_a_park
  the order of the steps, both ways                           here: the_order_of_a_park_and_of_a_wake
  create throws: released, retryable                          test_pool_failures: a_wake_that_fails_is_parked_again
  the first or a later set-up step throws                     test_pool_failures: a_wake_that_fails_is_parked_again
  a tear-down step throws: all others still run               here: what_cannot_be_given_back_stops_nothing_else
  giving the handle up throws                                 test_pool_failures:
                                                              a_park_that_fails_halfway_is_undone_whole
  nothing is given back twice, half-made things are cleaned   test_pool_failures: a_failed_allocation_leaves_nothing,
                                                              a_failed_free_can_be_repeated_and_never_parked
  twice materialise, twice release                            test_runtime: repeats_and_subsets_are_no_change
  offload to pageable and pinned memory, bit for bit          here: random_data_of_4_mib
  the manager: tags, add, remove, unknown tags                test_pool: tags_are_parked_and_woken_alone;
                                                              here: unknown_tags_are_no_tags_of_a_pool
  64 MiB, and one byte more                                   here: one_byte_more_than_a_granule_is_a_granule_more
  nested scopes                                               test_torch_routing
  restore PINNED; a KV cache; weights discarded               here: weights_that_are_discarded_are_loaded_again
Failures of vLLM's cumem allocator (vllm-project/vllm):
  a wake that is asked again maps nothing twice               here: a_wake_that_is_asked_again_takes_nothing_twice
  an error stays and fails later allocations (#36651)         here: an_error_belongs_to_its_call
  host memory rounded to a power of two (#16663, #56410)      here: backups_are_as_large_as_what_they_keep
  other tags come back at the first wake (0.32)               test_pool: tags_are_parked_and_woken_alone
  a handle is lost when mapping fails                         test_pool_failures: a_failed_allocation_leaves_nothing
Failures of torch_memory_saver (fzyzcjy/torch_memory_saver):
  freed while paused: released twice (#92)                    test_pool: free_while_parked_gives_everything_back
  a backup that is not what was written (#71)                 test_pool_failures: undoing_a_wake_never_copies_onto_a_
                                                              good_backup, a_failed_copy_changes_nothing
  calls in the wrong state end the process                    test_pool: nothing_else_during_a_transition
Weak points of TensorRT-LLM's manager:
  no host memory in the middle of a park loses contents       test_pool_failures: no_host_memory_for_backups_changes_
                                                              nothing
  out of memory at a wake cannot be repeated                  test_pool_failures: no_device_memory_at_wake_leaves_it_
                                                              parked_and_retryable
  rollback copies over a good backup                          test_pool_failures: undoing_a_wake_never_copies_onto_a_
                                                              good_backup
  host memory is never given back while running               test_pool_memory: backups_are_freed_after_the_wake_on_
                                                              request, kept_backups_can_be_given_back_while_running
Ours:
  two releases at once                                        test_runtime: of_two_releases_at_once_one_parks;
                                                              here: many_threads_park_and_wake_one_pool
  a park while an allocation is under way                     test_pool: a_park_waits_for_an_allocation_under_way
  writing to sealed memory is fatal                           test_device_processes: touching_what_is_not_there_is_fatal
  memory is zero for the next user                            test_pool: contents_that_are_not_kept_cost_no_host_memory
  every driver call fails once, in every short program        test_pool_exhaustive
  random programs                                             test_pool_machine
"""

from __future__ import annotations

import re
import threading
from pathlib import Path

import pytest

from lull.vmm.errors import ContentsLost, DriverError, OutOfDeviceMemory, TransitionInProgress
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, pattern, read, write

MIB = 1 << 20
TESTS = Path(__file__).resolve().parents[2]


def test_every_case_of_the_table_exists() -> None:
    assert __doc__ is not None
    table = __doc__.partition("Cases of")[2]
    text = re.sub(r"_\n\s+", "_", table)
    sources = {path.stem: path.read_text() for path in TESTS.rglob("test_*.py")}
    module, seen = "", 0
    for named, name in re.findall(r"(?:(test_\w+|here):\s+)?\b([a-z0-9]+(?:_[a-z0-9]+)+)(?=[,;\n])", text + "\n"):
        module = named or module
        if name.startswith("test_"):
            assert name in sources, name
            continue
        seen += 1
        assert f"def test_{name}(" in sources[Path(__file__).stem if module == "here" else module], (module, name)
    assert seen >= 25


class Recorder(HostDriver):
    def __init__(self, device: HostDevice) -> None:
        self.verbs: list[str] = []
        super().__init__(device, granularity_bytes=GRANULE_BYTES)

    def _enter(self, verb: str, nbytes: int | None = None) -> None:
        self.verbs.append(verb)
        super()._enter(verb, nbytes)


def test_the_order_of_a_park_and_of_a_wake(driver: HostDriver) -> None:
    recorder = Recorder(driver.device)
    pool = Pool(recorder)
    for _ in range(2):
        pool.allocate(GRANULE_BYTES, "model")
    recorder.verbs.clear()
    pool.release(["model"])
    assert recorder.verbs == ["synchronize", "open_lane", "open_lane", "copy", "copy", *["unmap", "release"] * 2]
    recorder.verbs.clear()
    pool.resume(["model"])
    attach = ["map", "set_access"]
    assert recorder.verbs == ["free_bytes", "create", "create", *attach, *attach, "copy", "copy", "synchronize"]
    recorder.verbs.clear()
    pool.close()
    assert recorder.verbs == ["unmap", "release", "free_address"] * 2  # no backup is made of what is freed


def test_what_cannot_be_given_back_stops_nothing_else(driver: HostDriver) -> None:
    pool = Pool(driver)
    for _ in range(3):
        pool.allocate(GRANULE_BYTES, "model")
    pool.release(["model"])
    pool.prepare_resume(["model"])
    driver.inject("unmap", DriverError("unmap", "injected"))
    with pytest.raises(ContentsLost, match="the wake failed"):
        pool.abort_resume()
    assert driver.capacity_bytes - driver.free_bytes() == GRANULE_BYTES  # the one that would not go
    pool.close()
    assert driver.free_bytes() == driver.capacity_bytes


@pytest.fixture
def large(tmp_path: Path) -> HostDriver:
    """With the granules of the real device."""
    return HostDriver(HostDevice.create(tmp_path / "large", capacity_bytes=128 * MIB))


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED])
def test_random_data_of_4_mib(large: HostDriver, mode: RestoreMode) -> None:
    pool = Pool(large)
    allocation = pool.allocate(4 * MIB, "model", mode)
    content = pattern(4, 4 * MIB)
    write(allocation, content)
    for _ in range(2):
        pool.release(["model"])
        pool.resume(["model"])
        assert read(allocation) == content
    pool.close()


@pytest.mark.parametrize(("nbytes", "reserved_bytes"), [(64 * MIB, 64 * MIB), (64 * MIB + 1, 66 * MIB)])
def test_one_byte_more_than_a_granule_is_a_granule_more(large: HostDriver, nbytes: int, reserved_bytes: int) -> None:
    pool = Pool(large)
    allocation = pool.allocate(nbytes, "kv_cache", RestoreMode.MEMSET)
    assert large.capacity_bytes - large.free_bytes() == allocation.reserved_bytes == reserved_bytes
    pool.release(["kv_cache"])
    pool.resume(["kv_cache"])
    assert read(allocation)[-1:] == b"\0"
    pool.close()


def test_unknown_tags_are_no_tags_of_a_pool(pool: Pool, driver: HostDriver) -> None:
    pool.allocate(1, "model")
    pool.release(["sampler"])  # nothing of it: parked, and nothing is done
    assert driver.calls("unmap") == 0
    pool.resume(["drafter", "sampler"])
    assert pool.parked_tags() == frozenset()
    assert pool.allocations("drafter") == ()


def test_weights_that_are_discarded_are_loaded_again(driver: HostDriver) -> None:
    pool = Pool(driver, restore_modes={"model_weights": RestoreMode.NONE})
    weights = pool.allocate(GRANULE_BYTES, "model_weights")
    write(weights, pattern(1, GRANULE_BYTES))
    pool.release(["model_weights"])
    assert pool.backup_bytes() == 0
    pool.resume(["model_weights"])
    write(weights, pattern(1, GRANULE_BYTES))  # at the same address: nothing that points there is rebuilt
    assert read(weights) == pattern(1, GRANULE_BYTES)
    pool.close()


def test_a_wake_that_is_asked_again_takes_nothing_twice(pool: Pool, driver: HostDriver) -> None:
    kept = [pool.allocate(GRANULE_BYTES, "model") for _ in range(3)]
    pool.release(["model"])
    for verb, nth_call in (("create", 2), ("map", 3), ("copy", 2)):
        driver.inject(verb, DriverError(verb, "injected"), nth_call=nth_call)
        with pytest.raises(DriverError):
            pool.resume(["model"])
        assert driver.free_bytes() == driver.capacity_bytes
    pool.resume(["model"])
    pool.resume(["model"])
    assert driver.capacity_bytes - driver.free_bytes() == len(kept) * GRANULE_BYTES


def test_an_error_belongs_to_its_call(pool: Pool, driver: HostDriver) -> None:
    with pytest.raises(OutOfDeviceMemory):
        pool.allocate(2 * driver.capacity_bytes, "model")
    pool.allocate(1, "model")
    pool.release(["model"])
    pool.resume(["model"])


@pytest.mark.parametrize("mode", [RestoreMode.CPU, RestoreMode.PINNED])
def test_backups_are_as_large_as_what_they_keep(pool: Pool, mode: RestoreMode) -> None:
    sizes_bytes = [5 * 4096, 9 * 4096 + 1, 17 * 4096]  # each just above a power of two
    for nbytes in sizes_bytes:
        pool.allocate(nbytes, "model", mode)
    pool.release(["model"])
    assert pool.backup_bytes() == (5 + 10 + 17) * 4096
    pool.resume(["model"])


def test_many_threads_park_and_wake_one_pool(pool: Pool, driver: HostDriver) -> None:
    allocation = pool.allocate(GRANULE_BYTES, "model")
    content = pattern(7, GRANULE_BYTES)
    write(allocation, content)
    refused: list[TransitionInProgress] = []
    unexpected: list[BaseException] = []

    def work() -> None:
        for _ in range(30):
            try:
                pool.release(["model"])
                pool.resume(["model"])
            except TransitionInProgress as error:
                refused.append(error)
            except BaseException as error:
                unexpected.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert unexpected == []
    pool.resume(["model"])
    assert read(allocation) == content
    assert driver.capacity_bytes - driver.free_bytes() == GRANULE_BYTES
