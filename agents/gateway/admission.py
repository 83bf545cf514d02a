"""Who may go to one engine, and who waits: the state of one gate. Pure: no I/O, no clock, no tasks.

The law: a ticket is admitted only while the gate is open, and it counts as in flight from that very call. So the
number that ``close`` returns covers every request that can still reach the engine, and once it is zero no request can
until ``open``. All calls come from one thread.

Requests that waited are released one after the other: the next one is admitted when the one before it has been sent
(``sent``), so they reach the engine in the order in which they came. What arrives meanwhile queues behind them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Literal

GateMode = Literal["hold", "refuse"]

RETRY_AFTER_SECONDS_DEFAULT: Final = 5


class TicketState(StrEnum):
    HELD = "held"
    ADMITTED = "admitted"  # in flight
    REFUSED = "refused"
    FINISHED = "finished"


class Refusal(StrEnum):
    GATE_REFUSES = "gate_refuses"
    HOLD_FULL = "hold_full"
    HOLD_DEADLINE = "hold_deadline"
    ROUTE_REMOVED = "route_removed"
    STOPPING = "gateway_stopping"


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
    """One look at a gate. ``requests_total`` is the sum of the other totals, ``held`` and what is not ended yet."""

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
    last_request_seconds_ago: float | None
    # Since the gate was last closed: from the coming of the first request that had waited to its first byte.
    first_byte_seconds: float | None = None


class Ticket:
    """One request's place at the gate. ``on_change`` is called once, when it stops being held."""

    __slots__ = ("arrived_at", "has_waited", "on_change", "outcome", "refusal", "state")

    def __init__(self, arrived_at: float, on_change: Callable[[], None]) -> None:
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
        self._held: dict[Ticket, None] = {}  # in order of arrival
        self._being_sent: Ticket | None = None  # the released ticket for which the next one waits
        self._when_idle: dict[Callable[[], None], None] = {}
        self._when_wanted: dict[Callable[[], None], None] = {}
        self._first_byte_seconds: float | None = None
        self._counts: dict[Outcome | Refusal, int] = {}
        self._requests_total = 0
        self._last_request_at: float | None = None

    @property
    def held(self) -> int:
        return len(self._held)

    def arrive(self, now: float, on_change: Callable[[], None]) -> Ticket:
        """Admits, holds or refuses a new request; ``on_change`` is called only if it is held at first."""
        self._requests_total += 1
        self._last_request_at = now
        ticket = Ticket(now, on_change)
        full = len(self._held) >= self.terms.hold_requests_max
        if self.is_open:
            # An open gate refuses nobody: when the queue that is being released is full, the newest one passes it.
            if self._held and not full:
                self._held[ticket] = None
            else:
                self._admit(ticket)
        elif self.terms.gate == "refuse":
            self._refuse(ticket, Refusal.GATE_REFUSES)
        elif full:
            self._refuse(ticket, Refusal.HOLD_FULL)
        else:
            self._held[ticket] = None
        if not self.is_open:
            waiting, self._when_wanted = self._when_wanted, {}
            for callback in waiting:
                callback()
        return ticket

    def close(self, terms: Terms) -> int:
        """Closes the gate (or changes the terms of a closed one) and returns how many requests are in flight."""
        if self.is_open:
            self._first_byte_seconds = None
        self.is_open = False
        self.terms = terms
        if terms.gate == "refuse":
            self.refuse_held(Refusal.GATE_REFUSES)
        return self.in_flight

    def open(self) -> None:
        self.is_open = True
        self._release_next()

    def sent(self, ticket: Ticket) -> None:
        """The ticket's request is on its way (or never will be): the next one that waited may go."""
        if self._being_sent is ticket:
            self._being_sent = None
            self._release_next()

    def seconds_left(self, ticket: Ticket, now: float) -> float:
        """How long the ticket may still be held; without end while an open gate releases its queue."""
        return math.inf if self.is_open else ticket.arrived_at + self.terms.hold_seconds_max - now

    def expire(self, ticket: Ticket, now: float) -> None:
        """Refuses the ticket if it is held and its time is over."""
        if ticket.state is TicketState.HELD and self.seconds_left(ticket, now) <= 0:
            del self._held[ticket]
            self._refuse(ticket, Refusal.HOLD_DEADLINE)

    def refuse_held(self, reason: Refusal) -> None:
        held, self._held = self._held, {}
        for ticket in held:
            self._refuse(ticket, reason)
            ticket.on_change()

    def finish(self, ticket: Ticket, now: float, outcome: Outcome) -> None:
        """Ends the ticket: nothing of it can reach the engine any more. Further calls change nothing."""
        before, ticket.state = ticket.state, TicketState.FINISHED
        if before is TicketState.HELD:
            del self._held[ticket]
            self.settle(ticket, outcome)
        elif before is TicketState.ADMITTED:
            self.settle(ticket, outcome)
            self.in_flight -= 1
            self._last_request_at = now
            self.sent(ticket)
            if self.in_flight == 0:
                waiting, self._when_idle = self._when_idle, {}
                for callback in waiting:
                    callback()

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

    def is_wanted(self, after: int | None) -> bool:
        """A request waits here, or more than ``after`` have come in all: those of a gate that refuses do not wait."""
        return bool(self._held) or (after is not None and self._requests_total > after)

    def when_wanted(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Calls ``callback`` once, when the next request comes to the closed gate; the result takes it back."""
        self._when_wanted[callback] = None
        return lambda: self._when_wanted.pop(callback, None)

    def view(self, now: float) -> AdmissionView:
        oldest = next(iter(self._held), None)
        quiet_seconds = None if self._last_request_at is None else max(0.0, now - self._last_request_at)
        return AdmissionView(
            state="open" if self.is_open else "closed",
            gate=self.terms.gate,
            in_flight=self.in_flight,
            held=len(self._held),
            oldest_held_seconds=None if oldest is None else max(0.0, now - oldest.arrived_at),
            requests_total=self._requests_total,
            answered_total=self._counts.get(Outcome.ANSWERED, 0),
            refused_total=sum(self._counts.get(reason, 0) for reason in Refusal),
            failed_total=self._counts.get(Outcome.FAILED, 0),
            disconnected_total=self._counts.get(Outcome.DISCONNECTED, 0),
            last_request_seconds_ago=0.0 if self.in_flight else quiet_seconds,
            first_byte_seconds=self._first_byte_seconds,
        )

    def _release_next(self) -> None:
        if self.is_open and self._being_sent is None and self._held:
            ticket = next(iter(self._held))
            del self._held[ticket]
            self._being_sent = ticket
            ticket.has_waited = True
            self._admit(ticket)
            ticket.on_change()

    def _admit(self, ticket: Ticket) -> None:
        ticket.state = TicketState.ADMITTED
        self.in_flight += 1

    def _refuse(self, ticket: Ticket, reason: Refusal) -> None:
        ticket.state = TicketState.REFUSED
        ticket.refusal = reason
        self._count(reason)

    def _count(self, kind: Outcome | Refusal) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1
