"""Which GPUs the agent's file means: found, refused with what there is, or known from before and absent now."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from lull.agents import device_opening
from lull.agents.device_opening import open_devices
from lull.agents.errors import ConfigError
from lull.agents.node import Device, cuda_visible
from lull.agents.probe_nvml import host_bytes
from lull.agents.settings import AgentSettings
from lull.vmm.cuda_driver import CudaDriver
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES
from tests.fake_nvml.library import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, NOT_SUPPORTED, FakeNvml, gpu_uuid, load

GPU, OTHER = gpu_uuid(0), gpu_uuid(1)
Open = Callable[..., list[Device]]


@pytest.fixture
def faults(new_fake_cuda: NewFakeCuda) -> FakeNvml:
    return begin(new_fake_cuda)


def begin(new_fake_cuda: NewFakeCuda, *, devices: int = 2, slices: int = 0) -> FakeNvml:
    load()
    new_fake_cuda(granules=32, devices=devices, slices=slices)
    CudaDriver.devices()
    return FakeNvml(Path(os.environ["FAKE_CUDA_STATE"]))


@pytest.fixture
def opened(tmp_path: Path) -> Open:
    """What an agent of one and the same directory opens for these [[devices]]."""

    def open_(*devices: dict[str, Any]) -> list[Device]:
        (tmp_path / "agent").mkdir(exist_ok=True)
        settings = AgentSettings.model_validate(
            {
                "server_url": "http://127.0.0.1:1",
                "token_file": tmp_path / "token",
                "data_dir": tmp_path / "agent",
                "devices": devices,
            }
        )
        return open_devices(settings)

    return open_


def nvidia(**fields: object) -> dict[str, object]:
    return {"kind": "nvidia", **fields}


def test_gpus_are_opened_by_uuid_or_index_beside_host_memory(faults: FakeNvml, opened: Open, tmp_path: Path) -> None:
    host = {"path": tmp_path / "device0", "capacity_bytes": 1 << 20}
    devices = opened(nvidia(uuid=OTHER), host, nvidia(index=0, reserve_bytes=4 * GRANULE_BYTES))
    assert [(device.device_id, device.kind) for device in devices[::2]] == [(OTHER, "cuda"), (GPU, "cuda")]
    assert devices[2].capacity_bytes == 28 * GRANULE_BYTES
    assert (devices[1].kind, devices[1].capacity_bytes, devices[1].is_cuda) == ("host_discrete", 1 << 20, False)
    assert cuda_visible(devices) == f"{OTHER},{GPU}"
    assert cuda_visible(devices[1:2]) == ""
    assert [device.opened_by for device in devices] == [OTHER, str(tmp_path / "device0"), GPU]


@pytest.mark.parametrize(
    ("devices", "said"),
    [
        ([nvidia(uuid="GPU-nobody")], rf"devices\.0\.uuid: there is no GPU-nobody on this machine; there are {GPU} \("),
        ([nvidia(index=2)], r"devices\.0\.index: no GPU has index 2; there are GPU-"),
        ([nvidia(uuid=GPU), nvidia(index=0)], rf"devices\.1: {GPU} is device 0 already"),
        ([nvidia(uuid=GPU, reserve_bytes=1 << 40)], r"devices\.0\.reserve_bytes: .* has 2097152 bytes in all"),
    ],
)
def test_a_gpu_that_is_not_there_is_refused_with_those_that_are(
    faults: FakeNvml, opened: Open, devices: list[dict[str, object]], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        opened(*devices)


def test_without_its_driver_a_new_agent_says_what_is_missing(faults: FakeNvml, opened: Open) -> None:
    faults.begin("error", "InitWithFlags", "*", LIB_RM_VERSION_MISMATCH)
    with pytest.raises(ConfigError, match="the driver was updated while an older one is loaded"):
        opened(nvidia(uuid=GPU))


@pytest.mark.parametrize(
    "fault",
    [("error", "*", 0, GPU_IS_LOST), ("hide", 0), ("error", "InitWithFlags", "*", LIB_RM_VERSION_MISMATCH)],
)
def test_a_gpu_that_was_there_is_opened_as_it_was_for_an_agent_that_starts_again(
    faults: FakeNvml, opened: Open, fault: tuple[object, ...]
) -> None:
    before = opened(nvidia(uuid=GPU))
    faults.begin(*fault)
    assert opened(nvidia(uuid=GPU)) == before


def test_a_driver_that_hangs_lets_the_agent_start(
    faults: FakeNvml, opened: Open, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = opened(nvidia(uuid=GPU))
    monkeypatch.setattr(device_opening, "_SURVEY_SECONDS_MAX", 0.1)
    faults.begin("hang", "*", "*")
    assert opened(nvidia(uuid=GPU)) == before
    faults.end_all()


def test_an_index_means_the_gpu_that_it_meant_first(faults: FakeNvml, opened: Open) -> None:
    assert opened(nvidia(index=1))[0].device_id == OTHER
    faults.begin("hide", 0)  # now the other one has index 0, and nobody index 1
    assert opened(nvidia(index=1))[0].device_id == OTHER


def test_a_gpu_in_mig_mode_is_lent_by_its_slices(new_fake_cuda: NewFakeCuda, opened: Open) -> None:
    begin(new_fake_cuda, devices=3, slices=2)
    first, second = gpu_uuid(1, is_slice=True), gpu_uuid(2, is_slice=True)
    with pytest.raises(ConfigError, match=f"{GPU} is in MIG mode; lend its slices by their UUIDs: {first}, {second}"):
        opened(nvidia(index=0))
    assert [device.kind for device in opened(nvidia(uuid=second), nvidia(uuid=first))] == ["mig", "mig"]
    with pytest.raises(ConfigError, match=f"there are {first} "):
        opened(nvidia(uuid="MIG-nobody"))


def test_unified_memory_keeps_a_reserve_for_the_host(faults: FakeNvml, opened: Open, tmp_path: Path) -> None:
    for function in ("DeviceGetMemoryInfo", "DeviceGetMemoryInfo_v2"):
        faults.begin("error", function, 0, NOT_SUPPORTED)
    (device,) = opened(nvidia(uuid=GPU))
    assert (device.kind, device.unified) == ("cuda_unified", True)
    assert device.reserve_bytes == int(host_bytes() * 0.10)
    assert device.capacity_bytes == host_bytes() - device.reserve_bytes
    with pytest.raises(ConfigError, match=r"devices\.0\.reserve_bytes: 1024 is less than 8% of this machine's unified"):
        opened(nvidia(uuid=GPU, reserve_bytes=1024))
    with pytest.raises(ConfigError, match=r"devices\.0\.memory_service: .* unified memory"):
        opened(nvidia(uuid=GPU, memory_service=True))
    host = {"path": tmp_path / "unified", "capacity_bytes": 1 << 20, "memory": "unified"}
    (device,) = opened({**host, "reserve_bytes": host_bytes() // 4})
    assert (device.kind, device.unified, device.reserve_bytes) == ("host_unified", True, host_bytes() // 4)
    with pytest.raises(ConfigError, match=r"devices\.0\.reserve_bytes"):
        opened({**host, "reserve_bytes": 1})
