"""vLLM's GPU worker with its allocations in our pool: what `--sleep-mode-backend lull` parks.

Graphs, runtime and workspace stay where vLLM puts them; weights and KV cache are what a park is about.
"""

from __future__ import annotations

# vLLM lives in an environment of its own:
# pyright: reportMissingModuleSource=false
import os
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final, cast

import torch
from vllm.v1.worker.gpu_worker import Worker

from .device_pool import open_device_pool, tag_of
from .levels import KV_CACHE, WEIGHTS
from .settings import settings_of

_POOLED: Final = frozenset({WEIGHTS, KV_CACHE})


class LullGpuWorker(Worker):
    def init_device(self) -> None:
        super().init_device()
        settings = settings_of(os.environ, self.vllm_config.additional_config)
        self.lull = open_device_pool(self._device_uuid(), settings)

    def _device_uuid(self) -> str:
        return f"GPU-{cast('Any', torch.cuda).get_device_properties(self.device).uuid}"

    def _maybe_get_memory_pool_context(self, tag: str) -> AbstractContextManager[None]:
        return self.lull.pool.torch_scope(tag_of(tag)) if tag in _POOLED else nullcontext()
