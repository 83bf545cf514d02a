"""How much host memory may be taken, and taking it. Ask first: the kernel does not refuse, it kills.

Anonymous mappings and the few libc calls that they need. Nothing here knows of devices or tags.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Final

PROT_NONE: Final = 0
PROT_READ: Final = mmap.PROT_READ
PROT_READ_WRITE: Final = mmap.PROT_READ | mmap.PROT_WRITE
PAGE_BYTES: Final = mmap.PAGESIZE
HUGE_BYTES: Final = 2 << 20  # with 4 KiB pages; elsewhere a size that aligns well all the same
MAP_FIXED: Final = 0x10
MAP_FIXED_NOREPLACE: Final = 0x100000  # Linux 4.17
MAP_NORESERVE: Final = 0x4000
RESERVED: Final = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
SHARED_FIXED: Final = mmap.MAP_SHARED | MAP_FIXED
MADV_SEQUENTIAL: Final = 2
MADV_DONTFORK: Final = 10
MADV_HUGEPAGE: Final = 14
MADV_NOHUGEPAGE: Final = 15
MADV_POPULATE_WRITE: Final = 23  # Linux 5.14
MADV_COLLAPSE: Final = 25  # Linux 6.1

_CAP_IPC_LOCK: Final = 14
_MAP_FAILED: Final = ctypes.c_void_p(-1).value
_UNLIMITED_BYTES: Final = 1 << 60  # cgroup v1 writes "no limit" as a huge number

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]


def map_pages(address: int | None, nbytes: int, prot: int, flags: int, fd: int = -1) -> int:
    mapped: int | None = _libc.mmap(address, nbytes, prot, flags, fd, 0)
    if mapped is None or mapped == _MAP_FAILED:
        raise _os_error("mmap")
    return mapped


def map_anonymous(nbytes: int) -> int:
    """Private memory in huge pages as far as they go, at an address that allows for them, and not for children."""
    slack_bytes = HUGE_BYTES if nbytes >= HUGE_BYTES else 0
    start = map_pages(None, nbytes + slack_bytes, PROT_READ_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    address = start
    if slack_bytes:
        address = -(-start // slack_bytes) * slack_bytes
        if address > start:
            unmap_pages(start, address - start)
        if tail_bytes := start + slack_bytes - address:
            unmap_pages(address + nbytes, tail_bytes)
    advise_pages(address, nbytes, MADV_DONTFORK)
    advise_pages(address, nbytes, MADV_HUGEPAGE)
    return address


def unmap_pages(address: int, nbytes: int) -> None:
    if _libc.munmap(address, nbytes):
        raise _os_error("munmap")


def protect_pages(address: int, nbytes: int, prot: int) -> None:
    if _libc.mprotect(address, nbytes, prot):
        raise _os_error("mprotect")


def advise_pages(address: int, nbytes: int, advice: int) -> bool:
    """False where the kernel does not know or does not follow the advice."""
    return bool(_libc.madvise(address, nbytes, advice) == 0)


def lock_pages(address: int, nbytes: int) -> bool:
    """False where the memlock limit does not allow it."""
    return bool(_libc.mlock(address, nbytes) == 0)


def unlock_pages(address: int, nbytes: int) -> None:
    if _libc.munlock(address, nbytes):
        raise _os_error("munlock")


def lockable_bytes() -> int | None:
    """How much more this process may lock; None: no limit."""
    status: dict[str, str] = {}
    with open("/proc/self/status", encoding="utf-8", errors="replace") as lines:  # its name may be no text
        for line in lines:
            name, _, value = line.partition(":")
            status[name] = value.strip()
    if int(status["CapEff"], 16) >> _CAP_IPC_LOCK & 1:
        return None
    limit_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if limit_bytes == resource.RLIM_INFINITY:
        return None
    return max(0, limit_bytes - int(status["VmLck"].split()[0]) * 1024)


def available_bytes() -> int:
    """What may be taken now without being killed for it: MemAvailable, and the room in every cgroup above us."""
    rooms_bytes = cgroup_rooms_bytes(Path("/proc/self/cgroup"), Path("/sys/fs/cgroup"))
    return min([_mem_available_bytes(), *rooms_bytes])


def _mem_available_bytes() -> int:
    with open("/proc/meminfo", encoding="ascii") as lines:
        for line in lines:
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    raise OSError(errno.ENOSYS, "/proc/meminfo has no MemAvailable line")


def cgroup_rooms_bytes(membership: Path, root: Path) -> Iterator[int]:
    """The room under every limit that is set on us, in either version of cgroups or in both at once."""
    try:
        lines = membership.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            for base in (root, root / "unified"):
                yield from _rooms_up_bytes(base, path, "memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            yield from _rooms_up_bytes(
                root / "memory", path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
            )


def _rooms_up_bytes(base: Path, path: str, limit_name: str, usage_name: str, reclaimable: str) -> Iterator[int]:
    """The room in the group and in each of its parents, as far as they can be seen from here."""
    group = base / path.lstrip("/")
    while True:
        limit_bytes = _number(group / limit_name)
        usage_bytes = _number(group / usage_name)
        if limit_bytes is not None and usage_bytes is not None and limit_bytes < _UNLIMITED_BYTES:
            yield max(0, limit_bytes - usage_bytes + _stat_bytes(group / "memory.stat", reclaimable))
        if group == base:
            return
        group = group.parent


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="ascii").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _stat_bytes(path: Path, name: str) -> int:
    try:
        lines = path.read_text(encoding="ascii").splitlines()
    except OSError:
        return 0
    for line in lines:
        key, _, value = line.partition(" ")
        if key == name:
            return int(value)
    return 0


def _os_error(call: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, f"{call}: {os.strerror(number)}")
