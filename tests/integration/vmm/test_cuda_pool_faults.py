"""Park and wake with an error at every single call of the CUDA driver: contents, addresses, accounting and states are
right afterwards, or the error says what is lost; and nothing leaks. On the fake driver in its strict mode.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from lull.vmm.blocks import Allocation
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.errors import ContentsLost, LullMemoryError, RuntimeFailed
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from tests.driver_rigs import device_mappings, own_descriptors
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES, FakeCuda
from tests.memory import pattern

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
ILLEGAL_ADDRESS = 700
KEEPING = (RestoreMode.CPU, RestoreMode.PINNED)


@dataclass
class Engine:
    """Two tags, of which one has two modes; the weights are sealed after their first wake."""

    fake: FakeCuda
    driver: CudaDriver
    pool: Pool
    runtime: Runtime
    allocations: list[Allocation]
    contents: dict[Allocation, bytes]

    def write(self, seed: int) -> None:
        for number, allocation in enumerate(self.allocations):
            if self.pool.is_sealed(allocation):
                continue
            content = pattern(seed * 10 + number, allocation.nbytes)
            source = ctypes.create_string_buffer(content, len(content))
            self.driver.copy(allocation.address, ctypes.addressof(source), len(content))
            self.contents[allocation] = content

    def read(self, allocation: Allocation) -> bytes:
        back = ctypes.create_string_buffer(allocation.nbytes)
        self.driver.copy(ctypes.addressof(back), allocation.address, allocation.nbytes)
        return back.raw

    def require_contents(self) -> None:
        for allocation in self.allocations:
            if allocation.mode in KEEPING:
                assert self.read(allocation) == self.contents[allocation], allocation

    def require_bytes(self, *, parked: bool) -> None:
        taken_bytes = 0 if parked else sum(allocation.reserved_bytes for allocation in self.allocations)
        assert self.driver.capacity_bytes - self.driver.free_bytes() == self.pool.device_bytes() == taken_bytes
        count = 0 if parked else len(self.allocations)
        assert self.fake.live("mappings") == self.fake.live("handles") == count
        assert self.fake.live("reservations") == len(self.allocations)

    def close(self) -> None:
        self.pool.close()
        self.driver.close()


@pytest.fixture
def new_engine(new_fake_cuda: NewFakeCuda) -> Callable[[], Engine]:
    def make() -> Engine:
        fake = new_fake_cuda(strict=True)
        driver = CudaDriver(CudaDriver.devices()[0])
        pool = Pool(driver, immutable_tags={"model_weights"})
        allocations = [
            pool.allocate(GRANULE_BYTES + 5, "model_weights", RestoreMode.PINNED),
            pool.allocate(100, "model_extra", RestoreMode.CPU),
            pool.allocate(GRANULE_BYTES, "model_extra", RestoreMode.MEMSET),
        ]
        engine = Engine(fake, driver, pool, Runtime(pool), allocations, {})
        engine.write(1)
        return engine

    return make


def calls_of(engine: Engine, work: Callable[[], None]) -> int:
    before = engine.fake.calls("*")
    work()
    return engine.fake.calls("*") - before


def attempt(work: Callable[[], None]) -> LullMemoryError | None:
    try:
        work()
    except LullMemoryError as error:
        return error
    return None


def require_whole(engine: Engine) -> None:
    """Whatever happened, one more loan goes well and nothing of it stays."""
    if engine.runtime.status().state is MemoryState.PARKED:
        engine.require_bytes(parked=True)
        engine.runtime.resume()
    engine.require_bytes(parked=False)
    engine.require_contents()
    engine.write(2)
    engine.runtime.release()
    engine.require_bytes(parked=True)
    engine.runtime.resume()
    engine.require_bytes(parked=False)
    engine.require_contents()
    engine.close()
    assert set(engine.fake.everything_live().values()) == {0}
    assert engine.fake.live("contexts") == 0


@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY])
@pytest.mark.parametrize("loans_before", [0, 1])
def test_a_park_that_fails_at_any_call_is_undone(
    new_engine: Callable[[], Engine], error: int, loans_before: int
) -> None:
    count = calls_of_park(new_engine, loans_before)
    before = own_descriptors(), device_mappings()
    refused = 0
    for nth_call in range(1, count + 1):
        engine = engine_after(new_engine, loans_before)
        engine.fake.fail("*", error, nth_call=nth_call)
        if attempt(engine.runtime.release) is not None:
            refused += 1
            engine.fake.forget_faults()
            assert engine.runtime.status().state is MemoryState.RUNNING, f"call {nth_call} of {count}"
            engine.require_contents()
        engine.fake.forget_faults()
        require_whole(engine)
    engine.fake.reset()
    assert (own_descriptors(), device_mappings()) == before
    assert refused >= count // 4


def engine_after(new_engine: Callable[[], Engine], loans: int) -> Engine:
    engine = new_engine()
    for _ in range(loans):
        engine.runtime.release()
        engine.runtime.resume()
    return engine


def calls_of_park(new_engine: Callable[[], Engine], loans_before: int) -> int:
    engine = engine_after(new_engine, loans_before)
    count = calls_of(engine, engine.runtime.release)
    engine.fake.reset()
    return count


@pytest.mark.parametrize("error", [INVALID_VALUE, OUT_OF_MEMORY])
def test_a_wake_that_fails_at_any_call_leaves_everything_parked(new_engine: Callable[[], Engine], error: int) -> None:
    engine = new_engine()
    engine.runtime.release()
    count = calls_of(engine, engine.runtime.resume)
    refused = 0
    for nth_call in range(1, count + 1):
        engine = new_engine()
        engine.runtime.release()
        engine.fake.fail("*", error, nth_call=nth_call)
        if attempt(engine.runtime.resume) is not None:
            refused += 1
            assert engine.runtime.status().state is MemoryState.PARKED, f"call {nth_call} of {count}"
        engine.fake.forget_faults()
        require_whole(engine)
    assert refused > count // 3


@pytest.mark.parametrize("verb", ["release", "resume"])
def test_a_device_that_is_lost_at_any_call_fails_the_runtime(new_engine: Callable[[], Engine], verb: str) -> None:
    def begin() -> tuple[Engine, Callable[[], None]]:
        engine = new_engine()
        if verb == "resume":
            engine.runtime.release()
        return engine, getattr(engine.runtime, verb)

    engine, work = begin()
    count = calls_of(engine, work)
    for nth_call in range(1, count + 1):
        engine, work = begin()
        engine.fake.fail("*", ILLEGAL_ADDRESS, nth_call=nth_call)
        error = attempt(work)
        status = engine.runtime.status()
        assert status.state is MemoryState.FAILED, f"call {nth_call} of {count}: {error}"
        assert "ILLEGAL_ADDRESS" in (engine.runtime.failure or "") or isinstance(error, ContentsLost)
        with pytest.raises(RuntimeFailed, match="replace the process"):
            work()


def test_a_second_fault_while_undoing_says_what_is_lost(new_engine: Callable[[], Engine]) -> None:
    """The wake fails at its last map, and undoing it fails too: the runtime says so and is failed, not wrong."""
    engine = new_engine()
    engine.runtime.release()
    engine.fake.fail("cuMemMap", INVALID_VALUE, nth_call=3)
    engine.fake.fail("cuMemUnmap", INVALID_VALUE, nth_call=1)
    with pytest.raises(ContentsLost) as caught:
        engine.runtime.resume()
    assert caught.value.lost == ()
    assert set(caught.value.parked) == {"model_weights", "model_extra"}
    assert engine.runtime.status().state is MemoryState.FAILED
