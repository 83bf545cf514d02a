"""How ranks agree on a park or a wake: everything that decides it is in this file, and it does no I/O.

The leader asks every rank, its own among them, to prepare; what all have prepared is committed by all, and anything
else is undone by all. Both machines are values: a step returns the next one and what is to be done. A message counts
once and for the operation that it names; late ones and repeats change nothing.

What a rank does when it loses its leader, or is told to fail, by its phase:
  idle        nothing is pending: failed, memory as it is
  preparing   failed at once; its runtime undoes what it was preparing
  prepared    undoes it, then failed
  committing  failed at once; a commit that has begun runs to its end, one that has not is undone
  aborting    failed at once; the undoing runs to its end
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Verb(StrEnum):
    RELEASE = "release"
    RESUME = "resume"


class Kind(StrEnum):
    # leader to rank
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    FAIL = "fail"
    # rank to leader
    READY = "ready"
    UNCHANGED = "unchanged"  # there was nothing to do, so nothing is prepared
    REFUSED = "refused"  # could not prepare; everything is as before
    COMMITTED = "committed"
    COMMIT_FAILED = "commit_failed"
    ABORTED = "aborted"
    ABORT_FAILED = "abort_failed"


@dataclass(frozen=True, slots=True)
class Message:
    kind: Kind
    operation: int = 0
    verb: Verb | None = None
    tags: tuple[str, ...] | None = None
    error: str = ""  # the class of what was raised
    reason: str = ""


# -- a rank


class Phase(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"
    WITHDRAWING = "withdrawing"  # preparing still, and to be undone as soon as that has ended
    PREPARED = "prepared"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FAILED = "failed"


class Event(StrEnum):
    """What a rank is told, and how that what it does has ended."""

    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    FAIL = "fail"
    LEADER_LOST = "leader_lost"
    DID_PREPARE = "did_prepare"
    DID_NOTHING = "did_nothing"
    DID_NOT_PREPARE = "did_not_prepare"
    DID_COMMIT = "did_commit"
    DID_NOT_COMMIT = "did_not_commit"
    DID_ABORT = "did_abort"
    DID_NOT_ABORT = "did_not_abort"


class Act(StrEnum):
    PREPARE = "prepare"
    COMMIT = "commit"
    ABORT = "abort"
    FAIL = "fail"
    ABORT_AND_FAIL = "abort_and_fail"


@dataclass(frozen=True, slots=True)
class Step:
    """Do ``act`` if there is one, then say ``answer`` if there is one."""

    phase: Phase
    act: Act | None = None
    answer: Kind | None = None


RANK_TABLE: Final[Mapping[tuple[Phase, Event], Step]] = MappingProxyType(
    {
        (Phase.IDLE, Event.PREPARE): Step(Phase.PREPARING, Act.PREPARE),
        (Phase.IDLE, Event.ABORT): Step(Phase.IDLE, answer=Kind.ABORTED),
        (Phase.PREPARING, Event.DID_PREPARE): Step(Phase.PREPARED, answer=Kind.READY),
        (Phase.PREPARING, Event.DID_NOTHING): Step(Phase.IDLE, answer=Kind.UNCHANGED),
        (Phase.PREPARING, Event.DID_NOT_PREPARE): Step(Phase.IDLE, answer=Kind.REFUSED),
        (Phase.PREPARING, Event.ABORT): Step(Phase.WITHDRAWING),
        (Phase.WITHDRAWING, Event.DID_PREPARE): Step(Phase.ABORTING, Act.ABORT),
        (Phase.WITHDRAWING, Event.DID_NOTHING): Step(Phase.IDLE, answer=Kind.ABORTED),
        (Phase.WITHDRAWING, Event.DID_NOT_PREPARE): Step(Phase.IDLE, answer=Kind.ABORTED),
        (Phase.PREPARED, Event.COMMIT): Step(Phase.COMMITTING, Act.COMMIT),
        (Phase.PREPARED, Event.ABORT): Step(Phase.ABORTING, Act.ABORT),
        (Phase.COMMITTING, Event.DID_COMMIT): Step(Phase.IDLE, answer=Kind.COMMITTED),
        (Phase.COMMITTING, Event.DID_NOT_COMMIT): Step(Phase.IDLE, answer=Kind.COMMIT_FAILED),
        (Phase.ABORTING, Event.DID_ABORT): Step(Phase.IDLE, answer=Kind.ABORTED),
        (Phase.ABORTING, Event.DID_NOT_ABORT): Step(Phase.IDLE, answer=Kind.ABORT_FAILED),
        **{
            (phase, event): Step(Phase.FAILED, Act.ABORT_AND_FAIL if phase is Phase.PREPARED else Act.FAIL)
            for phase in Phase
            if phase is not Phase.FAILED
            for event in (Event.FAIL, Event.LEADER_LOST)
        },
    }
)
_ENDINGS: Final = frozenset(event for event in Event if event.startswith("did_"))


class IllegalRankStep(RuntimeError):
    """The machine has no such edge: what it does has ended in a way that does not fit its phase."""


@dataclass(frozen=True, slots=True)
class Rank:
    """One rank's side. ``operation`` is the newest that it has heard of."""

    phase: Phase = Phase.IDLE
    operation: int = 0

    def hear(self, message: Message) -> tuple[Rank, Step]:
        """A step without act and answer for what is late, repeated or out of order."""
        current = message.operation == self.operation
        newer = message.operation > self.operation
        if message.kind is Kind.FAIL:
            return self._go(Event.FAIL)
        if (message.kind is Kind.PREPARE and newer) or (message.kind is Kind.ABORT and newer):
            # An abort may be all that is ever heard of an operation; its prepare is late then.
            return replace(self, operation=message.operation)._go(Event(message.kind))
        if message.kind in (Kind.COMMIT, Kind.ABORT) and current:
            return self._go(Event(message.kind))
        return self, Step(self.phase)

    def lose_leader(self) -> tuple[Rank, Step]:
        return self._go(Event.LEADER_LOST)

    def end(self, event: Event) -> tuple[Rank, Step]:
        """What it was doing has ended so. After a failure nobody is told any more."""
        if self.phase is not Phase.FAILED and (self.phase, event) not in RANK_TABLE:
            raise IllegalRankStep(f"a rank that is {self.phase} cannot end with {event}")
        return self._go(event)

    def _go(self, event: Event) -> tuple[Rank, Step]:
        step = RANK_TABLE.get((self.phase, event), Step(self.phase))
        return replace(self, phase=step.phase), step


# -- the leader


class LeaderPhase(StrEnum):
    IDLE = "idle"
    PREPARING = "preparing"
    COMMITTING = "committing"
    ABORTING = "aborting"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Trouble:
    """Why an operation was undone. ``rank`` is None if several ranks are the reason."""

    rank: int | None
    error: str
    reason: str


@dataclass(frozen=True, slots=True)
class Send:
    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class Done:
    changed: bool


@dataclass(frozen=True, slots=True)
class Undone:
    trouble: Trouble


@dataclass(frozen=True, slots=True)
class Failed:
    """For good, on every rank. All connections are closed now: a rank that missed the word hears that."""

    reason: str


Output = Send | Done | Undone | Failed
TIMED_OUT: Final = "TimedOut"
RANK_LOST: Final = "RankLost"


@dataclass(frozen=True, slots=True)
class Leader:
    ranks: frozenset[int]
    phase: LeaderPhase = LeaderPhase.IDLE
    operation: int = 0
    waiting: frozenset[int] = frozenset()  # for the answer to the newest request
    unchanged: frozenset[int] = frozenset()
    lost: frozenset[int] = frozenset()
    trouble: Trouble | None = None

    def start(self, verb: Verb, tags: tuple[str, ...] | None) -> tuple[Leader, tuple[Output, ...]]:
        assert self.phase is LeaderPhase.IDLE, "one operation at a time, and none after a failure"
        message = Message(Kind.PREPARE, self.operation + 1, verb, tags)
        leader = replace(
            self,
            phase=LeaderPhase.PREPARING,
            operation=message.operation,
            waiting=self.ranks,
            unchanged=frozenset(),
            trouble=None,
        )
        return leader, _to(self.ranks, message)

    def hear(self, rank: int, message: Message) -> tuple[Leader, tuple[Output, ...]]:
        if message.operation != self.operation or rank not in self.waiting:
            return self, ()
        answered = replace(self, waiting=self.waiting - {rank})
        match self.phase, message.kind:
            case LeaderPhase.PREPARING, Kind.READY:
                return answered._go_on()
            case LeaderPhase.PREPARING, Kind.UNCHANGED:
                return replace(answered, unchanged=self.unchanged | {rank})._go_on()
            case LeaderPhase.PREPARING, Kind.REFUSED:
                return answered._abort(Trouble(rank, message.error, message.reason), {rank})
            case LeaderPhase.COMMITTING, Kind.COMMITTED:
                return answered._go_on()
            # A rank that had nothing to undo when the abort was sent is as good as one that has undone it.
            case LeaderPhase.ABORTING, Kind.ABORTED | Kind.REFUSED | Kind.UNCHANGED:
                return answered._go_on()
            case _, Kind.COMMIT_FAILED | Kind.ABORT_FAILED:
                verb = "commit" if message.kind is Kind.COMMIT_FAILED else "undo"
                return self.fail(f"rank {rank} could not {verb} its part: {message.reason}")
            case _:
                return self, ()

    def lose(self, rank: int) -> tuple[Leader, tuple[Output, ...]]:
        """The rank has died, or cannot be talked to any more."""
        if self.phase is LeaderPhase.FAILED or rank in self.lost:
            return self, ()
        leader = replace(self, lost=self.lost | {rank}, waiting=self.waiting - {rank})
        if self.phase is LeaderPhase.PREPARING:
            return leader._abort(Trouble(rank, RANK_LOST, "it is gone"), set())
        if self.phase is LeaderPhase.ABORTING:
            return leader._go_on()
        return leader.fail(f"{_names({rank})} is gone")

    def expire(self) -> tuple[Leader, tuple[Output, ...]]:
        """The deadline of the phase has passed."""
        silent = _names(self.waiting)
        match self.phase:
            case LeaderPhase.PREPARING:
                rank = next(iter(self.waiting)) if len(self.waiting) == 1 else None
                return self._abort(Trouble(rank, TIMED_OUT, f"{silent} did not get ready in time"), set())
            case LeaderPhase.COMMITTING:
                return self.fail(f"{silent} did not commit in time")
            case LeaderPhase.ABORTING:
                return self.fail(f"{silent} did not undo in time")
            case _:
                return self, ()

    def fail(self, reason: str) -> tuple[Leader, tuple[Output, ...]]:
        leader = replace(self, phase=LeaderPhase.FAILED, waiting=frozenset())
        return leader, (*_to(self.ranks - self.lost, Message(Kind.FAIL, reason=reason)), Failed(reason))

    def _go_on(self) -> tuple[Leader, tuple[Output, ...]]:
        if self.waiting:
            return self, ()
        idle = replace(self, phase=LeaderPhase.IDLE)
        if self.phase is LeaderPhase.COMMITTING:
            return idle, (Done(changed=True),)
        if self.phase is LeaderPhase.ABORTING:
            assert self.trouble is not None, "nothing is undone without a reason"
            if self.lost:
                return self.fail(f"{_names(self.lost)} is gone")
            return idle, (Undone(self.trouble),)
        if not self.unchanged:
            committing = replace(self, phase=LeaderPhase.COMMITTING, waiting=self.ranks)
            return committing, _to(self.ranks, Message(Kind.COMMIT, self.operation))
        if self.unchanged == self.ranks:
            return idle, (Done(changed=False),)
        return self.fail(f"{_names(self.unchanged)} had nothing to do, {_names(self.ranks - self.unchanged)} had")

    def _abort(self, trouble: Trouble, as_before: set[int]) -> tuple[Leader, tuple[Output, ...]]:
        pending = self.ranks - self.lost - self.unchanged - as_before
        leader = replace(self, phase=LeaderPhase.ABORTING, waiting=pending, trouble=trouble)
        if not pending:
            return leader._go_on()
        return leader, _to(pending, Message(Kind.ABORT, self.operation))


def _to(ranks: Iterable[int], message: Message) -> tuple[Output, ...]:
    return tuple(Send(rank, message) for rank in sorted(ranks))


def _names(ranks: Iterable[int]) -> str:
    numbers = sorted(ranks)
    return f"rank{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"
