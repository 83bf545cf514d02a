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
import sqlite3
import time
import uuid
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from .disk_reserve import DiskReserve
from .errors import JournalTooNew
from .journal_file import JournalFile
from .outbox import ALERTS_MAX, OBSERVATIONS_MAX, Outbox
from .protocol.loans import LoanState, LoanStep
from .protocol.policy import EnginePolicy
from .protocol.wire import AttemptChanged, AttemptSpec, LoanStepTaken, OpenLoan, OrderAnswer, Reason

SCHEMA_VERSION: Final = 1

# Flushed before their act.
INTENTS: Final = frozenset({LoanStep.PARK_SENT, LoanStep.SPAWN_INTENT, LoanStep.RESUME_SENT})

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
    """Opens or makes the journal in ``path``; raises JournalCorrupt, JournalUnavailable and JournalTooNew."""

    def __init__(
        self,
        path: Path,
        reserve: DiskReserve | None = None,
        *,
        observations_max: int = OBSERVATIONS_MAX,
        alerts_max: int = ALERTS_MAX,
    ) -> None:
        self.path = path
        self._file = JournalFile(path, self._open_schema, reserve)
        self.on_report = self._file.on_write  # callables without arguments, called after something was written
        self._outbox = Outbox(self._file, observations_max, alerts_max)
        self.journal_id = self._meta_or("journal_id", str(uuid.uuid4()))

    def _open_schema(self, db: sqlite3.Connection) -> None:
        (version,) = db.execute("PRAGMA user_version").fetchone()
        if version > SCHEMA_VERSION:
            raise JournalTooNew(
                f"{self.path} has schema {version}, this version knows {SCHEMA_VERSION}:"
                " start the newer agent again; running jobs were left alone"
            )
        if version == 0:
            try:
                db.executescript(f"BEGIN;{_SCHEMA}PRAGMA user_version = {SCHEMA_VERSION};COMMIT;")
            except sqlite3.Error:
                if db.in_transaction:
                    db.execute("ROLLBACK")
                raise

    def close(self) -> None:
        self._file.close()

    @contextmanager
    def together(self, *, flush: bool = False) -> Generator[None]:
        """Everything written inside commits at once, or not at all; on disk if any part of it asks for that."""
        with self._file.together(flush=flush):
            yield

    @property
    def short(self) -> str:
        """What the disk refused, if it did: then no new loan is taken, and observations wait. Empty: all is well."""
        return self._file.short

    @property
    def in_memory(self) -> bool:
        """The disk takes nothing: what is written now is lost with this process."""
        return self._file.in_memory

    def mend(self) -> bool:
        """Tries to get back what a full disk took; True if all is well."""
        was_short = bool(self.short)
        if not self._file.mend():
            return False
        if was_short:
            self._outbox.write_held_back()
        return True

    # ---- identity and marks -----------------------------------------------------------------------------------

    def meta(self, key: str) -> str | None:
        row = self._file.read("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def set_meta(self, key: str, value: str) -> None:
        self._file.write(
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
            self._file.write(
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
        self._file.write(f"UPDATE loan SET {columns} WHERE loan_id = ?", (*values.values(), loan_id))  # noqa: S608

    def loan(self, loan_id: str) -> LoanRow | None:
        rows = self._loans("WHERE loan_id = ?", (loan_id,))
        return rows[0] if rows else None

    def open_loans(self) -> list[LoanRow]:
        return self._loans("WHERE closed_at IS NULL ORDER BY opened_at", ())

    def _loans(self, where: str, values: tuple[Any, ...]) -> list[LoanRow]:
        columns = "order_json, boot_id, restore_by_boottime, state, recalled, engine_lost, reason"
        found = self._file.read(f"SELECT {columns} FROM loan {where}", values)  # noqa: S608
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
            self._file.write(
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
        found = self._file.read(
            "SELECT step, engine_id, attempt_id, at, boottime, data FROM step WHERE loan_id = ? ORDER BY seq",
            (loan_id,),
        )
        return [StepRow(LoanStep(row[0]), row[1], row[2], row[3], row[4], json.loads(row[5])) for row in found]

    # ---- attempts ---------------------------------------------------------------------------------------------

    def accept_attempt(self, loan_id: str, spec: AttemptSpec) -> bool:
        """False if this attempt was accepted before: it is never started twice."""
        with self.together(flush=True):
            done = self._file.write(
                "INSERT INTO attempt VALUES (?, ?, ?, NULL, NULL) ON CONFLICT DO NOTHING",
                (spec.attempt_id, loan_id, spec.model_dump_json()),
            )
        return done == 1

    def stop_attempt(self, attempt_id: str, end: str) -> None:
        self._file.write("UPDATE attempt SET stop = ? WHERE attempt_id = ? AND ended IS NULL", (end, attempt_id))

    def end_attempt(self, ended: AttemptChanged) -> bool:
        """Writes the end once, with its report; False if it had one."""
        with self.together(flush=True):
            done = self._file.write(
                "UPDATE attempt SET ended = ? WHERE attempt_id = ? AND ended IS NULL",
                (ended.model_dump_json(), ended.attempt_id),
            )
            if done == 1:
                self.report(ended)
            return done == 1

    def attempt_end(self, attempt_id: str) -> AttemptChanged | None:
        row = self._file.read("SELECT ended FROM attempt WHERE attempt_id = ?", (attempt_id,)).fetchone()
        return None if row is None or row[0] is None else AttemptChanged.model_validate_json(row[0])

    def attempt_loan(self, attempt_id: str) -> str | None:
        row = self._file.read("SELECT loan_id FROM attempt WHERE attempt_id = ?", (attempt_id,)).fetchone()
        return None if row is None else str(row[0])

    def live_attempts(self, loan_id: str) -> list[tuple[AttemptSpec, str | None]]:
        """Those without an end, with the end that was asked for, if any; in the order of acceptance."""
        found = self._file.read(
            "SELECT spec, stop FROM attempt WHERE loan_id = ? AND ended IS NULL ORDER BY attempt_id", (loan_id,)
        )
        return [(AttemptSpec.model_validate_json(row[0]), row[1]) for row in found.fetchall()]

    # ---- policies ---------------------------------------------------------------------------------------------

    def policy(self, engine_id: str) -> tuple[int, EnginePolicy] | None:
        row = self._file.read("SELECT version, policy FROM policy WHERE engine_id = ?", (engine_id,)).fetchone()
        return None if row is None else (int(row[0]), EnginePolicy.model_validate_json(row[1]))

    def set_policy(self, engine_id: str, version: int, policy: EnginePolicy) -> None:
        text = policy.model_dump_json()
        self._file.write(
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
        self._outbox.add(report)

    def unsent(self, limit: int = 500) -> list[dict[str, Any]]:
        """The oldest reports that were not acknowledged, as ReportEnvelope objects."""
        return self._outbox.unsent(limit)

    def acknowledge(self, report_id: int) -> None:
        self._outbox.acknowledge(report_id)

    def drop_too_big(self, report_id: int) -> bool:
        """An alert takes the place of a report that the scheduler cannot be sent; False if there is none by that id."""
        return self._outbox.drop_too_big(report_id)

    def newest_report(self) -> int:
        """The id of the newest report that was not acknowledged; 0 if there is none."""
        return self._outbox.newest()

    @property
    def reports_at_start(self) -> int:
        """The number of the newest report when this process began: all above it are its own."""
        return self._outbox.numbered_at_start

    def ended_unacknowledged(self) -> list[AttemptChanged]:
        """Ends that still wait in the outbox, for the registration."""
        return self._outbox.ended()

    def forget_closed(self, before: float) -> list[str]:
        """Drops closed loans older than ``before`` with their steps and attempts; returns those attempts' ids."""
        with self.together():
            old = [r[0] for r in self._file.read("SELECT loan_id FROM loan WHERE closed_at < ?", (before,))]
            attempts: list[str] = []
            for loan_id in old:
                found = self._file.read("SELECT attempt_id FROM attempt WHERE loan_id = ?", (loan_id,))
                attempts += [str(row[0]) for row in found]
                for table in ("step", "attempt", "loan"):
                    self._file.write(f"DELETE FROM {table} WHERE loan_id = ?", (loan_id,))  # noqa: S608
        return attempts
