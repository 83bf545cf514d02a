"""The plug-in, its back end and both worker classes, inside a stand-in of vLLM's interface."""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from lull.vmm.errors import AdmissionClosed, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.vllm import device_pool, plugin
from lull.vmm.vllm.pool_sleep import StepInFlight
from tests.engines.vllm_interface import Executor, Factory, Model, Worker, put_to_sleep, vllm_modules

GIVEN = torch.arange(64, dtype=torch.float32) / 64
KV_BYTES = 1 << 20


@pytest.fixture
def factory() -> Iterator[Factory]:
    with vllm_modules(cpu_worker=CpuWorker) as factory:
        yield factory


@pytest.fixture
def device(tmp_path: Path) -> HostDevice:
    return HostDevice.create(tmp_path / "device", capacity_bytes=16 << 20)


@pytest.fixture
def gpu_worker(factory: Factory, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Loaded, with its pool on a host device in place of a GPU."""
    plugin.register()
    module: Any = importlib.import_module("lull.vmm.vllm.gpu_worker")

    def open_here(uuid: str, settings: Any) -> Any:
        return device_pool.use_pool(Pool(HostDriver(device), restore_modes=settings.restore_modes))

    monkeypatch.setattr(module, "open_device_pool", open_here)
    monkeypatch.setattr(module.LullGpuWorker, "_device_uuid", lambda self: "GPU-0")
    worker = module.LullGpuWorker(free_bytes=device.free_bytes)
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(KV_BYTES)
    yield worker
    device_pool.close_pool()


def test_the_plugin_is_an_entry_point_and_may_be_loaded_twice(factory: Factory) -> None:
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text()
    assert '[project.entry-points."vllm.general_plugins"]\nlull = "lull.vmm.vllm.plugin:register"' in text
    plugin.register()
    plugin.register()
    assert list(factory.registry) == [plugin.BACKEND_NAME]


def test_a_vllm_without_sleep_back_ends_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.device_allocator.sleep_mode_backend", None)
    plugin.register()


def test_without_the_worker_class_a_sleep_is_refused_before_anything_changes(factory: Factory) -> None:
    plugin.register()
    worker = Worker(backend="lull")
    worker.load_model()
    with pytest.raises(device_pool.NoPool, match=re.escape("--worker-cls lull.vmm.vllm.gpu_worker.LullGpuWorker")):
        put_to_sleep(worker, 1)


def test_the_back_end_frees_the_device_and_brings_the_answers_back(gpu_worker: Any, device: HostDevice) -> None:
    executor, answer = Executor(gpu_worker), gpu_worker.model(GIVEN)
    used = device.capacity_bytes - device.free_bytes()
    assert used >= KV_BYTES
    executor.put_to_sleep(1)
    assert device.free_bytes() == device.capacity_bytes
    assert gpu_worker.sleep_mode_backend.state() == "SUSPENDED"
    executor.wake_up()
    assert torch.equal(gpu_worker.model(GIVEN), answer)
    assert gpu_worker.sleep_mode_backend.state() == "RUNNING"
    assert device.capacity_bytes - device.free_bytes() == used


def test_level_2_loses_the_weights_and_keeps_buffers(gpu_worker: Any) -> None:
    executor = Executor(gpu_worker)
    executor.put_to_sleep(2)
    assert gpu_worker.lull.pool.backup_bytes() == 0
    executor.wake_up(["weights"])
    assert gpu_worker.sleep_mode_backend.state() == "SUSPENDED", "the KV cache still sleeps"
    assert not gpu_worker.model.linear.weight.any()
    assert gpu_worker.model.scale[0] == 3.0
    executor.wake_up(["kv_cache"])
    assert gpu_worker.sleep_mode_backend.state() == "RUNNING"


def test_the_kv_cache_is_discarded_alone(gpu_worker: Any, device: HostDevice) -> None:
    executor, answer, free_bytes = Executor(gpu_worker), gpu_worker.model(GIVEN), device.free_bytes()
    executor.discard(("kv_cache",))
    assert device.free_bytes() >= free_bytes + KV_BYTES
    assert torch.equal(gpu_worker.model(GIVEN), answer)
    executor.wake_up(["kv_cache"])
    assert not gpu_worker.kv_cache.any()


def test_a_wake_without_room_says_suspended_and_is_asked_again(gpu_worker: Any, device: HostDevice) -> None:
    executor, answer = Executor(gpu_worker), gpu_worker.model(GIVEN)
    executor.put_to_sleep(1)
    other = HostDriver(device)
    taken = other.create(device.free_bytes() - (2 << 20))
    with pytest.raises(OutOfDeviceMemory):
        executor.wake_up()
    assert gpu_worker.sleep_mode_backend.state() == "SUSPENDED"
    assert executor.sleeping_tags == {"weights", "kv_cache"}
    other.release(taken)
    executor.wake_up()
    assert torch.equal(gpu_worker.model(GIVEN), answer)


class CpuWorker(Worker):
    """vLLM's CPU worker: sleep does nothing, a step may owe its output (v1/worker/cpu_worker.py, gpu_worker.py)."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.owes_output = False
        self.fails = False
        self.in_step: Any = None

    @property
    def model_runner(self) -> Any:
        return self

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_draft_model(self) -> torch.nn.Module | None:
        return None

    def load_model(self) -> None:
        self.model = Model()

    def reload_weights(self) -> None:
        with torch.no_grad():
            self.model.linear.weight.fill_(1.0)

    def execute_model(self, scheduler_output: Any) -> Any:
        if self.fails:
            raise RuntimeError("the step failed")
        if self.in_step:
            self.in_step()
        return None if self.owes_output else "output"

    def sample_tokens(self, grammar_output: Any) -> Any:
        return "output"

    def execute_dummy_batch(self) -> None:
        if self.in_step:
            self.in_step()


class Scheduled:
    total_num_scheduled_tokens = 4


@pytest.fixture
def cpu_worker(factory: Factory, device: HostDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setenv("LULL_HOST_DEVICE", str(device.path))
    monkeypatch.setenv("LULL_IMMUTABLE_WEIGHTS", "1")
    module: Any = importlib.import_module("lull.vmm.vllm.cpu_worker")
    worker = module.LullCpuWorker()
    worker.init_device()
    worker.load_model()
    worker.initialize_kv_cache(KV_BYTES)
    yield worker
    worker.lull.pool.close()


def test_the_cpu_worker_really_sleeps(cpu_worker: Any, device: HostDevice) -> None:
    assert sys.modules["vllm._custom_ops"]._supports_onednn is False, "packed copies of the weights would stay"
    answer = cpu_worker.model(GIVEN)
    for _ in range(2):
        put_to_sleep(cpu_worker, 1)
        assert device.free_bytes() == device.capacity_bytes
        cpu_worker.wake_up(None)
        assert torch.equal(cpu_worker.model(GIVEN), answer)
    cpu_worker.discard(("kv_cache",))
    cpu_worker.wake_up(["kv_cache"])
    copied = cpu_worker.lull.pool.statistics()["model_weights"]
    assert copied.parks == 2


def test_immutable_weights_are_loaded_again_in_place(cpu_worker: Any) -> None:
    put_to_sleep(cpu_worker, 1)
    cpu_worker.wake_up()
    cpu_worker.reload_weights()  # a write to sealed memory would end the process
    answer = cpu_worker.model(GIVEN)
    put_to_sleep(cpu_worker, 1)
    cpu_worker.wake_up()
    assert torch.equal(cpu_worker.model(GIVEN), answer)


def test_a_step_that_owes_its_output_is_in_flight(cpu_worker: Any) -> None:
    cpu_worker.owes_output = True
    assert cpu_worker.execute_model(Scheduled()) is None
    with pytest.raises(StepInFlight):
        put_to_sleep(cpu_worker, 1)
    cpu_worker.sample_tokens(None)
    put_to_sleep(cpu_worker, 1)
    for step in (lambda: cpu_worker.execute_model(Scheduled()), cpu_worker.execute_dummy_batch):
        with pytest.raises(AdmissionClosed):
            step()
    cpu_worker.wake_up()


def test_a_step_that_fails_or_is_dropped_is_not_in_flight_for_ever(cpu_worker: Any) -> None:
    cpu_worker.fails = True
    with pytest.raises(RuntimeError, match="the step failed"):
        cpu_worker.execute_model(Scheduled())
    cpu_worker.fails, cpu_worker.owes_output = False, True
    cpu_worker.execute_model(Scheduled())
    cpu_worker.execute_model(Scheduled())
    cpu_worker.sample_tokens(None)
    assert cpu_worker.lull.in_flight == 0


def test_a_sleep_from_within_a_step_is_refused(cpu_worker: Any) -> None:
    refused: list[StepInFlight] = []

    def sleep() -> None:
        with pytest.raises(StepInFlight) as caught:
            put_to_sleep(cpu_worker, 1)
        refused.append(caught.value)

    cpu_worker.in_step = sleep
    cpu_worker.execute_model(Scheduled())
    cpu_worker.execute_dummy_batch()
    assert len(refused) == 2
