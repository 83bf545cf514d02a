"""The Python side of _torch_allocator.c: which space a thread allocates in, and what its pool takes over from it.

Nothing here is called by torch, and nothing here runs while C holds its mutex: C never wants the GIL, and ctypes
releases it around each call. This file does not know torch.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Generator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from typing import Any, Final

from .blocks import Allocation
from .cuda_driver import CudaDriver
from .errors import DriverError, LullMemoryError, TransitionInProgress
from .pool import Pool
from .tags import RestoreMode

SPACES_MAX: Final = 256
FREEZE_SECONDS_MAX: Final = 60.0
MALLOC_NAME: Final = "lull_allocator_malloc"
FREE_NAME: Final = "lull_allocator_free"

# How an allocation or free can end, beside the driver's own codes.
OUT_OF_MEMORY: Final = 2
NO_SCOPE: Final = -1
FROZEN: Final = -2
WRONG_DEVICE: Final = -3
UNKNOWN_ADDRESS: Final = -4
NO_HOST_MEMORY: Final = -5
PARKED: Final = -6

_RECORDS_AT_ONCE: Final = 256
_REASON_BYTES: Final = 256


class _Record(ctypes.Structure):
    """The layout is known to _torch_allocator.c."""

    _fields_ = (
        ("serial", ctypes.c_uint64),
        ("address", ctypes.c_uint64),
        ("handle", ctypes.c_uint64),
        ("nbytes", ctypes.c_uint64),
        ("reserved_bytes", ctypes.c_uint64),
        ("space", ctypes.c_int32),
        ("reserved", ctypes.c_int32),
    )


@dataclass(frozen=True, slots=True)
class _Made:
    """A record, out of C."""

    serial: int
    address: int
    handle: int
    nbytes: int
    reserved_bytes: int
    space: int


def library_path() -> str:
    """The compiled part. Raises DriverError where the installation has none."""
    spec = find_spec("._torch_allocator", __package__)
    if spec is None or spec.origin is None:
        raise DriverError(
            "torch_scope",
            "the compiled part of this installation is missing (lull.vmm._torch_allocator): CUDA tensors need it; "
            "install a C compiler (on Debian: apt-get install gcc) and install gpu-lull again",
        )
    return spec.origin


@cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(library_path())
    signatures: dict[str, tuple[Any, list[Any]]] = {
        "last": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_size_t]),
        "open": (ctypes.c_int, [ctypes.c_char_p, ctypes.c_size_t]),
        "group": (ctypes.c_int, [ctypes.c_int, ctypes.c_size_t, ctypes.c_int]),
        "close": (None, [ctypes.c_int]),
        "enter": (None, [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p]),
        "malloc": (ctypes.c_void_p, [ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]),
        "free": (None, [ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p]),
        "bar": (None, [ctypes.c_int, ctypes.c_int, ctypes.c_int]),
        "freeze": (ctypes.c_int, [ctypes.c_int, ctypes.c_double]),
        "thaw": (None, [ctypes.c_int]),
        "take": (ctypes.c_size_t, [ctypes.c_int, ctypes.c_int, ctypes.c_void_p, ctypes.c_size_t]),
        "settle": (ctypes.c_int, [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint64]),
    }
    for name, (result, arguments) in signatures.items():
        function = library[f"lull_allocator_{name}"]
        function.restype = result
        function.argtypes = arguments
        setattr(library, f"lull_allocator_{name}", function)
    reason = ctypes.create_string_buffer(_REASON_BYTES)
    if library.lull_allocator_open(reason, len(reason)):
        raise DriverError("torch_scope", reason.value.decode(errors="replace"))
    return library


def last_outcome() -> tuple[int, str]:
    """How the last allocation or free of this thread ended: 0, a CUDA error, or a negative code of ours."""
    reason = ctypes.create_string_buffer(_REASON_BYTES)
    code = int(_library().lull_allocator_last(reason, len(reason)))
    return code, reason.value.decode(errors="replace")


class AllocatorGuest:
    """The memory that torch has from one pool. A PoolGuest: each transition begins with taking over what is new."""

    def __init__(self, pool: Pool, driver: CudaDriver) -> None:
        self.pool = pool
        self.ordinal = CudaDriver.devices().index(driver.device_uuid)
        self.kept: list[object] = []  # torch's MemPools: dropping one frees what lies in it
        self._driver = driver
        self._lock = threading.Lock()  # guards the spaces
        self._spaces: list[tuple[str, RestoreMode]] = []
        self._transitions = threading.Lock()  # guards the next three
        self._adopted: dict[int, Allocation] = {}  # by serial
        self._new: list[_Made] = []  # taken out of C, and not yet adopted
        self._gone: list[_Made] = []  # taken out of C, and not yet forgotten
        self._number = int(
            _library().lull_allocator_group(self.ordinal, driver.granularity(), driver.handle_type.value)
        )
        if self._number < 0:
            raise DriverError("torch_scope", last_outcome()[1])

    @contextmanager
    def scope(self, tag: str, mode: RestoreMode | None) -> Generator[None]:
        """What torch allocates on this thread inside is of the tag. The former scope comes back after it."""
        space = self._space(tag, self.pool.restore_mode(tag, mode))
        group, former = ctypes.c_int(), ctypes.c_int()
        _library().lull_allocator_enter(self._number, space, ctypes.byref(group), ctypes.byref(former))
        try:
            yield
        finally:
            unused = ctypes.c_int()
            _library().lull_allocator_enter(group.value, former.value, ctypes.byref(unused), ctypes.byref(unused))
            self.settle()

    def settle(self) -> None:
        """Lets the pool know what is new and what is gone, as each transition does: its tags and bytes are right then.

        Does nothing while a transition is under way, and leaves errors to the next one."""
        with suppress(LullMemoryError):
            self.before_transition()
            self.after_transition()

    def before_transition(self) -> None:
        if _library().lull_allocator_freeze(self._number, FREEZE_SECONDS_MAX):
            raise TransitionInProgress(f"an allocation of torch has been under way for {FREEZE_SECONDS_MAX} s")
        try:
            with self._transitions:
                self._forget_gone()
                self._adopt_new()
        except BaseException:
            _library().lull_allocator_thaw(self._number)
            raise

    def after_transition(self) -> None:
        try:
            with self._transitions:
                for serial, allocation in self._adopted.items():
                    _library().lull_allocator_settle(allocation.address, serial, self._native_of(allocation))
            parked = self.pool.parked_tags()
            with self._lock:
                for space, (tag, _) in enumerate(self._spaces):
                    _library().lull_allocator_bar(self._number, space, tag in parked)
        finally:
            _library().lull_allocator_thaw(self._number)

    def close(self) -> None:
        """Once nothing of torch's is left, and before the pool is closed. What is left is the pool's to free."""
        if _library().lull_allocator_freeze(self._number, FREEZE_SECONDS_MAX):
            raise TransitionInProgress(f"an allocation of torch has been under way for {FREEZE_SECONDS_MAX} s")
        with self._transitions:
            self._forget_gone()
            self._adopted.clear()
        _library().lull_allocator_close(self._number)
        self.pool.guest = None

    def _native_of(self, allocation: Allocation) -> int:
        try:
            handle = self.pool.handle_of(allocation)
        except ValueError:
            return 0  # somebody has freed torch's memory in the pool; a transition must end all the same
        return 0 if handle is None else self._driver.native_handle(handle)

    def _space(self, tag: str, mode: RestoreMode) -> int:
        with self._lock:
            if (tag, mode) in self._spaces:
                return self._spaces.index((tag, mode))
            if len(self._spaces) == SPACES_MAX:
                raise DriverError("torch_scope", f"a pool has at most {SPACES_MAX} pairs of tag and mode")
            self._spaces.append((tag, mode))
            space = len(self._spaces) - 1
            _library().lull_allocator_bar(self._number, space, tag in self.pool.parked_tags())
            return space

    def _forget_gone(self) -> None:
        self._gone.extend(self._take(gone=True))
        while self._gone:
            made = self._gone[0]
            allocation = self._adopted.get(made.serial)
            if allocation is None:
                self._new = [one for one in self._new if one.serial != made.serial]
            else:
                self._forget(allocation)
                del self._adopted[made.serial]
            del self._gone[0]

    def _forget(self, allocation: Allocation) -> None:
        try:
            handle = self.pool.forget(allocation)
        except ValueError:
            return  # freed in the pool before torch has done it, and in the driver with it
        self._driver.disown(allocation.address, allocation.reserved_bytes, handle)

    def _adopt_new(self) -> None:
        self._new.extend(self._take(gone=False))
        while self._new:
            made = self._new[0]
            tag, mode = self._spaces[made.space]
            allocation = Allocation(made.address, made.nbytes, made.reserved_bytes, tag, mode)
            handle = self._driver.adopt(made.address, made.reserved_bytes, made.handle)
            try:
                self.pool.adopt(allocation, handle)
            except BaseException:
                self._driver.disown(made.address, made.reserved_bytes, handle)
                raise
            self._adopted[made.serial] = allocation
            del self._new[0]

    def _take(self, *, gone: bool) -> list[_Made]:
        taken: list[_Made] = []
        records = (_Record * _RECORDS_AT_ONCE)()
        count = _RECORDS_AT_ONCE
        while count == _RECORDS_AT_ONCE:
            count = int(_library().lull_allocator_take(self._number, gone, records, _RECORDS_AT_ONCE))
            taken.extend(
                _Made(one.serial, one.address, one.handle, one.nbytes, one.reserved_bytes, one.space)
                for one in records[:count]
            )
        return taken


_guest_lock: Final = threading.Lock()


def guest_of(pool: Pool) -> AllocatorGuest:
    """The same for the same pool. Raises DriverError where the pool's device is none of CUDA's."""
    with _guest_lock:
        if pool.guest is None:
            if not isinstance(pool.driver, CudaDriver):
                raise DriverError("torch_scope", f"{type(pool.driver).__name__} is no device that torch can use")
            pool.guest = AllocatorGuest(pool, pool.driver)
        guest = pool.guest
    if not isinstance(guest, AllocatorGuest):
        raise TypeError(f"this pool parks the memory of {type(guest).__name__} already")
    return guest
