"""What an agent opens before it does anything: its directory and its journal. A full disk stops neither."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import structlog

from .disk_reserve import DiskReserve
from .errors import ConfigError, JournalCorrupt, JournalUnavailable
from .journal import Journal
from .node import Device
from .node_files import read_json, replace_json
from .protocol.wire import Reason
from .quarantine import quarantine_path, write_quarantine

log = structlog.get_logger(__name__)


def open_home(data_dir: Path, boot_id: str) -> str:
    """What tells the directory from a copy of it. Two agents in one directory are excluded by its lock; two in copies
    would both take the other's loans, jobs and engines for their own. Raises ConfigError as `refuse_copy` does."""
    refuse_copy(data_dir, boot_id)
    status = data_dir.stat()
    record = data_dir / "home.json"
    try:
        replace_json(record, {"boot_id": boot_id, "inode": status.st_ino}, flush=False)
    except OSError as error:
        log.error("a copy of the data directory could not be told from it", record=str(record), error=str(error))
    return f"{status.st_dev}:{status.st_ino}"


def refuse_copy(data_dir: Path, boot_id: str) -> None:
    """Raises ConfigError for a copy that was made since the machine booted: after a boot nothing runs any more that
    it could take over."""
    record = data_dir / "home.json"
    known = read_json(record)
    if known and known.get("boot_id") == boot_id and known.get("inode") != data_dir.stat().st_ino:
        raise ConfigError(
            f"data_dir {data_dir}: is a copy, and the agent of the original may run on this machine. For a node of its"
            f" own delete node.json and journal.sqlite* in it; if the original is gone for good, delete {record}"
        )


def open_journal(data_dir: Path, reserve: DiskReserve, devices: list[Device]) -> tuple[Journal, str | None]:
    """The journal, and what was wrong with the old one if a new one had to be begun: then nothing is lent."""
    path = data_dir / "journal.sqlite"
    try:
        return Journal(path, reserve), None
    except JournalCorrupt as error:
        aside = path.with_name(f"{path.name}.corrupt-{time.time():.0f}")
        text = (
            f"the journal could not be read ({error}); it lies in {aside}. No device of this node is lent until"
            f" somebody has looked for running jobs, deleted {quarantine_path(data_dir)} and restarted the agent"
        )
        log.critical("journal corrupt", error=str(error), kept=str(aside))
        device_ids = [device.device_id for device in devices]
        try:
            # Before the new journal: an agent that dies in between must not take it for all there ever was.
            write_quarantine(data_dir, device_ids, Reason(code="JournalCorrupt", sentence=text))
            for suffix in ("", "-wal", "-shm"):
                with contextlib.suppress(FileNotFoundError):
                    Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
        except OSError as refused:
            raise JournalUnavailable(f"the corrupt journal {path} cannot be set aside: {refused}") from error
        return Journal(path, reserve), text
