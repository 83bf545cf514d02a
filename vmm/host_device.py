"""The host-memory device: a directory that all its processes share, with the ledger of who holds how much of it.

``device.json`` says what the device is and never changes. ``ledger`` is replaced whole, by rename, under the lock of
``ledger.lock``: so a reader needs no lock, and a writer killed halfway leaves the old ledger. A row belongs to a
process (pid and start time); rows of dead processes count for nothing and go with the next write. Several rows with
one key are one piece of memory, charged once.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import time
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

from . import host_memory
from .errors import LedgerBusy, LedgerUnreadable, LedgerUnwritable, OutOfDeviceMemory
from .whole_numbers import require_whole

KINDS: Final = ("discrete", "unified")
ENVIRONMENT_NAME: Final = "LULL_HOST_DEVICE"

CAPACITY_BYTES_MAX: Final = 1 << 60
_UUID_PATTERN: Final = re.compile(r"[A-Za-z0-9-]{1,64}")
_LOCK_SECONDS_MAX: Final = 30.0
_LOCK_POLL_SECONDS: Final = 0.001


class ProcessKey(NamedTuple):
    pid: int
    start_ticks: int


@dataclass(frozen=True, slots=True)
class Charge:
    """One process's hold on one piece of device memory."""

    key: str
    pid: int
    start_ticks: int
    nbytes: int
    owner: str | None

    @property
    def process(self) -> ProcessKey:
        return ProcessKey(self.pid, self.start_ticks)

    def as_fields(self) -> dict[str, str | int | None]:
        return {
            "key": self.key,
            "pid": self.pid,
            "start_ticks": self.start_ticks,
            "nbytes": self.nbytes,
            "owner": self.owner,
        }


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


class HostDevice:
    """An opened device directory. Holds no memory and no lock of its own; cheap to make."""

    def __init__(self, path: Path, *, uuid: str, kind: str, capacity_bytes: int) -> None:
        self.path = path
        self._ledger = str(path / "ledger")  # read and written at every charge and discharge
        self._known: tuple[bytes, tuple[Charge, ...]] = (b"", ())  # a ledger that has been read, to be read but once
        self.uuid = uuid
        self.kind = kind
        self.capacity_bytes = capacity_bytes

    @classmethod
    def create(cls, path: Path, *, capacity_bytes: int, kind: str = "discrete", uuid: str | None = None) -> HostDevice:
        """Makes the directory, or opens it if it is there already and says the same; else ValueError."""
        if kind not in KINDS:
            raise ValueError(f"kind is {kind!r}; a host device is one of {', '.join(KINDS)}")
        require_whole(capacity_bytes, "capacity_bytes", 1, CAPACITY_BYTES_MAX)
        path = _require_path(path)
        if uuid is not None and not _UUID_PATTERN.fullmatch(uuid):
            raise ValueError(f"uuid is {uuid!r}; use at most 64 letters, digits and hyphens")
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        description = {
            "uuid": uuid or f"HOST-{uuid4()}",
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
            return cls(
                path,
                uuid=str(description["uuid"]),
                kind=str(description["kind"]),
                capacity_bytes=int(description["capacity_bytes"]),
            )
        except FileNotFoundError:
            raise FileNotFoundError(f"{path} is not a host device: it has no device.json") from None
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"{path / 'device.json'} does not describe a host device: {error}") from error

    @classmethod
    def from_environment(cls) -> list[HostDevice]:
        """The devices in LULL_HOST_DEVICE, in the job's order; none if it is not set."""
        value = os.environ.get(ENVIRONMENT_NAME, "")
        return [cls.open(Path(part)) for part in value.split(":") if part]

    def free_bytes(self) -> int:
        free_bytes = max(0, self.capacity_bytes - _sum_by_key_bytes(self.charges()))
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
        rows = self._read()
        try:
            return _living(rows)
        except OSError as error:
            raise LedgerUnreadable("ledger", f"whose the rows of {self._ledger} are cannot be seen: {error}") from error

    def charge(self, row: Charge, owner_bytes_max: int | None) -> None:
        """Adds a row if it fits; else OutOfDeviceMemory and nothing has changed."""
        self.charge_all([row], owner_bytes_max)

    def charge_all(self, new: Iterable[Charge], owner_bytes_max: int | None) -> None:
        """Adds the rows, in one write, if all of them fit; else OutOfDeviceMemory and nothing has changed."""
        with self._locked(_LOCK_SECONDS_MAX):
            rows = self.charges()
            held_bytes = {row.key: row.nbytes for row in rows}
            used_bytes = sum(held_bytes.values())
            owners_bytes: dict[str, dict[str, int]] = {}
            for row in rows:
                if row.owner is not None:
                    owners_bytes.setdefault(row.owner, {})[row.key] = row.nbytes
            known = {(row.key, row.process) for row in rows}
            for row in new:
                if row.key not in held_bytes:
                    self._require_room(row.nbytes, used_bytes)
                    held_bytes[row.key] = row.nbytes
                    used_bytes += row.nbytes
                if row.owner is not None:
                    owned = owners_bytes.setdefault(row.owner, {})
                    if owner_bytes_max is not None:
                        _require_owner_room(row, owned, owner_bytes_max)
                    owned[row.key] = row.nbytes
                if (row.key, row.process) not in known:
                    rows.append(row)
            self._write(rows)

    def discharge(self, keys: set[str], process: ProcessKey, *, lock_seconds_max: float | None = None) -> None:
        """Waits for the lock as long as a charge does unless told otherwise."""
        with self._locked(_LOCK_SECONDS_MAX if lock_seconds_max is None else lock_seconds_max):
            rows = self.charges()
            self._write([row for row in rows if not (row.key in keys and row.process == process)])

    def _require_room(self, nbytes: int, used_bytes: int) -> None:
        free_bytes = self.capacity_bytes - used_bytes
        if nbytes > free_bytes:
            raise OutOfDeviceMemory(nbytes, max(0, free_bytes), self.capacity_bytes)

    def _read(self) -> list[Charge]:
        try:
            with open(self._ledger, "rb", buffering=0) as file:
                text = file.read()
            known_text, known_rows = self._known
            if text == known_text:
                return list(known_rows)
            content: dict[str, Any] = json.loads(text)
            if content["boot_id"] != _boot_id():
                return []  # nothing survives a reboot, and pids and start times repeat
            rows = [_require_whole(Charge(**row)) for row in content["rows"]]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise LedgerUnreadable(
                "ledger", f"{self._ledger} cannot be read ({error}): end the device's processes and remove it"
            ) from error
        self._known = text, tuple(rows)
        return rows

    def _write(self, rows: list[Charge]) -> None:
        text = json.dumps({"boot_id": _boot_id(), "rows": [row.as_fields() for row in rows]}).encode()
        draft = self._ledger + ".new"  # one name: we hold the lock
        try:
            with open(draft, "wb") as file:
                file.write(text)
            os.replace(draft, self._ledger)
        except OSError as error:
            with suppress(OSError):
                os.unlink(draft)  # a full disk took half of it
            raise self._unwritable(error) from error
        self._known = text, tuple(rows)

    def _unwritable(self, error: OSError) -> LedgerUnwritable:
        what = "give its disk room" if error.errno == errno.ENOSPC else "put that right"
        return LedgerUnwritable("ledger", f"{self.path} cannot be written ({error.strerror}): {what}, then try again")

    @contextmanager
    def _locked(self, seconds_max: float) -> Generator[None]:
        try:
            fd = os.open(self._ledger + ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise self._unwritable(error) from error
        try:
            deadline = time.monotonic() + seconds_max
            while not _try_lock(fd):
                if time.monotonic() > deadline:
                    raise LedgerBusy("ledger", f"{self._ledger}.lock was locked for {seconds_max} s")
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


def _require_whole(row: Charge) -> Charge:
    numbers = cast("list[object]", [row.pid, row.start_ticks, row.nbytes])
    if not isinstance(cast("object", row.key), str) or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{row} is no charge")
    return row


def _living(rows: list[Charge]) -> list[Charge]:
    own_pid = os.getpid()
    pids = {row.pid for row in rows}
    now_alive = {pid: _own_key(pid) if pid == own_pid else process_key(pid) for pid in pids}
    return [row for row in rows if now_alive[row.pid] == row.process]


def _sum_by_key_bytes(rows: list[Charge]) -> int:
    return sum({row.key: row.nbytes for row in rows}.values())


def _require_owner_room(row: Charge, owned_bytes: Mapping[str, int], owner_bytes_max: int) -> None:
    if row.key in owned_bytes:
        return
    free_bytes = owner_bytes_max - sum(owned_bytes.values())
    if row.nbytes > free_bytes:
        raise OutOfDeviceMemory(row.nbytes, max(0, free_bytes), owner_bytes_max, limit=f"the limit of {row.owner}")


@lru_cache(maxsize=1)
def _own_key(pid: int) -> ProcessKey | None:
    return process_key(pid)


@lru_cache(maxsize=1)
def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
