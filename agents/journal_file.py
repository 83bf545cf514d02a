"""The SQLite file of a journal: its transactions outlive a full or broken disk.

The statements of a transaction are kept until it is committed. If the disk refuses it, the reserve is given up and they
are written again; if that is refused too, the journal goes on in memory, so that engines are brought back all the
same. ``mend`` brings it back to disk. Only a file that is proved corrupt raises JournalCorrupt.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import structlog

from .disk_reserve import DiskReserve
from .errors import AgentError, JournalCorrupt, JournalUnavailable

log = structlog.get_logger(__name__)

_CORRUPT: Final = frozenset({sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB})
_DISK_TROUBLE: Final = frozenset(
    {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR, sqlite3.SQLITE_READONLY, sqlite3.SQLITE_CANTOPEN}
)
_BUSY_SECONDS_MAX: Final = 5.0


def _code(error: sqlite3.Error) -> int:
    """The primary result code; 0 for an error of Python's module itself."""
    return int(getattr(error, "sqlite_errorcode", 0)) & 0xFF


class JournalFile:
    """Opens or makes ``path``. ``prepare`` brings a connection's tables up to date, or raises."""

    def __init__(
        self, path: Path, prepare: Callable[[sqlite3.Connection], None], reserve: DiskReserve | None = None
    ) -> None:
        self.path = path
        self.short = ""  # what the disk refused; empty while all is well
        self.on_write: list[Callable[[], None]] = []  # called after a transaction that wrote something
        self._prepare = prepare
        self._reserve = reserve
        self._statements: list[tuple[str, tuple[Any, ...]]] = []
        self._depth, self._flush = 0, False
        self._disk: sqlite3.Connection | None = None  # the file's connection, while the journal is in memory
        self.in_memory = False
        if reserve is not None and not reserve.hold():
            self.short = f"there is no room for a reserve of {reserve.size_bytes} bytes"
        self._db = self._open()

    # ---- opening ------------------------------------------------------------------------------------------------

    def _open(self) -> sqlite3.Connection:
        try:
            return self._connect()
        except (sqlite3.Error, OSError) as error:
            self._refuse_unless_disk(error)
            self._fall_short(error)
        try:
            return self._connect()
        except (sqlite3.Error, OSError) as error:
            self._refuse_unless_disk(error)
            return self._open_in_memory(error)

    def _refuse_unless_disk(self, error: sqlite3.Error | OSError) -> None:
        if isinstance(error, sqlite3.Error):
            if _code(error) in _CORRUPT:
                raise JournalCorrupt(f"{self.path}: {error}") from error
            if _code(error) not in _DISK_TROUBLE:
                raise JournalUnavailable(f"the journal {self.path} cannot be opened now: {error}") from error

    def _connect(self) -> sqlite3.Connection:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        db = sqlite3.connect(self.path, isolation_level=None, timeout=_BUSY_SECONDS_MAX)
        try:
            db.execute("PRAGMA journal_mode = WAL")
            db.execute("PRAGMA synchronous = NORMAL")
            (check,) = db.execute("PRAGMA quick_check(1)").fetchone()
            if check != "ok":
                raise JournalCorrupt(f"{self.path}: {check}")
            self._prepare(db)
            self.path.chmod(0o600)
        except BaseException:
            db.close()
            raise
        return db

    def _open_in_memory(self, error: sqlite3.Error | OSError) -> sqlite3.Connection:
        """What is written down, read without the files that WAL mode makes for itself."""
        memory = sqlite3.connect(":memory:", isolation_level=None)
        try:
            with contextlib.closing(sqlite3.connect(f"{self.path.as_uri()}?mode=rw", uri=True)) as disk:
                disk.execute("PRAGMA locking_mode = EXCLUSIVE")
                (version,) = disk.execute("PRAGMA user_version").fetchone()
                if version == 0:
                    raise JournalUnavailable(f"the journal {self.path} cannot be made: {error}; give it room")
                disk.backup(memory)
            self._prepare(memory)
        except (sqlite3.Error, AgentError) as second:
            memory.close()
            if isinstance(second, AgentError):
                raise
            raise JournalUnavailable(f"the journal {self.path} cannot be opened now: {error}") from second
        self.in_memory = True
        log.critical("the journal is kept in memory until its disk takes it", journal=str(self.path), error=str(error))
        return memory

    def close(self) -> None:
        self._db.close()
        if self._disk is not None:
            self._disk.close()

    # ---- reading and writing ------------------------------------------------------------------------------------

    def read(self, sql: str, values: tuple[Any, ...] = ()) -> sqlite3.Cursor:
        return self._db.execute(sql, values)

    def write(self, sql: str, values: tuple[Any, ...] = ()) -> int:
        """One statement, in the open transaction or in one of its own; how many rows it changed."""
        with self.together():
            self._statements.append((sql, values))
            try:
                return self._db.execute(sql, values).rowcount
            except sqlite3.Error as error:
                return self._write_again(error, commit=False)

    @contextmanager
    def together(self, *, flush: bool = False) -> Generator[None]:
        """Everything written inside commits at once, or not at all; on disk if any part of it asks for that."""
        self._flush = self._flush or flush
        if self._depth:
            yield
            return
        self._statements = []
        try:
            self._db.execute("BEGIN IMMEDIATE")
        except sqlite3.Error as error:
            self._write_again(error, commit=False)
        self._depth = 1
        try:
            yield
        except BaseException:
            self._depth, self._flush = 0, False
            self._roll_back()
            raise
        self._depth, flush, self._flush = 0, self._flush, False
        try:
            self._db.execute("COMMIT")
        except sqlite3.Error as error:
            self._write_again(error, commit=True)
        if flush:
            self._sync()
        if self._statements:
            for wake in self.on_write:
                wake()

    def _roll_back(self) -> None:
        if self._db.in_transaction:
            self._db.execute("ROLLBACK")

    def _write_again(self, error: sqlite3.Error, *, commit: bool) -> int:
        """The open transaction from its beginning: without the reserve, then in memory."""
        if self.in_memory or _code(error) not in _DISK_TROUBLE:
            self._roll_back()
            raise error
        self._fall_short(error)
        try:
            return self._replay(commit)
        except sqlite3.Error as second:
            if _code(second) not in _DISK_TROUBLE:
                raise
            self._go_on_in_memory(second)
        return self._replay(commit)

    def _replay(self, commit: bool) -> int:
        self._roll_back()
        self._db.execute("BEGIN IMMEDIATE")
        changed = 0
        for sql, values in self._statements:
            changed = self._db.execute(sql, values).rowcount
        if commit:
            self._db.execute("COMMIT")
        return changed

    def _sync(self) -> None:
        """Everything committed so far, by one flush of the write-ahead log."""
        if self.in_memory:
            return
        try:
            self._flush_log()
        except OSError as error:
            self._fall_short(error)
            try:
                self._flush_log()
            except OSError as second:
                self._go_on_in_memory(second)

    def _flush_log(self) -> None:
        fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    # ---- a disk that refuses ------------------------------------------------------------------------------------

    def _fall_short(self, error: Exception) -> None:
        self.short = str(error)
        log.critical("the journal's disk refuses a write", journal=str(self.path), error=str(error))
        if self._reserve is not None:
            self._reserve.release()

    def _go_on_in_memory(self, error: Exception) -> None:
        self._roll_back()
        memory = sqlite3.connect(":memory:", isolation_level=None)
        self._db.backup(memory)
        # Kept open: its shared files may be impossible to make again.
        self._disk, self._db, self.in_memory = self._db, memory, True
        log.critical("the journal goes on in memory", journal=str(self.path), error=str(error))

    def mend(self) -> bool:
        """Back to disk, with a reserve, if there is room again; True if all is well."""
        if self._reserve is not None and not self._reserve.hold():
            self.short = self.short or "its reserve was given up"
            return False
        if not self.short:
            return True
        if self.in_memory and not self._back_to_disk():
            return False
        self.short = ""
        log.info("the journal's disk takes writes again", journal=str(self.path))
        return True

    def _back_to_disk(self) -> bool:
        disk = self._disk
        try:
            disk = disk or self._connect()
            self._db.backup(disk)
        except (sqlite3.Error, OSError) as error:
            log.warning("the journal stays in memory", journal=str(self.path), error=str(error))
            return False
        self._db.close()
        self._db, self._disk, self.in_memory = disk, None, False
        self._sync()
        return not self.in_memory
