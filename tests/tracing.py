"""Processes that SIGKILL does not end: what a driver call that hangs does to a job, a tracer does here."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Generator
from contextlib import contextmanager

# It stops at its own end, with its memory still mapped, until the tracer lets it go or is gone.
_TRACER = """
import ctypes, sys
ptrace = ctypes.CDLL(None, use_errno=True).ptrace
ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
PTRACE_SEIZE, PTRACE_O_TRACEEXIT = 0x4206, 0x40
if ptrace(PTRACE_SEIZE, int(sys.argv[1]), None, PTRACE_O_TRACEEXIT):
    sys.exit(f"errno {ctypes.get_errno()}")
print("held", flush=True)
sys.stdin.read()
"""


class Tracer:
    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def let_go(self) -> None:
        if self._process.poll() is None:
            self._process.communicate()


@contextmanager
def held_at_its_end(pid: int) -> Generator[Tracer | None]:
    """The process survives SIGKILL until it is let go; None where the machine forbids tracing."""
    argv = [sys.executable, "-I", "-S", "-c", _TRACER, str(pid)]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        tracer = Tracer(process)
        try:
            yield tracer if process.stdout.readline() == "held\n" else None
        finally:
            tracer.let_go()
