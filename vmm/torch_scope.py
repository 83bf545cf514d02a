"""Torch storage in a pool. The only file of the library that imports torch.

The pool keeps the memory until it is freed there: a tensor may be dropped at any time, but must not be touched while
its tag is parked (that is a segmentation fault, not an error).
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Final, Protocol, cast

import torch

from .blocks import Allocation
from .pool import Pool
from .tags import RestoreMode

_ALIGNMENT_BYTES: Final = 64  # what torch's own CPU allocator gives


class _Swappable(Protocol):
    """What torch's storages have and its stubs lack."""

    def _swap_data_ptr_(self, other: torch.UntypedStorage) -> None: ...


def host_tensor(
    pool: Pool, shape: Sequence[int], dtype: torch.dtype, tag: str, mode: RestoreMode | None = None
) -> torch.Tensor:
    """A zeroed tensor in an allocation of its own."""
    count = math.prod(shape)
    if count == 0:
        return torch.empty(tuple(shape), dtype=dtype)
    allocation = pool.allocate(count * dtype.itemsize, tag, mode)
    return _view(allocation, 0, count * dtype.itemsize).view(dtype).view(tuple(shape))


def move_module(module: torch.nn.Module, pool: Pool, tag: str, mode: RestoreMode | None = None) -> Allocation | None:
    """Moves all parameters and buffers into one allocation. Parameters, views and ties stay the objects they are.

    None if the module has no storage. Copies of the module (deepcopy) are outside the pool.
    """
    storages = _storages(module)
    if not storages:
        return None
    offsets: list[int] = []
    end = 0
    for storage in storages:
        offsets.append(end)
        end += -(-storage.nbytes() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    allocation = pool.allocate(end, tag, mode)
    for storage, offset in zip(storages, offsets, strict=True):
        inside = _view(allocation, offset, storage.nbytes()).untyped_storage()
        inside.copy_(storage)
        cast(_Swappable, storage)._swap_data_ptr_(inside)  # pyright: ignore[reportPrivateUsage]
    return allocation


def _storages(module: torch.nn.Module) -> list[torch.UntypedStorage]:
    """Each storage once, however many parameters and views share it."""
    unique: dict[int, torch.UntypedStorage] = {}
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if tensor.device.type != "cpu":
            raise ValueError(f"{name} is on {tensor.device}; only tensors in host memory can move into a host pool")
        storage = tensor.untyped_storage()
        if storage.nbytes():
            unique.setdefault(storage.data_ptr(), storage)
    return list(unique.values())


def _view(allocation: Allocation, offset: int, nbytes: int) -> torch.Tensor:
    buffer = (ctypes.c_uint8 * nbytes).from_address(allocation.address + offset)
    return torch.frombuffer(buffer, dtype=torch.uint8)
