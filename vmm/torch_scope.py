"""Torch storage in a pool: tensors made inside a scope, single tensors, modules and optimizers that exist already.

What was moved keeps its memory until it is freed in the pool; what a scope has made, until its storage dies. A tensor
may be dropped at any time, but not touched while its tag is parked: that is a segmentation fault, not an error.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import cast

import torch

from .blocks import Allocation
from .host_driver import HostDriver
from .pool import Pool
from .tags import RestoreMode
from .torch_routing import Buffer, exchange, routed_to, storage_over, storages_in_host_memory
from .torch_segments import ALIGNMENT_BYTES, segments_of


def torch_scope(pool: Pool, tag: str, mode: RestoreMode | None = None) -> AbstractContextManager[None]:
    """Every tensor that this thread makes inside gets its storage in the pool, on the pool's device.

    Scopes nest, also with different modes inside one tag: the innermost counts. A scope belongs to the thread that
    entered it, and to no other; do not await inside. An operation whose result does not fit raises OutOfDeviceMemory
    (on CUDA torch.OutOfMemoryError), one while the tag is parked LayoutChanged (on CUDA the same).
    """
    pool.restore_mode(tag, mode)  # a bad one is refused here, not at the first tensor
    if isinstance(pool.driver, HostDriver):
        return routed_to(segments_of(pool, tag, mode))
    from .torch_cuda import cuda_scope

    return cuda_scope(pool, tag, mode)


def host_tensor(
    pool: Pool, shape: Sequence[int], dtype: torch.dtype, tag: str, mode: RestoreMode | None = None
) -> torch.Tensor:
    """A zeroed tensor in an allocation of its own."""
    _require_host(pool)
    pool.restore_mode(tag, mode)
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    allocation = pool.allocate(count * dtype.itemsize, tag, mode)
    storage = storage_over(_buffer(allocation, 0, count * dtype.itemsize))
    return torch.empty(0, dtype=dtype).set_(storage).view(tuple(shape))


def move_module(module: torch.nn.Module, pool: Pool, tag: str, mode: RestoreMode | None = None) -> Allocation | None:
    """Moves all parameters and buffers into one allocation. Parameters, views and ties stay the objects they are.

    None if the module has no storage. Copies of the module (deepcopy) are outside the pool.
    """
    if not isinstance(cast("object", module), torch.nn.Module):
        raise TypeError(f"module is {module!r}; it must be a torch.nn.Module")
    return _move([*module.named_parameters(), *module.named_buffers()], pool, tag, mode)


def move_optimizer(
    optimizer: torch.optim.Optimizer, pool: Pool, tag: str, mode: RestoreMode | None = None
) -> Allocation | None:
    """Moves the state of an optimizer that has made a step already: before, there is none, and None is returned.

    To have it in the pool from the start, make the first step inside a scope.
    """
    if not isinstance(cast("object", optimizer), torch.optim.Optimizer):
        raise TypeError(f"optimizer is {optimizer!r}; it must be a torch.optim.Optimizer")
    return _move(_state_tensors(optimizer), pool, tag, mode)


def _state_tensors(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, torch.Tensor]]:
    for position, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                yield f"{name} of parameter {position}", value


def _move(
    tensors: Iterable[tuple[str, torch.Tensor]], pool: Pool, tag: str, mode: RestoreMode | None
) -> Allocation | None:
    _require_host(pool)
    pool.restore_mode(tag, mode)
    storages = _unique_storages(tensors)
    if not storages:
        return None
    offsets: list[int] = []
    end = 0
    for storage in storages:
        offsets.append(end)
        end += -(-storage.nbytes() // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
    with pool.changing_layout(tag):  # no park between the allocation and its contents
        allocation = pool.allocate(end, tag, mode)
        for storage, offset in zip(storages, offsets, strict=True):
            exchange(storage, _buffer(allocation, offset, storage.nbytes()))
    return allocation


def _require_host(pool: Pool) -> None:
    if not isinstance(pool.driver, HostDriver):
        raise ValueError(f"the pool is on device {pool.driver.device_uuid}; make tensors there inside pool.torch_scope")


def _unique_storages(tensors: Iterable[tuple[str, torch.Tensor]]) -> list[torch.UntypedStorage]:
    """Each storage once, however many parameters and views share it."""
    unique: dict[int, torch.UntypedStorage] = {}
    for name, tensor in tensors:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; only tensors in host memory can move into a host pool")
        for storage in storages_in_host_memory(tensor):
            unique.setdefault(storage.data_ptr(), storage)
    return list(unique.values())


def _buffer(allocation: Allocation, offset: int, nbytes: int) -> Buffer:
    return (ctypes.c_uint8 * nbytes).from_address(allocation.address + offset)
