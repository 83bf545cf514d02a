"""A data pool through random writes, parks, takeovers and deaths of its service: whole, torn or lost, as was said."""

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
from lull.vmm.service.data_pool import DataPool
from lull.vmm.service.pool import Piece
from tests.memory_services import MIB, MemoryService

pytestmark = pytest.mark.long
KEYS = ("a", "b", "c")  # a and b share an allocation
BESIDE = {"a": {"a", "b"}, "b": {"a", "b"}, "c": {"c"}}
BYTES = MIB // 2
TAG = "kv_cache"


class DataAndService(RuleBasedStateMachine):
    @initialize()
    def begin(self) -> None:
        self.root = Path(tempfile.mkdtemp(prefix="lull-memory-"))
        self.device = HostDevice.create(self.root / "device", capacity_bytes=64 * MIB)
        self.service = MemoryService(str(self.device.path), self.root / "s" / "m.sock", self.root / "state", {})
        self.service.start()
        self.handed = True  # the service that runs has this pool
        self.attach(fresh=True)

    def teardown(self) -> None:
        if hasattr(self, "service"):
            self.pool.close()
            assert self.service.stop() == 0
            shutil.rmtree(self.root)

    def attach(self, *, fresh: bool) -> None:
        self.pool = DataPool(HostDriver(self.device), self.service.socket, "kv", wait_seconds=20)
        assert self.pool.adopted is not fresh
        self.pool.build({key: Piece(BYTES) for key in KEYS}, slab_bytes=2 * BYTES)
        self.pool.seal()
        if fresh:
            self.values: dict[str, int] = dict.fromkeys(KEYS, 0)
            self.torn: set[str] = set()
        self.parked = False

    @precondition(lambda self: not self.parked)
    @rule(key=st.sampled_from(KEYS), value=st.integers(1, 255))
    def write(self, key: str, value: int) -> None:
        with self.pool.writing(key) as regions:
            ctypes.memset(regions[key].address, value, BYTES)
        self.values[key] = value
        self.torn.discard(key)

    @precondition(lambda self: not self.parked)
    @rule(key=st.sampled_from(KEYS))
    def write_half(self, key: str) -> None:
        with pytest.raises(InterruptedError), self.pool.writing(key):
            raise InterruptedError
        self.torn |= BESIDE[key]

    @precondition(lambda self: not self.parked)
    @rule(undone=st.booleans())
    def park(self, undone: bool) -> None:
        self.pool.prepare_release([TAG])
        self.handed = True
        if undone:
            self.pool.abort_release()
        else:
            self.pool.commit_release()
            self.parked = True

    @precondition(lambda self: self.parked)
    @rule(undone=st.booleans())
    def wake(self, undone: bool) -> None:
        try:
            self.pool.prepare_resume([TAG])
        except ContentsLost:
            assert not self.handed, "only a service that died takes what is parked in it"
            self.take_over()
            return
        assert self.handed
        if undone:
            self.pool.abort_resume()
        else:
            self.pool.commit_resume()
            self.parked = False

    @rule()
    def take_over(self) -> None:
        """The engine ends, and the next one adopts, or builds anew where the service does not have it."""
        self.pool.close()
        self.attach(fresh=not self.handed)
        self.handed = True

    @rule()
    def the_service_dies(self) -> None:
        self.service.kill()
        self.service.start()
        self.handed = False

    @invariant()
    def what_is_not_torn_is_what_was_last_written(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert set(self.pool.torn) == self.torn
        if self.parked:
            if self.handed:
                assert self.service.device_bytes(self.device.uuid) == 0
            return
        for key in set(KEYS) - self.torn:
            region = self.pool.regions()[key]
            assert ctypes.string_at(region.address, BYTES) == bytes([self.values[key]]) * BYTES


DataAndService.TestCase.settings = settings(max_examples=12, stateful_step_count=20, deadline=None)
TestDataAndService = DataAndService.TestCase
