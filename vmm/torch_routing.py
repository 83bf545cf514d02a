"""Puts the storage of new CPU tensors where the innermost scope of the thread says.

Torch has no allocator hook for host memory that a library may use from Python, so this works one step later: each
operation that the thread dispatches is looked at when it returns, and a storage that it has made is exchanged for one
in the pool, contents and all. The exchange happens inside the storage, so tensors, views, ties and parameters stay the
objects they are. Storages reach a thread on three ways that are no operation's output; each has its own line here:
`torch.tensor` (lift_fresh), `torch.load` and deepcopy (set_), and a module that takes a finished tensor.
"""

from __future__ import annotations

import ctypes
import threading
import weakref
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from typing import Any, Final, cast

import torch
from torch.nn.modules import module as torch_modules
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass

from .torch_segments import Segments

Buffer = ctypes.Array[ctypes.c_uint8]


_torch_c: Final[Any] = torch._C  # pyright: ignore[reportPrivateUsage]  what follows is in no stub

# Address -> the buffer there, for as long as a storage uses it: what is in a pool already is never moved again.
_housed: Final[weakref.WeakValueDictionary[int, Buffer]] = weakref.WeakValueDictionary()

_EMPTY: Final = frozenset(
    {
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_like.default,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.new_empty.default,
        torch.ops.aten.new_empty_strided.default,
    }
)
_LIFTS: Final = torch.ops.aten.lift_fresh.default
_SETS: Final = frozenset({torch.ops.aten.set_.source_Storage, torch.ops.aten.set_.source_Storage_storage_offset})


@contextmanager
def routed_to(segments: Segments) -> Generator[None]:
    """New tensors of this thread go there until the block ends. Blocks nest; the innermost counts."""
    scopes = _scopes()
    scopes.append(segments)
    try:
        if len(scopes) > 1:
            # One mode for all: nested modes would each see every operation, the outer one first.
            yield
        else:
            router = _Router()  # type: ignore[no-untyped-call]
            router.owners_of_new_storage = _owners_of_new_storage()
            with _module_hooks(), router:
                yield
    finally:
        scopes.pop()


def storage_over(buffer: Buffer) -> torch.UntypedStorage:
    """A storage that keeps the buffer alive, known as one that lies in a pool."""
    _housed[ctypes.addressof(buffer)] = buffer
    return torch.frombuffer(buffer, dtype=torch.uint8).untyped_storage()


def exchange(storage: torch.UntypedStorage, buffer: Buffer, *, copy: bool = True) -> None:
    """Gives the storage the buffer's memory in place of its own. Both have the same size."""
    if copy:
        ctypes.memmove(buffer, storage.data_ptr(), storage.nbytes())
    cast(Any, storage)._swap_data_ptr_(storage_over(buffer))


class _Local(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Segments] = []


_local: Final = _Local()


def _scopes() -> list[Segments]:
    return _local.scopes


class _Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Where it is True, torch imports its compiler, seconds of work, at the first operation of every process."""
        return False


class _Router(_Mode):  # type: ignore[no-untyped-call]
    owners_of_new_storage = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        call = cast("Callable[..., object]", func)
        given = kwargs or {}
        if func in _SETS:
            new = _owners(args[1]) <= self.owners_of_new_storage
            result = call(*args, **given)
            if new:
                _house(args[1], copy=True)
            return result
        old: set[int] = set()
        if func is not _LIFTS:
            old.update(storage.data_ptr() for storage in _storages((args, given)))
        result = call(*args, **given)
        for storage in _storages(result):
            # Not resizable: memory that torch did not allocate, such as an array of NumPy's that it only wraps.
            if storage.resizable() and storage.data_ptr() not in old:
                _house(storage, copy=func not in _EMPTY)
        return result


def _owners(storage: torch.UntypedStorage) -> int:
    return int(_torch_c._storage_Use_Count(cast(Any, storage)._cdata))


class _OwnersSeen(_Mode):  # type: ignore[no-untyped-call]
    owners = 0

    def __torch_dispatch__(
        self, func: object, types: object, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> object:
        if func in _SETS:
            self.owners = _owners(args[1])
        return cast("Callable[..., object]", func)(*args, **(kwargs or {}))


def _owners_of_new_storage() -> int:
    """How many owners the source of set_ has where no tensor is one: its Python object and the dispatcher's copies.

    It differs between releases of torch. A storage with more owners belongs to a tensor that exists already.
    """
    look = _OwnersSeen()  # type: ignore[no-untyped-call]
    with look:
        torch.empty(0, dtype=torch.uint8).set_(torch.UntypedStorage(1))  # type: ignore[no-untyped-call]
    return look.owners


def _house(storage: torch.UntypedStorage, *, copy: bool) -> None:
    # What is shared must stay where the other process sees it.
    if not storage.nbytes() or storage.data_ptr() in _housed or storage.is_shared():
        return
    segments = _scopes()[-1]
    with segments.pool.changing_layout(segments.tag):
        exchange(storage, segments.take(storage.nbytes()), copy=copy)


def _storages(values: object) -> Iterator[torch.UntypedStorage]:
    for value in pytree.tree_leaves(values):
        if isinstance(value, torch.Tensor):
            yield from storages_in_host_memory(value)


def storages_in_host_memory(tensor: torch.Tensor) -> Iterator[torch.UntypedStorage]:
    """One, none for what has no memory of its own (meta, sparse, empty), several for a tensor made of tensors."""
    if is_traceable_wrapper_subclass(tensor):
        names, _ = tensor.__tensor_flatten__()
        for name in names:
            yield from storages_in_host_memory(getattr(tensor, name))
    elif tensor.layout is torch.strided and tensor.device.type == "cpu" and not torch.nn.parameter.is_lazy(tensor):
        storage = tensor.untyped_storage()
        if storage.device.type == "cpu" and storage.nbytes():
            yield storage


# -- modules that take a tensor which was made elsewhere: load_state_dict(assign=True), nn.Parameter(loaded)

_hooked_scopes = 0
_hooks_lock: Final = threading.Lock()
_hooks: list[Any] = []


@contextmanager
def _module_hooks() -> Generator[None]:
    global _hooked_scopes
    with _hooks_lock:
        _hooked_scopes += 1
        if _hooked_scopes == 1:
            _hooks.append(torch_modules.register_module_parameter_registration_hook(_take_in))
            _hooks.append(torch_modules.register_module_buffer_registration_hook(_take_in))
    try:
        yield
    finally:
        with _hooks_lock:
            _hooked_scopes -= 1
            if not _hooked_scopes:
                while _hooks:
                    _hooks.pop().remove()


def _take_in(module: torch.nn.Module, name: str, tensor: torch.Tensor | None) -> None:
    if tensor is None or not _scopes():
        return
    for storage in storages_in_host_memory(tensor):
        _house(storage, copy=True)
