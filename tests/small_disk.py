"""A file system of a few MiB that a test may fill to the last byte."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import subprocess
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

MIB = 1 << 20


class SmallDisk:
    """Mounted at ``path``. ``fill`` takes all that is left, ``clear`` gives that back."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._ballast = path / "ballast"

    def fill(self) -> None:
        with self._ballast.open("ab", buffering=0) as file:
            for size in (64 << 10, 4 << 10, 1):
                try:
                    while file.write(b"x" * size) == size:
                        pass
                except OSError:
                    continue

    def clear(self) -> None:
        self._ballast.unlink()

    def take_all_names(self) -> None:
        """No file or directory can be made any more; files that are there may grow."""
        self._ballast.mkdir()
        with contextlib.suppress(OSError):
            for number in itertools.count():
                (self._ballast / str(number)).touch()

    def give_names_back(self) -> None:
        shutil.rmtree(self._ballast)


@contextmanager
def small_disk(path: Path, size_bytes: int = 4 * MIB, files_max: int = 0) -> Generator[SmallDisk]:
    """Needs root, or sudo without a password. ``files_max``: of files and directories; 0: as many as fit."""
    path.mkdir()
    as_root = [] if os.geteuid() == 0 else ["sudo", "-n"]
    options = f"size={size_bytes},nr_inodes={files_max},uid={os.geteuid()},mode=0700"
    subprocess.run([*as_root, "mount", "-t", "tmpfs", "-o", options, "lull-test", str(path)], check=True)
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run([*as_root, "umount", "--lazy", str(path)], check=True)
