"""What nvidia-smi would show of a park: the process's bytes go down by what was parked, and up again."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest

from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.driver_rigs import GIB, Rig
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu
SECONDS_MAX = 20


@pytest.fixture
def used_bytes(rig: Rig, record_property: Callable[[str, object], None]) -> Iterator[Callable[[], int]]:
    """Of this process, where NVML tells; else of the device, which nobody else uses here."""
    import pynvml

    pynvml.nvmlInit()
    device = pynvml.nvmlDeviceGetHandleByUUID(rig.driver.device_uuid.encode())

    def of_process() -> int | None:
        rows = pynvml.nvmlDeviceGetComputeRunningProcesses(device)
        own = [row.usedGpuMemory for row in rows if row.pid == os.getpid()]
        return own[0] if own else None

    by_process = of_process() is not None
    record_property("counted by", "process" if by_process else "device: NVML does not show this process")
    yield lambda: (of_process() or 0) if by_process else int(pynvml.nvmlDeviceGetMemoryInfo(device).used)
    pynvml.nvmlShutdown()


def test_nvml_sees_what_is_parked_and_woken(rig: Rig, used_bytes: Callable[[], int]) -> None:
    pool = Pool(rig.driver)
    size_bytes = 2 * GIB
    weights = pool.allocate(size_bytes, "model_weights", RestoreMode.CPU)
    rig.driver.set(weights.address, 5, weights.nbytes)
    awake_bytes = used_bytes()
    slack_bytes = GIB // 16
    for _ in range(2):
        pool.release(["model_weights"])
        wait_until(
            lambda: abs(awake_bytes - size_bytes - used_bytes()) <= slack_bytes, SECONDS_MAX, "NVML seeing the park"
        )
        pool.resume(["model_weights"])
        wait_until(lambda: abs(awake_bytes - used_bytes()) <= slack_bytes, SECONDS_MAX, "NVML seeing the wake")
    pool.close()
