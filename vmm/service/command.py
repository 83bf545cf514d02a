"""What `lull memory-service` and `python -m lull.vmm.service` do: one service for one device, until SIGTERM."""

from __future__ import annotations

import fcntl
import logging
import logging.handlers
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..driver import Driver
from ..errors import LullMemoryError
from ..host_device import HostDevice
from ..host_driver import HostDriver
from .errors import ServiceError
from .holdings import Holdings, Limits
from .protocol import WAIT_SECONDS_MAX
from .server import Server

LOG_BYTES_MAX: Final = 8 << 20  # of each of two files
UID_MAX: Final = (1 << 32) - 2  # -1 is nobody
COPY_THREADS_MAX: Final = 64
_HOLDER_BYTES_MAX: Final = 1000
_CUDA_UUIDS: Final = ("GPU-", "MIG-")


class DeviceServed(ServiceError):
    """There is a memory service on the device; the text says where."""


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """``device``: the directory of a host-memory device, or the UUID of a GPU."""

    device: str
    socket: Path
    state_dir: Path | None = None  # for the log and the pid; None: standard error, no pid file
    allowed_uids: Collection[int] = ()
    copy_threads: int = 2
    limits: Limits = field(default_factory=Limits)

    def require_sound(self) -> None:
        """Raises ValueError with the option's name."""
        for uid in self.allowed_uids:
            _require(0 <= uid <= UID_MAX, f"--allow-uid is {uid}; give the number of a user")
        most = COPY_THREADS_MAX
        _require(1 <= self.copy_threads <= most, f"--copy-threads is {self.copy_threads}; 1 to {most} are allowed")
        seconds = self.limits.oom_wait_seconds_max
        _require(
            0 <= seconds <= WAIT_SECONDS_MAX,
            f"--oom-wait-seconds-max is {seconds}; 0 to {WAIT_SECONDS_MAX:.0f} seconds are allowed",
        )


def run_service(settings: ServiceSettings) -> int:
    """The exit code: 0 after SIGTERM or SIGINT, 1 with one line on stderr that says what to change."""
    with ExitStack() as stack:
        try:
            settings.require_sound()
            _log_to(settings.state_dir)
            driver = _open_driver(settings.device)
            stack.enter_context(_only_service(settings))
            holdings = Holdings(driver, settings.limits, copy_threads=settings.copy_threads)
            server = Server(holdings, settings.socket.absolute(), allowed_uids=settings.allowed_uids)
        except (LullMemoryError, OSError, ValueError, ImportError) as error:
            print(f"lull memory-service: {error}", file=sys.stderr)  # noqa: T201  the one line for whoever started us
            return 1
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda _number, _frame: server.stop())
        pid_file = None if settings.state_dir is None else settings.state_dir / "memory-service.pid"
        if pid_file is not None:
            pid_file.write_text(f"{os.getpid()}\n")
            stack.callback(pid_file.unlink, missing_ok=True)
        logging.getLogger(__name__).info("serving %s on %s", driver.device_uuid, settings.socket)
        server.run()
    return 0


def _open_driver(device: str) -> Driver:
    if device.startswith(_CUDA_UUIDS):
        from ..cuda_driver import CudaDriver

        return CudaDriver(device)
    return HostDriver(HostDevice.open(Path(device)))


@contextmanager
def _only_service(settings: ServiceSettings) -> Generator[None]:
    """Of a device: two would make two copies of what engines share, and know nothing of each other."""
    try:
        fd = os.open(_lock_path(settings.device), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except PermissionError as error:
        raise DeviceServed(
            f"--device {settings.device}: {error.filename} belongs to another user, whose memory service serves it or "
            "has served it; attach there, or remove that file"
        ) from error
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = os.read(fd, _HOLDER_BYTES_MAX).decode(errors="replace").strip()
            raise DeviceServed(
                f"--device {settings.device}: another memory service serves it already ({holder}); attach there, or "
                "stop it first"
            ) from None
        os.ftruncate(fd, 0)
        os.write(fd, f"process {os.getpid()} on socket {settings.socket.absolute()}\n".encode())
        yield
    finally:
        os.close(fd)


def _lock_path(device: str) -> Path:
    """A GPU has no folder of its own: it is one of the system, the same for all that may serve it."""
    if device.startswith(_CUDA_UUIDS):
        return Path(tempfile.gettempdir()) / f"lull-memory-service-{device}.lock"
    return Path(device) / "memory-service.lock"


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)


def _log_to(state_dir: Path | None) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if state_dir is not None:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = state_dir / "memory-service.log"
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    logging.basicConfig(
        level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s", force=True
    )
