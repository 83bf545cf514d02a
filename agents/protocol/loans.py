"""The loan machine, and the steps of one loan.

One file owns the machine and the table is the machine: agent and scheduler both advance a loan by it, so they
cannot disagree about what may follow. It does no I/O and reads no clock. A pair that the table does not hold raises.

``LoanStep`` is the vocabulary of the journal, the tests and the docs: each names a fact that the agent
has written down, not an intention (the three intents that are flushed before the act say so).
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class LoanState(StrEnum):
    DRAINING = "draining"
    PARKING = "parking"
    SETTLING = "settling"
    LENT = "lent"
    RECALLING = "recalling"
    WAKING = "waking"
    VERIFYING = "verifying"
    FAULTED = "faulted"  # an engine could not be brought back yet; its gate stays closed
    CLOSED = "closed"


class LoanStep(StrEnum):
    ACCEPTED = "accepted"  # journalled with epoch, restore_by and the policy snapshot
    PREFLIGHTED = "preflighted"  # host RAM reserved, clock skew and devices looked at
    GATE_CLOSING = "gate_closing"  # intent
    GATE_CLOSED = "gate_closed"
    IN_FLIGHT_ZERO = "in_flight_zero"  # and the golden answer was still right
    PARK_SENT = "park_sent"  # intent, flushed before the call; once per loan and engine
    PARKED_SEEN = "parked_seen"  # by the engine's own word
    SETTLED = "settled"  # bytes on every device agree with the plan for k samples
    SPAWN_INTENT = "spawn_intent"  # intent, flushed before the runner may start the attempt
    SPAWNED = "spawned"
    EXIT_RECORDED = "exit_recorded"  # the runner's record is on disk and its group is empty
    ROOM_PROVED = "room_proved"  # free bytes cover what the engine takes back, before every resume call
    RESUME_SENT = "resume_sent"  # intent, flushed before the call
    RUNNING_SEEN = "running_seen"  # by the engine's own word, and its bytes are back
    VERIFIED = "verified"  # the canary equals the golden answer
    GATE_OPENING = "gate_opening"  # intent
    GATE_OPENED = "gate_opened"
    CLOSED = "closed"


# The state that a loan is in once the step has been taken by every engine of its plan.
STEP_STATE: Final[Mapping[LoanStep, LoanState]] = MappingProxyType(
    {
        LoanStep.ACCEPTED: LoanState.DRAINING,
        LoanStep.PREFLIGHTED: LoanState.DRAINING,
        LoanStep.GATE_CLOSING: LoanState.DRAINING,
        LoanStep.GATE_CLOSED: LoanState.DRAINING,
        LoanStep.IN_FLIGHT_ZERO: LoanState.DRAINING,
        LoanStep.PARK_SENT: LoanState.PARKING,
        LoanStep.PARKED_SEEN: LoanState.SETTLING,
        LoanStep.SETTLED: LoanState.LENT,
        LoanStep.SPAWN_INTENT: LoanState.LENT,
        LoanStep.SPAWNED: LoanState.LENT,
        LoanStep.EXIT_RECORDED: LoanState.LENT,
        LoanStep.ROOM_PROVED: LoanState.WAKING,
        LoanStep.RESUME_SENT: LoanState.WAKING,
        LoanStep.RUNNING_SEEN: LoanState.VERIFYING,
        LoanStep.VERIFIED: LoanState.VERIFYING,
        LoanStep.GATE_OPENING: LoanState.VERIFYING,
        LoanStep.GATE_OPENED: LoanState.VERIFYING,
        LoanStep.CLOSED: LoanState.CLOSED,
    }
)


class LoanEvent(StrEnum):
    DRAINED = "drained"
    DRAIN_DEADLINE_ABORTED = "drain_deadline_aborted"  # policy abort_loan
    DRAIN_DEADLINE_FORCED = "drain_deadline_forced"  # policy abort_requests
    PREFLIGHT_REFUSED = "preflight_refused"
    GOLDEN_WRONG = "golden_wrong"
    PARKED = "parked"
    PARK_REFUSED = "park_refused"  # before any change
    PARK_DEADLINE = "park_deadline"
    MEMORY_FREE = "memory_free"
    MEMORY_NOT_FREE = "memory_not_free"
    FOREIGN_PROCESS = "foreign_process"
    RECALLED = "recalled"
    WORK_ENDED = "work_ended"  # the last attempt ended and no fitting job came
    RESTORE_BY_REACHED = "restore_by_reached"
    GROUPS_EMPTY = "groups_empty"
    GROUPS_EMPTY_WITHOUT_ENGINE = "groups_empty_without_engine"
    GROUPS_EMPTY_ENGINE_LOST = "groups_empty_engine_lost"
    UNKILLABLE = "unkillable"
    RUNNING = "running"
    ENGINE_LOST = "engine_lost"  # gone or failed
    WAKE_OUT_OF_MEMORY = "wake_out_of_memory"  # the engine is still parked
    RESUME_DEADLINE = "resume_deadline"
    CANARY_RIGHT = "canary_right"
    CANARY_WRONG = "canary_wrong"
    CANARY_DEADLINE = "canary_deadline"
    ENGINE_BACK = "engine_back"  # healthy again and the canary is right
    GIVEN_UP = "given_up"  # by an operator; the gate stays closed


_D, _P, _S, _L = LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING, LoanState.LENT
_R, _W, _V = LoanState.RECALLING, LoanState.WAKING, LoanState.VERIFYING
_F, _C = LoanState.FAULTED, LoanState.CLOSED
_E = LoanEvent

TRANSITIONS: Final[Mapping[tuple[LoanState, LoanEvent], LoanState]] = MappingProxyType(
    {
        (_D, _E.DRAINED): _P,
        (_D, _E.RECALLED): _C,
        (_D, _E.RESTORE_BY_REACHED): _C,
        (_D, _E.DRAIN_DEADLINE_ABORTED): _C,
        (_D, _E.DRAIN_DEADLINE_FORCED): _P,
        (_D, _E.PREFLIGHT_REFUSED): _C,
        (_D, _E.GOLDEN_WRONG): _C,
        (_D, _E.ENGINE_LOST): _F,
        (_P, _E.ENGINE_LOST): _F,
        (_P, _E.PARK_REFUSED): _C,
        # Marked, not moved: no second call; waking begins once `parked` is seen.
        (_P, _E.RECALLED): _P,
        (_P, _E.RESTORE_BY_REACHED): _P,
        (_P, _E.PARK_DEADLINE): _P,
        (_P, _E.PARKED): _S,
        (_S, _E.ENGINE_LOST): _F,
        (_S, _E.RECALLED): _W,
        (_S, _E.RESTORE_BY_REACHED): _W,
        (_S, _E.FOREIGN_PROCESS): _W,
        (_S, _E.MEMORY_NOT_FREE): _W,
        (_S, _E.MEMORY_FREE): _L,
        (_L, _E.ENGINE_LOST): _L,
        (_L, _E.WORK_ENDED): _R,
        (_L, _E.RECALLED): _R,
        (_L, _E.RESTORE_BY_REACHED): _R,
        (_R, _E.ENGINE_LOST): _R,
        (_R, _E.RECALLED): _R,
        (_R, _E.RESTORE_BY_REACHED): _R,
        (_R, _E.GROUPS_EMPTY): _W,
        (_R, _E.GROUPS_EMPTY_WITHOUT_ENGINE): _C,
        (_R, _E.GROUPS_EMPTY_ENGINE_LOST): _F,
        (_R, _E.UNKILLABLE): _F,
        (_W, _E.WAKE_OUT_OF_MEMORY): _W,
        (_W, _E.ENGINE_LOST): _F,
        (_W, _E.RESUME_DEADLINE): _F,
        (_W, _E.RUNNING): _V,
        (_V, _E.ENGINE_LOST): _F,
        (_V, _E.CANARY_WRONG): _F,
        (_V, _E.CANARY_DEADLINE): _F,
        (_V, _E.CANARY_RIGHT): _C,
        (_F, _E.ENGINE_BACK): _C,
        (_F, _E.GIVEN_UP): _C,
        # A loan without an engine starts in settling and has nothing to wake.
        (_S, _E.GROUPS_EMPTY_WITHOUT_ENGINE): _C,
    }
)


class IllegalLoanTransition(RuntimeError):
    """The machine has no such edge. ``loan_id``, ``state`` and ``event`` say which."""

    def __init__(self, loan_id: str, state: LoanState, event: LoanEvent) -> None:
        super().__init__(f"loan {loan_id} is {state}: {event} has no transition from there")
        self.loan_id = loan_id
        self.state = state
        self.event = event


def advance(loan_id: str, state: LoanState, event: LoanEvent) -> LoanState:
    """The state after ``event``; raises IllegalLoanTransition where the table holds no edge."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalLoanTransition(loan_id, state, event) from None
