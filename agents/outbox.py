"""Reports that the scheduler has not taken yet, in their order and by their numbers.

Whatever says what was done stays until it is taken. Observations are many and the newest one counts, and alerts only
tell of what the others say: the oldest of them go when there are too many. While the disk is short only the newest
observation of each thing is kept, in memory, for as long as the one before it was not taken: the file then has one row
of each at most, and a scheduler that listens hears all.
"""

from __future__ import annotations

import json
import time
from typing import Any, Final

from pydantic import TypeAdapter

from .journal_file import JournalFile
from .protocol.wire import Alert, AttemptChanged, DeviceObserved, EngineChanged, OccupancyChanged, Report

OBSERVATIONS_MAX: Final = 50_000
ALERTS_MAX: Final = 10_000

_REPORT: Final[TypeAdapter[Any]] = TypeAdapter(Report)
_KIND: Final = "json_extract(report, '$.kind')"
_IS_OBSERVATION: Final = f"{_KIND} IN ('device_observed', 'occupancy_changed', 'engine_changed')"
_TOO_BIG: Final = "report_too_big"
_IS_ALERT: Final = f"{_KIND} = 'alert'"


def _observed(report: Any) -> tuple[str, str] | None:
    """What an observation is of; None for every other report."""
    match report:
        case DeviceObserved() | OccupancyChanged():
            return report.kind, report.device_id
        case EngineChanged():
            return report.kind, report.engine_id
        case _:
            return None


class Outbox:
    """Part of the journal in ``file``."""

    def __init__(
        self, file: JournalFile, observations_max: int = OBSERVATIONS_MAX, alerts_max: int = ALERTS_MAX
    ) -> None:
        self._file = file
        self._most = {_IS_OBSERVATION: observations_max, _IS_ALERT: alerts_max}
        self._acknowledged = self._mark("acknowledged")
        # A power cut takes the newest of what was not flushed: their numbers are then given a second time.
        self.numbered_at_start = self._numbered()
        self._held_back: dict[tuple[str, str], tuple[float, Any]] = {}
        self._last: dict[tuple[str, str], int] = {}  # the number of what was last written of each thing
        self._counts = {of_kind: self._count(of_kind) for of_kind in self._most}  # at least as many as there are

    def _count(self, of_kind: str) -> int:
        return int(self._file.read(f"SELECT count(*) FROM outbox WHERE {of_kind}").fetchone()[0])  # noqa: S608

    def _numbered(self) -> int:
        row = self._file.read("SELECT seq FROM sqlite_sequence WHERE name = 'outbox'").fetchone()
        return 0 if row is None else int(row[0])

    def _mark(self, key: str) -> int:
        row = self._file.read("SELECT value FROM meta WHERE key = ?", (key,)).fetchone()
        return 0 if row is None else int(row[0])

    def _raise_mark(self, key: str, value: int) -> None:
        if value > self._mark(key):
            self._file.write(
                "INSERT INTO meta VALUES (?, ?) ON CONFLICT (key) DO UPDATE SET value = excluded.value",
                (key, str(value)),
            )

    def add(self, report: Any) -> None:
        of = _observed(report)
        if of is not None and self._file.short and self._waits(of):
            self._held_back[of] = (time.time(), report)
            return
        self._write(time.time(), report)
        if of is not None:
            self._held_back.pop(of, None)
            self._last[of] = self.newest()
            self._counted(_IS_OBSERVATION)
        elif isinstance(report, Alert):
            self._counted(_IS_ALERT)

    def _counted(self, of_kind: str, more: int = 1) -> None:
        self._counts[of_kind] += more
        if self._counts[of_kind] > self._most[of_kind]:
            self._drop_oldest(of_kind)

    def _waits(self, of: tuple[str, str]) -> bool:
        """The last report of it was not taken yet."""
        return self._last.get(of, 0) > self._acknowledged

    def _write(self, at: float, report: Any) -> None:
        self._file.write("INSERT INTO outbox (at, report) VALUES (?, ?)", (at, _REPORT.dump_json(report).decode()))

    def write_held_back(self) -> None:
        """What was observed while the disk was short."""
        self._write_these(list(self._held_back))

    def _write_these(self, things: list[tuple[str, str]]) -> None:
        if not things:
            return
        with self._file.together():
            for of in things:
                self._write(*self._held_back[of])
                self._last[of] = self.newest()
        for of in things:
            del self._held_back[of]
        self._counted(_IS_OBSERVATION, len(things))

    def _drop_oldest(self, of_kind: str) -> None:
        """Down to a hundredth below the bound, so that it is rarely done."""
        self._counts[of_kind] = self._count(of_kind)
        over = self._counts[of_kind] - self._most[of_kind]
        if over <= 0:
            return
        oldest = self._file.read(
            f"SELECT id FROM outbox WHERE {of_kind} ORDER BY id LIMIT ?",  # noqa: S608
            (over + self._most[of_kind] // 100,),
        ).fetchall()
        with self._file.together():
            for (number,) in oldest:
                self._file.write("DELETE FROM outbox WHERE id = ?", (number,))
            self._raise_mark("dropped_to", oldest[-1][0])
        self._counts[of_kind] -= len(oldest)

    def drop_too_big(self, number: int) -> bool:
        """An alert takes its place, so that nothing is missing in between. False if there is no such report, or it is
        that alert: then it is not its size that is refused."""
        found = self._file.read(f"SELECT {_KIND}, report FROM outbox WHERE id = ?", (number,)).fetchone()  # noqa: S608
        if found is None or f'"code":"{_TOO_BIG}"' in found[1]:
            return False
        sentence = f"a report ({found[0]}) of {len(found[1])} bytes was dropped: the server takes none of that size"
        alert = Alert(severity="critical", code=_TOO_BIG, sentence=sentence)
        self._file.write("UPDATE outbox SET report = ? WHERE id = ?", (_REPORT.dump_json(alert).decode(), number))
        return True

    def unsent(self, limit: int) -> list[dict[str, Any]]:
        """The oldest reports that were not acknowledged, as ReportEnvelope objects."""
        found = self._file.read("SELECT id, at, report FROM outbox ORDER BY id LIMIT ?", (limit,))
        reports = [{"id": row[0], "at": row[1], "report": json.loads(row[2])} for row in found]
        if reports and self._has_dropped_before(reports[0]["id"]):
            # A gap would mean that reports of what was done are lost: they are not.
            sentence = "the oldest observations and alerts were dropped while the scheduler was away"
            gap = Alert(severity="info", code="observations_dropped", sentence=sentence)
            first = {"id": self._acknowledged + 1, "at": reports[0]["at"], "report": gap.model_dump(mode="json")}
            reports = [first, *reports[: limit - 1]]
        return reports

    def _has_dropped_before(self, number: int) -> bool:
        """All that is missing before ``number`` was dropped here; nothing was acknowledged and then lost there."""
        if self._acknowledged < self._mark("acknowledged"):
            return False
        return self._acknowledged + 1 < number <= self._mark("dropped_to") + 1

    def acknowledge(self, number: int) -> None:
        self._acknowledged = number
        with self._file.together():
            self._file.write("DELETE FROM outbox WHERE id <= ?", (number,))
            self._raise_mark("acknowledged", number)
        self._write_these([of for of in self._held_back if not self._waits(of)])

    def newest(self) -> int:
        """The id of the newest report that was not acknowledged; 0 if there is none."""
        return int(self._file.read("SELECT coalesce(max(id), 0) FROM outbox").fetchone()[0])

    def ended(self) -> list[AttemptChanged]:
        """Ends that still wait, for the registration."""
        found = self._file.read(
            'SELECT report FROM outbox WHERE report LIKE \'%"kind":"attempt_changed"%\' ORDER BY id'
        )
        reports = [AttemptChanged.model_validate_json(row[0]) for row in found]
        return [report for report in reports if report.end is not None]
