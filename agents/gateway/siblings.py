"""The gates of the engines that serve one model: which of them takes a request, and where it waits. Pure.

A request goes to the open engine with the fewest requests in flight, in turn where they are equal; a closed one is
passed over while a sibling is open. While none is open it is held, once: it goes to whichever opens first, in order of
arrival.

Their policies may differ. It is held if at least one of them holds (`gate = "hold"`) and has room, and counts at that
one: the one expected to open first, else the one that lets it wait longest. It is refused if none does. What refuses
meanwhile takes what waits all the same once it is open. Every sibling tells that it is wanted, also by what is refused:
none can know which one will be woken for it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Sequence
from typing import Final

from .admission import Admission, Refusal, Ticket, TicketState

RETRY_AFTER_SECONDS_DEFAULT: Final = 5
_NUMBERS: Final = itertools.count()  # requests in order of arrival, over all models


class Siblings:
    """Changes only by ``set_gates``; the gates' own state is theirs."""

    def __init__(self, gates: Sequence[Admission] = ()) -> None:
        self.gates = tuple(gates)
        self._turn = 0

    def arrive(self, now: float, on_change: Callable[[], None], *, patient: bool = True) -> Ticket:
        """Admits, holds or refuses a new request; ``on_change`` is called only if it is held at first.

        One that is not ``patient`` (its client cannot be kept waiting with comments) is refused at once if every
        engine is expected to open only after the time for which it might be held.
        """
        gate = self.gates[0] if len(self.gates) == 1 else self._open_gate()
        if gate is None or not gate.is_open:
            return self._arrive_at_closed(now, on_change, patient=patient)
        ticket = Ticket(self, gate, next(_NUMBERS), now, on_change)
        gate.take(ticket)
        return ticket

    def _open_gate(self) -> Admission | None:
        """The open gate with nothing queued before it and the fewest requests in flight; in turn if several are."""
        gates = self.gates
        best: Admission | None = None
        best_index, least = 0, (math.inf, math.inf)
        for step in range(len(gates)):
            index = (self._turn + step) % len(gates)
            gate = gates[index]
            if gate.is_open and (load := (float(bool(gate.held)), float(gate.in_flight))) < least:
                best, best_index, least = gate, index, load
        if best is not None:
            self._turn = best_index + 1
        return best

    def _arrive_at_closed(self, now: float, on_change: Callable[[], None], *, patient: bool) -> Ticket:
        home = self.home()
        # What is refused counts at a gate that would have held it, if there is one.
        gate = home or next((gate for gate in self.gates if gate.terms.gate == "hold"), self.gates[0])
        gate.count_arrival(now)
        ticket = Ticket(self, gate, next(_NUMBERS), now, on_change)
        if home is None:
            reason = Refusal.HOLD_FULL if gate.terms.gate == "hold" else Refusal.GATE_REFUSES
            gate.refuse_arrival(ticket, reason)
        elif not patient and self.opens_in_seconds(now) > home.terms.hold_seconds_max:
            gate.refuse_arrival(ticket, Refusal.OPENS_TOO_LATE)
        else:
            gate.hold(ticket)
        for each in self.gates:
            each.tell_wanted()
        return ticket

    def home(self, other_than: Admission | None = None) -> Admission | None:
        """At which gate a request that waits counts; None: at none."""
        best: Admission | None = None
        best_rank = (True, math.inf, 0.0)
        for gate in self.gates:
            if gate is other_than or not (gate.is_open or (gate.terms.gate == "hold" and gate.has_room)):
                continue
            expected_at = math.inf if gate.expected_open_at is None else gate.expected_open_at
            rank = (not gate.is_open, expected_at, -gate.terms.hold_seconds_max)
            if best is None or rank < best_rank:
                best, best_rank = gate, rank
        return best

    def open_gate_but(self, tried: Collection[Admission]) -> Admission | None:
        """The least busy engine that is open and was not tried."""
        others = [gate for gate in self.gates if gate.is_open and gate not in tried]
        return min(others, key=lambda other: other.in_flight, default=None)

    def opens_in_seconds(self, now: float) -> float:
        """When the first of them is expected to open; 0 while one is open, or if any of them may open at any time."""
        earliest = math.inf
        for gate in self.gates:
            if gate.is_open or gate.expected_open_at is None:
                return 0.0
            earliest = min(earliest, gate.expected_open_at)
        return max(0.0, earliest - now) if self.gates else 0.0

    def retry_after_seconds(self, gate: Admission, now: float) -> int:
        """What a client is told that ``gate`` refuses: what the agent said, or when one is expected to open."""
        if gate.terms.retry_after_seconds is not None:
            return gate.terms.retry_after_seconds
        return math.ceil(self.opens_in_seconds(now)) or RETRY_AFTER_SECONDS_DEFAULT

    def seconds_left(self, ticket: Ticket, now: float) -> float:
        """How long the ticket may still be held; without end while an open gate releases its queue."""
        if any(gate.is_open for gate in self.gates):
            return math.inf
        return ticket.arrived_at + ticket.gate.terms.hold_seconds_max - now

    def set_gates(self, gates: Sequence[Admission]) -> None:
        """The engines that serve the model now. What waits keeps its place; what nobody serves any more is refused."""
        before, self.gates = self.gates, tuple(gates)
        waiting = {ticket for gate in before for ticket in gate.waiting_of(self)}
        for gate in before:
            if gate not in self.gates:
                gate.leave_group(self)
        still = [ticket for ticket in waiting if ticket.state is TicketState.HELD]
        for gate in self.gates:
            if gate not in before:
                gate.join_group(still)
