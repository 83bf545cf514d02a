"""The job and attempt machines, leases, and usage: pure parts, small facts."""

from __future__ import annotations

from itertools import product

import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState, OccupancyKind
from lull.scheduler.leases import LeaseBook
from lull.scheduler.lifecycle import (
    ATTEMPT_TRANSITIONS,
    EVENT_OF_REPORT,
    JOB_TRANSITIONS,
    TERMINAL_JOB_STATES,
    AttemptEvent,
    IllegalAttemptTransition,
    IllegalJobTransition,
    JobEvent,
    JobState,
    advance_attempt,
    advance_job,
    job_event_of_end,
)
from lull.scheduler.model import DeviceId, Interval, Node, NodeId
from lull.scheduler.usage import Sight, cut


def test_the_job_table_is_the_machine() -> None:
    for state, event in product(JobState, JobEvent):
        if (state, event) in JOB_TRANSITIONS:
            assert advance_job("j", state, event) is JOB_TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalJobTransition, match=f"job j is {state}: {event}"):
                advance_job("j", state, event)


def test_terminal_is_final_and_every_state_is_reached() -> None:
    assert not [pair for pair in JOB_TRANSITIONS if pair[0] in TERMINAL_JOB_STATES]
    assert set(JobState) == set(JOB_TRANSITIONS.values()) | {JobState.QUEUED}
    assert not [pair for pair in ATTEMPT_TRANSITIONS if pair[0] is AttemptState.ENDED]
    assert set(AttemptState) == set(ATTEMPT_TRANSITIONS.values()) | {AttemptState.PLACED}


def test_the_attempt_table_is_the_machine() -> None:
    for state, event in product(AttemptState, AttemptEvent):
        if (state, event) in ATTEMPT_TRANSITIONS:
            assert advance_attempt("a", state, event) is ATTEMPT_TRANSITIONS[state, event]
        else:
            with pytest.raises(IllegalAttemptTransition, match=f"attempt a is {state}: {event}"):
                advance_attempt("a", state, event)
    assert set(EVENT_OF_REPORT) == set(AttemptState)


def test_every_end_means_something_for_every_live_job() -> None:
    live = (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
    for end, code, state in product(AttemptEnd, (None, 0, 1), live):
        event, failure = job_event_of_end(end, code, stop_wanted=state is JobState.STOPPING)
        after = advance_job("j", state, event)
        assert (failure is not None) == (after is JobState.FAILED)
        assert after in TERMINAL_JOB_STATES or (after is JobState.QUEUED and state is not JobState.STOPPING)


def test_a_job_that_ended_before_it_was_stopped_keeps_its_result() -> None:
    assert job_event_of_end(AttemptEnd.EXITED, 0, stop_wanted=True) == (JobEvent.SUCCEEDED, None)
    assert job_event_of_end(AttemptEnd.NOT_STARTED, None, stop_wanted=True) == (JobEvent.CANCELLED, None)


def node(heard: int, *, silent: bool = False) -> Node:
    return Node(NodeId("n"), "n", up=not silent, silent=silent, heard_count=heard)


def test_a_new_leader_waits_its_long_grace() -> None:
    book = LeaseBook(45.0, 300.0)
    assert book.overdue([node(5)], 0.0) == []
    assert book.overdue([node(5)], 299.0) == []
    assert [each.id for each in book.overdue([node(5)], 300.0)] == ["n"]
    assert book.overdue([node(5, silent=True)], 400.0) == []


def test_once_heard_the_lease_rules() -> None:
    book = LeaseBook(45.0, 300.0)
    book.overdue([node(5)], 0.0)
    assert book.overdue([node(6)], 10.0) == []
    assert book.overdue([node(6)], 54.0) == []
    assert len(book.overdue([node(6)], 55.0)) == 1
    assert book.overdue([node(7)], 56.0) == [], "a sign of life begins a new lease"
    late = Node(NodeId("late"), "late", up=True, silent=False)
    assert book.overdue([node(8), late], 60.0) == []
    assert [each.id for each in book.overdue([node(9), late], 105.0)] == ["late"], "one that came later has no grace"
    book.forget()
    assert book.overdue([node(9), late], 1000.0) == []


D = DeviceId("d")


def test_usage_is_unknown_after_the_last_sign_of_life() -> None:
    rows = [
        Interval(D, 0.0, 10.0, OccupancyKind.IDLE, None, None),
        Interval(D, 10.0, None, OccupancyKind.JOB, "a", None),
    ]
    silent = {"d": Sight(25.0, silent=True)}
    found = cut(rows, silent, 5.0, 100.0, now=50.0)
    assert [(each.started_at, each.ended_at, each.kind) for each in found] == [
        (5.0, 10.0, OccupancyKind.IDLE),
        (10.0, 25.0, OccupancyKind.JOB),
        (25.0, None, OccupancyKind.UNKNOWN),
    ]
    assert cut(rows, silent, 0.0, 20.0, now=50.0)[-1].ended_at == 20.0
    assert cut(rows, {"d": Sight(25.0, silent=False)}, 0.0, 100.0, now=50.0)[-1].kind is OccupancyKind.JOB
    unheard = cut(rows, {"d": Sight(25.0, silent=False)}, 0.0, 100.0, now=71.0)
    assert (unheard[-1].started_at, unheard[-1].kind) == (25.0, OccupancyKind.UNKNOWN), "nobody called it silent yet"
    early = cut(rows, {"d": Sight(2.0, silent=True)}, 0.0, 40.0, now=50.0)
    assert [each.kind for each in early] == [OccupancyKind.IDLE, OccupancyKind.UNKNOWN]
