"""What a piece of work takes: seconds, and what a busy machine disturbs less: processor time and page faults."""

from __future__ import annotations

import os
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from ..vmm.host_device import HostDevice
from ..vmm.host_driver import HostDriver
from ..vmm.pool import Pool

ALLOCATIONS: Final = 1000  # each holds a descriptor
_GRANULE_BYTES: Final = os.sysconf("SC_PAGE_SIZE")


class Seconds(float):
    """Of the wall's clock, with what all threads of the process took meanwhile."""

    cpu_seconds: float = 0.0
    page_faults: int = 0


def timed(work: Callable[[], object]) -> Seconds:
    before, begin = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    work()
    seconds = Seconds(time.perf_counter() - begin)
    after = resource.getrusage(resource.RUSAGE_SELF)
    seconds.cpu_seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    seconds.page_faults = after.ru_minflt - before.ru_minflt
    return seconds


def many_allocations(say: Callable[[str], None], count: int = ALLOCATIONS) -> dict[str, Any]:
    """Small allocations of one pool, one after the other: what they write is the ledger."""
    say(f"{count} allocations")
    with tempfile.TemporaryDirectory(prefix="lull-bench-") as directory:
        device = HostDevice.create(Path(directory) / "device", capacity_bytes=2 * count * _GRANULE_BYTES)
        pool = Pool(HostDriver(device, granularity_bytes=_GRANULE_BYTES))
        try:
            written_bytes = _written_bytes()
            seconds = timed(lambda: [pool.allocate(_GRANULE_BYTES, "kv_cache") for _ in range(count)])
            written_bytes = _written_bytes() - written_bytes
        finally:
            pool.close()
    return {
        "count": count,
        "seconds": float(seconds),
        "cpu_seconds": seconds.cpu_seconds,
        "written_bytes_each": written_bytes / count,
    }


def _written_bytes() -> int:
    """By this process so far, as the kernel counts."""
    lines = Path("/proc/self/io").read_text(encoding="ascii").splitlines()
    return int(next(line for line in lines if line.startswith("wchar:")).split()[1])
