"""`lull doctor` on a machine with GPUs: NVML's stand-in, and what real processes hold through the driver's."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lull.agents.device_settings import DeviceSettings
from lull.agents.doctor import nvidia
from lull.agents.doctor.checks import CHECKS
from lull.agents.doctor.examine import examine
from lull.agents.doctor.findings import Status
from tests.engines.spawned import HERE, ROOT
from tests.fake_nvml.library import GPU_IS_LOST, LIB_RM_VERSION_MISMATCH, FakeNvml, gpu_uuid
from tests.gpu_node import gpu_machine
from tests.odd_names import oddly_named

ASKED = [check for check in CHECKS if check.name in ("config", "nvidia_driver", "gpus", "gpu_processes")]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with gpu_machine(tmp_path_factory.mktemp("doctor"), devices=2):
        yield Path(os.environ["FAKE_CUDA_STATE"])


@pytest.fixture
def nvml(state: Path) -> Iterator[FakeNvml]:
    one = FakeNvml(state)
    yield one
    one.end_all()


def config(root: Path, *devices: str, engines: str = "") -> Path:
    path = root / "agent.toml"
    listed = "".join(f'[[devices]]\nkind = "nvidia"\n{device}\n' for device in devices or (f'uuid = "{gpu_uuid(0)}"',))
    path.write_text(f'server_url = "http://127.0.0.1:1"\ntoken_file = "token"\ndata_dir = "agent"\n{listed}{engines}')
    return path


def told(path: Path) -> dict[str, list[tuple[Status, str]]]:
    found: dict[str, list[tuple[Status, str]]] = {}
    for one in examine(path, ASKED).told:
        found.setdefault(one.check, []).append((one.status, one.seen))
    assert [status for status, _ in found.pop("config")] == [Status.OK]
    return found


@contextmanager
def somebody() -> Iterator[int]:
    """A process with 2 MiB on the first GPU that is nobody of ours."""
    argv = [sys.executable, str(HERE / "cuda_server.py"), *("--port", "0", "--device", ".", "--rank")]
    argv += ["--weights-mib", "1", "--kv-mib", "1"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None
            child.stdout.readline()
            yield child.pid
        finally:
            child.kill()


def test_gpus_in_order(nvml: FakeNvml, tmp_path: Path) -> None:
    found = told(config(tmp_path, f'uuid = "{gpu_uuid(0)}"', "index = 1"))
    assert [status for status, _ in found["gpus"]] == [Status.OK, Status.OK]
    assert [status for status, _ in found["gpu_processes"]] == [Status.OK, Status.OK]
    ((status, seen),) = found["nvidia_driver"]
    assert (status, "580.95.05" in seen, "13.0" in seen) == (Status.OK, True, True)


def test_a_foreign_process(nvml: FakeNvml, tmp_path: Path) -> None:
    with somebody() as pid:
        ((status, seen),) = told(config(tmp_path))["gpu_processes"]
    assert status is Status.WARNING
    assert f"{pid} (python" in seen
    assert "2 MiB" in seen


def test_a_foreign_process_whose_name_is_no_text(nvml: FakeNvml, tmp_path: Path) -> None:
    with oddly_named() as pid:
        nvml.begin("process", 0, pid, 1 << 20, "C")
        ((status, seen),) = told(config(tmp_path))["gpu_processes"]
        assert status is Status.WARNING
        assert f"{pid} (job \N{REPLACEMENT CHARACTER}, 1 MiB)" in seen


def test_gpus_that_are_not_there_or_lost(nvml: FakeNvml, tmp_path: Path) -> None:
    ((status, seen),) = told(config(tmp_path, 'uuid = "GPU-00000000"'))["gpus"]
    assert (status, gpu_uuid(1) in seen) == (Status.FAILED, True)
    nvml.begin("error", "*", 0, GPU_IS_LOST)
    found = told(config(tmp_path, "index = 1", f'uuid = "{gpu_uuid(0)}"'))
    assert [status for status, _ in found["gpus"]] == [Status.OK, Status.FAILED]


def test_modes(nvml: FakeNvml, tmp_path: Path) -> None:
    nvml.begin("persistence", 0, 0)
    nvml.begin("compute", 0, 3)
    found = told(config(tmp_path))["gpus"]
    assert [status for status, _ in found] == [Status.WARNING, Status.WARNING]
    assert "EXCLUSIVE_PROCESS" in found[0][1]
    engine = '[[engines]]\nname = "a"\nkind = "cuda-checkpoint"\nmodels = ["a"]\nurl = "http://127.0.0.1:9"\n'
    found = told(config(tmp_path, engines=engine + "device_indexes = [0]\n"))["gpus"]
    assert "a restore needs it" in found[1][1]
    nvml.end("compute", 0, 3)
    nvml.begin("compute", 0, 2)
    assert told(config(tmp_path))["gpus"][0][0] is Status.FAILED


def test_a_driver_that_was_updated_or_hangs(nvml: FakeNvml, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.begin("error", "InitWithFlags", "*", LIB_RM_VERSION_MISMATCH)
    found = told(config(tmp_path))
    ((status, seen),) = found["nvidia_driver"]
    assert (status, "reboot" in seen) == (Status.FAILED, True)
    assert found["gpus"][0][0] is Status.NOT_APPLICABLE
    nvml.end_all()
    monkeypatch.setattr(nvidia, "_NVML_SECONDS", 0.3)
    nvml.begin("hang", "*", "*")
    ((status, seen),) = told(config(tmp_path))["nvidia_driver"]
    assert (status, "hangs" in seen) == (Status.FAILED, True)


def test_a_gpu_that_is_cut_into_slices(tmp_path: Path) -> None:
    declared = DeviceSettings(kind="nvidia", uuid=gpu_uuid(0))
    slice_uuid = gpu_uuid(1, is_slice=True)
    gpus = {gpu_uuid(0): nvidia.Gpu(gpu_uuid(0), 0, is_cut=True), slice_uuid: nvidia.Gpu(slice_uuid, None)}
    (found,) = nvidia.judge_gpu(0, declared, nvidia.Machine("580", "580", 13000, gpus), checkpoints=False)
    assert (found.status, slice_uuid in found.seen) == (Status.FAILED, True)
    named = DeviceSettings(kind="nvidia", uuid=slice_uuid)
    (found,) = nvidia.judge_gpu(0, named, nvidia.Machine("580", "580", 13000, gpus), checkpoints=False)
    assert found.status is Status.OK


def test_drivers_that_do_not_fit() -> None:
    def status(machine: nvidia.Machine, *, wanted: bool = True, checkpoints: bool = False) -> Status:
        return nvidia.judge_driver(machine, wanted=wanted, checkpoints=checkpoints).status

    assert status(nvidia.Machine("", trouble="no library"), wanted=False) is Status.NOT_APPLICABLE
    assert status(nvidia.Machine("", trouble="no library")) is Status.FAILED
    assert status(nvidia.Machine("570.1", "570.1", 12080), checkpoints=True) is Status.OK
    assert status(nvidia.Machine("560.1", "560.1", 12060), checkpoints=True) is Status.FAILED
    assert status(nvidia.Machine("560.1", "570.1", 12080)) is Status.FAILED
    assert nvidia.judge_unlisted({}) is None
    unlisted = nvidia.judge_unlisted({7: "python"})
    assert unlisted is not None
    assert unlisted.status is Status.WARNING
    assert nvidia.judge_access({"/dev/nvidia0": "this user may not"}).status is Status.FAILED
    assert nvidia.judge_access({}).status is Status.OK
