"""Every short program over a pool, with every single driver call of it failing once.

After each step the model says what contents, addresses, bytes and states must be; at the end nothing is left of the
pool in the process: descriptors, mappings, backups, as the operating system counts them.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm.blocks import Allocation
from lull.vmm.driver import Access, Handle
from lull.vmm.errors import AlreadyParked, ContentsLost, DriverError, LullMemoryError, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from tests.memory import mapped_memfds, memfd_bytes, pattern, read, write

PAGE_BYTES = 4096
KEPT = {"model": RestoreMode.CPU, "sampler": RestoreMode.PINNED}
IMMUTABLE = "sampler"


class CountingDriver(HostDriver):
    """Remembers its calls in order, so that each can be made to fail in a second run."""

    def __init__(self, device: HostDevice) -> None:
        self.sequence: list[str] = []
        super().__init__(device, granularity_bytes=PAGE_BYTES)

    def _enter(self, verb: str, nbytes: int | None = None) -> None:
        self.sequence.append(verb)
        super()._enter(verb, nbytes)


class World:
    def __init__(self, device: HostDevice) -> None:
        self.device = device
        self.driver = CountingDriver(device)
        self.pool = Pool(self.driver, immutable_tags={IMMUTABLE}, copy_threads=1)
        self.runtime = Runtime(self.pool, drain_seconds_max=0)
        self.contents: dict[Allocation, bytes] = {}
        self.parked: frozenset[str] = frozenset()
        self.failed = False
        for tag, mode in KEPT.items():
            self.add(self.pool.allocate(PAGE_BYTES + 1, tag, mode))
        self.pool.allocate(PAGE_BYTES, "kv_cache")
        self.spares = [self.make_elsewhere() for _ in range(2)]
        self.driver.sequence.clear()

    def make_elsewhere(self) -> tuple[Allocation, Handle]:
        """What another allocator would have made."""
        address, handle = self.driver.reserve(PAGE_BYTES), self.driver.create(PAGE_BYTES)
        self.driver.map(address, PAGE_BYTES, handle)
        self.driver.set_access(address, PAGE_BYTES, Access.READ_WRITE)
        return Allocation(address, PAGE_BYTES, PAGE_BYTES, "model", RestoreMode.CPU), handle

    def add(self, allocation: Allocation) -> None:
        self.contents[allocation] = pattern(len(self.contents), allocation.nbytes)
        write(allocation, self.contents[allocation])

    # -- steps

    def release(self, tags: list[str]) -> None:
        self.runtime.release(tags)
        self.parked = self.parked or frozenset(tags)

    def resume(self, tags: list[str] | None) -> None:
        self.runtime.resume(tags)
        self.parked = self.parked.difference(self.parked if tags is None else tags)

    def abort_park(self) -> None:
        if self.runtime.prepare_release(["model", "kv_cache"]):
            self.runtime.abort_release()

    def abort_wake(self) -> None:
        if self.runtime.prepare_resume():
            self.runtime.abort_resume()

    def allocate(self) -> None:
        if "model" not in self.parked:
            self.add(self.pool.allocate(2 * PAGE_BYTES, "model"))

    def free(self) -> None:
        """The oldest of its tag, live or parked."""
        for allocation in self.pool.allocations("model")[:1]:
            self.contents.pop(allocation, None)
            self.pool.free(allocation)

    def adopt(self) -> None:
        if "model" not in self.parked and self.spares:
            allocation, handle = self.spares.pop()
            self.pool.adopt(allocation, handle)
            self.add(allocation)

    # -- the truth

    def check(self, leaving: bool) -> None:
        status = self.runtime.status()
        if self.failed:
            assert status.state is MemoryState.FAILED
            return
        assert status.state is (MemoryState.PARKED if self.parked else MemoryState.RUNNING)
        assert frozenset(status.parked_tags) == self.parked
        used_bytes = self.device.capacity_bytes - self.device.free_bytes()
        assert used_bytes == self.pool.device_bytes() + PAGE_BYTES * len(self.spares)
        here = [allocation for allocation in self.pool.allocations() if allocation.tag not in self.parked]
        if not leaving:
            assert self.pool.device_bytes() == sum(allocation.reserved_bytes for allocation in here)
        for allocation, content in self.contents.items():
            if allocation.tag not in self.parked:
                assert read(allocation) == content

    def end(self) -> None:
        """The fault is over: everything can be had again, and nothing stays."""
        self.driver.clear_faults()
        if not self.failed:
            self.runtime.resume()
            self.parked = frozenset()
            for allocation, content in self.contents.items():
                assert read(allocation) == content
        for allocation, handle in self.spares:
            self.driver.unmap(allocation.address, allocation.reserved_bytes)
            self.driver.release(handle)
            self.driver.free_address(allocation.address, allocation.reserved_bytes)
        self.pool.close()
        assert self.pool.backup_bytes() == 0
        assert self.device.free_bytes() == self.device.capacity_bytes


Step = Callable[[World], None]
STEPS: dict[str, Step] = {
    "release all": lambda world: world.release(["model", "sampler", "kv_cache"]),
    "release model": lambda world: world.release(["model"]),
    "resume all": lambda world: world.resume(None),
    "resume model": lambda world: world.resume(["model"]),
    "abort a park": lambda world: world.abort_park() if not world.parked else None,
    "abort a wake": World.abort_wake,
    "allocate": World.allocate,
    "free": World.free,
    "adopt": World.adopt,
}


def run(device: HostDevice, program: tuple[str, ...], fault: tuple[str, int] | None) -> list[str]:
    """The driver calls that were made, in order."""
    world = World(device)
    if fault is not None:
        verb, nth_call = fault
        error = OutOfDeviceMemory(1, 0, 1) if verb == "create" else DriverError(verb, "injected")
        world.driver.inject(verb, error, nth_call=nth_call)
    leaving = False
    for name in program:
        try:
            STEPS[name](world)
        except ContentsLost:
            world.failed = True
            break
        except AlreadyParked:
            pass  # more than what is parked: refused, and nothing has changed
        except LullMemoryError:
            if fault is None:
                raise
            leaving = leaving or name == "free"
        world.check(leaving)
    made = list(world.driver.sequence)
    world.end()
    return made


def backups_mapped() -> int:
    """Mappings of this process that no child inherits: ours alone."""
    with open("/proc/self/smaps", encoding="utf-8") as lines:
        return sum(line.startswith("VmFlags:") and " dc" in line for line in lines)


def run_with_every_fault(device: HostDevice, program: tuple[str, ...]) -> int:
    made = run(device, program, None)
    counts: dict[str, int] = {}
    for verb in made:
        counts[verb] = counts.get(verb, 0) + 1
        run(device, program, (verb, counts[verb]))
    return len(made)


def check_all(path: Path, length: int) -> None:
    device = HostDevice.create(path / "device", capacity_bytes=64 * PAGE_BYTES)
    descriptors, mappings = len(os.listdir("/proc/self/fd")), backups_mapped()
    calls = sum(run_with_every_fault(device, program) for program in itertools.product(STEPS, repeat=length))
    assert calls > len(STEPS) ** length  # they did reach the driver
    assert memfd_bytes(os.getpid(), device.uuid) == 0
    assert mapped_memfds(os.getpid(), device.uuid) == 0
    assert len(os.listdir("/proc/self/fd")) == descriptors
    assert backups_mapped() == mappings


def test_all_programs_of_two_steps(tmp_path: Path) -> None:
    check_all(tmp_path, 2)


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_all_programs_of_three_steps(tmp_path: Path) -> None:
    check_all(tmp_path, 3)
