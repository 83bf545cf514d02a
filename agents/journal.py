"""What this node has promised and done, on disk before the act.

SQLite in WAL mode. When a method returns, its rows are committed: no end of a process loses them. Those that a power
cut must not lose either are flushed to disk first: what was accepted, each intent before its act, how an attempt
ended. The other facts are about things that a power cut ends as well, and the next flush takes them along. A step and
the report about it commit together, so the scheduler hears in the end about everything that happened here, in order.
Change a table: bump SCHEMA_VERSION and say how an older file is read.

One thread uses a journal (the agent's event loop).
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from .errors import JournalCorrupt, JournalTooNew
from .protocol.loans import LoanState, LoanStep
from .protocol.policy import EnginePolicy
from .protocol.wire import AttemptChanged, AttemptSpec, LoanStepTaken, OpenLoan, OrderAnswer, Reason, Report

SCHEMA_VERSION: Final = 1

# Flushed before their act.
INTENTS: Final = frozenset({LoanStep.PARK_SENT, LoanStep.SPAWN_INTENT, LoanStep.RESUME_SENT})

_REPORT: Final[TypeAdapter[Any]] = TypeAdapter(Report)

_SCHEMA: Final = """
CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE loan (
  loan_id TEXT PRIMARY KEY, epoch INTEGER NOT NULL, order_json TEXT NOT NULL, boot_id TEXT NOT NULL,
  restore_by_boottime REAL, state TEXT NOT NULL, recalled TEXT, engine_lost TEXT NOT NULL DEFAULT '[]',
  reason TEXT, opened_at REAL NOT NULL, closed_at REAL
) WITHOUT ROWID;
CREATE TABLE step (
  seq INTEGER PRIMARY KEY AUTOINCREMENT, loan_id TEXT NOT NULL, step TEXT NOT NULL, engine_id TEXT,
  attempt_id TEXT, at REAL NOT NULL, boottime REAL NOT NULL, data TEXT NOT NULL
);
CREATE INDEX step_by_loan ON step (loan_id, seq);
CREATE TABLE attempt (
  attempt_id TEXT PRIMARY KEY, loan_id TEXT NOT NULL, spec TEXT NOT NULL, stop TEXT, ended TEXT
) WITHOUT ROWID;
CREATE TABLE policy (engine_id TEXT PRIMARY KEY, version INTEGER NOT NULL, policy TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE outbox (id INTEGER PRIMARY KEY AUTOINCREMENT, at REAL NOT NULL, report TEXT NOT NULL);
"""


def boottime() -> float:
    """Seconds since the machine booted, suspend included: the clock of every deadline on a node."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


@dataclass(frozen=True, slots=True)
class LoanRow:
    """A loan as last written down."""

    order: OpenLoan
    boot_id: str
    restore_by_boottime: float | None
    state: LoanState
    recalled: str | None
    engine_lost: frozenset[str]
    reason: Reason | None


@dataclass(frozen=True, slots=True)
class StepRow:
    step: LoanStep
    engine_id: str | None
    attempt_id: str | None
    at: float
    boottime: float
    data: dict[str, Any]


class Journal:
    """Opens or makes the journal in ``path``; raises JournalCorrupt and JournalTooNew."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.on_report: list[Any] = []  # callables without arguments, called after a report was written
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        try:
            self._db = sqlite3.connect(path, isolation_level=None, timeout=5.0)
            self._db.execute("PRAGMA journal_mode = WAL")
            self._db.execute("PRAGMA synchronous = NORMAL")
            (check,) = self._db.execute("PRAGMA quick_check(1)").fetchone()
            if check != "ok":
                raise JournalCorrupt(f"{path}: {check}")
            self._open_schema()
        except sqlite3.DatabaseError as error:
            raise JournalCorrupt(f"{path}: {error}") from error
        path.chmod(0o600)
        self._depth, self._flush = 0, False
        self.journal_id = self._meta_or("journal_id", str(uuid.uuid4()))

    def _open_schema(self) -> None:
        (version,) = self._db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise JournalTooNew(
                f"{self.path} has schema {version}, this version knows {SCHEMA_VERSION}:"
                " start the newer agent again; running jobs were left alone"
            )
        if version == 0:
            self._db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")

    def close(self) -> None:
        self._db.close()

    @contextmanager
    def together(self, *, flush: bool = False) -> Generator[None]:
        """Everything written inside commits at once, or not at all; on disk if any part of it asks for that."""
        self._flush = self._flush or flush
        if self._depth:
            yield
            return
        self._db.execute("BEGIN IMMEDIATE")
        self._depth = 1
        reported = self._db.total_changes
        try:
            yield
        except BaseException:
            self._depth, self._flush = 0, False
            self._db.execute("ROLLBACK")
            raise
        self._depth, flush, self._flush = 0, self._flush, False
        self._db.execute("COMMIT")
        if flush:
            self._sync()
        if self._db.total_changes != reported:
            for wake in self.on_report:
                wake()

    def _sync(self) -> None:
        """Everything committed so far, by one flush of the write-ahead log."""
        fd = os.open(f"{self.path}-wal", os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fdatasync(fd)
        finally:
            os.close(fd)

    # ---- identity and marks -----------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        row = self._db.execute("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        self._db.execute(
            "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = ?", (key, value, value)
        )

    def _meta_or(self, key: str, value: str) -> str:
        found = self.meta(key)
        if found is None:
            self.set_meta(key, value)
            return value
        return found

    def highest(self, key: str) -> int:
        return int(self.meta(key) or 0)

    def raise_to(self, key: str, value: int) -> bool:
        """Remembers the highest ``value``; False if it is lower than one already seen."""
        known = self.highest(key)
        if value > known:
            self.set_meta(key, str(value))
        return value >= known

    # ---- loans ------------------------------------------------------------------------------------------------

    def accept_loan(self, order: OpenLoan, *, boot_id: str, state: LoanState, restore_by: float | None) -> None:
        with self.together(flush=True):
            self._db.execute(
                "INSERT INTO loan VALUES (?, ?, ?, ?, ?, ?, NULL, '[]', NULL, ?, NULL)",
                (order.loan_id, order.epoch, order.model_dump_json(), boot_id, restore_by, state, time.time()),
            )
            for attempt in order.attempts:
                self.accept_attempt(order.loan_id, attempt)

    def set_loan(
        self,
        loan_id: str,
        *,
        state: LoanState | None = None,
        recalled: str | None = None,
        engine_lost: frozenset[str] | None = None,
        reason: Reason | None = None,
        restore_by: float | None = None,
    ) -> None:
        """Writes what is given; the rest stays."""
        values: dict[str, Any] = {}
        if state is not None:
            values["state"] = state
            if state is LoanState.CLOSED:
                values["closed_at"] = time.time()
        if recalled is not None:
            values["recalled"] = recalled
        if engine_lost is not None:
            values["engine_lost"] = json.dumps(sorted(engine_lost))
        if reason is not None:
            values["reason"] = reason.model_dump_json()
        if restore_by is not None:
            values["restore_by_boottime"] = restore_by
        columns = ", ".join(f"{name} = ?" for name in values)
        self._db.execute(f"UPDATE loan SET {columns} WHERE loan_id = ?", (*values.values(), loan_id))  # noqa: S608

    def loan(self, loan_id: str) -> LoanRow | None:
        rows = self._loans("WHERE loan_id = ?", (loan_id,))
        return rows[0] if rows else None

    def open_loans(self) -> list[LoanRow]:
        return self._loans("WHERE closed_at IS NULL ORDER BY opened_at", ())

    def _loans(self, where: str, values: tuple[Any, ...]) -> list[LoanRow]:
        columns = "order_json, boot_id, restore_by_boottime, state, recalled, engine_lost, reason"
        found = self._db.execute(f"SELECT {columns} FROM loan {where}", values)  # noqa: S608
        return [
            LoanRow(
                OpenLoan.model_validate_json(row[0]),
                row[1],
                row[2],
                LoanState(row[3]),
                row[4],
                frozenset(json.loads(row[5])),
                None if row[6] is None else Reason.model_validate_json(row[6]),
            )
            for row in found.fetchall()
        ]

    def write_step(
        self,
        loan_id: str,
        step: LoanStep,
        *,
        engine_id: str | None = None,
        attempt_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        """Writes the step and the report about it; an intent is on disk when this returns."""
        now = boottime()
        data = data or {}
        with self.together(flush=step in INTENTS):
            self._db.execute(
                "INSERT INTO step (loan_id, step, engine_id, attempt_id, at, boottime, data) VALUES (?,?,?,?,?,?,?)",
                (loan_id, step, engine_id, attempt_id, time.time(), now, json.dumps(data)),
            )
            self.report(
                LoanStepTaken(
                    loan_id=loan_id,
                    step=step,
                    engine_id=engine_id,
                    attempt_id=attempt_id,
                    monotonic_seconds=now,
                    data=data,
                )
            )

    def steps(self, loan_id: str) -> list[StepRow]:
        found = self._db.execute(
            "SELECT step, engine_id, attempt_id, at, boottime, data FROM step WHERE loan_id = ? ORDER BY seq",
            (loan_id,),
        )
        return [StepRow(LoanStep(row[0]), row[1], row[2], row[3], row[4], json.loads(row[5])) for row in found]

    # ---- attempts ---------------------------------------------------------------------------------------------

    def accept_attempt(self, loan_id: str, spec: AttemptSpec) -> bool:
        """False if this attempt was accepted before: it is never started twice."""
        with self.together(flush=True):
            done = self._db.execute(
                "INSERT INTO attempt VALUES (?, ?, ?, NULL, NULL) ON CONFLICT DO NOTHING",
                (spec.attempt_id, loan_id, spec.model_dump_json()),
            )
        return done.rowcount == 1

    def stop_attempt(self, attempt_id: str, end: str) -> None:
        self._db.execute("UPDATE attempt SET stop = ? WHERE attempt_id = ? AND ended IS NULL", (end, attempt_id))

    def end_attempt(self, ended: AttemptChanged) -> bool:
        """Writes the end once, with its report; False if it had one."""
        with self.together(flush=True):
            done = self._db.execute(
                "UPDATE attempt SET ended = ? WHERE attempt_id = ? AND ended IS NULL",
                (ended.model_dump_json(), ended.attempt_id),
            )
            if done.rowcount == 1:
                self.report(ended)
            return done.rowcount == 1

    def attempt_end(self, attempt_id: str) -> AttemptChanged | None:
        row = self._db.execute("SELECT ended FROM attempt WHERE attempt_id = ?", (attempt_id,)).fetchone()
        return None if row is None or row[0] is None else AttemptChanged.model_validate_json(row[0])

    def attempt_loan(self, attempt_id: str) -> str | None:
        row = self._db.execute("SELECT loan_id FROM attempt WHERE attempt_id = ?", (attempt_id,)).fetchone()
        return None if row is None else str(row[0])

    def live_attempts(self, loan_id: str) -> list[tuple[AttemptSpec, str | None]]:
        """Those without an end, with the end that was asked for, if any; in the order of acceptance."""
        found = self._db.execute(
            "SELECT spec, stop FROM attempt WHERE loan_id = ? AND ended IS NULL ORDER BY attempt_id", (loan_id,)
        )
        return [(AttemptSpec.model_validate_json(row[0]), row[1]) for row in found.fetchall()]

    # ---- policies ---------------------------------------------------------------------------------------------

    def policy(self, engine_id: str) -> tuple[int, EnginePolicy] | None:
        row = self._db.execute("SELECT version, policy FROM policy WHERE engine_id = ?", (engine_id,)).fetchone()
        return None if row is None else (int(row[0]), EnginePolicy.model_validate_json(row[1]))

    def set_policy(self, engine_id: str, version: int, policy: EnginePolicy) -> None:
        text = policy.model_dump_json()
        self._db.execute(
            "INSERT INTO policy VALUES (?, ?, ?) ON CONFLICT (engine_id) DO UPDATE SET version = ?, policy = ?",
            (engine_id, version, text, version, text),
        )

    # ---- orders and reports -----------------------------------------------------------------------------------

    def order_done(self, answer: OrderAnswer) -> None:
        """The order is over, whatever its outcome: it is not looked at again."""
        with self.together():
            self.raise_to("orders_after", answer.seq)
            self.report(answer)

    def report(self, report: Any) -> None:
        with self.together():
            self._db.execute(
                "INSERT INTO outbox (at, report) VALUES (?, ?)", (time.time(), _REPORT.dump_json(report).decode())
            )

    def unsent(self, limit: int = 500) -> list[dict[str, Any]]:
        """The oldest reports that were not acknowledged, as ReportEnvelope objects."""
        found = self._db.execute("SELECT id, at, report FROM outbox ORDER BY id LIMIT ?", (limit,))
        return [{"id": row[0], "at": row[1], "report": json.loads(row[2])} for row in found]

    def acknowledge(self, report_id: int) -> None:
        self._db.execute("DELETE FROM outbox WHERE id <= ?", (report_id,))

    def newest_report(self) -> int:
        """The id of the newest report that was not acknowledged; 0 if there is none."""
        return int(self._db.execute("SELECT coalesce(max(id), 0) FROM outbox").fetchone()[0])

    def ended_unacknowledged(self) -> list[AttemptChanged]:
        """Ends that still wait in the outbox, for the registration."""
        found = self._db.execute(
            'SELECT report FROM outbox WHERE report LIKE \'%"kind":"attempt_changed"%\' ORDER BY id'
        )
        reports = [AttemptChanged.model_validate_json(row[0]) for row in found]
        return [report for report in reports if report.end is not None]

    def forget_closed(self, before: float) -> list[str]:
        """Drops closed loans older than ``before`` with their steps and attempts; returns those attempts' ids."""
        with self.together():
            old = [r[0] for r in self._db.execute("SELECT loan_id FROM loan WHERE closed_at < ?", (before,))]
            attempts: list[str] = []
            for loan_id in old:
                found = self._db.execute("SELECT attempt_id FROM attempt WHERE loan_id = ?", (loan_id,))
                attempts += [str(row[0]) for row in found]
                for table in ("step", "attempt", "loan"):
                    self._db.execute(f"DELETE FROM {table} WHERE loan_id = ?", (loan_id,))  # noqa: S608
        return attempts
