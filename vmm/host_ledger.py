"""The ledger of a host device: who holds how much of it, as lines that are appended. What one costs, costs one line.

The first line names the file and the boot; each further one has a checksum, and either charges or discharges, whole
or not at all. Whoever appends holds the device's lock; whoever reads needs none: a line without its end does not count,
and the next writer cuts it off, since its own writer has died over it. Lines that count for nothing any more, of
released memory and of dead processes, go when they are most of the file: it is written anew then, and replaced by
rename. A `Ledger` remembers what it has read, and reads on from there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final, NamedTuple, cast
from uuid import uuid4

_MAGIC: Final = b"lull-ledger-2"
_HEAD_BYTES: Final = len(_MAGIC) + 1 + 36 + 1 + 32 + 1
_SUM_BYTES: Final = 9  # eight hexadecimal digits and a space
_REWRITE_BYTES_MIN: Final = 64 << 10
_REWRITE_FACTOR: Final = 4  # of what the living rows take


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


class Holds:
    """Charges by process and by key, kept so that one more or one less costs the same however many there are."""

    def __init__(self) -> None:
        self.used_bytes = 0
        self._rows: dict[ProcessKey, dict[str, Charge]] = {}
        self._holders: dict[str, int] = {}  # several rows of one key are one piece of memory
        self._owned: dict[str, dict[str, int]] = {}  # by owner and key, how many rows
        self._owned_bytes: dict[str, int] = {}

    def processes(self) -> list[ProcessKey]:
        return list(self._rows)

    def rows(self) -> list[Charge]:
        return [row for rows in self._rows.values() for row in rows.values()]

    def count(self) -> int:
        return sum(map(len, self._rows.values()))

    def holds(self, key: str) -> bool:
        return key in self._holders

    def owned_bytes(self, owner: str) -> int:
        return self._owned_bytes.get(owner, 0)

    def owns(self, owner: str | None, key: str) -> bool:
        return owner is not None and key in self._owned.get(owner, {})

    def row(self, process: ProcessKey, key: str) -> Charge | None:
        return self._rows.get(process, {}).get(key)

    def add(self, row: Charge) -> bool:
        """False if the process has the key already."""
        rows = self._rows.setdefault(row.process, {})
        if row.key in rows:
            return False
        rows[row.key] = row
        if self._holders.setdefault(row.key, 0) == 0:
            self.used_bytes += row.nbytes
        self._holders[row.key] += 1
        if row.owner is not None:
            owned = self._owned.setdefault(row.owner, {})
            if owned.setdefault(row.key, 0) == 0:
                self._owned_bytes[row.owner] = self._owned_bytes.get(row.owner, 0) + row.nbytes
            owned[row.key] += 1
        return True

    def remove(self, process: ProcessKey, key: str) -> None:
        """No change if it is not there."""
        rows = self._rows.get(process, {})
        row = rows.pop(key, None)
        if row is None:
            return
        if not rows:
            del self._rows[process]
        self._holders[key] -= 1
        if not self._holders[key]:
            del self._holders[key]
            self.used_bytes -= row.nbytes
        if row.owner is not None:
            owned = self._owned[row.owner]
            owned[key] -= 1
            if not owned[key]:
                del owned[key]
                self._owned_bytes[row.owner] -= row.nbytes
            if not owned:
                del self._owned[row.owner], self._owned_bytes[row.owner]

    def remove_process(self, process: ProcessKey) -> None:
        for key in list(self._rows.get(process, ())):
            self.remove(process, key)


class Ledger:
    """One process's view of the file. Not thread-safe. Raises OSError, and ValueError for a file that is no ledger."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._head = b""  # of the file that was read
        self._read_bytes = 0
        self._holds = Holds()

    def read(self) -> Holds:
        """What the file says, the dead included. The same object until a file of another name is there."""
        try:
            fd = os.open(self._path, os.O_RDONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            self._forget(b"")
            return self._holds
        try:
            self._read_on(fd)
        finally:
            os.close(fd)
        return self._holds

    def charge(self, rows: Iterable[Charge]) -> None:
        """With the lock, after `read`."""
        fields = [[row.key, row.pid, row.start_ticks, row.nbytes, row.owner] for row in rows]
        if fields:
            self._append({"charge": fields})

    def discharge(self, process: ProcessKey, keys: Iterable[str]) -> None:
        """With the lock, after `read`."""
        held = [key for key in keys if self._holds.row(process, key) is not None]
        if held:
            self._append({"discharge": held, "of": [*process]})

    def _append(self, entry: dict[str, Any]) -> None:
        line = _line(entry)
        if not self._head or self._is_mostly_past(len(line)):
            _apply(self._holds, entry)
            try:
                self._write_anew()
            except BaseException:
                self._forget(b"")  # it is read again
                raise
            return
        fd = os.open(self._path, os.O_WRONLY | os.O_CLOEXEC)
        try:
            end = os.lseek(fd, 0, os.SEEK_END)
            if end != self._read_bytes:
                os.ftruncate(fd, self._read_bytes)  # half a line of somebody who died over it
            try:
                _write_all(fd, line, self._read_bytes)
            except OSError:
                with suppress(OSError):
                    os.ftruncate(fd, self._read_bytes)  # a full disk took half of it
                raise
        finally:
            os.close(fd)
        self._read_bytes += len(line)
        _apply(self._holds, entry)

    def _is_mostly_past(self, more_bytes: int) -> bool:
        file_bytes = self._read_bytes + more_bytes
        if file_bytes < _REWRITE_BYTES_MIN:
            return False
        return file_bytes > _REWRITE_FACTOR * _lived_bytes(self._holds)

    def _write_anew(self) -> None:
        head = _MAGIC + b" " + boot_id().encode() + b" " + uuid4().hex.encode() + b"\n"
        rows = [[row.key, row.pid, row.start_ticks, row.nbytes, row.owner] for row in self._holds.rows()]
        text = head + (_line({"charge": rows}) if rows else b"")
        draft = self._path + ".new"  # one name: we hold the lock
        try:
            fd = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            try:
                _write_all(fd, text, 0)
            finally:
                os.close(fd)
            os.replace(draft, self._path)
        except OSError:
            with suppress(OSError):
                os.unlink(draft)
            raise
        self._head, self._read_bytes = head, len(text)

    def _read_on(self, fd: int) -> None:
        head = os.pread(fd, _HEAD_BYTES, 0)
        if head != self._head or not head:
            self._forget(b"")
            if head[:1] == b"{":
                self._read_first_format(fd)
                return
            _require_head(head)
            if _boot_of(head) != boot_id():
                return  # nothing survives a reboot, and pids and start times repeat
            self._forget(head)
        size_bytes = os.fstat(fd).st_size
        if size_bytes < self._read_bytes:
            self._forget(head)  # somebody has put an older copy there
        if size_bytes == self._read_bytes:
            return
        text = os.pread(fd, size_bytes - self._read_bytes, self._read_bytes)
        whole_bytes = text.rfind(b"\n") + 1
        try:
            for line in text[:whole_bytes].splitlines():
                _apply(self._holds, _parse(line))
        except BaseException:
            self._forget(b"")
            raise
        self._read_bytes += whole_bytes

    def _read_first_format(self, fd: int) -> None:
        """One JSON object, as lull wrote it before; the next write is in this format."""
        content: dict[str, Any] = json.loads(os.pread(fd, os.fstat(fd).st_size, 0))
        if content["boot_id"] != boot_id():
            return
        for row in content["rows"]:
            self._holds.add(_charge([row["key"], row["pid"], row["start_ticks"], row["nbytes"], row["owner"]]))

    def _forget(self, head: bytes) -> None:
        self._head, self._read_bytes, self._holds = head, len(head), Holds()


@lru_cache(maxsize=1)
def boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def _lived_bytes(holds: Holds) -> int:
    """About what the living rows take in the file."""
    return _HEAD_BYTES + 120 * holds.count()


def _require_head(head: bytes) -> None:
    if len(head) != _HEAD_BYTES or not head.startswith(_MAGIC + b" ") or not head.endswith(b"\n"):
        raise ValueError(f"it begins with {head[:40]!r}, as no ledger does that this version of lull can read")


def _boot_of(head: bytes) -> str:
    return head.split(b" ")[1].decode("ascii", "replace")


def _line(entry: dict[str, Any]) -> bytes:
    text = json.dumps(entry, separators=(",", ":")).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _parse(line: bytes) -> dict[str, Any]:
    text = line[_SUM_BYTES:]
    if line[:_SUM_BYTES] != b"%08x " % zlib.crc32(text):
        raise ValueError(f"a line is not what was written: {line[:60]!r}")
    entry: object = json.loads(text)
    if not isinstance(entry, dict):
        raise ValueError(f"{line[:60]!r} is no entry")
    return cast("dict[str, Any]", entry)


def _apply(holds: Holds, entry: dict[str, Any]) -> None:
    if "charge" in entry:
        for fields in entry["charge"]:
            holds.add(_charge(fields))
    else:
        pid, start_ticks = entry["of"]
        for key in entry["discharge"]:
            holds.remove(ProcessKey(pid, start_ticks), key)


def _charge(fields: list[Any]) -> Charge:
    row = Charge(*fields)
    numbers = cast("list[object]", [row.pid, row.start_ticks, row.nbytes])
    if not isinstance(cast("object", row.key), str) or not all(isinstance(number, int) for number in numbers):
        raise ValueError(f"{row} is no charge")
    return row


def _write_all(fd: int, text: bytes, offset: int) -> None:
    while text:
        written = os.pwrite(fd, text, offset)
        text, offset = text[written:], offset + written
