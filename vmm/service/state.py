"""Who holds which lock on one pool, who waits, and where its bytes are. Pure: it is told the time and does nothing.

A lock is a connection. One writer, or many readers; a waiting writer keeps new readers out. Under a layout that is
sealed for data one client writes data, and keeps that lock while it is parked; its memory outlives it, see `data_seal`.
What has to be done outside (copy, release, clear) is answered as a word and reported back; while it is being done the
pool has an ``activity`` and grants nothing. Only `settle` grants, refuses and expires.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Final

from .data_seal import DataSeal
from .errors import LayoutInvalid, LockTimeout, ServiceError, StaleLayout, WrongLock

EVENTS_MAX: Final = 256


class Lock(StrEnum):
    READ_WRITE = "read_write"
    READ_ONLY = "read_only"
    READ_WRITE_OR_READ_ONLY = "read_write_or_read_only"  # the first one writes, later ones read
    WRITE_DATA = "write_data"  # of a layout that is sealed for that; nothing else of it changes
    WRITE_DATA_OR_READ_WRITE = "write_data_or_read_write"  # the first one builds and seals, later ones adopt
    PARKED = "parked"  # a user that holds no memory and may ask for it later


DATA_LOCKS: Final = frozenset({Lock.WRITE_DATA, Lock.WRITE_DATA_OR_READ_WRITE})


class Phase(StrEnum):
    WAITING = "waiting"
    WRITER = "writer"
    READER = "reader"
    DATA_WRITER = "data_writer"
    LEAVING = "leaving"  # a reader or data writer whose park is prepared
    PARKED = "parked"
    WAKER = "waker"  # will be what it asked for once it has brought the bytes back
    REFUSED = "refused"


class Activity(StrEnum):
    PARKING = "parking"
    WAKING = "waking"
    CLEARING = "clearing"


class Place(StrEnum):
    DEVICE = "device"
    HOST = "host"


class PoolWord(StrEnum):
    """One word for a pool, for people and tests."""

    EMPTY = "empty"
    WRITING = "writing"
    SEALED = "sealed"  # for data, which nobody writes now
    WRITING_DATA = "writing_data"
    COMMITTED = "committed"
    READING = "reading"
    PARKED = "parked"


class Todo(StrEnum):
    """What the caller has to do now, and then report."""

    NOTHING = "nothing"
    WAIT = "wait"  # an activity is under way: ask again when it has ended
    BACK_UP = "back_up"  # then backed_up
    PARK = "park"  # back up if there is no backup, release; then parked
    CLEAR = "clear"  # then cleared


@dataclass(slots=True, eq=False)
class Session:
    """One connection's part in one pool. ``number`` is unique in the service."""

    number: int
    pid: int
    lock: Lock
    phase: Phase
    since: float
    deadline: float
    expected_layout: str | None = None
    was_parked: bool = False
    holds_data: bool = False  # the data lock, from its grant to the end of the connection, parked or not
    left: bool = False  # it has said that it writes no more
    refusal: ServiceError | None = None


@dataclass(frozen=True, slots=True)
class Event:
    number: int
    at: float
    kind: str
    pool: str
    data: dict[str, Any]


class EventRing:
    """The last events of a service. ``clock`` tells the time of day."""

    def __init__(self, clock: Callable[[], float], events_max: int = EVENTS_MAX) -> None:
        self._clock = clock
        self._events: deque[Event] = deque(maxlen=events_max)
        self._count = 0

    def add(self, kind: str, pool: str, **data: Any) -> None:
        self._count += 1
        self._events.append(Event(self._count, self._clock(), kind, pool, data))

    def after(self, number: int) -> list[Event]:
        return [event for event in self._events if event.number > number]


class PoolState:
    """The lock state of one pool. The caller serialises the calls."""

    def __init__(self, name: str, events: EventRing) -> None:
        self.name = name
        self.committed = False
        self.data: DataSeal | None = None  # the layout is sealed, and its data is not
        self.layout_hash: str | None = None  # of what is committed or sealed
        self.generation = 0  # counts commits and clears: contents of two generations may differ
        self.place = Place.DEVICE
        self.backup_clean = False  # host memory holds what was committed
        self.park_wanted = False  # somebody has parked, and nobody has come back since
        self.activity: Activity | None = None
        self.sessions: dict[int, Session] = {}  # in the order of their requests
        self._events = events

    # -- asking for a lock

    def request(
        self, number: int, pid: int, lock: Lock, now: float, wait_seconds: float, expected_layout: str | None = None
    ) -> Session:
        """A new session that waits; `settle` decides."""
        session = Session(number, pid, lock, Phase.WAITING, now, now + wait_seconds, expected_layout)
        self.sessions[number] = session
        return session

    def request_again(self, session: Session, now: float, wait_seconds: float, expected_layout: str) -> None:
        """A parked session wants to read again, or to write data again."""
        self._require(session, Phase.PARKED)
        del self.sessions[session.number]  # it queues up behind those that wait already
        self.sessions[session.number] = session
        session.lock = Lock.WRITE_DATA if session.holds_data else Lock.READ_ONLY
        session.phase, session.was_parked = Phase.WAITING, True
        session.since, session.deadline = now, now + wait_seconds
        session.expected_layout, session.refusal = expected_layout, None

    def settle(self, now: float) -> None:
        """Grants what can be granted, then refuses what has waited too long."""
        while self._grant_one(now):
            pass
        for session in self._waiting():
            if now >= session.deadline:
                self._refuse(session, LockTimeout(self._timeout_text(session, now)))

    def next_deadline(self) -> float | None:
        return min((session.deadline for session in self._waiting()), default=None)

    # -- the writer

    def commit(self, session: Session, layout_hash: str, now: float) -> None:
        """Seals everything; the writer, or the data writer once its data is whole, is a reader from now on."""
        self._require(session, Phase.WRITER, Phase.DATA_WRITER)
        if self.data is not None and (unfinished := self.data.written | self.data.torn):
            shown = ", ".join(sorted(unfinished)[:5])
            raise LayoutInvalid(f"{len(unfinished)} entries are not written whole ({shown}); write them, then commit")
        self.data, session.holds_data = None, False
        self.committed, self.layout_hash, self.place = True, layout_hash, Place.DEVICE
        self.backup_clean = self.park_wanted = False
        self.generation += 1
        session.phase, session.since = Phase.READER, now
        self._say("committed", session, layout_hash=layout_hash, generation=self.generation)

    def seal(self, session: Session, layout_hash: str, identity: str, slot_of: Mapping[str, int], now: float) -> None:
        """Seals the layout and leaves the data to be written; the writer is the data writer from now on."""
        self._require(session, Phase.WRITER)
        self.layout_hash, self.place = layout_hash, Place.DEVICE
        self.data = DataSeal(identity, slot_of)
        self.backup_clean = self.park_wanted = False
        self.generation += 1
        session.phase, session.since, session.holds_data = Phase.DATA_WRITER, now, True
        self._say("layout_sealed", session, layout_hash=layout_hash, generation=self.generation)

    def writing_data(self, session: Session) -> DataSeal:
        """What the data writer says about its writes; a backup is none of what it writes from now on."""
        self._require(session, Phase.DATA_WRITER)
        assert self.data is not None, "a data writer has a sealed layout"
        return self.data

    def cleared(self, allocations: int) -> None:
        """Everything that the pool held is gone: so many allocations."""
        if self.activity is Activity.CLEARING:
            self.activity = None
        self.committed, self.data, self.layout_hash, self.place = False, None, None, Place.DEVICE
        self.backup_clean = self.park_wanted = False
        self.generation += 1
        if allocations:
            self._events.add("allocations_cleared", self.name, allocations=allocations, generation=self.generation)

    # -- park and wake

    def prepare_park(self, session: Session) -> Todo:
        """A user wants to leave. The last one has the backup made before anything is given up."""
        self._require(session, Phase.READER, Phase.DATA_WRITER, Phase.LEAVING)
        if self.data is not None and self.data.written:
            raise WrongLock(f"pool {self.name}: {len(self.data.written)} entries are being written; end that first")
        if self.activity is not None:
            return Todo.WAIT
        session.phase = Phase.LEAVING
        if self.backup_clean or self._count(Phase.READER):
            return Todo.NOTHING
        self.activity = Activity.PARKING
        return Todo.BACK_UP

    def backed_up(self, session: Session, *, done: bool) -> None:
        self.activity = None
        self.backup_clean = done
        if not done:
            session.phase = _using(session)
            self._say("backup_failed", session)

    def abort_park(self, session: Session) -> None:
        self._require(session, Phase.LEAVING)
        session.phase = _using(session)

    def commit_park(self, session: Session, now: float) -> Todo:
        """The reader has dropped its mappings. PARK if it was the last user, else NOTHING is given back yet."""
        self._require(session, Phase.LEAVING)
        if self.activity is not None:
            return Todo.WAIT
        session.phase, session.since = Phase.PARKED, now
        self.park_wanted = True
        self._say("user_parked", session, users=self.users())
        return self._park_if_unused()

    def parked(self, session: Session | None, *, done: bool) -> None:
        """The park that PARK asked for has ended; ``session`` had asked, or nobody who still lives."""
        self.activity = None
        if done:
            self.place, self.backup_clean = Place.HOST, True
            self._events.add("parked", self.name)
            return
        self._events.add("park_failed", self.name)
        if session is not None:
            session.phase = Phase.LEAVING

    def woken(self, session: Session, now: float, *, done: bool) -> None:
        """The waker has brought the bytes back, or could not; then it is what it was before."""
        self._require(session, Phase.WAKER)
        self.activity = None
        if done:
            self.place = Place.DEVICE
            self._become_user(session, now)
            self._say("woken", session)
        else:
            self._refuse(session, None)
            self._say("wake_failed", session)

    def may_drop_backup(self) -> bool:
        """The bytes are on the device and no wake can still be undone into the backup."""
        return self.place is Place.DEVICE and self.activity is None and not self._count(Phase.LEAVING)

    # -- the end of a connection

    def gone(self, session: Session, survivor: tuple[int, int] | None = None) -> Todo:
        """The connection has ended. CLEAR for a writer that has sealed nothing; PARK if only parked users are left.

        ``survivor``: pid and start of its process, if that lives on.
        """
        if self.sessions.pop(session.number, None) is None:
            return Todo.NOTHING
        if session.phase is Phase.WRITER:
            self._say("writer_aborted", session)
            self.activity = Activity.CLEARING
            return Todo.CLEAR
        if session.holds_data and self.data is not None:
            self.data.writer_gone(None if session.left else survivor)
            self._say("data_writer_gone", session, phase=str(session.phase), torn=len(self.data.torn))
        elif session.phase in (Phase.READER, Phase.LEAVING, Phase.PARKED):
            self._say("user_gone", session, phase=str(session.phase))
        return self._park_if_unused() if session.phase in (Phase.READER, Phase.LEAVING) else Todo.NOTHING

    # -- looking

    def users(self) -> int:
        """Sessions whose memory is on the device."""
        return len(self.pids(*USING))

    def word(self) -> PoolWord:
        if self._count(Phase.WRITER):
            return PoolWord.WRITING
        if self.layout_hash is None:
            return PoolWord.EMPTY
        if self.place is Place.HOST:
            return PoolWord.PARKED
        if self.data is not None:
            return PoolWord.WRITING_DATA if self.users() else PoolWord.SEALED
        return PoolWord.READING if self.users() else PoolWord.COMMITTED

    def pids(self, *phases: Phase) -> list[int]:
        return [session.pid for session in self.sessions.values() if session.phase in phases]

    # -- inside

    def _grant_one(self, now: float) -> bool:
        if self.activity is not None or self._count(Phase.WRITER):
            return False
        if self.data is not None and self.data.survivor is not None:
            return False  # it may write still
        waiting = self._waiting()
        if (holder := next((one for one in self.sessions.values() if one.holds_data), None)) is not None:
            return self._refuse_stale(waiting) or (holder.phase is Phase.WAITING and self._grant_shared(holder, now))
        if any(session.lock is Lock.READ_WRITE for session in waiting):
            if self.users():
                return self._refuse_stale(waiting)  # a waiting writer keeps new readers out
            writer = next(session for session in waiting if session.lock is Lock.READ_WRITE)
            return self._become_writer(writer, now)
        return self._refuse_stale(waiting) or any(self._grant_shared(session, now) for session in waiting)

    def _grant_shared(self, session: Session, now: float) -> bool:
        if self.data is not None:
            return session.lock in DATA_LOCKS and self._grant_use(session, now)
        if self.committed:
            if session.lock in DATA_LOCKS:
                return False
            if session.lock is Lock.PARKED:
                session.phase, session.since = Phase.PARKED, now
                self._say("user_parked", session, users=self.users())
                return True
            return self._grant_use(session, now)
        first_builds = session.lock in (Lock.READ_WRITE_OR_READ_ONLY, Lock.WRITE_DATA_OR_READ_WRITE)
        return first_builds and self._become_writer(session, now)

    def _grant_use(self, session: Session, now: float) -> bool:
        """Of what is committed or sealed, by whoever may have it."""
        if self.data is not None and not session.holds_data:
            session.holds_data = True
            self.data.grants += 1
        if self.place is Place.HOST:
            session.phase, self.activity = Phase.WAKER, Activity.WAKING
        else:
            self._become_user(session, now)
        return True

    def _refuse_stale(self, waiting: list[Session]) -> bool:
        """Whoever was built on another layout need not wait."""
        for session in waiting:
            if session.expected_layout not in (None, self.layout_hash):
                has = f"layout {self.layout_hash}" if self.layout_hash else "nothing that is committed"
                text = f"pool {self.name} holds {has}, not layout {session.expected_layout}; build the engine again"
                self._refuse(session, StaleLayout(text))
                return True
        return False

    def _become_writer(self, session: Session, now: float) -> bool:
        session.phase, session.since = Phase.WRITER, now
        self._say("writer_connected", session)
        return True

    def _become_user(self, session: Session, now: float) -> None:
        session.phase, session.since = _using(session), now
        self.park_wanted = False
        self._say("data_writer_connected" if session.holds_data else "reader_connected", session)

    def _refuse(self, session: Session, refusal: ServiceError | None) -> None:
        session.refusal = refusal
        session.phase = Phase.PARKED if session.was_parked else Phase.REFUSED
        if session.phase is Phase.REFUSED:
            if session.holds_data and self.data is not None:  # it never had it: the wake before it failed
                session.holds_data = False
                self.data.grants -= 1
            del self.sessions[session.number]

    def _park_if_unused(self) -> Todo:
        if not (self.layout_hash is not None and self.place is Place.DEVICE and self.park_wanted):
            return Todo.NOTHING
        if self.users() or self.activity is not None:
            return Todo.NOTHING
        self.activity = Activity.PARKING
        return Todo.PARK

    def _waiting(self) -> list[Session]:
        return [session for session in self.sessions.values() if session.phase is Phase.WAITING]

    def _count(self, phase: Phase) -> int:
        return sum(session.phase is phase for session in self.sessions.values())

    def _timeout_text(self, session: Session, now: float) -> str:
        reason = f"it is {self.word()}"
        if self.data is not None and self.data.survivor is not None:
            reason = f"process {self.data.survivor[0]} has lost its connection and may write to it still; end it"
        elif self.committed and session.lock in DATA_LOCKS:
            reason = "it is committed, so only read: replace it (read_write)"
        elif self.users():
            reason += f", used by processes {self.pids(*USING)}"
        elif any(one.holds_data for one in self.sessions.values()):
            reason += f", and process {self.pids(Phase.PARKED)} has its data lock"
        elif self.data is not None:
            reason = (
                "its layout is sealed and its data is not committed: adopt it (write_data) or replace it (read_write)"
            )
        elif not self.committed:
            reason = "nothing is committed in it"
        return f"pool {self.name}: no {session.lock} lock within {now - session.since:.1f} s: {reason}"

    def _require(self, session: Session, *phases: Phase) -> None:
        if session.phase not in phases:
            needed = " or ".join(phases)
            raise WrongLock(f"pool {self.name}: this connection is {session.phase}; the request is for a {needed}")

    def _say(self, kind: str, session: Session, **data: Any) -> None:
        self._events.add(kind, self.name, pid=session.pid, session=session.number, **data)


USING: Final = (Phase.WRITER, Phase.READER, Phase.DATA_WRITER, Phase.LEAVING)  # whose memory is on the device


def _using(session: Session) -> Phase:
    return Phase.DATA_WRITER if session.holds_data else Phase.READER
