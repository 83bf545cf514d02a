"""Two engines and a service in random order: parks, wakes, deaths of either. What is readable is right, always."""

from __future__ import annotations

import ctypes
import shutil
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lull.vmm.errors import ContentsLost
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.pool import Piece, ServicePool
from tests.memory_clients import TAG
from tests.memory_services import MIB, MemoryService

pytestmark = pytest.mark.long
ENGINES = (0, 1)
BYTES = 3 * MIB


class EnginesAndService(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="lull-memory-"))
        self.device = HostDevice.create(self.root / "device", capacity_bytes=64 * MIB)
        self.service = MemoryService(str(self.device.path), self.root / "s" / "m.sock", self.root / "state", {})
        self.service.start()
        self.pools: dict[int, ServicePool] = {}
        self.may_be_lost = False  # the service has died while somebody was parked
        for engine in ENGINES:
            self._attach(engine)

    def teardown(self) -> None:
        if hasattr(self, "service"):
            for pool in self.pools.values():
                pool.close()
            assert self.service.stop() == 0
            shutil.rmtree(self.root)

    def _attach(self, engine: int) -> None:
        pool = ServicePool(HostDriver(self.device), self.service.socket, "w", wait_seconds=20)
        if pool.writer:
            region = pool.build({"x": Piece(BYTES)})["x"]
            ctypes.memset(region.address, 0x5A, BYTES)
            pool.commit()
        self.pools[engine] = pool

    def _parked(self, engine: int) -> bool:
        return TAG in self.pools[engine].parked_tags()

    @rule(engine=st.sampled_from(ENGINES))
    def park(self, engine: int) -> None:
        self.pools[engine].release([TAG])
        assert self._parked(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def begin_to_park(self, engine: int) -> None:
        before = self._parked(engine)
        self.pools[engine].prepare_release([TAG])
        self.pools[engine].abort_release()
        assert self._parked(engine) is before

    @rule(engine=st.sampled_from(ENGINES), undone=st.booleans())
    def wake(self, engine: int, undone: bool) -> None:
        pool = self.pools[engine]
        before = self._parked(engine)
        try:
            pool.prepare_resume([TAG])
        except ContentsLost:
            assert self.may_be_lost
            self.crash(engine)
            return
        if undone:
            pool.abort_resume()
            assert self._parked(engine) is before
        else:
            pool.commit_resume()
            assert not self._parked(engine)

    @rule(engine=st.sampled_from(ENGINES))
    def crash(self, engine: int) -> None:
        """Its connection and mappings go, as with its process; another one takes its place."""
        self.pools.pop(engine).close()
        self._attach(engine)

    @precondition(lambda self: hasattr(self, "service"))
    @rule()
    def the_service_dies(self) -> None:
        self.may_be_lost = self.may_be_lost or any(self._parked(engine) for engine in ENGINES)
        self.service.kill()
        self.service.start()

    @invariant()
    def whoever_runs_reads_what_was_committed(self) -> None:
        for engine in getattr(self, "pools", {}):
            if not self._parked(engine):
                region = self.pools[engine].regions()["x"]
                assert ctypes.string_at(region.address, BYTES) == b"\x5a" * BYTES

    @invariant()
    def what_is_given_back_is_gone(self) -> None:
        if not hasattr(self, "service") or not all(self._parked(engine) for engine in ENGINES):
            return
        assert self.service.device_bytes(self.device.uuid) == 0
        drivers = [pool.driver for pool in self.pools.values()]
        assert all(driver.free_bytes() == driver.capacity_bytes for driver in drivers)


EnginesAndService.TestCase.settings = settings(max_examples=10, stateful_step_count=15, deadline=None)
TestEnginesAndService = EnginesAndService.TestCase
