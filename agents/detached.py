"""Starts what outlives the agent: a session of its own, no pipe of ours, its output in a file."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

_OUTPUT_BYTES_MAX: Final = 4000


def start_module(
    module: str, words: Sequence[str], output: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """``python -m module WORDS``, with ``environment`` over our own. ``output`` is begun anew, for what it says before
    it has a log of its own."""
    descriptor = os.open(output, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", module, *words],
            stdin=subprocess.DEVNULL,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            cwd="/",
            env={**os.environ, **(environment or {})},
        )
    finally:
        os.close(descriptor)
    # Our child, so it has to be reaped when it ends. Not by the event loop, whose child transports kill at their end.
    threading.Thread(target=process.wait, name=f"reaper of {module}", daemon=True).start()
    return process


def output_tail(path: Path) -> str:
    """The end of what it said; empty if there is no such file."""
    try:
        return path.read_bytes()[-_OUTPUT_BYTES_MAX:].decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return ""
