"""One word for a device at every moment."""

from __future__ import annotations

import pytest

from lull.agents.occupancy import EngineFacts, Holder, holder
from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.wire import EngineState, OccupancyKind

BUSY = EngineFacts("e", EngineState.RUNNING, 1.0)
QUIET = EngineFacts("e", EngineState.RUNNING, 60.0)
NEVER = EngineFacts("e", EngineState.RUNNING, None)
DEAD = EngineFacts("e", EngineState.GONE, 1.0)


def look(**given: object) -> Holder:
    facts: dict[str, object] = {
        "quarantined": False,
        "loan_id": None,
        "loan_state": None,
        "running_attempt_ids": [],
        "engines": [],
        "foreign": False,
    }
    return holder(**{**facts, **given})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, Holder(OccupancyKind.EMPTY)),
        ({"engines": [BUSY]}, Holder(OccupancyKind.SERVING, "e")),
        ({"engines": [QUIET]}, Holder(OccupancyKind.IDLE, "e")),
        ({"engines": [NEVER]}, Holder(OccupancyKind.IDLE, "e")),
        ({"engines": [EngineFacts("e", EngineState.STARTING, None)]}, Holder(OccupancyKind.WAKING, "e")),
        ({"engines": [DEAD]}, Holder(OccupancyKind.FAULTED, "e")),
        ({"foreign": True}, Holder(OccupancyKind.FOREIGN)),
        ({"quarantined": True, "engines": [BUSY]}, Holder(OccupancyKind.QUARANTINED)),
        (
            {"loan_id": "l", "loan_state": LoanState.LENT, "running_attempt_ids": ["a"], "engines": [BUSY]},
            Holder(OccupancyKind.JOB, "a", "l"),
        ),
        ({"loan_id": "l", "loan_state": LoanState.LENT, "engines": [BUSY]}, Holder(OccupancyKind.EMPTY, None, "l")),
        (
            {"loan_id": "l", "loan_state": LoanState.RECALLING, "running_attempt_ids": ["a"]},
            Holder(OccupancyKind.RECALLING, "a", "l"),
        ),
        (
            {"loan_id": "l", "loan_state": LoanState.FAULTED, "engines": [DEAD], "quarantined": True},
            Holder(OccupancyKind.FAULTED, "e", "l"),
        ),
    ],
)
def test_the_word(given: dict[str, object], expected: Holder) -> None:
    assert look(**given) == expected


@pytest.mark.parametrize("state", [s for s in LoanState if s is not LoanState.CLOSED])
def test_a_loan_always_shows_itself(state: LoanState) -> None:
    assert look(loan_id="l", loan_state=state, engines=[BUSY]).loan_id == "l"
