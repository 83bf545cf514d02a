"""Which part of a loan is whose: differences of named journal stamps, never a remainder. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

from ..agents.protocol.loans import STEP_STATE, LoanStep

Owner = Literal["lull", "copy", "settle", "job", "canary", "drain"]


@dataclass(frozen=True, slots=True)
class Part:
    """The time from one step to another, and who spends it."""

    name: str
    start: LoanStep
    end: LoanStep
    owner: Owner


# In the order of the loan; together they cover it from the first stamp to the last.
PARTS: Final = (
    Part("accept_to_preflight", LoanStep.ACCEPTED, LoanStep.PREFLIGHTED, "lull"),
    Part("preflight_to_gate_intent", LoanStep.PREFLIGHTED, LoanStep.GATE_CLOSING, "lull"),
    Part("gate_close", LoanStep.GATE_CLOSING, LoanStep.GATE_CLOSED, "lull"),
    # Waits for requests in flight, and asks for the golden answer: the engine's time.
    Part("drain_and_golden_answer", LoanStep.GATE_CLOSED, LoanStep.IN_FLIGHT_ZERO, "drain"),
    Part("drained_to_park_call", LoanStep.IN_FLIGHT_ZERO, LoanStep.PARK_SENT, "lull"),
    Part("park_copy", LoanStep.PARK_SENT, LoanStep.PARKED_SEEN, "copy"),
    Part("settle_samples", LoanStep.PARKED_SEEN, LoanStep.SETTLED, "settle"),
    Part("settled_to_spawn_intent", LoanStep.SETTLED, LoanStep.SPAWN_INTENT, "lull"),
    Part("spawn", LoanStep.SPAWN_INTENT, LoanStep.SPAWNED, "lull"),
    Part("job", LoanStep.SPAWNED, LoanStep.EXIT_RECORDED, "job"),
    Part("job_end_to_room_proof", LoanStep.EXIT_RECORDED, LoanStep.ROOM_PROVED, "lull"),
    Part("room_proof_to_resume_call", LoanStep.ROOM_PROVED, LoanStep.RESUME_SENT, "lull"),
    Part("resume_copy", LoanStep.RESUME_SENT, LoanStep.RUNNING_SEEN, "copy"),
    Part("canary", LoanStep.RUNNING_SEEN, LoanStep.VERIFIED, "canary"),
    Part("verified_to_gate_intent", LoanStep.VERIFIED, LoanStep.GATE_OPENING, "lull"),
    Part("gate_open", LoanStep.GATE_OPENING, LoanStep.GATE_OPENED, "lull"),
    Part("close", LoanStep.GATE_OPENED, LoanStep.CLOSED, "lull"),
)


class MissingStamp(ValueError):
    """The loan's journal has no such step, so its parts cannot be told."""

    def __init__(self, step: LoanStep, seen: Iterable[LoanStep]) -> None:
        super().__init__(f"the loan has no step {step}; it has: {', '.join(seen) or 'none'}")
        self.step = step


@dataclass(frozen=True, slots=True)
class Stamp:
    step: LoanStep
    monotonic_seconds: float


def is_over(state: str, steps: Iterable[str]) -> bool:
    """Closed, and all is told: the last step is a report of its own, behind the one that says closed."""
    return state == "closed" and LoanStep.CLOSED in steps


def stamps_of(steps: Sequence[Mapping[str, Any]]) -> list[Stamp]:
    """The stamps of a loan as the API shows it, in the order of the node's clock."""
    stamps = [Stamp(LoanStep(str(step["step"])), float(step["monotonic_seconds"])) for step in steps]
    return sorted(stamps, key=lambda stamp: stamp.monotonic_seconds)


def part_seconds(stamps: Sequence[Stamp]) -> dict[str, float]:
    """Seconds of every part of a loan with one engine. Raises MissingStamp.

    With several attempts the job's part runs from the first spawn to the last exit; with several engines each
    part ends when the last of them has passed it.
    """
    first: dict[LoanStep, float] = {}
    last: dict[LoanStep, float] = {}
    for stamp in stamps:
        first.setdefault(stamp.step, stamp.monotonic_seconds)
        last[stamp.step] = stamp.monotonic_seconds
    early = {LoanStep.SPAWN_INTENT, LoanStep.SPAWNED}
    at = {step: first[step] if step in early else last[step] for step in first}
    seconds: dict[str, float] = {}
    for part in PARTS:
        for step in (part.start, part.end):
            if step not in at:
                raise MissingStamp(step, first)
        seconds[part.name] = at[part.end] - at[part.start]
    return seconds


def own_seconds(seconds: Mapping[str, float]) -> dict[str, float]:
    """The parts that are Lull's own; their sum is its overhead."""
    return {part.name: seconds[part.name] for part in PARTS if part.owner == "lull" and part.name in seconds}


def phase_seconds(stamps: Sequence[Stamp]) -> dict[str, float]:
    """How long the loan was in each state, by the first step of each state to the first step of the next one."""
    entered: list[tuple[str, float]] = []
    for stamp in stamps:
        state = "recalling" if stamp.step is LoanStep.EXIT_RECORDED else STEP_STATE[stamp.step].value
        if not entered or entered[-1][0] != state:
            entered.append((state, stamp.monotonic_seconds))
    phases: dict[str, float] = {}
    for (state, start), (_, end) in itertools.pairwise(entered):
        phases[state] = phases.get(state, 0.0) + end - start
    return phases
