"""A memory service has a CUDA context, which takes room on the device, only once it keeps a backup. On the fake."""

from __future__ import annotations

from pathlib import Path

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.service.pool import Piece, ServicePool
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.memory_services import memory_service

CONTEXT_GRANULES = 4


def test_a_service_takes_a_context_only_for_backups(tmp_path: Path, new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(context_granules=CONTEXT_GRANULES)
    driver = CudaDriver(CudaDriver.devices()[0])

    def taken_granules() -> int:
        return (driver.capacity_bytes - driver.free_bytes()) // GRANULE_BYTES

    with memory_service(tmp_path, driver.device_uuid) as service:
        assert taken_granules() == CONTEXT_GRANULES  # our own
        pool = ServicePool(driver, service.socket, "w")
        pool.build({"w": Piece(2 * GRANULE_BYTES)})
        pool.commit()
        service.state()
        assert taken_granules() == CONTEXT_GRANULES + 2
        pool.release(["model_weights"])
        assert taken_granules() == 2 * CONTEXT_GRANULES
        pool.resume(["model_weights"])
        pool.close()
