"""The same service and the same clients over the CUDA driver, on a libcuda without a GPU."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.service.scratch import ScratchRange
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.memory_clients import A_BYTES, B_BYTES, Clients, memory_clients
from tests.memory_services import MIB, MemoryService, memory_service
from tests.waiting import wait_until

CAPACITY_BYTES = 16 * MIB


@dataclass
class Gpu:
    uuid: str
    service: MemoryService
    clients: Clients

    def free_bytes(self) -> int:
        driver = CudaDriver(self.uuid)
        try:
            return driver.free_bytes()
        finally:
            driver.close()


@pytest.fixture
def gpu(new_fake_cuda: NewFakeCuda, tmp_path: Path) -> Iterator[Gpu]:
    new_fake_cuda(granules=256)
    (uuid,) = CudaDriver.devices()
    with memory_service(tmp_path, uuid) as service, memory_clients(uuid, service.socket) as clients:
        yield Gpu(uuid, service, clients)


def test_attach_park_kill_and_wake_over_the_cuda_driver(gpu: Gpu) -> None:
    assert gpu.clients.life() == 0
    assert gpu.service.pool()["state"] == "committed"
    held_bytes = gpu.service.pool()["resident_bytes"]
    assert held_bytes >= A_BYTES + B_BYTES
    assert gpu.free_bytes() == CAPACITY_BYTES - held_bytes

    # Two engines, one copy; a write to what is read-only is fatal.
    first, second = gpu.clients.hold("w"), gpu.clients.hold("w")
    assert gpu.free_bytes() == CAPACITY_BYTES - held_bytes
    assert gpu.clients.write_to("w") == -signal.SIGSEGV
    gpu.clients.kill(first)
    gpu.clients.kill(second)
    wait_until(lambda: gpu.service.pool()["state"] == "committed", 10, "both forgotten")

    # Killed while parked: the next one finds everything.
    parked = gpu.clients.hold("w", "release")
    assert (gpu.service.pool()["state"], gpu.free_bytes()) == ("parked", CAPACITY_BYTES)
    gpu.clients.kill(parked)
    wait_until(lambda: gpu.service.pool()["parked_pids"] == [], 10, "the parked one forgotten")
    assert gpu.clients.life() == 0

    # Killed in the middle of writing: nothing of it is left.
    assert gpu.clients.life("half", kill_at=4) == -signal.SIGKILL
    wait_until(lambda: gpu.service.pool("half")["state"] == "gone", 10, "the half-built pool cleared")
    assert gpu.free_bytes() == CAPACITY_BYTES - held_bytes
    assert "Traceback" not in gpu.service.log()


def test_a_standby_s_range_costs_one_block_on_cuda_too(gpu: Gpu) -> None:
    driver = CudaDriver(gpu.uuid)
    scratch = ScratchRange(driver, 8 * MIB, block_bytes=MIB)
    assert driver.free_bytes() == CAPACITY_BYTES - MIB
    driver.set(scratch.address, 7, 8 * MIB)
    scratch.replace(driver.create)
    driver.set(scratch.address, 0, 8 * MIB)
    buffer = (ctypes.c_char * (8 * MIB))()
    driver.copy(ctypes.addressof(buffer), scratch.address, 8 * MIB)
    assert bytes(buffer) == bytes(8 * MIB)
    scratch.close()
    driver.close()


def test_a_gpu_has_one_service(gpu: Gpu, tmp_path: Path) -> None:
    second = MemoryService(gpu.uuid, tmp_path / "second" / "m.sock", tmp_path / "state2", gpu.service.environment)
    argv = [sys.executable, "-m", "lull.vmm.service", "--device", gpu.uuid, "--socket", str(second.socket)]
    environment = {**os.environ, **gpu.service.environment}
    refused = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert refused.returncode == 1
    assert f"another memory service serves it already (process {gpu.service.pid} on socket" in refused.stderr
    gpu.service.kill()
    second.start()
    assert second.stop() == 0


def test_data_outlives_its_writer_on_cuda_too(gpu: Gpu) -> None:
    assert gpu.clients.data_life() == 0
    gpu.clients.kill(gpu.clients.write_half())
    wait_until(lambda: gpu.service.pool("kv")["state"] == "sealed", 10, "the writer forgotten")
    assert gpu.service.pool("kv")["data"]["torn"] == 1
    assert gpu.clients.write_outside() == -signal.SIGSEGV
    assert gpu.clients.data_life() == 0
    assert gpu.service.pool("kv")["data"]["torn"] == 0
    assert gpu.clients.data_life(kill_at=12) == -signal.SIGKILL
    assert gpu.clients.data_life() == 0
    assert "Traceback" not in gpu.service.log()


def test_the_service_has_no_context_until_a_backup_is_asked_for(new_fake_cuda: NewFakeCuda, tmp_path: Path) -> None:
    context_bytes = 4 * GRANULE_BYTES
    new_fake_cuda(granules=256, context_granules=4)
    (uuid,) = CudaDriver.devices()
    with memory_service(tmp_path, uuid) as service, memory_clients(uuid, service.socket) as clients:
        gpu = Gpu(uuid, service, clients)
        own_bytes = CAPACITY_BYTES - gpu.free_bytes()  # asking takes a context as well
        assert own_bytes == context_bytes
        clients.kill(clients.hold("w"))
        wait_until(lambda: service.pool()["state"] == "committed", 10, "the writer forgotten")
        held_bytes = service.pool()["resident_bytes"]
        assert gpu.free_bytes() == CAPACITY_BYTES - own_bytes - held_bytes
        assert clients.life() == 0
        assert gpu.free_bytes() == CAPACITY_BYTES - own_bytes - held_bytes - context_bytes
