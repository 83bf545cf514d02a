"""The agent's probe on a real GPU: what it opens, what it says of this process, and how long a look takes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from lull.agents.probe_nvml import Nvml, NvmlProbe, survey
from lull.vmm.cuda_driver import CudaDriver
from tests.driver_rigs import GIB, Rig
from tests.waiting import wait_until

pytestmark = pytest.mark.gpu
LOOK_SECONDS_MAX = 0.05
SECONDS_MAX = 20


@pytest.fixture
def nvml() -> Iterator[Nvml]:
    found = Nvml()
    yield found
    found.close()


def test_the_survey_knows_every_gpu_that_cuda_sees(record_property: Callable[[str, object], None]) -> None:
    found = survey()
    record_property("devices", ", ".join(f"{device.name} {device.kind}" for device in found.devices.values()))
    assert found.failed is None
    assert set(CudaDriver.devices()) <= set(found.devices)
    for uuid, device in found.devices.items():
        assert device.capacity_bytes > 0, uuid


def test_bytes_that_are_taken_are_seen_as_ours_and_not_as_free(
    rig: Rig, nvml: Nvml, record_property: Callable[[str, object], None]
) -> None:
    uuid = rig.driver.device_uuid
    capacity_bytes = nvml.device(uuid).capacity_bytes
    size_bytes, slack_bytes = 2 * GIB, GIB // 16
    before = nvml.facts(uuid, capacity_bytes, 0)
    handle = rig.driver.create(size_bytes)
    fell = before.free_bytes - size_bytes
    wait_until(
        lambda: abs(nvml.facts(uuid, capacity_bytes, 0).free_bytes - fell) <= slack_bytes, SECONDS_MAX, "free to fall"
    )
    after = nvml.facts(uuid, capacity_bytes, 0)
    told = after.bytes_by_pid.get(os.getpid())
    record_property("counted by", "process" if told is not None else "device: its pids are of another namespace")
    if told is not None:
        assert abs(told - before.bytes_by_pid.get(os.getpid(), 0) - size_bytes) <= slack_bytes
    rig.driver.release(handle)
    wait_until(
        lambda: abs(nvml.facts(uuid, capacity_bytes, 0).free_bytes - before.free_bytes) <= slack_bytes,
        SECONDS_MAX,
        "all free again",
    )


def test_a_look_takes_a_small_part_of_a_loan(record_property: Callable[[str, object], None]) -> None:
    probe = NvmlProbe(dict.fromkeys(survey().devices, (1 << 40, 0)))
    list(probe.read())
    seconds: list[float] = []
    for _ in range(20):
        began = time.perf_counter()
        assert all(not hasattr(found, "sentence") for _, found in probe.read())
        seconds.append(time.perf_counter() - began)
    record_property("ms", f"{min(seconds) * 1000:.2f} at best, {max(seconds) * 1000:.2f} at worst")
    assert min(seconds) < LOOK_SECONDS_MAX
