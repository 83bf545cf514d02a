"""The fake NVML under the unmodified nvidia-ml-py: what processes hold through the fake CUDA driver, and its faults."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pynvml
import pytest

from lull.vmm.cuda_driver import CudaDriver
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.fake_nvml.library import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NOT_SUPPORTED, FakeNvml, gpu_uuid, load

nvml: Any = pynvml
CHILD = """
import sys
from lull.vmm.cuda_driver import CudaDriver
driver = CudaDriver(CudaDriver.devices()[0])
driver.create(3 * driver.granularity())
print("holds", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def faults(new_fake_cuda: NewFakeCuda) -> Iterator[FakeNvml]:
    load()
    new_fake_cuda(granules=32, devices=2)
    yield begin()
    nvml.nvmlShutdown()


def begin() -> FakeNvml:
    CudaDriver.devices()  # the machine exists from the first use of its driver on
    faults = FakeNvml(Path(os.environ["FAKE_CUDA_STATE"]))
    nvml.nvmlInit()
    return faults


def held(device: Any) -> dict[int, int | None]:
    return {one.pid: one.usedGpuMemory for one in nvml.nvmlDeviceGetComputeRunningProcesses(device)}


def test_it_tells_what_processes_hold_and_nothing_of_the_dead(faults: FakeNvml) -> None:
    assert [nvml.nvmlDeviceGetUUID(nvml.nvmlDeviceGetHandleByIndex(i)) for i in range(2)] == CudaDriver.devices()
    device = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))
    with subprocess.Popen([sys.executable, "-c", CHILD], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"holds\n"
        assert held(device) == {child.pid: 3 * GRANULE_BYTES}
        assert held(nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(1))) == {}
        memory = nvml.nvmlDeviceGetMemoryInfo(device)
        assert (memory.total, memory.used, memory.free) == tuple(n * GRANULE_BYTES for n in (32, 3, 29))
        child.kill()
    assert held(device) == {}
    assert nvml.nvmlDeviceGetMemoryInfo(device).free == 32 * GRANULE_BYTES


def test_a_lost_gpu_answers_so_to_everything_and_one_off_the_bus_is_not_found(faults: FakeNvml) -> None:
    device = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))
    faults.begin("error", "*", 0, GPU_IS_LOST)
    for ask in (nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlDeviceGetComputeRunningProcesses, nvml.nvmlDeviceGetUUID):
        with pytest.raises(nvml.NVMLError_GpuIsLost):
            ask(device)
    assert held(nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(1))) == {}
    faults.end_all()
    faults.begin("hide", 0)
    assert nvml.nvmlDeviceGetCount() == 1
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))


def test_memory_may_be_not_supported_and_bytes_of_processes_not_available(faults: FakeNvml) -> None:
    device = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))
    faults.begin("error", "DeviceGetMemoryInfo", 0, NOT_SUPPORTED)
    with pytest.raises(nvml.NVMLError_NotSupported):
        nvml.nvmlDeviceGetMemoryInfo(device)
    faults.begin("process", 0, os.getpid(), 5 * GRANULE_BYTES, "G")
    faults.begin("process", 0, 4194301, "na", "C")
    assert held(device) == {4194301: None}
    (drawing,) = nvml.nvmlDeviceGetGraphicsRunningProcesses(device)
    assert (drawing.pid, drawing.usedGpuMemory) == (os.getpid(), 5 * GRANULE_BYTES)
    faults.begin("bytes_na", 0)
    (drawing,) = nvml.nvmlDeviceGetGraphicsRunningProcesses(device)
    assert drawing.usedGpuMemory is None


def test_what_the_driver_keeps_for_itself_and_what_it_frees_late(faults: FakeNvml) -> None:
    device = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))
    faults.begin("reserved", 0, 2 * GRANULE_BYTES)
    memory = nvml.nvmlDeviceGetMemoryInfo(device, nvml.nvmlMemory_v2)
    assert (memory.total, memory.reserved, memory.free) == tuple(n * GRANULE_BYTES for n in (32, 2, 30))
    driver = CudaDriver(gpu_uuid(0))
    handle = driver.create(4 * GRANULE_BYTES)
    faults.begin("keep", 0)
    assert held(device) == {os.getpid(): 4 * GRANULE_BYTES}
    driver.release(handle)
    assert held(device) == {os.getpid(): 4 * GRANULE_BYTES}
    assert nvml.nvmlDeviceGetMemoryInfo(device).free == 26 * GRANULE_BYTES
    faults.end("keep", 0)
    assert held(device) == {}
    driver.close()


def test_a_call_may_hang(faults: FakeNvml) -> None:
    device = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(0))
    faults.begin("hang", "DeviceGetMemoryInfo", 0)
    answered = threading.Event()

    def ask() -> None:
        nvml.nvmlDeviceGetMemoryInfo(device)
        answered.set()

    thread = threading.Thread(target=ask)
    thread.start()
    assert held(device) == {}
    assert not answered.is_set()
    faults.end_all()
    assert answered.wait(10)
    thread.join(10)


def test_slices_are_listed_below_their_gpu_and_seen_by_cuda_by_their_name(
    new_fake_cuda: NewFakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    load()
    new_fake_cuda(granules=32, devices=3, slices=2)
    begin()
    first, second = gpu_uuid(1, is_slice=True), gpu_uuid(2, is_slice=True)
    gpu = nvml.nvmlDeviceGetHandleByIndex(0)
    assert nvml.nvmlDeviceGetCount() == 1
    assert nvml.nvmlDeviceGetMigMode(gpu) == [1, 1]
    slices = [nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, index) for index in range(2)]
    assert [nvml.nvmlDeviceGetUUID(one) for one in slices] == [first, second]
    with pytest.raises(nvml.NVMLError_NotFound):
        nvml.nvmlDeviceGetMigDeviceHandleByIndex(gpu, 2)
    assert CudaDriver.devices() == [first]
    nvml.nvmlShutdown()


@pytest.mark.parametrize(
    ("names", "seen"),
    [("", []), (gpu_uuid(1), [1]), ("1,0", [1, 0]), (f"{gpu_uuid(0)},7,1", [0])],
)
def test_cuda_sees_what_is_named(
    new_fake_cuda: NewFakeCuda, monkeypatch: pytest.MonkeyPatch, names: str, seen: list[int]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", names)
    new_fake_cuda(granules=32, devices=2)
    assert CudaDriver.devices() == [gpu_uuid(number) for number in seen]


def test_a_driver_that_was_replaced_under_the_library_lets_nobody_in(new_fake_cuda: NewFakeCuda) -> None:
    load()
    new_fake_cuda()
    CudaDriver.devices()
    FakeNvml(Path(os.environ["FAKE_CUDA_STATE"])).begin("error", "InitWithFlags", "*", LIB_RM_VERSION_MISMATCH)
    with pytest.raises(nvml.NVMLError_LibRmVersionMismatch):
        nvml.nvmlInit()
