"""While the scheduler is away, what is observed is bounded; what was done is all kept."""

from __future__ import annotations

from pathlib import Path

from lull.agents.journal import Journal
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import Alert, OccupancyChanged, OccupancyKind


def observe(journal: Journal, count: int) -> None:
    for number in range(count):
        kind = OccupancyKind.IDLE if number % 2 else OccupancyKind.SERVING
        journal.report(OccupancyChanged(device_id="d", occupancy=kind))


def kinds(journal: Journal) -> list[str]:
    return [one["report"]["kind"] for one in journal.unsent(10_000)]


def test_the_oldest_observations_go_and_steps_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", observations_max=100)
    for _ in range(5):
        observe(journal, 100)
        journal.write_step("l", LoanStep.ACCEPTED, data={"kind": "occupancy_changed"})
    assert kinds(journal).count("loan_step") == 5
    assert 90 <= kinds(journal).count("occupancy_changed") <= 100
    newest = journal.newest_report()
    journal.close()
    again = Journal(tmp_path / "journal.sqlite", observations_max=100)
    observe(again, 50)
    assert 90 <= kinds(again).count("occupancy_changed") <= 100
    assert again.newest_report() == newest + 50


def test_a_dropped_observation_is_no_gap_for_the_scheduler(tmp_path: Path) -> None:
    """It takes a missing report for a loss of what was done."""
    journal = Journal(tmp_path / "journal.sqlite", observations_max=100)
    observe(journal, 30)
    journal.acknowledge(20)
    observe(journal, 150)
    journal.acknowledge(20)  # the registration's word
    taken, seen = 20, 0
    while reports := journal.unsent(7):
        assert len(reports) <= 7
        assert reports[0]["id"] == taken + 1
        taken = reports[-1]["id"]
        seen += sum(one["report"]["kind"] == "occupancy_changed" for one in reports)
        journal.acknowledge(taken)
    assert taken == 180
    assert 90 <= seen <= 100


def test_reports_that_the_scheduler_forgot_stay_a_gap(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", observations_max=100)
    observe(journal, 30)
    journal.acknowledge(30)
    observe(journal, 150)
    journal.acknowledge(10)  # its database is an older one now
    assert journal.unsent(7)[0]["id"] > 30


def test_a_process_knows_which_numbers_are_its_own(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    assert journal.reports_at_start == 0
    observe(journal, 3)
    journal.acknowledge(3)
    observe(journal, 2)
    assert journal.reports_at_start == 0
    journal.close()
    again = Journal(tmp_path / "journal.sqlite")
    assert again.reports_at_start == 5, "also those that were taken and forgotten"
    again.close()


def test_the_oldest_alerts_go_and_what_was_done_stays(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite", alerts_max=100)
    for _ in range(5):
        for number in range(100):
            journal.report(Alert(severity="critical", code="engine_not_running", sentence=str(number)))
        journal.write_step("l", LoanStep.ACCEPTED)
    assert kinds(journal).count("loan_step") == 5
    assert 90 <= kinds(journal).count("alert") <= 101
    taken = 0
    while reports := journal.unsent(7):
        assert reports[0]["id"] == taken + 1, "no gap for the scheduler"
        taken = reports[-1]["id"]
        journal.acknowledge(taken)
    assert taken == 505
    journal.close()


def test_an_alert_takes_the_place_of_a_report_that_is_too_big(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal.sqlite")
    observe(journal, 3)
    assert journal.drop_too_big(2)
    assert kinds(journal) == ["occupancy_changed", "alert", "occupancy_changed"]
    assert not journal.drop_too_big(2), "it is not its size that is refused"
    assert not journal.drop_too_big(4), "there is no such report"
    journal.close()
