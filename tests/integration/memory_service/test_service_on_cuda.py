"""The memory service on a CUDA device: it makes and exports, engines import and map. On the fake driver."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.service.pool import Piece, ServicePool
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.memory_services import memory_service

WEIGHTS_BYTES = 3 * GRANULE_BYTES


def read(pool: ServicePool, nbytes: int) -> bytes:
    back = ctypes.create_string_buffer(nbytes)
    pool.driver.copy(ctypes.addressof(back), pool.regions()["w"].address, nbytes)
    return back.raw


def test_weights_on_a_cuda_device_are_shared_parked_and_woken(tmp_path: Path, new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(strict=True)
    uuid = CudaDriver.devices()[0]
    content = os.urandom(WEIGHTS_BYTES)
    with memory_service(tmp_path, uuid) as service:
        first = ServicePool(CudaDriver(uuid), service.socket, "w")
        assert first.writer
        region = first.build({"w": Piece(WEIGHTS_BYTES)})["w"]
        source = ctypes.create_string_buffer(content, WEIGHTS_BYTES)
        first.driver.copy(region.address, ctypes.addressof(source), WEIGHTS_BYTES)
        first.commit()
        second = ServicePool(CudaDriver(uuid), service.socket, "w")
        assert not second.writer
        assert read(second, WEIGHTS_BYTES) == content
        assert first.driver.capacity_bytes - first.driver.free_bytes() == WEIGHTS_BYTES  # one copy of them
        for pool in (first, second):
            pool.prepare_release(["model_weights"])
            pool.commit_release()
        assert first.driver.free_bytes() == first.driver.capacity_bytes
        assert service.pool()["backup_bytes"] >= WEIGHTS_BYTES
        for pool in (first, second):
            pool.prepare_resume(["model_weights"])
            pool.commit_resume()
            assert read(pool, WEIGHTS_BYTES) == content
        first.close()
        second.close()
        assert service.stop() == 0
