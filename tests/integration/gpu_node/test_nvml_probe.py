"""The probe through nvidia-ml-py: whose bytes, how much is free, and every way in which NVML does not tell."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.agents.probe import DeviceFacts, Facts
from lull.agents.probe_nvml import INITIALIZE_AGAIN_SECONDS, LOST, UNREADABLE, Nvml, NvmlFailed, NvmlProbe, host_bytes
from lull.agents.protocol.words import Reason
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.host_memory import available_bytes
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.fake_nvml.library import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NOT_SUPPORTED, FakeNvml, gpu_uuid, load
from tests.odd_names import oddly_named

GPU, OTHER = gpu_uuid(0), gpu_uuid(1)
CAPACITY_BYTES = 32 * GRANULE_BYTES
MACHINE = {GPU: (CAPACITY_BYTES, 0), OTHER: (CAPACITY_BYTES, 0)}

Machine = Callable[..., FakeNvml]


@pytest.fixture
def machine(new_fake_cuda: NewFakeCuda) -> Machine:
    """GPUs of 32 granules."""
    load()

    def make(*, devices: int = 2, slices: int = 0) -> FakeNvml:
        new_fake_cuda(granules=32, devices=devices, slices=slices)
        CudaDriver.devices()
        return FakeNvml(Path(os.environ["FAKE_CUDA_STATE"]))

    return make


class Looks:
    """A probe whose clock the test moves."""

    def __init__(self, devices: dict[str, tuple[int, int]] | None = None) -> None:
        self.now = 1000.0
        self.opened = 0
        self._probe = NvmlProbe(devices or MACHINE, self._open, lambda: self.now)

    def _open(self) -> Nvml:
        self.opened += 1
        return Nvml()

    def look(self) -> Facts:
        seen = dict(self._probe.read())
        read = {uuid: found for uuid, found in seen.items() if isinstance(found, DeviceFacts)}
        return Facts(read, {uuid: found for uuid, found in seen.items() if isinstance(found, Reason)})


def test_bytes_are_those_that_processes_hold(machine: Machine) -> None:
    machine()
    driver = CudaDriver(OTHER)
    handle = driver.create(5 * GRANULE_BYTES)
    seen = Looks().look()
    assert seen[GPU] == DeviceFacts(CAPACITY_BYTES, 0)
    assert seen[OTHER] == DeviceFacts(CAPACITY_BYTES, 5 * GRANULE_BYTES, {os.getpid(): 5 * GRANULE_BYTES})
    assert seen[OTHER].free_bytes == 27 * GRANULE_BYTES
    driver.release(handle)
    driver.close()


def test_what_the_driver_keeps_and_what_the_operator_reserves_is_never_free(machine: Machine) -> None:
    faults = machine()
    faults.begin("reserved", 0, 2 * GRANULE_BYTES)
    device = Nvml().device(GPU)
    assert (device.capacity_bytes, device.kind, device.name) == (30 * GRANULE_BYTES, "cuda", "Fake GPU 0")
    looks = Looks({GPU: (26 * GRANULE_BYTES, 4 * GRANULE_BYTES)})
    assert looks.look()[GPU].free_bytes == 26 * GRANULE_BYTES
    faults.begin("process", 0, os.getpid(), 3 * GRANULE_BYTES, "C")
    assert looks.look()[GPU].free_bytes == 23 * GRANULE_BYTES


def test_lists_are_merged_and_who_only_draws_is_no_stranger(machine: Machine) -> None:
    faults = machine()
    for pid, nbytes, kind in ((11, 1, "C"), (11, 3, "G"), (12, 2, "G"), (13, 4, "M")):
        faults.begin("process", 0, pid, nbytes * GRANULE_BYTES, kind)
    seen = Looks().look()[GPU]
    assert seen.bytes_by_pid == {11: 3 * GRANULE_BYTES, 12: 2 * GRANULE_BYTES, 13: 4 * GRANULE_BYTES}
    assert seen.bystanders == {12}


def test_a_process_whose_name_is_no_text_is_a_process_like_any_other(machine: Machine) -> None:
    with oddly_named() as pid:
        machine().begin("process", 0, pid, GRANULE_BYTES, "C")
        seen = Looks().look()
        assert (seen[GPU].bytes_by_pid, seen[GPU].bystanders) == ({pid: GRANULE_BYTES}, frozenset())
        assert OTHER in seen


def test_bytes_that_are_not_told_are_those_that_nobody_is_told_to_have(machine: Machine) -> None:
    faults = machine()
    driver = CudaDriver(GPU)
    handle = driver.create(8 * GRANULE_BYTES)
    faults.begin("bytes_na", 0)
    assert Looks().look()[GPU].bytes_by_pid == {os.getpid(): 8 * GRANULE_BYTES}
    faults.begin("process", 0, 4194301, "na", "C")
    assert Looks().look()[GPU].bytes_by_pid == {os.getpid(): 4 * GRANULE_BYTES, 4194301: 4 * GRANULE_BYTES}
    driver.release(handle)
    driver.close()


@pytest.mark.parametrize("fault", [("error", "*", 0, GPU_IS_LOST), ("hide", 0), ("error", "*", 0, 16)])
def test_a_lost_gpu_is_absent_and_its_neighbour_is_not(machine: Machine, fault: tuple[object, ...]) -> None:
    faults, looks = machine(), Looks()
    assert set(looks.look()) == {GPU, OTHER}
    faults.begin(*fault)
    seen = looks.look()
    assert set(seen) == {OTHER}
    assert seen.absent[GPU].code == LOST
    assert GPU in seen.absent[GPU].sentence
    faults.end_all()
    assert set(looks.look()) == {GPU, OTHER}


def test_nvml_is_opened_anew_for_what_stays_away_and_no_more_often_than_that_pays(machine: Machine) -> None:
    faults, looks = machine(), Looks()
    faults.begin("error", "*", 0, 999)
    for _ in range(5):
        looks.now += INITIALIZE_AGAIN_SECONDS / 3
        assert looks.look().absent[GPU].code == UNREADABLE
    assert looks.opened == 2
    faults.end_all()
    assert set(looks.look()) == {GPU, OTHER}
    looks.now += 10 * INITIALIZE_AGAIN_SECONDS
    assert set(looks.look()) == {GPU, OTHER}
    assert looks.opened == 2


def test_a_driver_that_was_updated_under_us_is_said_with_what_to_do(machine: Machine) -> None:
    faults, looks = machine(), Looks()
    faults.begin("error", "InitWithFlags", "*", LIB_RM_VERSION_MISMATCH)
    seen = looks.look()
    assert set(seen) == set()
    assert "the driver was updated while an older one is loaded: reboot" in seen.absent[GPU].sentence
    faults.end_all()
    looks.now += INITIALIZE_AGAIN_SECONDS
    assert set(looks.look()) == {GPU, OTHER}


def test_unified_memory_is_judged_by_what_the_host_can_give(machine: Machine) -> None:
    faults = machine()
    faults.begin("error", "DeviceGetMemoryInfo", 0, NOT_SUPPORTED)
    faults.begin("error", "DeviceGetMemoryInfo_v2", 0, NOT_SUPPORTED)
    faults.begin("process", 0, os.getpid(), 3 * GRANULE_BYTES, "C")
    faults.begin("process", 0, os.getppid(), "na", "C")
    device = Nvml().device(GPU)
    assert (device.kind, device.unified, device.capacity_bytes) == ("cuda_unified", True, host_bytes())
    reserve_bytes = host_bytes() // 10
    seen = Looks({GPU: (host_bytes() - reserve_bytes, reserve_bytes)}).look()[GPU]
    assert seen.unified
    assert abs(seen.free_bytes - (available_bytes() - reserve_bytes)) < 256 << 20  # others run meanwhile
    assert seen.bytes_by_pid[os.getpid()] == 3 * GRANULE_BYTES
    assert seen.bytes_by_pid[os.getppid()] > 0  # its share of the host's memory


def test_an_older_driver_has_no_second_version_of_memory(machine: Machine) -> None:
    machine().begin("error", "DeviceGetMemoryInfo_v2", "*", 13)
    assert Looks().look()[GPU] == DeviceFacts(CAPACITY_BYTES, 0)


@pytest.mark.parametrize("code", [NOT_SUPPORTED, 13])
def test_without_a_list_of_processes_a_gpu_is_not_lent(machine: Machine, code: int) -> None:
    faults = machine()
    for function in ("GraphicsRunningProcesses_v3", "MPSComputeRunningProcesses_v3"):
        faults.begin("error", f"DeviceGet{function}", "*", code)
    assert set(Looks().look()) == {GPU, OTHER}
    faults.begin("error", "DeviceGetComputeRunningProcesses_v3", 0, code)
    seen = Looks().look()
    assert set(seen) == {OTHER}
    assert seen.absent[GPU].code == UNREADABLE


def test_a_slice_is_looked_at_by_itself(machine: Machine) -> None:
    machine(devices=3, slices=2)
    first, second = gpu_uuid(1, is_slice=True), gpu_uuid(2, is_slice=True)
    nvml = Nvml()
    assert (nvml.is_cut(GPU), nvml.slices(GPU)) == (True, [first, second])
    assert nvml.device(second).kind == "mig"
    driver = CudaDriver(first)
    handle = driver.create(GRANULE_BYTES)
    seen = Looks({first: (CAPACITY_BYTES, 0), second: (CAPACITY_BYTES, 0)}).look()
    assert seen[first].bytes_by_pid == {os.getpid(): GRANULE_BYTES}
    assert seen[second].bytes_by_pid == {}
    driver.release(handle)
    driver.close()
    nvml.close()


def test_a_machine_without_a_driver_is_told_so() -> None:
    code = "from lull.agents.probe_nvml import Nvml\ntry: Nvml()\nexcept Exception as e: print(type(e).__name__, e)"
    env = {key: value for key, value in os.environ.items() if key != "LD_LIBRARY_PATH"}
    said = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout.startswith("NvmlFailed NVML: ") or "GPU" in said.stdout, said
    if "Not Found" in said.stdout:
        assert "libnvidia-ml.so.1 is not there: install NVIDIA's driver" in said.stdout


def test_a_look_costs_little(machine: Machine) -> None:
    """It is a part of every loan's own time."""
    machine()
    looks = Looks()
    looks.look()
    best = min(_seconds(looks.look) for _ in range(20))
    assert best < 0.02, f"{best * 1000:.1f} ms"


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


def test_an_error_names_the_gpu_and_nvml_s_word() -> None:
    assert str(NvmlFailed("GPU-1", 999, "Unknown Error")).startswith(
        "GPU-1: NVML answers 'Unknown Error'; in a container"
    )
