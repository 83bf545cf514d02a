"""The memory machine: everything that affects it is in this file, and the table is the machine.

States and edges are those of TensorRT-LLM's executor admission (NVIDIA/TensorRT-LLM#19016). It does no I/O.
An edge that the table does not hold raises; nothing else may decide the next state.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from types import MappingProxyType


class MemoryState(StrEnum):
    RUNNING = "running"
    PARKING = "parking"
    PARKED = "parked"
    WAKING = "waking"
    FAILED = "failed"  # terminal: the process has to be replaced


class MemoryEvent(StrEnum):
    BEGIN_PARK = "begin_park"
    ABORT_PARK = "abort_park"  # only before any change, or after a change was rolled back whole
    COMPLETE_PARK = "complete_park"
    BEGIN_WAKE = "begin_wake"
    ABORT_WAKE = "abort_wake"  # as above: everything is still parked
    COMPLETE_WAKE_PARTLY = "complete_wake_partly"  # some tags stay parked
    COMPLETE_WAKE = "complete_wake"
    FAIL = "fail"


TRANSITIONS: Mapping[tuple[MemoryState, MemoryEvent], MemoryState] = MappingProxyType(
    {
        (MemoryState.RUNNING, MemoryEvent.BEGIN_PARK): MemoryState.PARKING,
        (MemoryState.PARKING, MemoryEvent.ABORT_PARK): MemoryState.RUNNING,
        (MemoryState.PARKING, MemoryEvent.COMPLETE_PARK): MemoryState.PARKED,
        (MemoryState.PARKED, MemoryEvent.BEGIN_WAKE): MemoryState.WAKING,
        (MemoryState.WAKING, MemoryEvent.ABORT_WAKE): MemoryState.PARKED,
        (MemoryState.WAKING, MemoryEvent.COMPLETE_WAKE_PARTLY): MemoryState.PARKED,
        (MemoryState.WAKING, MemoryEvent.COMPLETE_WAKE): MemoryState.RUNNING,
        (MemoryState.RUNNING, MemoryEvent.FAIL): MemoryState.FAILED,
        (MemoryState.PARKING, MemoryEvent.FAIL): MemoryState.FAILED,
        (MemoryState.PARKED, MemoryEvent.FAIL): MemoryState.FAILED,
        (MemoryState.WAKING, MemoryEvent.FAIL): MemoryState.FAILED,
        (MemoryState.FAILED, MemoryEvent.FAIL): MemoryState.FAILED,
    }
)


class IllegalMemoryTransition(RuntimeError):
    """The machine has no such edge. ``state`` and ``event`` say which."""

    def __init__(self, state: MemoryState, event: MemoryEvent) -> None:
        super().__init__(f"memory is {state}: {event} has no transition from there")
        self.state = state
        self.event = event


def advance(state: MemoryState, event: MemoryEvent) -> MemoryState:
    """The state after ``event``; raises IllegalMemoryTransition where the table holds no edge."""
    try:
        return TRANSITIONS[state, event]
    except KeyError:
        raise IllegalMemoryTransition(state, event) from None
