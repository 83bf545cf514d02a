"""The random programs of test_pool_machine over the CUDA driver on the fake, whose functions fail."""

from __future__ import annotations

import os
from unittest import mock

from hypothesis import HealthCheck, settings

from lull.vmm.cuda_driver import CudaDriver
from tests.fake_cuda.library import FakeCuda, environment, load
from tests.stateful.vmm.test_pool_machine import DEVICE_PAGES, FAULTY_VERBS, PAGE_BYTES, PoolMachine

INVALID_VALUE = 1
OUT_OF_MEMORY = 2
FUNCTION_OF = {
    "reserve": "cuMemAddressReserve",
    "free_address": "cuMemAddressFree",
    "create": "cuMemCreate",
    "map": "cuMemMap",
    "set_access": "cuMemSetAccess",
    "unmap": "cuMemUnmap",
    "release": "cuMemRelease",
    "copy": "cuMemcpyAsync",
    "set": "cuMemsetD8Async",
    "synchronize": "cuCtxSynchronize",
    "free_bytes": "cuMemGetInfo",
    "open_lane": "cuEventCreate",
    "pin_host": "cuMemHostRegister",
    "unpin_host": "cuMemHostUnregister",
}


class FaultyCudaDriver(CudaDriver):
    fake: FakeCuda

    def clear_faults(self) -> None:
        self.fake.forget_faults()


class CudaPoolMachine(PoolMachine):
    def open_device(self) -> None:
        self.fake = load()
        settings_of_fake = environment(self.directory, granules=DEVICE_PAGES, granule_bytes=PAGE_BYTES)
        self.environment = mock.patch.dict(os.environ, settings_of_fake)
        self.environment.start()
        self.fake.reset()
        uuid = CudaDriver.devices()[0]
        self.driver = FaultyCudaDriver(uuid)  # type: ignore[assignment]
        self.driver.fake = self.fake  # type: ignore[attr-defined]
        self.neighbour = CudaDriver(uuid)  # type: ignore[assignment]
        self.device = self.neighbour  # type: ignore[assignment] # for its capacity and free bytes

    def inject(self, chosen: list[tuple[str, int]]) -> None:
        for verb, nth_call in chosen:
            error = OUT_OF_MEMORY if verb == "create" else INVALID_VALUE
            self.fake.fail(FUNCTION_OF[verb], error, nth_call=nth_call)

    def teardown(self) -> None:
        super().teardown()
        if not self.lost_bytes:
            assert self.fake.live("mappings") == 0
            assert self.borrowed_bytes or self.fake.live("handles") == 0
        self.environment.stop()
        self.fake.reset()


def test_every_verb_that_fails_has_a_function() -> None:
    assert set(FUNCTION_OF) == set(FAULTY_VERBS)


CudaPoolMachine.TestCase.settings = settings(
    max_examples=40, stateful_step_count=25, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
TestCudaPoolMachine = CudaPoolMachine.TestCase
