"""The host-memory device: a directory that all its processes share, with the ledger of who holds how much of it.

``device.json`` says what the device is and never changes. ``ledger`` (see `host_ledger`) is written under the lock of
``ledger.lock``; a reader needs no lock, and a writer killed halfway has written nothing. A row belongs to a process
(pid and start time); rows of dead processes count for nothing. Several rows with one key are one piece of memory,
charged once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from typing import Final
from uuid import uuid4

from . import host_memory
from .errors import LedgerBusy, LedgerUnreadable, LedgerUnwritable, OutOfDeviceMemory
from .host_ledger import Charge as Charge
from .host_ledger import Holds, Ledger
from .host_ledger import ProcessKey as ProcessKey
from .whole_numbers import require_whole

KINDS: Final = ("discrete", "unified")
ENVIRONMENT_NAME: Final = "LULL_HOST_DEVICE"

CAPACITY_BYTES_MAX: Final = 1 << 60
_UUID_PATTERN: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_LOCK_SECONDS_MAX: Final = 30.0
_LOCK_POLL_SECONDS: Final = 0.001
_READS_MAX: Final = 3


def _require_path(path: object) -> Path:
    if isinstance(path, str | Path):
        return Path(path)
    raise TypeError(f"path is {path!r}; it must be the path of the device's directory")


def process_key(pid: int) -> ProcessKey | None:
    """The process's identity, or None if it is gone. A zombie holds no memory and counts as gone."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            fields = file.read().rpartition(b")")[2].split()
        # A leader may be a zombie while other threads still use the memory.
        if fields[0] in b"ZX" and len(os.listdir(f"/proc/{pid}/task")) <= 1:
            return None
    except (FileNotFoundError, ProcessLookupError):
        return None
    return ProcessKey(pid, int(fields[19]))


def _require_description(uuid: object, kind: object, capacity_bytes: object) -> None:
    if kind not in KINDS:
        raise ValueError(f"kind is {kind!r}; a host device is one of {', '.join(KINDS)}")
    require_whole(capacity_bytes, "capacity_bytes", 1, CAPACITY_BYTES_MAX)
    if not isinstance(uuid, str) or not _UUID_PATTERN.fullmatch(uuid):
        raise ValueError(f"uuid is {uuid!r}; use at most 64 letters, digits and hyphens")


class HostDevice:
    """An opened device directory. Holds no memory and no lock of its own; cheap to make."""

    def __init__(self, path: Path, *, uuid: str, kind: str, capacity_bytes: int) -> None:
        self.path = path
        self._ledger_path = str(path / "ledger")
        self._pid = 0
        self._view_after_fork()
        self.uuid = uuid
        self.kind = kind
        self.capacity_bytes = capacity_bytes

    @classmethod
    def create(cls, path: Path, *, capacity_bytes: int, kind: str = "discrete", uuid: str | None = None) -> HostDevice:
        """Makes the directory, or opens it if it is there already and says the same; else ValueError."""
        path = _require_path(path)
        uuid_wanted = f"HOST-{uuid4()}" if uuid is None else uuid
        _require_description(uuid_wanted, kind, capacity_bytes)
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        description = {
            "uuid": uuid_wanted,
            "kind": kind,
            "capacity_bytes": capacity_bytes,
            "created_at": time.time(),
        }
        draft = path / f"device.json.{os.getpid()}.{uuid4().hex}"
        try:
            draft.write_text(json.dumps(description), encoding="utf-8")
            os.link(draft, path / "device.json")  # fails if it exists: one of two makers wins
        except FileExistsError:
            pass
        finally:
            draft.unlink(missing_ok=True)
        device = cls.open(path)
        if (device.capacity_bytes, device.kind) != (capacity_bytes, kind) or uuid not in (None, device.uuid):
            raise ValueError(
                f"{path} is a {device.kind} device of {device.capacity_bytes} bytes with uuid {device.uuid}, not "
                f"{kind} of {capacity_bytes} bytes; remove the directory or ask for the same"
            )
        return device

    @classmethod
    def open(cls, path: Path) -> HostDevice:
        path = _require_path(path)
        try:
            description = json.loads((path / "device.json").read_text(encoding="utf-8"))
            uuid, kind, capacity_bytes = (description[key] for key in ("uuid", "kind", "capacity_bytes"))
            _require_description(uuid, kind, capacity_bytes)
            return cls(path, uuid=uuid, kind=kind, capacity_bytes=capacity_bytes)
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not a host device: it has no device.json") from None
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise ValueError(f"{path / 'device.json'} does not describe a host device: {error}") from error

    @classmethod
    def from_environment(cls) -> list[HostDevice]:
        """The devices in LULL_HOST_DEVICE, in the job's order; none if it is not set."""
        value = os.environ.get(ENVIRONMENT_NAME, "")
        return [cls.open(Path(part)) for part in value.split(":") if part]

    def free_bytes(self) -> int:
        with self._view() as holds:
            free_bytes = max(0, self.capacity_bytes - holds.used_bytes)
        if self.kind == "unified":
            return min(free_bytes, host_memory.available_bytes())
        return free_bytes

    def used_bytes_by_process(self) -> dict[ProcessKey, int]:
        """What each living process holds; shared memory counts for each holder, so the sum may exceed what is used."""
        used: dict[ProcessKey, int] = {}
        for charge in self.charges():
            used[charge.process] = used.get(charge.process, 0) + charge.nbytes
        return used

    def charges(self) -> list[Charge]:
        """The rows of living processes."""
        with self._view() as holds:
            return holds.rows()

    def charge(self, row: Charge, owner_bytes_max: int | None) -> None:
        """Adds a row if it fits; else OutOfDeviceMemory and nothing has changed."""
        self.charge_all([row], owner_bytes_max)

    def charge_all(self, new: Iterable[Charge], owner_bytes_max: int | None) -> None:
        """Adds the rows, in one write, if all of them fit; else OutOfDeviceMemory and nothing has changed."""
        with self._locked(_LOCK_SECONDS_MAX), self._view() as holds:
            added = {(row.process, row.key): row for row in self._fitting(new, holds, owner_bytes_max)}
            with self._writing():
                self._ledger.charge(added.values())

    def discharge(self, keys: set[str], process: ProcessKey, *, lock_seconds_max: float | None = None) -> None:
        """Waits for the lock as long as a charge does unless told otherwise."""
        seconds_max = _LOCK_SECONDS_MAX if lock_seconds_max is None else lock_seconds_max
        with self._locked(seconds_max), self._view(), self._writing():
            self._ledger.discharge(process, keys)

    def _fitting(self, new: Iterable[Charge], holds: Holds, owner_bytes_max: int | None) -> Generator[Charge]:
        """Those that are not there yet. OutOfDeviceMemory at the first that does not fit with those before it."""
        more, owned = Holds(), Holds()  # memory that nobody has, or that its owner has not
        for row in new:
            if not holds.holds(row.key):
                if not more.holds(row.key):
                    self._require_room(row.nbytes, holds.used_bytes + more.used_bytes)
                more.add(row)
            if row.owner is not None and not holds.owns(row.owner, row.key):
                if owner_bytes_max is not None and not owned.owns(row.owner, row.key):
                    left_bytes = owner_bytes_max - holds.owned_bytes(row.owner) - owned.owned_bytes(row.owner)
                    _require_owner_room(row, row.owner, left_bytes, owner_bytes_max)
                owned.add(row)
            if holds.row(row.process, row.key) is None:
                yield row

    def _require_room(self, nbytes: int, used_bytes: int) -> None:
        free_bytes = self.capacity_bytes - used_bytes
        if nbytes > free_bytes:
            raise OutOfDeviceMemory(nbytes, max(0, free_bytes), self.capacity_bytes)

    @contextmanager
    def _view(self) -> Generator[Holds]:
        """What the ledger says now of living processes. One thread at a time."""
        if self._pid != os.getpid():
            self._view_after_fork()
        with self._guard:
            holds = self._read()
            try:
                for process in holds.processes():
                    if _living(process.pid) != process:
                        holds.remove_process(process)
            except OSError as error:
                text = f"whose the rows of {self._ledger_path} are cannot be seen: {error}"
                raise LedgerUnreadable("ledger", text) from error
            yield holds

    def _view_after_fork(self) -> None:
        """Another thread may have had the guard."""
        self._pid, self._guard, self._ledger = os.getpid(), threading.Lock(), Ledger(self._ledger_path)

    def _read(self) -> Holds:
        for again in range(_READS_MAX):
            try:
                return self._ledger.read()
            except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
                if again + 1 < _READS_MAX:  # without the lock we may have read into what was just being written
                    continue
                raise LedgerUnreadable(
                    "ledger",
                    f"{self._ledger_path} cannot be read ({error}): end the device's processes and remove it",
                ) from error
        raise AssertionError("returned or raised")

    @contextmanager
    def _writing(self) -> Generator[None]:
        try:
            yield
        except OSError as error:
            raise self._unwritable(error) from error

    def _unwritable(self, error: OSError) -> LedgerUnwritable:
        what = "give its disk room" if error.errno == errno.ENOSPC else "put that right"
        return LedgerUnwritable("ledger", f"{self.path} cannot be written ({error.strerror}): {what}, then try again")

    @contextmanager
    def _locked(self, seconds_max: float) -> Generator[None]:
        try:
            fd = os.open(self._ledger_path + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            deadline = time.monotonic() + seconds_max
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise LedgerBusy("ledger", f"{self._ledger_path}.lock was locked for {seconds_max} s")
                time.sleep(_LOCK_POLL_SECONDS)
            yield
        finally:
            os.close(fd)


def _try_lock(fd: int) -> bool:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _living(pid: int) -> ProcessKey | None:
    return _own_key(pid) if pid == os.getpid() else process_key(pid)


def _require_owner_room(row: Charge, owner: str, left_bytes: int, owner_bytes_max: int) -> None:
    if row.nbytes > left_bytes:
        raise OutOfDeviceMemory(row.nbytes, max(0, left_bytes), owner_bytes_max, limit=f"the limit of {owner}")


@lru_cache(maxsize=1)
def _own_key(pid: int) -> ProcessKey | None:
    return process_key(pid)
