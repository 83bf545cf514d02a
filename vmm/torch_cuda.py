"""CUDA tensors in a pool: a torch MemPool whose segments come from our allocator in C (_torch_allocator.c).

Torch puts what a thread allocates while it uses a MemPool into segments of that pool. Before torch 2.10 such uses
cannot nest, and a MemPool can be used once only. So an inner scope ends the use of the outer one's, which goes on with
a fresh MemPool afterwards, and every MemPool is kept, since dropping one frees what lies in it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any, Final

import torch

from .errors import UnsupportedMode
from .pool import Pool
from .tags import RestoreMode
from .torch_allocator import FREE_NAME, MALLOC_NAME, AllocatorGuest, guest_of, library_path

_CONFIGURATION_NAMES: Final = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE: Final = "expandable_segments:true"


def refuse_expandable_segments(environment: Mapping[str, str] = os.environ) -> None:
    """Raises UnsupportedMode where torch maps its segments itself: then a park would free nothing."""
    for name in _CONFIGURATION_NAMES:
        settings = environment.get(name, "").lower().replace(" ", "").split(",")
        if _EXPANDABLE in settings:
            raise UnsupportedMode(
                f"{name} has expandable_segments:True, which cannot be combined with memory that parks; "
                "start the process without it"
            )


@contextmanager
def cuda_scope(pool: Pool, tag: str, mode: RestoreMode | None) -> Generator[None]:
    refuse_expandable_segments()
    guest = guest_of(pool)
    uses = _uses()
    use = _Use(guest, tag, mode)
    outer = uses[-1] if uses else None
    if outer is not None:
        outer.end()
    try:
        uses.append(use)
        try:
            use.begin()
            yield
        finally:
            use.end()
            uses.pop()
    finally:
        if outer is not None:
            outer.begin()


class _Use:
    """One scope's use of a MemPool. It can end and begin again."""

    def __init__(self, guest: AllocatorGuest, tag: str, mode: RestoreMode | None) -> None:
        self._guest = guest
        self._tag = tag
        self._mode = mode
        self._entered: list[AbstractContextManager[Any]] = []

    def begin(self) -> None:
        device = torch.device("cuda", self._guest.ordinal)
        # A MemPool does not do it.
        torch.cuda.init()  # type: ignore[no-untyped-call]
        with torch.cuda.device(device):  # a MemPool is of the device that is current
            mem_pool = torch.cuda.MemPool(_allocator().allocator())
        self._guest.kept.append(mem_pool)
        for manager in (self._guest.scope(self._tag, self._mode), torch.cuda.use_mem_pool(mem_pool, device)):
            manager.__enter__()
            self._entered.append(manager)

    def end(self) -> None:
        while self._entered:
            self._entered.pop().__exit__(None, None, None)


class _Local(threading.local):
    def __init__(self) -> None:
        self.uses: list[_Use] = []


_local: Final = _Local()


def _uses() -> list[_Use]:
    return _local.uses


@cache
def _allocator() -> Any:
    """Torch's hold on the two functions, for the life of the process."""
    return torch.cuda.memory.CUDAPluggableAllocator(library_path(), MALLOC_NAME, FREE_NAME)
