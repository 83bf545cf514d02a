"""A process whose name is no text: the kernel cuts names after 15 bytes, in the middle of a letter too."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

NAME = b"job \xe5\xad"


@contextmanager
def oddly_named() -> Iterator[int]:
    """Its pid."""
    argv = ["/bin/sh", "-c", r"printf 'job \345\255' > /proc/$$/comm; echo up; read line"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"up\n"
        with open(f"/proc/{child.pid}/comm", "rb") as file:
            assert file.read() == NAME + b"\n"
        yield child.pid
        child.kill()
