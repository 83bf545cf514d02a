"""The reference engine on a GPU whose addresses the host may not touch: same answers, parked for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.host_device import HostDevice
from lull.vmm.reference_engine.engine import Engine, build_engine
from lull.vmm.reference_engine.model import greedy
from lull.vmm.reference_engine.settings import CudaDevice, EngineSettings, open_device, parse_restore_modes
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES

MIB = 1 << 20
CAPACITY_BYTES = 8 * MIB


def settings(device: HostDevice | CudaDevice, mode: str = "CPU") -> EngineSettings:
    return EngineSettings(
        name="small",
        host="127.0.0.1",
        port=0,
        device=device,
        weights_bytes=2 * MIB,
        kv_cache_bytes=MIB,
        control_key=b"key",
        restore_modes=parse_restore_modes([f"model_weights={mode}"]),
        faults={},
    )


def answer(engine: Engine) -> list[tuple[int, float]]:
    found: list[tuple[int, float]] = []
    for token in engine.model.generate(list(b"The quick brown fox"), greedy):
        if token is not None:
            found.append((token.id, token.logprob))
        if len(found) == 8:
            return found
    raise AssertionError("the context is too small")


@pytest.fixture
def gpu(new_fake_cuda: NewFakeCuda) -> CudaDriver:
    """The machine's free bytes, as anybody sees them."""
    new_fake_cuda(granules=CAPACITY_BYTES // GRANULE_BYTES, strict=True)
    return CudaDriver(CudaDriver.devices()[0])


@pytest.mark.parametrize("mode", ["CPU", "PINNED"])
def test_it_answers_as_on_the_host_and_parks(gpu: CudaDriver, tmp_path: Path, mode: str) -> None:
    threads = torch.get_num_threads()
    host = build_engine(settings(HostDevice.create(tmp_path / "device", capacity_bytes=CAPACITY_BYTES)))
    engine = build_engine(settings(CudaDevice(gpu.device_uuid), mode))
    assert gpu.free_bytes() <= CAPACITY_BYTES - 3 * MIB + 2 * GRANULE_BYTES
    before = answer(engine)
    assert before == answer(host)
    for _ in range(2):
        engine.runtime.release()
        assert gpu.free_bytes() == CAPACITY_BYTES
        engine.runtime.resume()
        assert answer(engine) == before
    engine.pool.close()
    host.pool.close()
    torch.set_num_threads(threads)


def test_weights_that_changed_on_the_device_show_in_the_answer(gpu: CudaDriver) -> None:
    engine = build_engine(settings(CudaDevice(gpu.device_uuid)))
    before = answer(engine)
    (weights,) = (one for one in engine.allocations() if one.tag == "model_weights")
    CudaDriver.set(engine.pool.driver, weights.address + MIB, 0, 4096)  # type: ignore[arg-type]
    assert answer(engine) != before
    engine.pool.close()


def test_a_device_is_named_by_its_uuid_or_its_folder(tmp_path: Path) -> None:
    assert open_device("GPU-1") == CudaDevice("GPU-1")
    assert open_device("MIG-1") == CudaDevice("MIG-1")
    with pytest.raises(FileNotFoundError, match="is not a host device"):
        open_device(tmp_path)
