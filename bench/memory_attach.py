"""An engine that maps committed weights of a memory service, beside one that loads the same bytes from a file.

The file lies in the page cache: no disk is measured, which is the best case for loading.
"""

from __future__ import annotations

import ctypes
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from ..vmm import host_memory
from ..vmm.host_device import HostDevice
from ..vmm.host_driver import HostDriver
from ..vmm.service.pool import Piece, ServicePool
from ..vmm.service.state import Lock

JUDGED_BYTES_MIN: Final = 1 << 30
JUDGED_REPETITIONS_MIN: Final = 3
ATTACH_SECONDS_TARGET: Final = 0.02

_NAME: Final = "bench"
_PIECE_BYTES: Final = 256 << 20
_READ_BYTES: Final = 16 << 20
_END_SECONDS_MAX: Final = 30.0
_SERVICE: Final = (sys.executable, "-P", "-m", "lull.vmm.service")

_libc = ctypes.CDLL(None)
_libc.memchr.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_size_t]
_libc.memchr.restype = ctypes.c_void_p


def measure(nbytes: int, repetitions: int, say: Callable[[str], None]) -> dict[str, Any]:
    """Medians in seconds, or why it was not run."""
    needed_bytes, available_bytes = 2 * nbytes + (1 << 30), host_memory.available_bytes()
    if needed_bytes > available_bytes:
        return {"not_run": f"it needs {needed_bytes} bytes of host memory and {available_bytes} are available"}
    with tempfile.TemporaryDirectory(prefix="lull-bench-") as text:
        directory = Path(text)
        say(f"attaching to {nbytes >> 20} MiB of committed weights")
        attached = _attach_all(directory, nbytes, repetitions)
        say(f"loading {nbytes >> 20} MiB from the page cache")
        loaded = _load_all(directory / "weights", nbytes, repetitions)
    attach_seconds = statistics.median(attach for attach, _ in attached)
    return {
        "size_bytes": nbytes,
        "attach_seconds": attach_seconds,
        "attach_and_read_once_seconds": statistics.median(attach + read for attach, read in attached),
        "load_seconds": statistics.median(load for load, _ in loaded),
        "load_and_read_once_seconds": statistics.median(load + read for load, read in loaded),
        "targets": [
            {
                "name": "attach to committed weights, seconds",
                "value": attach_seconds,
                "at_most": ATTACH_SECONDS_TARGET,
                "met": attach_seconds <= ATTACH_SECONDS_TARGET,
                "judged": is_judged(nbytes, repetitions),
            }
        ],
    }


def is_judged(nbytes: int, repetitions: int) -> bool:
    """Whether there is enough of it for its times to say something."""
    return nbytes >= JUDGED_BYTES_MIN and repetitions >= JUDGED_REPETITIONS_MIN


def _attach_all(directory: Path, nbytes: int, repetitions: int) -> list[tuple[float, float]]:
    device = HostDevice.create(directory / "device", capacity_bytes=nbytes + _PIECE_BYTES)
    with memory_service(device, directory / "memory.sock") as socket:
        writer = ServicePool(HostDriver(device), socket, _NAME, lock=Lock.READ_WRITE)
        sizes = [min(_PIECE_BYTES, nbytes - offset) for offset in range(0, nbytes, _PIECE_BYTES)]
        regions = writer.build({f"layer.{number}": Piece(size) for number, size in enumerate(sizes)})
        for region in regions.values():
            ctypes.memset(region.address, 1, region.nbytes)
        writer.commit()
        writer.close()
        return [_attach(device, socket) for _ in range(repetitions)]


def _attach(device: HostDevice, socket: Path) -> tuple[float, float]:
    driver = HostDriver(device)
    begin = time.perf_counter()
    pool = ServicePool(driver, socket, _NAME, lock=Lock.READ_ONLY)
    regions = list(pool.regions().values())
    attached = time.perf_counter()
    for region in regions:
        _read_once(region.address, region.nbytes)
    end = time.perf_counter()
    pool.close()
    return attached - begin, end - attached


def _load_all(path: Path, nbytes: int, repetitions: int) -> list[tuple[float, float]]:
    with open(path, "wb", buffering=0) as file:
        content = bytes([1]) * _READ_BYTES
        for offset in range(0, nbytes, _READ_BYTES):
            file.write(content[: min(_READ_BYTES, nbytes - offset)])
    return [_load(path, nbytes) for _ in range(repetitions)]


def _load(path: Path, nbytes: int) -> tuple[float, float]:
    """As loaders do it: into memory of its own, in large reads."""
    begin = time.perf_counter()
    address = host_memory.map_anonymous(nbytes)
    try:
        with open(path, "rb", buffering=0) as file:
            offset = 0
            while offset < nbytes:
                window = (ctypes.c_char * min(_READ_BYTES, nbytes - offset)).from_address(address + offset)
                count = file.readinto(window)
                if not count:
                    raise OSError(f"{path} ends after {offset} of {nbytes} bytes")
                offset += count
        loaded = time.perf_counter()
        _read_once(address, nbytes)
        return loaded - begin, time.perf_counter() - loaded
    finally:
        host_memory.unmap_pages(address, nbytes)


def _read_once(address: int, nbytes: int) -> None:
    """Every byte: looks for one that is not there."""
    if _libc.memchr(address, 2, nbytes) is not None:
        raise ValueError("the weights are not what was committed")


@contextmanager
def memory_service(device: HostDevice, socket: Path) -> Generator[Path]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LULL_")}
    process = subprocess.Popen(
        [*_SERVICE, "--device", str(device.path), "--socket", str(socket), "--state-dir", str(socket.parent / "state")],
        env=environment,
    )
    try:
        yield socket
    finally:
        process.terminate()
        try:
            process.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
