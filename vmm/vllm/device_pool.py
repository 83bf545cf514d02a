"""The pool of this process on its GPU: the worker class allocates in it, the sleep back end parks and wakes it."""

from __future__ import annotations

import threading
from typing import Final

from ..pool import Pool
from .levels import MODEL_WEIGHTS, pool_tags
from .pool_sleep import PoolSleep
from .settings import WorkerSettings

WORKER_CLASS: Final = "lull.vmm.vllm.gpu_worker.LullGpuWorker"

_lock: Final = threading.Lock()
_open: Final[list[PoolSleep]] = []  # one at most: vLLM runs one worker in a process


class NoPool(RuntimeError):
    """Nothing was allocated in a pool, so there is nothing that could be parked."""


def open_device_pool(device_uuid: str, settings: WorkerSettings) -> PoolSleep:
    """Raises RuntimeError if there is one already, and as CudaDriver and Pool do."""
    from ..cuda_driver import CudaDriver

    immutable = frozenset({MODEL_WEIGHTS}) if settings.immutable_weights else frozenset[str]()
    return use_pool(Pool(CudaDriver(device_uuid), restore_modes=settings.restore_modes, immutable_tags=immutable))


def use_pool(pool: Pool) -> PoolSleep:
    """Makes ``pool`` the one of this process."""
    with _lock:
        if _open:
            raise RuntimeError("this process has a pool already; vLLM runs one worker in a process")
        _open.append(PoolSleep(pool))
        return _open[0]


def open_pool() -> PoolSleep:
    """The one of this process; NoPool where the worker class was not given."""
    if not _open:
        raise NoPool(
            f"--sleep-mode-backend lull parks what its worker class has allocated: add --worker-cls {WORKER_CLASS}"
        )
    return _open[0]


def close_pool() -> None:
    """Frees it. No change where there is none."""
    with _lock:
        if _open:
            _open.pop().pool.close()


def tag_of(vllm_tag: str) -> str:
    """Where an allocation of vLLM's tag goes."""
    return pool_tags([vllm_tag])[0]
