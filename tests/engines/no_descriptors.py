"""A process that may open no more files: what it asks of the system then fails on its own side."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def no_descriptors() -> Iterator[None]:
    """This process can open no other."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    held = [os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)]
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(held[0], *_open_fds()) + 1, hard))
    try:
        with contextlib.suppress(OSError):
            while True:
                held.append(os.dup(held[0]))
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        for fd in held:
            os.close(fd)


def _open_fds() -> list[int]:
    return [int(name) for name in os.listdir("/proc/self/fd")]
