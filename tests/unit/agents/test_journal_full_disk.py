"""A disk that is full costs observations and new loans, never a step; and no healthy journal."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path

import pytest

from lull.agents.disk_reserve import DiskReserve
from lull.agents.errors import JournalUnavailable
from lull.agents.journal import Journal
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptSpec, OccupancyChanged, OccupancyKind, OpenLoan
from tests.small_disk import MIB, SmallDisk, small_disk

ORDER = OpenLoan(
    loan_id="l1",
    epoch=3,
    device_ids=["d"],
    engine_ids=["e"],
    need_bytes=1,
    restore_by_seconds=60,
    policies={"e": EnginePolicy()},
    attempts=[AttemptSpec(attempt_id="a1", job_id="j1", attempt_no=1, argv=["true"], device_ids=["d"], hbm_bytes=1)],
)


@pytest.fixture
def disk(tmp_path: Path) -> Generator[SmallDisk]:
    with small_disk(tmp_path / "disk") as disk:
        yield disk


def opened(disk: SmallDisk, *, reserve: bool = True) -> Journal:
    return Journal(disk.path / "journal.sqlite", DiskReserve(disk.path / "reserve", MIB) if reserve else None)


def accept(journal: Journal) -> None:
    journal.accept_loan(ORDER, boot_id="b", state=LoanState.DRAINING, restore_by=12.5)


def fill_with_steps(journal: Journal, count: int) -> None:
    for number in range(count):
        journal.write_step("l1", LoanStep.RESUME_SENT, engine_id="e", data={"number": number, "text": "x" * 2000})


def numbers(journal: Journal) -> list[int]:
    return [step.data["number"] for step in journal.steps("l1")]


def observed(kind: OccupancyKind) -> OccupancyChanged:
    return OccupancyChanged(device_id="d", occupancy=kind)


def occupancies(journal: Journal) -> list[str]:
    seen = [one["report"] for one in journal.unsent(1000)]
    return [one["occupancy"] for one in seen if one["kind"] == "occupancy_changed"]


def test_a_full_disk_keeps_no_observation_from_a_scheduler_that_listens(disk: SmallDisk) -> None:
    """One row of each thing at most; what is newer follows as soon as that one was taken, with the disk as full."""
    journal = opened(disk)
    accept(journal)
    disk.fill()
    fill_with_steps(journal, 20)
    for kind in (OccupancyKind.WAKING, OccupancyKind.SERVING, OccupancyKind.IDLE):
        journal.report(observed(kind))
    assert occupancies(journal) == ["waking"]
    journal.acknowledge(journal.newest_report())
    assert occupancies(journal) == ["idle"]
    journal.acknowledge(journal.newest_report())
    assert occupancies(journal) == []
    journal.report(observed(OccupancyKind.SERVING))
    assert occupancies(journal) == ["serving"]
    assert journal.short
    journal.close()


def test_steps_go_into_the_reserve_and_observations_wait(disk: SmallDisk) -> None:
    journal = opened(disk)
    accept(journal)
    assert not journal.short
    disk.fill()
    fill_with_steps(journal, 20)
    assert "full" in journal.short
    assert not journal.in_memory
    journal.report(observed(OccupancyKind.WAKING))
    journal.report(observed(OccupancyKind.IDLE))
    assert occupancies(journal) == ["waking"]
    assert not journal.mend()
    journal.close()
    again = opened(disk)
    assert numbers(again) == list(range(20))
    assert again.short, "nobody made room meanwhile"
    again.close()


def test_with_room_again_the_reserve_is_back_and_the_newest_observation_is_told(disk: SmallDisk) -> None:
    journal = opened(disk)
    accept(journal)
    disk.fill()
    fill_with_steps(journal, 20)
    journal.report(observed(OccupancyKind.WAKING))
    journal.report(observed(OccupancyKind.IDLE))
    disk.clear()
    assert journal.mend()
    assert not journal.short
    assert (disk.path / "reserve").stat().st_size == MIB
    assert occupancies(journal) == ["waking", "idle"]
    journal.close()


def test_without_any_room_the_journal_goes_on_in_memory_and_back(disk: SmallDisk) -> None:
    journal = opened(disk, reserve=False)
    accept(journal)
    disk.fill()
    fill_with_steps(journal, 100)
    assert journal.in_memory
    assert numbers(journal) == list(range(100))
    assert not journal.mend()
    disk.clear()
    assert journal.mend()
    assert not journal.in_memory
    fill_with_steps(journal, 1)
    journal.close()
    again = opened(disk, reserve=False)
    assert numbers(again) == [*range(100), 0]
    assert len(again.open_loans()) == 1
    again.close()


def test_what_is_written_together_stays_together_when_the_disk_fills_up(disk: SmallDisk) -> None:
    journal = opened(disk)
    with journal.together():
        accept(journal)
        disk.fill()
        fill_with_steps(journal, 20)
    assert journal.short
    assert numbers(journal) == list(range(20))

    def write_and_fail() -> None:
        with journal.together():
            fill_with_steps(journal, 3)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_and_fail()
    assert numbers(journal) == list(range(20))
    journal.close()


@pytest.mark.parametrize("reserve", [True, False])
def test_a_healthy_journal_is_opened_on_a_full_disk(disk: SmallDisk, reserve: bool) -> None:
    journal = opened(disk, reserve=reserve)
    accept(journal)
    journal_id = journal.journal_id
    journal.close()
    disk.fill()
    again = opened(disk, reserve=reserve)
    assert again.short
    assert again.in_memory is not reserve
    assert [row.order for row in again.open_loans()] == [ORDER]
    assert again.journal_id == journal_id
    fill_with_steps(again, 3)
    disk.clear()
    assert again.mend()
    again.close()
    assert numbers(opened(disk, reserve=reserve)) == [0, 1, 2]


def test_a_new_journal_needs_room(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(JournalUnavailable, match="journal"):
        opened(disk)
