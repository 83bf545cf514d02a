"""Children that use a host device. Each runs a snippet; `say` and `wait_for_parent` are its two words with the test."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import time
from collections.abc import Mapping
from typing import Protocol

from lull.vmm.host_device import HostDevice
from tests.memory import GRANULE_BYTES

SECONDS_MAX = 30

PRELUDE = """
import ctypes, os, sys
from pathlib import Path
from lull.vmm import Access, Handle, HostDevice, HostDriver, Pool, RestoreMode, Runtime
from lull.vmm.errors import DriverError, LullMemoryError, OutOfDeviceMemory
GRANULE_BYTES = {granule_bytes}
device = HostDevice.from_environment()[0]
driver = HostDriver(device, granularity_bytes=GRANULE_BYTES)
pool = Pool(driver)
def say(text):
    print(text, flush=True)
def wait_for_parent():
    assert sys.stdin.readline() == "go on\\n"
"""


class Child:
    def __init__(self, device: HostDevice, code: str, fds: tuple[int, ...], environment: Mapping[str, str]) -> None:
        program = PRELUDE.format(granule_bytes=GRANULE_BYTES) + code
        self.process = subprocess.Popen(
            [sys.executable, "-c", program],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, "LULL_HOST_DEVICE": str(device.path), **environment},
        )
        self.pid = self.process.pid
        self._pending = b""

    def heard(self) -> str:
        """The child's next line; fails with what it left behind if it ends or takes too long."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + SECONDS_MAX
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"the child said nothing for {SECONDS_MAX} s"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, f"the child ended with {self.process.wait(SECONDS_MAX)}"
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()

    def ended(self) -> int:
        return self.process.wait(SECONDS_MAX)

    def kill(self) -> None:
        """Dead, but not waited for: as a process whose parent is busy."""
        self.process.kill()
        os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOWAIT)


class StartChild(Protocol):
    def __call__(
        self, code: str, *, fds: tuple[int, ...] = (), environment: Mapping[str, str] | None = None
    ) -> Child: ...
