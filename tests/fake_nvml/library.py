"""A libnvidia-ml.so.1 without a GPU: `build` compiles it, `FakeNvml` writes what goes wrong into the state folder.

`nvml.c` says how it works and what it stands on. It sees what processes hold through the fake libcuda of the same state
folder. A process gets it by the environment before it starts, or by `load` before it first calls nvidia-ml-py.
"""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

from tests.compiled import shared_library

GPU_IS_LOST, NOT_SUPPORTED, LIB_RM_VERSION_MISMATCH = 15, 3, 18
_SOURCES = (Path(__file__).parent / "nvml.c",)
_HEADERS = (Path(__file__).parents[1] / "fake_cuda" / "budget.h",)
_NAME = "libnvidia-ml.so.1"


@cache
def build() -> Path:
    """The folder of the library."""
    return shared_library(_NAME, _SOURCES, _HEADERS)


def gpu_uuid(number: int, *, is_slice: bool = False) -> str:
    """Of the fake's device with that number; the last ones may be slices of the first."""
    return f"{'MIG' if is_slice else 'GPU'}-66616b65-2d67-7075-0000-{number:012x}"


@cache
def load() -> None:
    """Into this process, for good, ahead of any real one: later loads find it by its name."""
    ctypes.CDLL(str(build() / _NAME), mode=ctypes.RTLD_GLOBAL)


class FakeNvml:
    """What goes wrong, for every process that uses the state folder. A fault stays until it is taken back."""

    def __init__(self, state: Path) -> None:
        self._path = state / "nvml"
        self._lines: list[str] = []

    def begin(self, *words: object) -> None:
        """One line of the file, as `nvml.c` explains them: begin("error", "*", 0, GPU_IS_LOST)."""
        self._lines.append(" ".join(map(str, words)))
        self._write()

    def end(self, *words: object) -> None:
        self._lines.remove(" ".join(map(str, words)))
        self._write()

    def end_all(self) -> None:
        self._lines.clear()
        self._write()

    def _write(self) -> None:
        draft = self._path.with_suffix(f".{os.getpid()}")
        draft.write_text("\n".join(self._lines) + "\n")
        draft.replace(self._path)
