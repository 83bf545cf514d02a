"""What `lull memory-service` and `python -m lull.vmm.service` do: one service for one device, until SIGTERM."""

from __future__ import annotations

import logging
import logging.handlers
import os
import signal
import sys
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..driver import Driver
from ..errors import LullMemoryError
from ..host_device import HostDevice
from ..host_driver import HostDriver
from .holdings import Holdings, Limits
from .server import Server

LOG_BYTES_MAX: Final = 8 << 20  # of each of two files
_CUDA_UUIDS: Final = ("GPU-", "MIG-")


@dataclass(frozen=True, slots=True)
class ServiceSettings:
    """``device``: the directory of a host-memory device, or the UUID of a GPU."""

    device: str
    socket: Path
    state_dir: Path | None = None  # for the log and the pid; None: standard error, no pid file
    allowed_uids: Collection[int] = ()
    copy_threads: int = 2
    limits: Limits = field(default_factory=Limits)


def run_service(settings: ServiceSettings) -> int:
    """The exit code: 0 after SIGTERM or SIGINT, 1 with one line on stderr that says what to change."""
    try:
        _log_to(settings.state_dir)
        driver = _open_driver(settings.device)
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
    logging.getLogger(__name__).info("serving %s on %s", driver.device_uuid, settings.socket)
    try:
        server.run()
    finally:
        if pid_file is not None:
            pid_file.unlink(missing_ok=True)
    return 0


def _open_driver(device: str) -> Driver:
    if device.startswith(_CUDA_UUIDS):
        from ..cuda_driver import CudaDriver

        return CudaDriver(device)
    return HostDriver(HostDevice.open(Path(device)))


def _log_to(state_dir: Path | None) -> None:
    handler: logging.Handler = logging.StreamHandler()
    if state_dir is not None:
        state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        path = state_dir / "memory-service.log"
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=LOG_BYTES_MAX, backupCount=1)
    logging.basicConfig(
        level=logging.INFO, handlers=[handler], format="%(asctime)s %(levelname)s %(message)s", force=True
    )
