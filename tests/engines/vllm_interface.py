"""A stand-in of what our plug-in and worker class meet inside vLLM: the sleep back ends and the worker around them.

Written from vllm-project/vllm 0.32.0: `device_allocator/sleep_mode_backend.py` (RFC #34303: SleepModeBackend,
SleepModeBackendFactory with register_backend, create_backend and the refusal of a name that is taken),
`v1/worker/gpu_worker.py` (sleep keeps named buffers at level 2, asks the back end, asserts that free memory did not
fall; wake_up asks it and restores the buffers; discard; the context that allocations of a tag are made in) and
`v1/executor/abstract.py` (what the executor remembers of tags that sleep). Memory is what the test's driver says.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import methodcaller
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch


class SleepModeBackend:
    def __init__(self) -> None:
        self._state = "RUNNING"

    def state(self) -> str:
        return self._state

    def discard(self, tags: tuple[str, ...]) -> None:
        raise RuntimeError(f"Sleep-mode backend {type(self).__name__!r} does not support selective discard.")

    @classmethod
    def is_supported(cls) -> bool:
        return True


class Factory:
    """A fresh registry in each process of vLLM; here in each test."""

    def __init__(self) -> None:
        self.registry: dict[str, Callable[[], type[Any]]] = {}

    def register_backend(self, name: str, module_path: str, class_name: str) -> None:
        if name in self.registry:
            raise ValueError(f"Sleep-mode backend '{name}' is already registered.")
        self.registry[name] = lambda: getattr(importlib.import_module(module_path), class_name)

    def create_backend(self, model_config: Any) -> Any:
        name = model_config.sleep_mode_backend
        if name not in self.registry:
            raise ValueError(f"Unsupported sleep-mode backend '{name}'.")
        backend_class = self.registry[name]()
        return backend_class()


class Worker:
    """The GPU worker, as far as sleep goes. ``free_bytes`` stands for the device."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.vllm_config = SimpleNamespace(
            additional_config=kwargs.get("additional_config", {}),
            model_config=SimpleNamespace(sleep_mode_backend=kwargs.get("backend", "lull")),
        )
        self.free_bytes: Callable[[], int] = kwargs.get("free_bytes", lambda: 0)
        self.local_rank = 0
        self._backend: Any = None
        self._saved_buffers: dict[str, torch.Tensor] = {}

    def init_device(self) -> None:
        self.device = torch.device("cpu")

    def load_model(self) -> None:
        with self._maybe_get_memory_pool_context("weights"):
            self.model = Model()

    def initialize_kv_cache(self, nbytes: int) -> None:
        with self._maybe_get_memory_pool_context("runtime"), self._maybe_get_memory_pool_context("kv_cache"):
            self.kv_cache = torch.zeros(nbytes, dtype=torch.int8)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return nullcontext()

    @property
    def sleep_mode_backend(self) -> Any:
        if self._backend is None:
            factory = sys.modules["vllm.device_allocator.sleep_mode_backend"].SleepModeBackendFactory
            self._backend = factory.create_backend(self.vllm_config.model_config)
        return self._backend

    def sleep(self, level: int = 1) -> None:
        before = self.free_bytes()
        if level == 2:
            self._saved_buffers = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        self.sleep_mode_backend.suspend(level)
        assert self.free_bytes() >= before, "Memory usage increased after sleeping."

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.sleep_mode_backend.resume(tags)
        if tags is None or "weights" in tags:
            for name, buffer in self.model.named_buffers():
                if name in self._saved_buffers:
                    buffer.data.copy_(self._saved_buffers[name])
            self._saved_buffers = {}

    def discard(self, tags: tuple[str, ...]) -> None:
        self.sleep_mode_backend.discard(tags)


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(64, 64)
        self.tied = torch.nn.Linear(64, 64, bias=False)
        self.tied.weight = self.linear.weight
        self.register_buffer("scale", torch.full((16,), 3.0))

    def forward(self, given: torch.Tensor) -> torch.Tensor:
        return self.tied(self.linear(given)) * self.get_buffer("scale")[0]


def put_to_sleep(worker: Any, level: int) -> None:
    """By vLLM's name for it, which in a test else means waiting for time."""
    methodcaller("sleep", level)(worker)


class Executor:
    """Over one worker: what vLLM's executor lets through to it."""

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.sleeping_tags: set[str] = set()

    def put_to_sleep(self, level: int) -> None:
        """Its `sleep`."""
        if "weights" in self.sleeping_tags:
            return
        put_to_sleep(self.worker, level)
        self.sleeping_tags |= {"weights", "kv_cache"}

    def wake_up(self, tags: list[str] | None = None) -> None:
        if not self.sleeping_tags or any(tag not in self.sleeping_tags for tag in tags or ()):
            return
        self.worker.wake_up(tags)
        self.sleeping_tags -= set(tags or self.sleeping_tags)

    def discard(self, tags: tuple[str, ...]) -> None:
        wanted = set(tags) - self.sleeping_tags
        if wanted:
            try:
                self.worker.discard(tuple(wanted))
            finally:
                self.sleeping_tags |= wanted


OURS = ("lull.vmm.vllm.sleep_backend", "lull.vmm.vllm.gpu_worker", "lull.vmm.vllm.cpu_worker")


@contextmanager
def vllm_modules(cpu_worker: type[Any] = Worker) -> Iterator[Factory]:
    """The modules that our code imports, for as long as the block lasts."""
    factory = Factory()
    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        "vllm._custom_ops": {"_supports_onednn": True},
        "vllm.device_allocator": {},
        "vllm.device_allocator.sleep_mode_backend": {
            "SleepModeBackend": SleepModeBackend,
            "SleepModeBackendFactory": factory,
        },
        "vllm.v1": {},
        "vllm.v1.worker": {},
        "vllm.v1.worker.gpu_worker": {"Worker": Worker},
        "vllm.v1.worker.cpu_worker": {"CPUWorker": cpu_worker},
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, members in modules.items():
            module = ModuleType(name)
            vars(module).update(members)
            patch.setitem(sys.modules, name, module)
            parent, _, leaf = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], leaf, module)
        for name in OURS:  # they inherit from what is above
            patch.delitem(sys.modules, name, raising=False)
        try:
            yield factory
        finally:
            for name in OURS:
                sys.modules.pop(name, None)
