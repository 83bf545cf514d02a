"""Any order of events keeps the law: nothing is admitted by a closed gate, nothing is lost or counted twice."""

from __future__ import annotations

import math

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lull.agents.gateway.admission import Admission, Outcome, Refusal, Terms, Ticket, TicketState
from lull.agents.gateway.siblings import Siblings

MODES = st.sampled_from(["hold", "refuse"])
GATES = st.sampled_from([0, 1])
MODELS = st.sampled_from([0, 1, 2])
HOLD_MAX = 3


class Gates(RuleBasedStateMachine):
    """Two engines; one model is served by both, one by each alone, until that changes."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = [Admission(Terms(hold_requests_max=HOLD_MAX)) for _ in range(2)]
        one, other = self.gates
        self.models = [Siblings((one, other)), Siblings((one,)), Siblings((other,))]
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.admitted: set[Ticket] = set()
        self.told: list[int] = []  # of each ticket, how often its change was told
        self.held_first: set[Ticket] = set()

    def _look(self) -> None:
        for ticket in self.tickets:
            if ticket.state is TicketState.ADMITTED and ticket not in self.admitted:
                assert ticket.gate.is_open, "admitted by a closed gate"
                self.admitted.add(ticket)

    @rule(model=MODELS, patient=st.booleans())
    def arrive(self, model: int, patient: bool) -> None:
        siblings = self.models[model]
        was_open = any(gate.is_open for gate in siblings.gates)
        in_flight = {gate: gate.in_flight for gate in siblings.gates if gate.is_open and not gate.held}
        number = len(self.told)
        self.told.append(0)

        def tell() -> None:
            self.told[number] += 1
            self._look()

        wanted = {gate: gate.view(self.now).asked_since_closed for gate in self.gates}
        ticket = siblings.arrive(self.now, tell, patient=patient)
        self.tickets.append(ticket)
        for gate, asked in wanted.items():
            refused = ticket.state is TicketState.REFUSED and gate in siblings.gates
            assert gate.view(self.now).asked_since_closed == asked + refused
        if not was_open:
            assert all(gate.is_wanted for gate in siblings.gates), "any of them may be woken for it"
        if ticket.state is TicketState.HELD:
            self.held_first.add(ticket)
        if was_open:
            assert ticket.state is not TicketState.REFUSED
        if in_flight:
            assert in_flight[ticket.gate] == min(in_flight.values()), "there was one less busy"
        if ticket.refusal is Refusal.OPENS_TOO_LATE:
            assert not patient
            assert all(
                gate.expected_open_at is not None
                and gate.expected_open_at - self.now > ticket.gate.terms.hold_seconds_max
                for gate in siblings.gates
            )
        self._look()

    @rule(number=GATES, mode=MODES, seconds=st.floats(0.1, 20), expected=st.none() | st.floats(0, 40))
    def close(self, number: int, mode: str, seconds: float, expected: float | None) -> None:
        gate = self.gates[number]
        terms = Terms(gate=mode, hold_requests_max=HOLD_MAX, hold_seconds_max=seconds)  # type: ignore[arg-type]
        count = gate.close(terms, None if expected is None else self.now + expected)
        assert count == sum(ticket.state is TicketState.ADMITTED and ticket.gate is gate for ticket in self.tickets)

    @rule(number=GATES)
    def open(self, number: int) -> None:
        self.gates[number].open()
        self._look()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        gate = ticket.gate
        gate.when_idle(lambda: self._idle(gate))
        gate.finish(ticket, self.now, outcome)
        self._look()

    def _idle(self, gate: Admission) -> None:
        assert gate.in_flight == 0

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(self.tickets))
        ticket.gate.sent(ticket)
        self._look()

    @precondition(lambda self: self.admitted)
    @rule(data=st.data())
    def not_sent(self, data: st.DataObject) -> None:
        ticket = data.draw(st.sampled_from(sorted(self.admitted, key=lambda ticket: ticket.number)))
        other = ticket.siblings.open_gate_but({ticket.gate})
        if ticket.state is TicketState.ADMITTED and other is not None:
            ticket.gate.pass_on(ticket, other, self.now)
            assert ticket.gate is other

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for ticket in self.tickets:
            ticket.gate.expire(ticket, self.now)
            assert ticket.state is not TicketState.HELD or ticket.siblings.seconds_left(ticket, self.now) > 0

    @rule(number=GATES)
    def nobody_will_open(self, number: int) -> None:
        self.gates[number].refuse_held(Refusal.ROUTE_REMOVED)

    @rule(serving=st.lists(st.booleans(), min_size=2, max_size=2))
    def engines_change(self, serving: list[bool]) -> None:
        """The model of both is served by another choice of engines; by none of them it is known no more."""
        gates = [gate for gate, serves in zip(self.gates, serving, strict=True) if serves]
        self.models[0].set_gates(gates)
        self._look()
        if not gates:
            self.models[0] = Siblings(self.gates)

    @invariant()
    def who_was_held_is_told_once_of_whatever_became_of_it(self) -> None:
        """Whoever is told sends the request or answers it: twice is as bad as never."""
        for ticket, told in zip(self.tickets, self.told, strict=True):
            assert told <= (ticket in self.held_first)
            if ticket in self.held_first and ticket.state in (TicketState.ADMITTED, TicketState.REFUSED):
                assert told == 1

    @invariant()
    def counts_agree(self) -> None:
        views = [gate.view(self.now) for gate in self.gates]
        states = [ticket.state for ticket in self.tickets]
        assert sum(view.in_flight for view in views) == states.count(TicketState.ADMITTED)
        for gate, view in zip(self.gates, views, strict=True):
            here = [ticket.state for ticket in self.tickets if ticket.gate is gate]
            assert view.in_flight == here.count(TicketState.ADMITTED)
            assert gate.held_here == here.count(TicketState.HELD)
            ended = view.answered_total + view.refused_total + view.failed_total + view.disconnected_total
            assert view.requests_total == ended + view.moved_total + view.in_flight + gate.held_here
        assert sum(view.requests_total - view.moved_total for view in views) == len(states)

    @invariant()
    def those_that_wait_are_in_the_queue_of_every_engine_that_serves_them_in_order(self) -> None:
        for gate in self.gates:
            waiting = [
                ticket for ticket in self.tickets if ticket.state is TicketState.HELD and gate in ticket.siblings.gates
            ]
            assert list(gate._queue) == waiting
            assert gate.view(self.now).held == len(waiting)

    @invariant()
    def an_open_gate_makes_progress(self) -> None:
        for gate in self.gates:
            if gate.is_open and gate.held:
                assert gate._being_sent is not None

    @invariant()
    def a_prediction_is_of_all(self) -> None:
        for siblings in self.models:
            seconds = siblings.opens_in_seconds(self.now)
            assert 0 <= seconds < math.inf
            if any(gate.is_open or gate.expected_open_at is None for gate in siblings.gates):
                assert seconds == 0


Gates.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGates = Gates.TestCase
