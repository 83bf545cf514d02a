"""A sleep back end for vLLM's GPU worker (vLLM 0.33; the interface is in 0.32 as well).

    vllm serve MODEL --enable-sleep-mode --sleep-mode-backend lull --worker-cls lull.vmm.vllm.gpu_worker.LullGpuWorker

What vLLM's own allocator lacks: backups before anything is unmapped, wakes that are undone where there is no room and
can be asked again, host memory of exactly the size of the weights. No CPU build loads sleep back ends, so this is
tested against a stand-in of the interface and has parked no engine on a GPU yet.
"""

from __future__ import annotations

# vLLM lives in an environment of its own:
# pyright: reportMissingModuleSource=false
from vllm.device_allocator.sleep_mode_backend import SleepModeBackend

from .device_pool import open_pool


class LullSleepBackend(SleepModeBackend):
    """Made by vLLM at its first sleep. Raises NoPool then, before anything has changed."""

    def __init__(self) -> None:
        super().__init__()
        self._sleep = open_pool()

    def suspend(self, level: int = 1) -> None:
        self._sleep.park(level)
        self._state = "SUSPENDED"

    def resume(self, tags: list[str] | None = None) -> None:
        self._state = "RESUMING"
        try:
            self._sleep.wake(tags)
        finally:
            self._state = "SUSPENDED" if self._sleep.asleep() else "RUNNING"

    def discard(self, tags: tuple[str, ...]) -> None:
        self._sleep.discard(tags)
        self._state = "SUSPENDED"

    @classmethod
    def preserves_communicators(cls) -> bool:
        return True  # NCCL's buffers are outside the pool

    @classmethod
    def preserves_compiled_artifacts(cls) -> bool:
        return True  # addresses do not change

    @classmethod
    def preserves_graphs_with_communicators(cls) -> bool:
        return True
