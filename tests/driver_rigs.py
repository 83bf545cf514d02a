"""Devices to run one suite of driver tests on: host memory, the fake CUDA driver, and a real GPU.

A rig says what differs between them, so that the tests need not know which they run on. Nothing here imports what a
machine that has a GPU and a bare torch may lack.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.driver import Access, Driver, Handle
from tests.fake_cuda.fixtures import reset_fake_cuda
from tests.fake_cuda.library import FakeCuda, load
from tests.memory import GRANULE_BYTES, small_driver

REAL_GPU_ENVIRONMENT_NAME = "LULL_TEST_GPU"  # set by tests/gpu/run.py: use the real driver, not the fake
UNIT_BYTES_ENVIRONMENT_NAME = "LULL_TEST_GPU_UNIT_BYTES"  # smaller ones, to try the command itself without a GPU
CHILD_SECONDS_MAX = 60
GIB = 1 << 30

_CHILD = """
import ctypes, os, sys
from lull.vmm import Access, Handle, HostDevice, HostDriver, LullMemoryError, OutOfDeviceMemory
if "LULL_HOST_DEVICE" in os.environ:
    driver = HostDriver(HostDevice.from_environment()[0], granularity_bytes={granule_bytes})
else:
    from lull.vmm.cuda_driver import CudaDriver
    driver = CudaDriver(CudaDriver.devices()[0])
def say(text):
    print(text, flush=True)
def wait_for_parent():
    assert sys.stdin.readline() == "go on\\n"
"""


@dataclass
class Rig:
    driver: Driver
    unit_bytes: int
    """What tests allocate by: whole granules, and well above what else moves free_bytes."""
    slack_bytes: int
    """How far free_bytes may be off, by what others and the driver itself take."""
    touchable: bool
    """Whether the host may touch device addresses."""
    environment: dict[str, str]
    fake: FakeCuda | None = None
    seconds_max: float = 0.0
    """How long memory may take to be free after its owner is gone."""
    context_bytes_max: int = 0
    """What another process's context may take of the device."""
    made: list[Mapped] = field(default_factory=list)

    def new_driver(self) -> Driver:
        """Another driver of the same device in this process."""
        assert isinstance(self.driver, CudaDriver)
        return CudaDriver(self.driver.device_uuid)

    def is_free(self, nbytes: int) -> bool:
        """Whether free_bytes is that, as far as it can be told."""
        return abs(self.driver.free_bytes() - nbytes) <= self.slack_bytes

    def mapped(self, units: int = 1) -> Mapped:
        nbytes = units * self.unit_bytes
        address = self.driver.reserve(nbytes)
        handle = self.driver.create(nbytes)
        self.driver.map(address, nbytes, handle)
        self.driver.set_access(address, nbytes, Access.READ_WRITE)
        self.made.append(Mapped(self.driver, address, nbytes, handle))
        return self.made[-1]

    def give_back(self) -> None:
        """What `mapped` made and the test has not taken apart."""
        while self.made:
            self.made.pop().give_back()

    @contextmanager
    def child(self, code: str, fds: tuple[int, ...] = ()) -> Iterator[RigChild]:
        """Another process with ``driver`` of the same device."""
        child = RigChild(code, fds, self.environment)
        try:
            yield child
        finally:
            child.end()


@dataclass
class Mapped:
    driver: Driver
    address: int
    nbytes: int
    handle: Handle

    def unmap_and_release(self) -> None:
        self.driver.unmap(self.address, self.nbytes)
        self.driver.release(self.handle)

    def make_again(self) -> None:
        self.handle = self.driver.create(self.nbytes)
        self.driver.map(self.address, self.nbytes, self.handle)
        self.driver.set_access(self.address, self.nbytes, Access.READ_WRITE)

    def write(self, content: bytes, offset: int = 0) -> None:
        source = ctypes.create_string_buffer(content, len(content))
        self.driver.copy(self.address + offset, ctypes.addressof(source), len(content))

    def read(self, nbytes: int = 4096, offset: int = 0) -> bytes:
        back = ctypes.create_string_buffer(nbytes)
        self.driver.copy(ctypes.addressof(back), self.address + offset, nbytes)
        return back.raw

    def give_back(self) -> None:
        self.unmap_and_release()
        self.driver.free_address(self.address, self.nbytes)


class RigChild:
    def __init__(self, code: str, fds: tuple[int, ...], environment: dict[str, str]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", _CHILD.format(granule_bytes=GRANULE_BYTES) + code],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=fds,
            env={**os.environ, **environment},
        )

    def heard(self) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + CHILD_SECONDS_MAX
        text = b""
        while not text.endswith(b"\n"):
            readable, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"the child said nothing for {CHILD_SECONDS_MAX} s"
            piece = os.read(self.process.stdout.fileno(), 1)
            assert piece, f"the child ended with {self.process.wait(CHILD_SECONDS_MAX)}"
            text += piece
        return text.decode().strip()

    def go_on(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(b"go on\n")
        self.process.stdin.flush()

    def ended(self) -> int:
        return self.process.wait(CHILD_SECONDS_MAX)

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
        self.process.communicate(timeout=CHILD_SECONDS_MAX)


def _host(kind: str) -> Callable[[Path, pytest.MonkeyPatch], Rig]:
    def make(folder: Path, _: pytest.MonkeyPatch) -> Rig:
        driver = small_driver(folder / "device", granules=32, kind=kind)
        return Rig(driver, GRANULE_BYTES, 0, True, {"LULL_HOST_DEVICE": str(driver.device.path)})

    return make


def _fake(*, strict: bool) -> Callable[[Path, pytest.MonkeyPatch], Rig]:
    def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Rig:
        fake = load()
        reset_fake_cuda(fake, monkeypatch, folder, strict=strict)
        driver = CudaDriver(CudaDriver.devices()[0])
        assert driver.free_bytes() == driver.capacity_bytes
        return Rig(driver, GRANULE_BYTES, 0, not strict, {}, fake)

    return make


def _real(_: Path, __: pytest.MonkeyPatch) -> Rig:
    driver = CudaDriver(CudaDriver.devices()[0])
    driver.synchronize()  # the context takes its own memory now, and not under a measurement
    unit_bytes = int(os.environ.get(UNIT_BYTES_ENVIRONMENT_NAME, GIB // 4))
    return Rig(driver, unit_bytes, unit_bytes // 4, False, {}, seconds_max=20.0, context_bytes_max=2 * GIB)


def rig_makers() -> dict[str, Callable[[Path, pytest.MonkeyPatch], Rig]]:
    """By name. One process can have only one CUDA driver."""
    if os.environ.get(REAL_GPU_ENVIRONMENT_NAME):
        return {"gpu": _real}
    return {
        "host-discrete": _host("discrete"),
        "host-unified": _host("unified"),
        "cuda": _fake(strict=False),
        "cuda-strict": _fake(strict=True),
    }


@contextmanager
def rig_of(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    rig = rig_makers()[name](folder, monkeypatch)
    yield rig
    if rig.fake is not None:
        rig.fake.reset()
    elif name == "gpu":
        rig.give_back()
        assert isinstance(rig.driver, CudaDriver)
        rig.driver.close()  # says what a test has left behind


def own_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


def device_mappings() -> int:
    """How many ranges of this process map memfds, the device memory of hosts and of the fake."""
    return sum("/memfd:" in line for line in Path("/proc/self/maps").read_text().splitlines())
