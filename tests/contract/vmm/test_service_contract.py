"""The memory service on a CUDA device: it makes, keeps and exports the memory; engines import and map it."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

from lull.vmm.host_driver import HostDriver
from lull.vmm.service.pool import Piece, ServicePool
from tests.driver_rigs import Rig
from tests.memory_services import memory_service

CONTENT_BYTES = 16 << 10


def read(pool: ServicePool) -> bytes:
    """Both ends of it."""
    region = pool.regions()["w"]
    back = ctypes.create_string_buffer(2 * CONTENT_BYTES)
    pool.driver.copy(ctypes.addressof(back), region.address, CONTENT_BYTES)
    end = region.address + region.nbytes - CONTENT_BYTES
    pool.driver.copy(ctypes.addressof(back) + CONTENT_BYTES, end, CONTENT_BYTES)
    return back.raw


def test_weights_are_shared_parked_and_woken(rig: Rig, tmp_path: Path) -> None:
    if isinstance(rig.driver, HostDriver):
        return  # the service has tests of its own for these
    free_bytes = rig.driver.free_bytes()
    content = os.urandom(2 * CONTENT_BYTES)
    with memory_service(tmp_path, rig.driver.device_uuid, environment=rig.environment) as service:
        first = ServicePool(rig.new_driver(), service.socket, "w")
        assert first.writer
        region = first.build({"w": Piece(2 * rig.unit_bytes)})["w"]
        source = ctypes.create_string_buffer(content, len(content))
        end = region.address + region.nbytes - CONTENT_BYTES
        first.driver.copy(region.address, ctypes.addressof(source), CONTENT_BYTES)
        first.driver.copy(end, ctypes.addressof(source) + CONTENT_BYTES, CONTENT_BYTES)
        first.commit()
        second = ServicePool(rig.new_driver(), service.socket, "w")
        assert not second.writer
        assert read(second) == content
        # One copy of them. The service has no context, which would take room of its own, until it keeps a backup.
        assert rig.is_free(free_bytes - 2 * rig.unit_bytes)
        for pool in (first, second):
            pool.release(["model_weights"])
        assert rig.driver.free_bytes() > free_bytes - rig.unit_bytes - rig.context_bytes_max
        assert service.pool()["backup_bytes"] >= 2 * rig.unit_bytes
        for pool in (first, second):
            pool.resume(["model_weights"])
            assert read(pool) == content
        first.close()
        second.close()
        assert service.stop() == 0
