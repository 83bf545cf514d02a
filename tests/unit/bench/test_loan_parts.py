from __future__ import annotations

import itertools

import pytest

from lull.agents.protocol.loans import LoanStep
from lull.bench.loan_parts import (
    PARTS,
    MissingStamp,
    Stamp,
    is_over,
    own_seconds,
    part_seconds,
    phase_seconds,
    stamps_of,
)


def whole_loan(step_seconds: float = 1.0) -> list[Stamp]:
    return [Stamp(step, 100.0 + number * step_seconds) for number, step in enumerate(LoanStep)]


def test_the_parts_cover_the_loan_without_gap_or_overlap() -> None:
    assert PARTS[0].start is LoanStep.ACCEPTED
    assert PARTS[-1].end is LoanStep.CLOSED
    assert all(before.end is after.start for before, after in itertools.pairwise(PARTS))


def test_the_parts_add_up_to_the_loan() -> None:
    seconds = part_seconds(whole_loan())
    assert sum(seconds.values()) == pytest.approx(len(LoanStep) - 1)


def test_copies_settling_job_drain_and_canary_are_not_lulls_own() -> None:
    own = own_seconds(part_seconds(whole_loan()))
    assert not own.keys() & {
        "park_copy",
        "resume_copy",
        "settle_samples",
        "job",
        "canary",
        "drain_and_golden_answer",
    }
    assert sum(own.values()) == pytest.approx(len(PARTS) - 6)


def test_several_attempts_count_as_one_job() -> None:
    stamps = whole_loan()
    last = stamps[-1].monotonic_seconds
    at = {stamp.step: stamp.monotonic_seconds for stamp in stamps}
    begun = at[LoanStep.SPAWNED]
    second = [Stamp(LoanStep.SPAWN_INTENT, begun + 0.4), Stamp(LoanStep.SPAWNED, begun + 0.5)]
    seconds = part_seconds(sorted([*stamps, *second], key=lambda stamp: stamp.monotonic_seconds))
    assert seconds["job"] == pytest.approx(1.0)
    assert sum(seconds.values()) == pytest.approx(last - 100.0)


def test_a_step_that_is_missing_is_named() -> None:
    stamps = [stamp for stamp in whole_loan() if stamp.step is not LoanStep.SETTLED]
    with pytest.raises(MissingStamp, match="settled") as missing:
        part_seconds(stamps)
    assert missing.value.step is LoanStep.SETTLED


def test_the_phases_are_the_loans_states() -> None:
    phases = phase_seconds(whole_loan())
    assert list(phases) == ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying"]
    assert sum(phases.values()) == pytest.approx(len(LoanStep) - 1)


def test_stamps_are_read_from_the_apis_steps() -> None:
    steps = [{"step": "closed", "monotonic_seconds": 2, "data": {}}, {"step": "accepted", "monotonic_seconds": 1.5}]
    assert stamps_of(steps) == [Stamp(LoanStep.ACCEPTED, 1.5), Stamp(LoanStep.CLOSED, 2.0)]


def test_a_loan_is_over_when_its_last_step_has_arrived_too() -> None:
    assert not is_over("closed", ["gate_opened"])
    assert not is_over("verifying", ["gate_opened", "closed"])
    assert is_over("closed", ["gate_opened", "closed"])
