from __future__ import annotations

import ctypes
import gc
import itertools
import threading
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lull.vmm.errors import DriverError, LayoutChanged, OutOfDeviceMemory
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from lull.vmm.torch_segments import SMALL_SEGMENT_BYTES, Segments, segments_of
from tests.memory import GRANULE_BYTES, small_driver
from tests.waiting import wait_until


@pytest.fixture
def segments(pool: Pool) -> Segments:
    return segments_of(pool, "model_weights", None)


def address(buffer: ctypes.Array[ctypes.c_uint8]) -> int:
    return ctypes.addressof(buffer)


def test_small_pieces_share_an_allocation(pool: Pool, segments: Segments) -> None:
    pieces = [segments.take(100) for _ in range(50)]
    assert [a.nbytes for a in pool.allocations()] == [SMALL_SEGMENT_BYTES]
    addresses = sorted(address(piece) for piece in pieces)
    assert all(second - first >= 128 for first, second in itertools.pairwise(addresses))
    assert all(one % 64 == 0 for one in addresses)


def test_the_last_piece_takes_the_allocation_along(pool: Pool, segments: Segments) -> None:
    pieces = [segments.take(1000) for _ in range(3)]
    del pieces[1], pieces[0]
    assert len(pool.allocations()) == 1
    pieces.clear()
    assert (pool.allocations(), pool.device_bytes()) == ((), 0)


def test_what_is_given_back_is_used_again(pool: Pool, segments: Segments) -> None:
    pieces = [segments.take(500 << 10) for _ in range(4)]
    free = address(pieces[1])
    del pieces[1], pieces[1]  # two that touch: together they take one that is larger than each
    assert address(segments.take(1000 << 10)) == free
    assert len(pool.allocations()) == 1


def test_a_device_that_is_nearly_full_gives_just_what_is_needed(tmp_path: Path) -> None:
    driver = small_driver(tmp_path / "device", granules=2)
    pool = Pool(driver)
    segments = segments_of(pool, "kv_cache", None)
    piece = segments.take(GRANULE_BYTES + 1)
    assert pool.device_bytes() == 2 * GRANULE_BYTES
    with pytest.raises(OutOfDeviceMemory):
        segments.take(GRANULE_BYTES)
    del piece
    assert driver.free_bytes() == driver.capacity_bytes


def test_modes_of_one_tag_are_apart(pool: Pool) -> None:
    kept = segments_of(pool, "scratch", RestoreMode.CPU).take(10)
    dropped = segments_of(pool, "scratch", RestoreMode.NONE).take(10)
    assert [a.mode for a in pool.allocations("scratch")] == [RestoreMode.CPU, RestoreMode.NONE]
    assert address(kept) != address(dropped)


def test_nothing_is_put_into_sealed_memory(driver: HostDriver) -> None:
    pool = Pool(driver, immutable_tags={"model_weights"})
    segments = segments_of(pool, "model_weights", None)
    first = segments.take(64 << 10)
    pool.release(["model_weights"])
    with pytest.raises(LayoutChanged), pool.changing_layout("model_weights"):
        segments.take(10)
    pool.resume(["model_weights"])
    second = segments.take(64 << 10)
    ctypes.memset(second, 1, len(second))
    assert len(pool.allocations()) == 2
    del first, second
    assert pool.allocations() == ()


def test_pieces_may_die_while_parked(pool: Pool, segments: Segments) -> None:
    piece = segments.take(1000)
    pool.release(["model_weights"])
    del piece
    assert (pool.allocations(), pool.backup_bytes()) == ((), 0)
    pool.resume(["model_weights"])


def test_pieces_may_die_during_a_transition(pool: Pool, segments: Segments) -> None:
    piece = segments.take(1000)
    pool.prepare_release(["model_weights"])
    del piece
    assert len(pool.allocations()) == 1
    pool.commit_release()
    pool.resume(["model_weights"])  # whose beginning is the next occasion to free it
    assert pool.allocations() == ()


def test_the_collector_may_work_while_the_driver_is_locked(pool: Pool, segments: Segments, driver: HostDriver) -> None:
    cycle: list[object] = [segments.take(1000)]
    cycle.append(cycle)
    del cycle
    with driver._lock:
        gc.collect()
        assert len(pool.allocations()) == 1
    wait_until(lambda: pool.allocations() == (), 10, "the empty allocation being freed")


def test_a_piece_outlives_its_closed_pool(driver: HostDriver) -> None:
    pool = Pool(driver)
    piece = segments_of(pool, "sampler", None).take(10)
    pool.close()
    del piece
    assert pool.allocations() == ()


@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_freed_now_is_freed_later(pool: Pool, segments: Segments, driver: HostDriver) -> None:
    piece = segments.take(1000)
    driver.inject("unmap", DriverError("unmap", "injected"))
    del piece
    assert len(pool.allocations()) == 1
    again = segments.take(1000)
    assert len(pool.allocations()) == 1
    del again


def test_threads_take_and_drop_at_once(pool: Pool, segments: Segments) -> None:
    wrong: list[str] = []

    def work(value: int) -> None:
        for size in range(100, 2000, 37):
            piece = segments.take(size)
            ctypes.memset(piece, value, size)
            if bytes(piece) != bytes([value]) * size:
                wrong.append(f"thread {value}, {size} bytes")

    threads = [threading.Thread(target=work, args=(value,)) for value in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert pool.allocations() == ()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.one_of(st.integers(1, 200 << 10), st.integers(-20, -1)), max_size=40))
def test_pieces_never_overlap(tmp_path_factory: pytest.TempPathFactory, steps: list[int]) -> None:
    """Positive: take so many bytes. Negative: drop one."""
    driver = small_driver(tmp_path_factory.mktemp("device"), granules=256)
    pool = Pool(driver)
    segments = segments_of(pool, "drafter", None)
    live: list[ctypes.Array[ctypes.c_uint8]] = []
    for step in steps:
        if step > 0:
            live.append(segments.take(step))
        elif live:
            del live[step % len(live)]
        ranges = sorted((address(piece), len(piece)) for piece in live)
        assert all(a + n <= b for (a, n), (b, _) in itertools.pairwise(ranges))
        assert all(
            any(one.address <= a and a + n <= one.address + one.nbytes for one in pool.allocations()) for a, n in ranges
        )
    live.clear()
    assert pool.allocations() == ()
    assert driver.free_bytes() == driver.capacity_bytes
