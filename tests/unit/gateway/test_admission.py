from __future__ import annotations

import functools
import math

import pytest

from lull.agents.gateway.admission import Admission, Outcome, Refusal, Terms, Ticket, TicketState
from lull.agents.gateway.siblings import Siblings

ANSWERED = Outcome.ANSWERED


class Door:
    """An Admission and the order in which its tickets were told of a change."""

    def __init__(self, **terms: object) -> None:
        self.admission = Admission(Terms(**terms))  # type: ignore[arg-type]
        self.siblings = Siblings((self.admission,))
        self.told: list[int] = []
        self.tickets: list[Ticket] = []

    def arrive(self, now: float = 0.0) -> Ticket:
        number = len(self.tickets)
        ticket = self.siblings.arrive(now, lambda: self.told.append(number))
        self.tickets.append(ticket)
        return ticket

    def states(self) -> list[TicketState]:
        return [ticket.state for ticket in self.tickets]


def test_starts_closed_and_holds() -> None:
    door = Door()
    assert door.arrive().state is TicketState.HELD
    view = door.admission.view(3.0)
    assert (view.state, view.held, view.in_flight, view.oldest_held_seconds) == ("closed", 1, 0, 3.0)


def test_open_admits_and_counts_from_that_call() -> None:
    door = Door()
    door.admission.open()
    ticket = door.arrive()
    assert ticket.state is TicketState.ADMITTED
    assert door.admission.close(Terms()) == 1
    door.admission.finish(ticket, 1.0, ANSWERED)
    assert door.admission.close(Terms()) == 0


def test_held_requests_are_released_one_after_the_other_in_order() -> None:
    door = Door()
    first, second, third = door.arrive(), door.arrive(), door.arrive()
    door.admission.open()
    assert door.told == [0]
    assert door.admission.in_flight == 1
    late = door.arrive()
    assert door.states()[3] is TicketState.HELD  # behind those that waited
    door.admission.sent(first)
    door.admission.sent(first)  # only once
    assert door.told == [0, 1]
    door.admission.finish(second, 1.0, Outcome.DISCONNECTED)  # never sent: it makes way as well
    assert door.told == [0, 1, 2]
    door.admission.sent(third)
    assert door.told == [0, 1, 2, 3]
    assert late.state is TicketState.ADMITTED


def test_close_in_the_middle_of_a_release_keeps_the_rest() -> None:
    door = Door()
    first, second = door.arrive(), door.arrive()
    door.admission.open()
    assert door.admission.close(Terms()) == 1
    door.admission.sent(first)
    door.admission.finish(first, 1.0, ANSWERED)
    assert door.states() == [TicketState.FINISHED, TicketState.HELD]
    door.admission.open()
    assert second.state is TicketState.ADMITTED


def test_open_gate_refuses_nobody() -> None:
    door = Door(hold_requests_max=2)
    door.arrive(), door.arrive()
    door.admission.open()
    assert door.arrive().state is TicketState.HELD
    assert door.arrive().state is TicketState.ADMITTED  # the queue is full: it passes it


def test_hold_bound() -> None:
    door = Door(hold_requests_max=1)
    door.arrive()
    refused = door.arrive()
    assert (refused.state, refused.refusal) == (TicketState.REFUSED, Refusal.HOLD_FULL)
    assert Door(hold_requests_max=0).arrive().refusal is Refusal.HOLD_FULL


def test_hold_deadline() -> None:
    door = Door(hold_seconds_max=10.0)
    ticket = door.arrive(5.0)
    assert door.siblings.seconds_left(ticket, 6.0) == 9.0
    door.admission.expire(ticket, 14.9)
    assert ticket.state is TicketState.HELD
    door.admission.expire(ticket, 15.0)
    assert ticket.refusal is Refusal.HOLD_DEADLINE
    assert door.told == [0], "as of every other change"
    assert door.admission.held == 0
    door.admission.open()
    assert door.admission.in_flight == 0


def test_new_terms_rule_those_that_wait() -> None:
    door = Door(hold_seconds_max=10.0)
    ticket = door.arrive(0.0)
    door.admission.close(Terms(hold_seconds_max=100.0))
    door.admission.expire(ticket, 50.0)
    assert ticket.state is TicketState.HELD
    door.admission.close(Terms(gate="refuse"))
    assert ticket.refusal is Refusal.GATE_REFUSES
    assert door.told == [0]


def test_deadline_does_not_run_while_an_open_gate_releases() -> None:
    door = Door(hold_seconds_max=1.0)
    door.arrive(), door.arrive()
    door.admission.open()
    assert door.siblings.seconds_left(door.tickets[1], 99.0) == math.inf
    door.admission.expire(door.tickets[1], 99.0)
    assert door.tickets[1].state is TicketState.HELD


def test_refuse_answers_at_once() -> None:
    door = Door(gate="refuse")
    assert door.arrive().refusal is Refusal.GATE_REFUSES
    assert door.admission.view(0.0).refused_total == 1


def test_held_client_that_leaves_is_forgotten() -> None:
    door = Door()
    first, second = door.arrive(), door.arrive()
    door.admission.finish(first, 1.0, Outcome.DISCONNECTED)
    door.admission.open()
    assert second.state is TicketState.ADMITTED
    view = door.admission.view(1.0)
    assert (view.disconnected_total, view.in_flight, view.held) == (1, 1, 0)


def test_finish_counts_once() -> None:
    door = Door()
    door.admission.open()
    ticket = door.arrive()
    # The client left; the engine lets go later. It is counted for the client at once, as in flight until then.
    door.admission.settle(ticket, Outcome.DISCONNECTED)
    assert door.admission.in_flight == 1
    door.admission.finish(ticket, 2.0, Outcome.FAILED)
    door.admission.finish(ticket, 2.0, Outcome.FAILED)
    view = door.admission.view(2.0)
    assert (view.in_flight, view.disconnected_total, view.failed_total) == (0, 1, 0)


def test_idle_callbacks_are_called_once_at_zero() -> None:
    door = Door()
    door.admission.open()
    first, second = door.arrive(), door.arrive()
    calls: list[str] = []
    door.admission.when_idle(lambda: calls.append("kept"))
    door.admission.when_idle(lambda: calls.append("taken back"))()
    door.admission.finish(first, 1.0, ANSWERED)
    assert calls == []
    door.admission.finish(second, 1.0, ANSWERED)
    assert calls == ["kept"]
    third = door.arrive()
    door.admission.finish(third, 1.0, ANSWERED)
    assert calls == ["kept"]


def test_last_request_is_now_while_something_is_in_flight() -> None:
    door = Door()
    assert door.admission.view(9.0).last_request_seconds_ago is None
    door.admission.open()
    ticket = door.arrive(1.0)
    assert door.admission.view(9.0).last_request_seconds_ago == 0.0
    door.admission.finish(ticket, 9.0, ANSWERED)
    assert door.admission.view(12.0).last_request_seconds_ago == 3.0


@pytest.mark.parametrize("reason", [Refusal.STOPPING, Refusal.ROUTE_REMOVED])
def test_all_held_are_refused_when_nobody_will_open_again(reason: Refusal) -> None:
    door = Door()
    door.arrive(), door.arrive()
    door.admission.refuse_held(reason)
    assert {ticket.refusal for ticket in door.tickets} == {reason}
    assert door.told == [0, 1]


def test_the_first_that_waited_tells_when_its_first_byte_came() -> None:
    door = Door()
    first, second = door.arrive(1.0), door.arrive(2.0)
    door.admission.open()
    late = door.arrive(5.0)
    door.admission.sent(first)
    door.admission.first_byte(second, 7.5)
    door.admission.first_byte(first, 8.0)
    door.admission.first_byte(late, 8.5)
    assert door.admission.view(9.0).first_byte_seconds == 5.5
    door.admission.open()
    assert door.admission.view(9.0).first_byte_seconds == 5.5
    door.admission.close(Terms())
    assert door.admission.view(9.0).first_byte_seconds is None
    door.admission.first_byte(first, 9.5)  # of an opening that is over
    assert door.admission.view(9.5).first_byte_seconds is None


def test_one_that_did_not_wait_tells_no_first_byte() -> None:
    door = Door()
    door.admission.open()
    door.admission.first_byte(door.arrive(1.0), 2.0)
    assert door.admission.view(2.0).first_byte_seconds is None


def test_a_closed_gate_tells_that_it_is_wanted() -> None:
    door = Door()
    calls: list[str] = []
    door.admission.open()
    door.admission.when_wanted(lambda: calls.append("kept"))
    door.arrive()
    door.admission.close(Terms())
    assert not door.admission.is_wanted
    assert calls == []
    door.admission.when_wanted(lambda: calls.append("taken back"))()
    door.arrive()
    assert calls == ["kept"]
    assert door.admission.is_wanted
    door.admission.finish(door.tickets[-1], 1.0, Outcome.DISCONNECTED)
    assert not door.admission.is_wanted, "nobody waits"


@pytest.mark.parametrize("terms", [Terms(gate="refuse"), Terms(hold_requests_max=0)])
@pytest.mark.parametrize("other", [Terms(gate="refuse"), Terms(hold_requests_max=0)])
def test_one_that_is_refused_is_asked_of_all_that_serve_its_model(terms: Terms, other: Terms) -> None:
    one, two, apart = Admission(terms), Admission(other), Admission()
    siblings = Siblings((one, two))
    told: list[Admission] = []
    for gate in (one, two, apart):
        gate.when_wanted(functools.partial(told.append, gate))
    for asked in (1, 2):
        assert siblings.arrive(0.0, lambda: None).state is TicketState.REFUSED
        assert [gate.view(0.0).asked_since_closed for gate in (one, two, apart)] == [asked, asked, 0]
    assert told == [one, two]
    assert [gate.is_wanted for gate in (one, two, apart)] == [True, True, False]
    assert sum(gate.view(0.0).requests_total for gate in (one, two)) == 2, "each counts once"
    one.close(Terms(gate="refuse"))
    assert one.is_wanted, "it was closed already"
    one.open()
    siblings.arrive(0.0, lambda: None)
    one.close(Terms(gate="refuse"))
    assert not one.is_wanted
    assert two.is_wanted


def test_one_whose_time_to_wait_is_over_is_not_asked_any_more() -> None:
    door = Door(hold_seconds_max=5.0)
    door.admission.expire(door.arrive(0.0), 5.0)
    assert door.states() == [TicketState.REFUSED]
    assert not door.admission.is_wanted


def test_those_that_a_closing_gate_refuses_are_asked_of_it() -> None:
    door = Door()
    door.arrive()
    door.arrive()
    door.admission.open()
    door.admission.close(Terms(gate="refuse"))
    assert door.states() == [TicketState.ADMITTED, TicketState.REFUSED]
    assert door.admission.view(0.0).asked_since_closed == 1
