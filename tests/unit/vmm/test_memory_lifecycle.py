from __future__ import annotations

import pytest

from lull.vmm.lifecycle import TRANSITIONS, IllegalMemoryTransition, MemoryEvent, MemoryState, advance

# The whole machine, written down a second time: state, event, next. Every other pair must raise.
EDGES = {
    ("running", "begin_park"): "parking",
    ("running", "fail"): "failed",
    ("parking", "abort_park"): "running",
    ("parking", "complete_park"): "parked",
    ("parking", "fail"): "failed",
    ("parked", "begin_wake"): "waking",
    ("parked", "fail"): "failed",
    ("waking", "abort_wake"): "parked",
    ("waking", "complete_wake_partly"): "parked",
    ("waking", "complete_wake"): "running",
    ("waking", "fail"): "failed",
    ("failed", "fail"): "failed",
}


@pytest.mark.parametrize("state", MemoryState)
@pytest.mark.parametrize("event", MemoryEvent)
def test_every_pair_is_an_edge_or_raises(state: MemoryState, event: MemoryEvent) -> None:
    expected = EDGES.get((state.value, event.value))
    if expected is not None:
        assert advance(state, event) == expected
        return
    with pytest.raises(IllegalMemoryTransition) as caught:
        advance(state, event)
    assert caught.value.state is state
    assert caught.value.event is event


def test_failed_is_terminal() -> None:
    assert {after for (state, _), after in TRANSITIONS.items() if state is MemoryState.FAILED} == {MemoryState.FAILED}


def test_every_state_can_be_reached() -> None:
    reached = {MemoryState.RUNNING}
    while more := {after for (state, _), after in TRANSITIONS.items() if state in reached} - reached:
        reached |= more
    assert reached == set(MemoryState)
