"""Random programs over a runtime with a failing driver and a neighbour on the same device.

Whatever fails: contents, addresses, accounting and states are what the model says, or ContentsLost says what is not.
"""

from __future__ import annotations

import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    MultipleResults,
    RuleBasedStateMachine,
    consumes,
    invariant,
    multiple,
    precondition,
    rule,
)

from lull.vmm.blocks import Allocation
from lull.vmm.driver import Access, Handle
from lull.vmm.errors import ContentsLost, DriverError, LullMemoryError, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import VERBS, HostDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import KEEPS_CONTENTS, RestoreMode
from tests.memory import pattern, read, write

PAGE_BYTES = 4096
DEVICE_PAGES = 24
TAGS = ("model", "kv_cache", "sampler")
IMMUTABLE = "sampler"
FAULTY_VERBS = sorted(VERBS - {"export_handle", "import_handle"})

tag_sets = st.lists(st.sampled_from(TAGS), min_size=1, max_size=3, unique=True)
faults = st.lists(st.tuples(st.sampled_from(FAULTY_VERBS), st.integers(1, 3)), max_size=3)


@dataclass
class Expected:
    address: int
    content: bytes | None  # None: not defined, because its mode does not keep it


class PoolMachine(RuleBasedStateMachine):
    allocations: Bundle[Allocation] = Bundle("allocations")
    borrowed: Bundle[Handle] = Bundle("borrowed")

    def __init__(self) -> None:
        super().__init__()
        self.directory = Path(tempfile.mkdtemp(prefix="lull-pool-"))
        self.open_device()
        self.pool = Pool(self.driver, immutable_tags={IMMUTABLE})
        self.runtime = Runtime(self.pool, drain_seconds_max=0)
        self.model: dict[Allocation, Expected] = {}
        self.leaving: set[Allocation] = set()
        self.parked: set[str] = set()
        self.borrowed_bytes = 0
        self.lost_bytes = 0  # what an error said could not be given back
        self.failed: ContentsLost | None = None

    def open_device(self) -> None:
        """Two drivers of one device, of which ours can be made to fail."""
        self.device = HostDevice.create(self.directory / "device", capacity_bytes=DEVICE_PAGES * PAGE_BYTES)
        self.driver = HostDriver(self.device, granularity_bytes=PAGE_BYTES)
        self.neighbour = HostDriver(self.device, granularity_bytes=PAGE_BYTES)

    def teardown(self) -> None:
        self.driver.clear_faults()
        self.pool.close()
        shutil.rmtree(self.directory)

    def inject(self, chosen: list[tuple[str, int]]) -> None:
        for verb, nth_call in chosen:
            error = OutOfDeviceMemory(1, 0, 1) if verb == "create" else DriverError(verb, "injected")
            self.driver.inject(verb, error, nth_call=nth_call)

    @rule(
        target=allocations,
        nbytes=st.integers(1, 3 * PAGE_BYTES),
        tag=st.sampled_from(TAGS),
        mode=st.sampled_from(RestoreMode),
        chosen=faults,
    )
    def allocate(
        self, nbytes: int, tag: str, mode: RestoreMode, chosen: list[tuple[str, int]]
    ) -> Allocation | MultipleResults[Allocation]:
        self.inject(chosen)
        try:
            allocation = self.pool.allocate(nbytes, tag, mode)
        except LullMemoryError as error:
            if getattr(error, "__notes__", ()):
                self.lost_bytes = self.device.capacity_bytes - self.device.free_bytes() - self.known_bytes()
            return multiple()
        finally:
            self.driver.clear_faults()
        assert tag not in self.parked
        assert read(allocation) == bytes(nbytes)
        self.model[allocation] = Expected(allocation.address, bytes(nbytes))
        return allocation

    @rule(allocation=allocations, seed=st.integers(0, 1 << 16))
    def write_to(self, allocation: Allocation, seed: int) -> None:
        if allocation not in self.model or self.failed or allocation.tag in self.parked or allocation in self.leaving:
            return
        if allocation.tag == IMMUTABLE:
            self.pool.unseal([IMMUTABLE])
        content = pattern(seed, allocation.nbytes)
        write(allocation, content)
        self.model[allocation].content = content

    @rule(allocation=allocations, chosen=faults)
    def free(self, allocation: Allocation, chosen: list[tuple[str, int]]) -> None:
        if allocation not in self.model:
            return
        self.inject(chosen)
        try:
            self.pool.free(allocation)
        except LullMemoryError:
            self.leaving.add(allocation)
        else:
            self.leaving.discard(allocation)
            del self.model[allocation]
        finally:
            self.driver.clear_faults()

    @precondition(lambda self: self.failed is None)
    @rule(
        target=allocations,
        pages=st.integers(1, 3),
        tag=st.sampled_from(TAGS),
        mode=st.sampled_from(RestoreMode),
    )
    def adopt(self, pages: int, tag: str, mode: RestoreMode) -> Allocation | MultipleResults[Allocation]:
        """Memory that another allocator has made."""
        nbytes = pages * PAGE_BYTES
        if tag in self.parked or (tag == IMMUTABLE and mode not in KEEPS_CONTENTS):
            return multiple()
        try:
            handle = self.driver.create(nbytes)
        except OutOfDeviceMemory:
            return multiple()
        address = self.driver.reserve(nbytes)
        self.driver.map(address, nbytes, handle)
        self.driver.set_access(address, nbytes, Access.READ_WRITE)
        allocation = Allocation(address, nbytes - 5, nbytes, tag, mode)
        self.pool.adopt(allocation, handle)
        self.model[allocation] = Expected(address, bytes(nbytes - 5))
        return allocation

    @precondition(lambda self: self.failed is None)
    @rule(allocation=allocations)
    def forget(self, allocation: Allocation) -> None:
        """Whoever made it takes it back, live or parked."""
        if allocation not in self.model or allocation in self.leaving:
            return
        handle = self.pool.forget(allocation)
        assert (handle is None) is (allocation.tag in self.parked)
        if handle is not None:
            self.driver.unmap(allocation.address, allocation.reserved_bytes)
            self.driver.release(handle)
        self.driver.free_address(allocation.address, allocation.reserved_bytes)
        del self.model[allocation]

    @rule(target=borrowed, pages=st.integers(1, DEVICE_PAGES))
    def neighbour_takes(self, pages: int) -> Handle | MultipleResults[Handle]:
        try:
            handle = self.neighbour.create(pages * PAGE_BYTES)
        except OutOfDeviceMemory:
            assert pages * PAGE_BYTES > self.device.free_bytes()
            return multiple()
        self.borrowed_bytes += handle.nbytes
        return handle

    @rule(handle=consumes(borrowed))
    def neighbour_gives(self, handle: Handle) -> None:
        self.neighbour.release(handle)
        self.borrowed_bytes -= handle.nbytes

    @precondition(lambda self: self.failed is None)
    @rule(tags=tag_sets, chosen=faults)
    def release(self, tags: list[str], chosen: list[tuple[str, int]]) -> None:
        before = set(self.parked)
        self.inject(chosen)
        try:
            self.runtime.release(tags)
        except ContentsLost as error:
            self.failed = error
        except LullMemoryError:
            self.forget_contents({tag for tag in tags if tag not in before}, at_most_zeroed=True)
        else:
            if not before:
                self.parked = set(tags)
                self.forget_contents(self.parked, at_most_zeroed=False)
        finally:
            self.driver.clear_faults()

    @precondition(lambda self: self.failed is None)
    @rule(tags=st.none() | tag_sets, chosen=faults)
    def resume(self, tags: list[str] | None, chosen: list[tuple[str, int]]) -> None:
        self.inject(chosen)
        try:
            self.runtime.resume(tags)
        except ContentsLost as error:
            self.failed = error
        except LullMemoryError:
            pass  # still parked: the invariants say so
        else:
            self.parked.difference_update(self.parked if tags is None else tags)
        finally:
            self.driver.clear_faults()

    @precondition(lambda self: self.failed is None and not self.parked)
    @rule(tags=tag_sets, chosen=faults)
    def abort_a_release(self, tags: list[str], chosen: list[tuple[str, int]]) -> None:
        """Whether it can be prepared or not: nothing has changed, of no mode's contents."""
        self.inject(chosen)
        try:
            prepared = self.runtime.prepare_release(tags)
        except LullMemoryError as error:
            assert not isinstance(error, ContentsLost)  # noqa: PT017  any other is welcome
            prepared = False
        finally:
            self.driver.clear_faults()
        if prepared:
            self.runtime.abort_release()

    @precondition(lambda self: self.failed is None and self.parked)
    @rule(tags=st.none() | tag_sets, chosen=faults)
    def abort_a_resume(self, tags: list[str] | None, chosen: list[tuple[str, int]]) -> None:
        self.inject(chosen)
        try:
            if self.runtime.prepare_resume(tags):
                self.driver.clear_faults()
                self.runtime.abort_resume()
        except ContentsLost as error:
            self.failed = error
        except LullMemoryError:
            pass  # still parked: the invariants say so
        finally:
            self.driver.clear_faults()

    def forget_contents(self, tags: set[str], *, at_most_zeroed: bool) -> None:
        """MEMSET is zero after a park; after a park that was undone it may be either, as NONE always may."""
        for allocation, expected in self.model.items():
            if allocation.tag in tags and allocation.mode not in KEEPS_CONTENTS:
                zeroed = allocation.mode is RestoreMode.MEMSET and not at_most_zeroed
                expected.content = bytes(allocation.nbytes) if zeroed else None

    def known_bytes(self) -> int:
        return self.pool.device_bytes() + self.borrowed_bytes

    @invariant()
    def addresses_are_what_they_were(self) -> None:
        assert set(self.pool.allocations()) == set(self.model)
        assert all(allocation.address == expected.address for allocation, expected in self.model.items())

    @invariant()
    def contents_are_what_was_written(self) -> None:
        if self.failed is not None:
            return
        for allocation, expected in self.model.items():
            if expected.content is None or allocation.tag in self.parked or allocation in self.leaving:
                continue
            assert read(allocation) == expected.content

    @invariant()
    def a_failure_says_what_is_lost(self) -> None:
        if self.failed is None:
            return
        assert self.failed.lost == ()  # every backup is good before anything is given back
        backups = {tag: [bytes(view) for view in self.pool.backup_views(tag)] for tag in self.failed.parked}
        for allocation, expected in self.model.items():
            kept = allocation.mode in KEEPS_CONTENTS and allocation not in self.leaving
            if kept and allocation.tag in self.failed.parked:
                assert expected.content in backups[allocation.tag]

    @invariant()
    def states_and_accounting_agree(self) -> None:
        status = self.runtime.status()
        if self.failed is not None:
            assert status.state is MemoryState.FAILED
        else:
            assert status.state is (MemoryState.PARKED if self.parked else MemoryState.RUNNING)
            assert status.parked_tags == tuple(sorted(self.parked))
            live = [a for a in self.model if a.tag not in self.parked and a not in self.leaving]
            leaving_bytes = sum(a.reserved_bytes for a in self.leaving)
            assert 0 <= self.pool.device_bytes() - sum(a.reserved_bytes for a in live) <= leaving_bytes
            if not self.parked and not self.leaving:
                pinned = [a for a in live if a.mode is RestoreMode.PINNED or a.tag == IMMUTABLE]
                assert self.pool.backup_bytes() <= sum(a.reserved_bytes for a in pinned)
        used_bytes = self.device.capacity_bytes - self.device.free_bytes()
        assert used_bytes == self.known_bytes() + self.lost_bytes


PoolMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestPoolMachine = PoolMachine.TestCase
