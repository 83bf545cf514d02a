"""What can go wrong with memory. An error says what is still true, and whether asking again can help.

LullMemoryError
├── OutOfDeviceMemory     no room on the device; nothing changed, ask again when there is room
├── OutOfHostMemory       no room in host memory for a backup or for host-device pages; nothing changed
├── DriverError           a driver call was refused or misused; that call changed nothing
│   ├── DeviceFailed      a sticky error: the device is lost to this process, and what it held with it
│   ├── LedgerBusy        another process keeps the device's ledger locked
│   ├── LedgerUnreadable  what lies in the device's ledger is none: nothing was charged
│   └── LedgerUnwritable  the disk of the device's ledger takes nothing: nothing was charged
├── UnsupportedMode       this device cannot honour the restore mode
├── HostMemoryNotPinned   backups must be page-locked and the system does not allow it; nothing changed
├── LayoutChanged         an allocation would change the layout of a tag that is parked, or it was woken as another
├── ImmutableChanged      a tag declared immutable is not what its backup is; nothing was released
├── ContentsLost          a park or wake failed and could not be rolled back; says which tags lost what
├── AdmissionClosed       work was offered while memory is not running
├── DrainTimeout          work in flight did not end in time; nothing was released
├── RankRefused           a rank could not do its part; every rank is as it was before
└── TransitionRefused     the request does not fit the present state; nothing changed
    ├── AlreadyParked         more tags than are parked were asked for
    ├── TransitionInProgress  a park or wake is under way
    ├── PoolClosed            the pool has been closed and its memory is gone: make another
    └── RuntimeFailed         memory is failed for good: replace the process
        └── RanksFailed       the ranks of an engine are not where each other are: replace the engine
"""

from __future__ import annotations

from collections.abc import Iterable


class LullMemoryError(RuntimeError):
    """Base of every error of the memory library."""


class OutOfDeviceMemory(LullMemoryError):
    def __init__(self, requested_bytes: int, free_bytes: int, capacity_bytes: int, limit: str = "the device") -> None:
        super().__init__(
            f"out of device memory: {requested_bytes} bytes requested, {free_bytes} of {capacity_bytes} bytes of "
            f"{limit} are free; free memory or ask for less, then try again"
        )
        self.requested_bytes = requested_bytes
        self.free_bytes = free_bytes
        self.capacity_bytes = capacity_bytes


class OutOfHostMemory(LullMemoryError):
    def __init__(self, requested_bytes: int, available_bytes: int, purpose: str) -> None:
        super().__init__(
            f"out of host memory: {purpose} needs {requested_bytes} bytes and {available_bytes} are available "
            "(MemAvailable and cgroup limits); free host memory or choose a restore mode without a backup"
        )
        self.requested_bytes = requested_bytes
        self.available_bytes = available_bytes


class DriverError(LullMemoryError):
    def __init__(self, verb: str, reason: str) -> None:
        super().__init__(f"{verb}: {reason}")
        self.verb = verb
        self.reason = reason


class DeviceFailed(DriverError):
    """Only a new process can use the device again."""


class LedgerBusy(DriverError):
    """The lock of the device's ledger could not be had within its bound."""


class LedgerUnreadable(DriverError):
    """Who holds how much of the device is not known: it gives out nothing until its directory is put right."""


class LedgerUnwritable(DriverError):
    """The ledger on disk is the one before; asking again helps once its disk has room."""


class UnsupportedMode(LullMemoryError, ValueError):
    pass


class HostMemoryNotPinned(LullMemoryError):
    def __init__(self, tag: str, nbytes: int, lockable_bytes: int | None) -> None:
        limit = "no limit of the system is in the way" if lockable_bytes is None else f"{lockable_bytes} are allowed"
        super().__init__(
            f"tag {tag}: {nbytes} bytes of host memory could not be page-locked ({limit}); raise the memlock limit "
            "(RLIMIT_MEMLOCK, ulimit -l), choose restore mode CPU, or allow unlocked backups"
        )
        self.tag = tag
        self.nbytes = nbytes


class LayoutChanged(LullMemoryError):
    """Raised out of a wake it is fatal: memory is not where the engine believes it is."""


class ImmutableChanged(LullMemoryError):
    def __init__(self, tag: str, address: int, nbytes: int) -> None:
        super().__init__(
            f"tag {tag} is immutable and the {nbytes} bytes at {address:#x} are no longer what was backed up; find who "
            "writes to them, or unseal the tag before it is changed"
        )
        self.tag = tag
        self.address = address


class ContentsLost(LullMemoryError):
    """``lost`` tags have contents nowhere any more, ``parked`` ones in their backups, ``live`` ones in place."""

    def __init__(self, during: str, *, lost: Iterable[str], parked: Iterable[str], live: Iterable[str]) -> None:
        self.lost = tuple(sorted(lost))
        self.parked = tuple(sorted(parked))
        self.live = tuple(sorted(live))
        super().__init__(
            f"{during} failed and could not be rolled back: lost {_names(self.lost)}, still parked "
            f"{_names(self.parked)}, in place {_names(self.live)}; replace the process"
        )


class AdmissionClosed(LullMemoryError):
    """The words are TensorRT-LLM's, so that its callers recognise them."""

    def __init__(self, state: str) -> None:
        super().__init__(f"Cannot enqueue requests while executor admission is {state}")
        self.state = state


class DrainTimeout(LullMemoryError):
    def __init__(self, in_flight: int, seconds: float) -> None:
        super().__init__(f"{in_flight} request(s) still in flight after draining for {seconds} s; nothing was released")
        self.in_flight = in_flight
        self.seconds = seconds


class RankRefused(LullMemoryError):
    pass


class TransitionRefused(LullMemoryError):
    pass


class AlreadyParked(TransitionRefused):
    def __init__(self, requested: Iterable[str], parked: Iterable[str]) -> None:
        super().__init__(
            f"Cannot release {_names(sorted(requested))}: memory is already parked with {_names(sorted(parked))}; "
            "resume first"
        )


class TransitionInProgress(TransitionRefused):
    pass


class PoolClosed(TransitionRefused):
    pass


class RuntimeFailed(TransitionRefused):
    pass


class RanksFailed(RuntimeFailed):
    pass


def _names(tags: Iterable[str]) -> str:
    return f"[{', '.join(tags)}]"
