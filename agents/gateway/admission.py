"""Who may go to which engine, and who waits: the state of the gates. Pure: no I/O, no clock, no tasks.

The law: a ticket is admitted only by a gate that is open, and it counts as in flight there from that very call. So the
number that ``close`` returns covers every request that can still reach the engine, and once it is zero no request can
until ``open``. All calls come from one thread.

Engines that serve the same model are siblings (`siblings.py`). A request that waits is in the queue of each of them,
and whichever opens first takes it; it counts at one of them, whose policy bounds how many wait and for how long.

Requests that waited are released one after the other: the next one is admitted when the one before it has been sent
(``sent``), so they reach the engine in the order in which they came. What arrives meanwhile queues behind them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, Literal

if TYPE_CHECKING:
    from .siblings import Siblings

GateMode = Literal["hold", "refuse"]


class TicketState(StrEnum):
    HELD = "held"
    ADMITTED = "admitted"  # in flight
    REFUSED = "refused"
    FINISHED = "finished"


class Refusal(StrEnum):
    GATE_REFUSES = "gate_refuses"
    HOLD_FULL = "hold_full"
    HOLD_DEADLINE = "hold_deadline"
    OPENS_TOO_LATE = "opens_too_late"
    ROUTE_REMOVED = "route_removed"
    STOPPING = "gateway_stopping"


# None of the engines took the request or let it wait: it wants them all the same.
_UNSERVED: Final = frozenset({Refusal.GATE_REFUSES, Refusal.HOLD_FULL, Refusal.OPENS_TOO_LATE})


class Outcome(StrEnum):
    ANSWERED = "answered"  # the engine's whole answer was passed on
    FAILED = "failed"  # no answer, a broken one, or aborted
    DISCONNECTED = "disconnected"  # the client went away


@dataclass(frozen=True, slots=True)
class Terms:
    """What happens to requests while the gate is closed."""

    gate: GateMode = "hold"
    hold_requests_max: int = 1000
    hold_seconds_max: float = 600.0
    retry_after_seconds: int | None = None


@dataclass(frozen=True, slots=True)
class AdmissionView:
    """One look at a gate. ``held`` is all that would go to this engine if it opened, a sibling's share included.

    ``requests_total`` is the sum of the other totals, of what is in flight and of what is held and counts here.
    """

    state: Literal["open", "closed"]
    gate: GateMode
    in_flight: int
    held: int
    oldest_held_seconds: float | None
    requests_total: int
    answered_total: int
    refused_total: int
    failed_total: int
    disconnected_total: int
    moved_total: int  # held or unsent here at first, then another engine's
    last_request_seconds_ago: float | None
    # Since the gate was last closed: from the coming of the first request that had waited to its first byte.
    first_byte_seconds: float | None = None
    expected_open_seconds: float | None = None
    # Since the gate was last closed: those that this engine or a sibling refused because all of them were closed.
    asked_since_closed: int = 0


class Ticket:
    """One request's place. ``gate``: where it counts. ``on_change`` is called once, when it stops being held."""

    __slots__ = ("arrived_at", "gate", "has_waited", "number", "on_change", "outcome", "refusal", "siblings", "state")

    def __init__(
        self, siblings: Siblings, gate: Admission, number: int, arrived_at: float, on_change: Callable[[], None]
    ) -> None:
        self.siblings = siblings
        self.gate = gate
        self.number = number
        self.arrived_at = arrived_at
        self.on_change = on_change
        self.state = TicketState.HELD
        self.has_waited = False
        self.refusal: Refusal | None = None
        self.outcome: Outcome | None = None


class Admission:
    """The gate of one engine. It starts closed: only an agent that knows the engine opens it."""

    def __init__(self, terms: Terms | None = None) -> None:
        self.terms = terms or Terms()
        self.is_open = False
        self.in_flight = 0
        self.expected_open_at: float | None = None  # while closed, if the agent foresees it
        self._held: dict[Ticket, None] = {}  # those that count here
        self._queue: dict[Ticket, None] = {}  # all that would go to this engine, in order of arrival
        self._being_sent: Ticket | None = None  # the released ticket for which the next one waits
        self._when_idle: dict[Callable[[], None], None] = {}
        self._when_wanted: dict[Callable[[], None], None] = {}
        self._first_byte_seconds: float | None = None
        self._asked_since_closed = 0
        self._counts: dict[Outcome | Refusal, int] = {}
        self._requests_total = 0
        self._moved_total = 0
        self._last_request_at: float | None = None

    @property
    def held(self) -> int:
        """What would go to this engine if it opened."""
        return len(self._queue)

    @property
    def held_here(self) -> int:
        """What counts here of it."""
        return len(self._held)

    @property
    def has_room(self) -> bool:
        return len(self._held) < self.terms.hold_requests_max

    def close(self, terms: Terms, expected_open_at: float | None = None) -> int:
        """Closes the gate (or changes the terms of a closed one) and returns how many requests are in flight."""
        if self.is_open:
            self._first_byte_seconds = None
            self._asked_since_closed = 0
        self.is_open = False
        self.terms = terms
        self.expected_open_at = expected_open_at
        if terms.gate == "refuse":
            self.give_up_held(Refusal.GATE_REFUSES)
        return self.in_flight

    def open(self) -> None:
        self.is_open = True
        self.expected_open_at = None
        self._release_next()

    def sent(self, ticket: Ticket) -> None:
        """The ticket's request is on its way (or never will be): the next one that waited may go."""
        if self._being_sent is ticket:
            self._being_sent = None
            self._release_next()

    def expire(self, ticket: Ticket, now: float) -> None:
        """Refuses the ticket if it is held here and its time is over."""
        if ticket.state is TicketState.HELD and ticket.siblings.seconds_left(ticket, now) <= 0:
            self._refuse(ticket, Refusal.HOLD_DEADLINE)
            ticket.on_change()

    def give_up_held(self, reason: Refusal) -> None:
        """What is held here waits at a sibling instead, or is refused."""
        for ticket in list(self._held):
            self._rehome(ticket, reason)

    def refuse_held(self, reason: Refusal) -> None:
        """Nobody will open again. Of several gates all are closed first: what waits at one may move to another."""
        for ticket in list(self._held):
            self._refuse(ticket, reason)
            ticket.on_change()

    def finish(self, ticket: Ticket, now: float, outcome: Outcome) -> None:
        """Ends the ticket: nothing of it can reach the engine any more. Further calls change nothing."""
        before, ticket.state = ticket.state, TicketState.FINISHED
        if before is TicketState.ADMITTED:
            self._last_request_at = now
            if ticket.outcome is None:
                ticket.outcome = outcome
                self._count(outcome)
            self._let_go(ticket)
        elif before is TicketState.HELD:
            self._leave_queues(ticket)
            self.settle(ticket, outcome)

    def pass_on(self, ticket: Ticket, other: Admission, now: float) -> None:
        """Nothing of an admitted ticket reached this engine: an open sibling takes it.

        It goes ahead of those that wait, whom it preceded.
        """
        self._last_request_at = now
        self._move(ticket, other)
        other.admit(ticket)
        self._let_go(ticket)

    def settle(self, ticket: Ticket, outcome: Outcome) -> None:
        """Counts how the request ended for its client, which may be before the engine has let go of it."""
        if ticket.outcome is None and ticket.refusal is None:
            ticket.outcome = outcome
            self._count(outcome)

    def when_idle(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls ``callback`` once, the next time that nothing is in flight; the result takes it back."""
        self._when_idle[callback] = None
        return lambda: self._when_idle.pop(callback, None)

    def first_byte(self, ticket: Ticket, now: float) -> None:
        """The first byte of the engine's answer is with the client; the first that had waited is remembered."""
        if ticket.has_waited and self._first_byte_seconds is None and self.is_open:
            self._first_byte_seconds = now - ticket.arrived_at

    @property
    def is_wanted(self) -> bool:
        """A request waits for this engine, or did not even find a place to wait since its gate was closed."""
        return bool(self._queue or self._asked_since_closed)

    def when_wanted(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls ``callback`` once, when the next request comes while no sibling is open; the result takes it back."""
        self._when_wanted[callback] = None
        return lambda: self._when_wanted.pop(callback, None)

    def view(self, now: float) -> AdmissionView:
        oldest = next(iter(self._queue), None)
        quiet_seconds = None if self._last_request_at is None else max(0.0, now - self._last_request_at)
        return AdmissionView(
            state="open" if self.is_open else "closed",
            gate=self.terms.gate,
            in_flight=self.in_flight,
            held=len(self._queue),
            oldest_held_seconds=None if oldest is None else max(0.0, now - oldest.arrived_at),
            requests_total=self._requests_total,
            answered_total=self._counts.get(Outcome.ANSWERED, 0),
            refused_total=sum(self._counts.get(reason, 0) for reason in Refusal),
            failed_total=self._counts.get(Outcome.FAILED, 0),
            disconnected_total=self._counts.get(Outcome.DISCONNECTED, 0),
            moved_total=self._moved_total,
            last_request_seconds_ago=0.0 if self.in_flight else quiet_seconds,
            first_byte_seconds=self._first_byte_seconds,
            expected_open_seconds=None if self.expected_open_at is None else max(0.0, self.expected_open_at - now),
            asked_since_closed=self._asked_since_closed,
        )

    # ---- for Siblings -----------------------------------------------------------------------------------------

    def take(self, ticket: Ticket) -> None:
        """Admits a new ticket of an open gate, or lets it wait behind those that are being released."""
        self._requests_total += 1
        self._last_request_at = ticket.arrived_at
        # An open gate refuses nobody: when the queue that is being released is full, the newest one passes it.
        if self._queue and self.has_room:
            self.hold(ticket)
        else:
            ticket.state = TicketState.ADMITTED
            self.in_flight += 1

    def count_arrival(self, now: float) -> None:
        self._requests_total += 1
        self._last_request_at = now

    def tell_wanted(self) -> None:
        """A request came while no sibling was open."""
        waiting, self._when_wanted = self._when_wanted, {}
        for callback in waiting:
            callback()

    def admit(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.in_flight += 1

    def refuse_arrival(self, ticket: Ticket, reason: Refusal) -> None:
        self._refuse(ticket, reason)

    def hold(self, ticket: Ticket) -> None:
        """Counts the ticket here; every sibling has it in its queue."""
        self._held[ticket] = None
        for gate in ticket.siblings.gates:
            gate._queue[ticket] = None

    def leave_group(self, siblings: Siblings) -> None:
        """This engine serves the siblings' model no more: what waits for it does so elsewhere."""
        for ticket in [ticket for ticket in self._queue if ticket.siblings is siblings]:
            del self._queue[ticket]
            if ticket.gate is self:
                self._rehome(ticket, Refusal.ROUTE_REMOVED)

    def join_group(self, waiting: Sequence[Ticket]) -> None:
        """This engine serves one more model: it takes those that wait for it too, in the order of all."""
        both = sorted({*self._queue, *waiting}, key=lambda ticket: ticket.number)
        self._queue = dict.fromkeys(both)
        self._release_next()

    def waiting_of(self, siblings: Siblings) -> list[Ticket]:
        return [ticket for ticket in self._queue if ticket.siblings is siblings]

    # ---- inside -----------------------------------------------------------------------------------------------

    def _release_next(self) -> None:
        if self.is_open and self._being_sent is None and self._queue:
            ticket = next(iter(self._queue))
            home = ticket.gate
            home._leave_queues(ticket)
            if home is not self:
                home._move(ticket, self)
            self._being_sent = ticket
            ticket.has_waited = True
            self.admit(ticket)
            ticket.on_change()

    def _leave_queues(self, ticket: Ticket) -> None:
        self._held.pop(ticket, None)
        for gate in ticket.siblings.gates:
            gate._queue.pop(ticket, None)

    def _rehome(self, ticket: Ticket, reason: Refusal) -> None:
        """What is held here counts at a sibling from now on; where none has a place for it, it is refused."""
        home = ticket.siblings.home(other_than=self)
        if home is None:
            self._refuse(ticket, reason)
            ticket.on_change()
        else:
            self._move(ticket, home)
            home._held[ticket] = None

    def _move(self, ticket: Ticket, other: Admission) -> None:
        self._held.pop(ticket, None)
        self._moved_total += 1
        other._requests_total += 1
        ticket.gate = other

    def _let_go(self, ticket: Ticket) -> None:
        self.in_flight -= 1
        if self._being_sent is ticket:
            self.sent(ticket)
        if self.in_flight == 0 and self._when_idle:
            waiting, self._when_idle = self._when_idle, {}
            for callback in waiting:
                callback()

    def _refuse(self, ticket: Ticket, reason: Refusal) -> None:
        self._leave_queues(ticket)
        ticket.state = TicketState.REFUSED
        ticket.refusal = reason
        self._count(reason)
        if reason in _UNSERVED:
            for gate in ticket.siblings.gates:
                gate._asked_since_closed += 1

    def _count(self, kind: Outcome | Refusal) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
