"""Shared libraries that tests compile, once per source and flags on this machine, by whoever comes first."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

_FLAGS = (
    "-std=gnu11",
    "-O1",
    "-g",
    "-fPIC",
    "-shared",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pthread",
)


def shared_library(name: str, sources: Sequence[Path], headers: Sequence[Path]) -> Path:
    """The folder that has ``name``, which is its SONAME too."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, f"the fake {name} needs a C compiler; install gcc"
    content = b"".join(path.read_bytes() for path in (*sources, *headers)) + " ".join(_FLAGS).encode()
    folder = Path(tempfile.gettempdir()) / f"lull-{name}-{os.getuid()}-{hashlib.sha256(content).hexdigest()[:16]}"
    if not (folder / name).exists():
        folder.mkdir(mode=0o700, exist_ok=True)
        draft = folder / f"{name}.{os.getpid()}"
        command = [compiler, *_FLAGS, f"-Wl,-soname,{name}", "-o", str(draft), *map(str, sources)]
        compiled = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        assert compiled.returncode == 0, compiled.stderr
        draft.replace(folder / name)
    return folder
