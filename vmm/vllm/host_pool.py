"""The pool of one vLLM worker on a host-memory device, and moving a loaded model into it."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch

from ..host_device import HostDevice
from ..host_driver import HostDriver
from ..pool import Pool
from ..torch_scope import move_module
from .levels import MODEL_WEIGHTS
from .settings import WorkerSettings


def open_pool(settings: WorkerSettings, local_rank: int) -> Pool:
    """Raises ValueError and FileNotFoundError for a device that is none, UnsupportedMode for modes that it refuses."""
    device = HostDevice.open(Path(settings.device_of(local_rank)))
    return Pool(
        HostDriver(device),
        restore_modes=settings.restore_modes,
        immutable_tags=frozenset({MODEL_WEIGHTS}) if settings.immutable_weights else frozenset(),
    )


def house_model(pool: Pool, model: torch.nn.Module, weights_tag: str, buffers_tag: str) -> int:
    """Moves parameters and buffers into the pool and tells how many bytes that took.

    Apart, because level 2 loses the first and keeps the second, which no checkpoint holds.
    """
    parameters = torch.nn.ParameterList(model.parameters())
    taken = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    buffers = _holder(buffer for buffer in model.buffers() if buffer.untyped_storage().data_ptr() not in taken)
    moved = (move_module(parameters, pool, weights_tag), move_module(buffers, pool, buffers_tag))
    return sum(allocation.reserved_bytes for allocation in moved if allocation is not None)


def _holder(buffers: Iterable[torch.Tensor]) -> torch.nn.Module:
    holder = torch.nn.Module()
    for number, buffer in enumerate(buffers):
        holder.register_buffer(f"buffer_{number}", buffer)
    return holder
