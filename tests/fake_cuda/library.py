"""A libcuda.so.1 without a device behind it: `build` compiles it, `FakeCuda` is the tests' side of it in this process.

The C files say how it works. A process gets it by the environment (`environment`) before it starts, or by `load` before
it first uses cuda-python. The first use of a state folder fixes the number and capacity of its devices.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from tests.compiled import shared_library

GRANULE_BYTES = 64 << 10  # of the fake; a real device's is 2 MiB
KINDS = ("handles", "mappings", "reservations", "registrations", "streams", "events")
_SOURCES = Path(__file__).parent
_NAME = "libcuda.so.1"


@cache
def build() -> Path:
    """The folder of the library."""
    return shared_library(_NAME, sorted(_SOURCES.glob("*.c")), sorted(_SOURCES.glob("*.h")))


def environment(
    state: Path,
    *,
    granules: int = 32,
    granule_bytes: int = GRANULE_BYTES,
    devices: int = 1,
    strict: bool = False,
    integrated: bool = False,
    export: str = "fd",
    pin: bool = True,
    context_granules: int = 0,
    slices: int = 0,
) -> dict[str, str]:
    """What a process needs to see devices of ``granules`` each. Processes with one ``state`` folder share them.

    The last ``slices`` of the ``devices`` are MIG slices of the first."""
    return {
        "LD_LIBRARY_PATH": str(build()),
        "FAKE_CUDA_STATE": str(state),
        "FAKE_CUDA_GRANULARITY_BYTES": str(granule_bytes),
        "FAKE_CUDA_CAPACITY_BYTES": str(granules * granule_bytes),
        "FAKE_CUDA_DEVICES": str(devices),
        "FAKE_CUDA_STRICT": str(int(strict)),
        "FAKE_CUDA_INTEGRATED": str(int(integrated)),
        "FAKE_CUDA_EXPORT": export,
        "FAKE_CUDA_PIN": str(int(pin)),
        "FAKE_CUDA_CONTEXT_BYTES": str(context_granules * granule_bytes),
        "FAKE_CUDA_SLICES": str(slices),
    }


class FakeCuda:
    """The fake inside this process."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library
        library.fake_cuda_calls.restype = ctypes.c_ulong
        library.fake_cuda_live.restype = ctypes.c_long

    def reset(self) -> None:
        """As if the process began anew with the environment that it has now."""
        self._library.fake_cuda_reset()

    def fail(self, name: str, error: int, *, nth_call: int = 1) -> None:
        """The nth call from now of a function ("*": of any; "stream:copy", "stream:set": of what a stream does)."""
        failed = self._library.fake_cuda_fail(name.encode(), ctypes.c_ulong(nth_call), error)
        assert failed == 0, f"{name} is no function of the fake, or too many faults are waiting"

    def forget_faults(self) -> None:
        self._library.fake_cuda_forget_faults()

    def calls(self, name: str) -> int:
        return int(self._library.fake_cuda_calls(name.encode()))

    def live(self, kind: str) -> int:
        live = int(self._library.fake_cuda_live(kind.encode()))
        assert live >= 0, f"there is no kind {kind}"
        return live

    def everything_live(self) -> dict[str, int]:
        """All but contexts, which a process keeps."""
        return {kind: self.live(kind) for kind in KINDS}

    @contextmanager
    def held_streams(self) -> Iterator[None]:
        """Streams stand still: what is not synchronised is certainly not done."""
        self._library.fake_cuda_hold_streams(1)
        try:
            yield
        finally:
            self._library.fake_cuda_hold_streams(0)


@cache
def load() -> FakeCuda:
    """Into this process, for good, ahead of any real driver: later loads find it by its name."""
    return FakeCuda(ctypes.CDLL(str(build() / _NAME), mode=ctypes.RTLD_GLOBAL))
