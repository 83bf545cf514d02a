"""The loan machine is total: every state and event either has its edge or raises, and every state can end."""

from __future__ import annotations

import itertools

import pytest

from lull.agents.protocol.loans import (
    STEP_STATE,
    TRANSITIONS,
    IllegalLoanTransition,
    LoanEvent,
    LoanState,
    LoanStep,
    advance,
)


@pytest.mark.parametrize(("state", "event"), list(itertools.product(LoanState, LoanEvent)))
def test_every_pair_has_its_edge_or_raises(state: LoanState, event: LoanEvent) -> None:
    if (state, event) in TRANSITIONS:
        assert advance("loan", state, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(IllegalLoanTransition) as caught:
            advance("loan", state, event)
        assert "loan" in str(caught.value)
        assert state in str(caught.value)
        assert event in str(caught.value)


def test_closed_is_final() -> None:
    assert not [event for state, event in TRANSITIONS if state is LoanState.CLOSED]


def test_every_state_reaches_closed() -> None:
    reaches = {LoanState.CLOSED}
    while True:
        more = {state for (state, _), to in TRANSITIONS.items() if to in reaches} - reaches
        if not more:
            break
        reaches |= more
    assert reaches == set(LoanState)


def test_traffic_returns_only_through_verifying_faulted_or_before_anything_was_released() -> None:
    into_closed = {state for (state, _), to in TRANSITIONS.items() if to is LoanState.CLOSED}
    assert into_closed == {
        LoanState.DRAINING,  # nothing was released
        LoanState.PARKING,  # refused before any change
        LoanState.SETTLING,  # no engine in the loan
        LoanState.RECALLING,  # no engine in the loan
        LoanState.VERIFYING,
        LoanState.FAULTED,
    }
    assert TRANSITIONS[LoanState.VERIFYING, LoanEvent.CANARY_RIGHT] is LoanState.CLOSED


def test_a_job_can_run_only_after_the_memory_was_proved_free() -> None:
    into_lent = {(state, event) for (state, event), to in TRANSITIONS.items() if to is LoanState.LENT}
    assert into_lent == {
        (LoanState.SETTLING, LoanEvent.MEMORY_FREE),
        (LoanState.LENT, LoanEvent.ENGINE_LOST),
    }


def test_every_step_belongs_to_a_state() -> None:
    assert set(STEP_STATE) == set(LoanStep)
