"""Any order of events keeps the law: nothing is admitted by a closed gate, nothing is lost or counted twice."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from lull.agents.gateway.admission import Admission, Outcome, Refusal, Terms, Ticket, TicketState

MODES = st.sampled_from(["hold", "refuse"])


class Gate(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.admission = Admission(Terms(hold_requests_max=3))
        self.now = 0.0
        self.tickets: list[Ticket] = []
        self.admitted_order: list[Ticket] = []

    def _look(self) -> None:
        for ticket in self.tickets:
            if ticket.state is TicketState.ADMITTED and ticket not in self.admitted_order:
                assert self.admission.is_open, "admitted by a closed gate"
                self.admitted_order.append(ticket)

    @rule()
    def arrive(self) -> None:
        was_open = self.admission.is_open
        self.tickets.append(self.admission.arrive(self.now, self._look))
        if was_open:
            assert self.tickets[-1].state is not TicketState.REFUSED
        self._look()

    @rule(mode=MODES, seconds=st.floats(0.1, 20))
    def close(self, mode: str, seconds: float) -> None:
        count = self.admission.close(Terms(gate=mode, hold_requests_max=3, hold_seconds_max=seconds))  # type: ignore[arg-type]
        assert count == sum(ticket.state is TicketState.ADMITTED for ticket in self.tickets)

    @rule()
    def open(self) -> None:
        self.admission.open()
        self._look()

    @precondition(lambda self: self.tickets)
    @rule(data=st.data(), outcome=st.sampled_from(Outcome))
    def finish(self, data: st.DataObject, outcome: Outcome) -> None:
        self.admission.when_idle(self._idle)
        self.admission.finish(data.draw(st.sampled_from(self.tickets)), self.now, outcome)
        self._look()

    def _idle(self) -> None:
        assert self.admission.in_flight == 0

    @precondition(lambda self: self.tickets)
    @rule(data=st.data())
    def sent(self, data: st.DataObject) -> None:
        self.admission.sent(data.draw(st.sampled_from(self.tickets)))
        self._look()

    @rule(seconds=st.floats(0, 15))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        for ticket in self.tickets:
            self.admission.expire(ticket, self.now)

    @rule()
    def remove(self) -> None:
        self.admission.refuse_held(Refusal.ROUTE_REMOVED)

    @invariant()
    def counts_agree(self) -> None:
        view = self.admission.view(self.now)
        states = [ticket.state for ticket in self.tickets]
        assert view.in_flight == states.count(TicketState.ADMITTED)
        assert view.held == states.count(TicketState.HELD) <= 3
        ended = view.answered_total + view.refused_total + view.failed_total + view.disconnected_total
        assert view.requests_total == len(states) == ended + view.in_flight + view.held

    @invariant()
    def those_that_waited_go_in_order(self) -> None:
        held = [ticket for ticket in self.tickets if ticket.state is TicketState.HELD]
        assert list(self.admission._held) == held

    @invariant()
    def an_open_gate_makes_progress(self) -> None:
        if self.admission.is_open and self.admission.held:
            assert self.admission._being_sent is not None


Gate.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)
TestGate = Gate.TestCase
