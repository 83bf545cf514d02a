"""Random clients of one pool, against what must always hold of its locks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from lull.vmm.service.errors import LayoutInvalid, WrongLock
from lull.vmm.service.state import DATA_LOCKS, USING, Activity, EventRing, Lock, Phase, Place, PoolState, Session, Todo

HASHES = ("a" * 64, "b" * 64)
SLOTS = {"x": 0, "y": 0, "z": 1}


class LockMachine(RuleBasedStateMachine):
    """The test does what the state asks to be done, now or later, as a server's threads would."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = PoolState("w", EventRing(lambda: self.now))
        self.count = 0
        self.gone: set[int] = set()
        self.written: str | None = None  # what a model knows to be committed or sealed
        self.sealed = False
        self.torn: set[str] = set()
        self.open: set[str] = set()
        self.backed_up = False
        self.doing: tuple[str, Session | None] | None = None  # what has to be reported back
        self.needs_clear: set[int] = set()  # writers that were granted and have not cleared yet

    def settle(self) -> None:
        self.pool.settle(self.now)
        for session in self.pool.sessions.values():
            if session.phase is Phase.WRITER and session.number not in self.needs_clear:
                self.needs_clear.add(session.number)
                self.pool.cleared(0)
                self.written, self.backed_up, self.sealed = None, False, False
                self.torn, self.open = set(), set()

    def live(self, session: Session) -> bool:
        return session.number in self.pool.sessions and session.number not in self.gone

    @rule(target=sessions, lock=st.sampled_from([*Lock]), wait=st.sampled_from([0, 5, 50]))
    def ask(self, lock: Lock, wait: float) -> Session:
        self.count += 1
        expect = HASHES[0] if lock is Lock.PARKED else None
        session = self.pool.request(self.count, self.count, lock, self.now, wait, expect)
        self.settle()
        return session

    @rule(seconds=st.sampled_from([1, 10]))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.settle()

    @rule(session=sessions, layout=st.sampled_from(HASHES))
    def commit(self, session: Session, layout: str) -> None:
        if not self.live(session):
            return
        may = session.phase is Phase.WRITER or (session.phase is Phase.DATA_WRITER and not self.torn | self.open)
        if not may:
            try:
                self.pool.commit(session, layout, self.now)
            except (WrongLock, LayoutInvalid):
                return
            raise AssertionError("only a writer commits, and only what is whole")
        self.pool.commit(session, layout, self.now)
        self.written, self.sealed, self.backed_up = layout, False, False
        self.settle()

    @rule(session=sessions, layout=st.sampled_from(HASHES))
    def seal(self, session: Session, layout: str) -> None:
        if self.live(session) and session.phase is Phase.WRITER:
            self.pool.seal(session, layout, "s", SLOTS, self.now)
            self.written, self.sealed, self.backed_up = layout, True, False
            self.settle()

    @rule(session=sessions, key=st.sampled_from(sorted(SLOTS)))
    def begin_write(self, session: Session, key: str) -> None:
        if self.live(session) and session.phase is Phase.DATA_WRITER:
            self.pool.writing_data(session).begin([key])
            self.open.add(key)
            self.pool.backup_clean = self.backed_up = False

    @rule(session=sessions, key=st.sampled_from(sorted(SLOTS)), whole=st.booleans())
    def end_write(self, session: Session, key: str, whole: bool) -> None:
        if self.live(session) and session.phase is Phase.DATA_WRITER:
            self.pool.writing_data(session).end([key], whole=whole)
            self.open.discard(key)
            self.torn = self.torn - {key} if whole else self.torn | {k for k in SLOTS if SLOTS[k] == SLOTS[key]}

    @precondition(lambda self: self.doing is None)
    @rule(session=sessions)
    def prepare_park(self, session: Session) -> None:
        if self.live(session) and session.phase in (Phase.READER, Phase.DATA_WRITER) and not self.open:
            todo = self.pool.prepare_park(session)
            if todo is Todo.BACK_UP:
                self.doing = ("back_up", session)
            self.settle()

    @precondition(lambda self: self.doing is None)
    @rule(session=sessions)
    def commit_park(self, session: Session) -> None:
        if self.live(session) and session.phase is Phase.LEAVING:
            if self.pool.commit_park(session, self.now) is Todo.PARK:
                self.doing = ("park", session)
            self.settle()

    @precondition(lambda self: self.doing is None)
    @rule(session=sessions)
    def abort_park(self, session: Session) -> None:
        if self.live(session) and session.phase is Phase.LEAVING:
            self.pool.abort_park(session)
            self.settle()

    @rule(session=sessions, layout=st.sampled_from(HASHES))
    def wake(self, session: Session, layout: str) -> None:
        if self.live(session) and session.phase is Phase.PARKED:
            self.pool.request_again(session, self.now, 5, layout)
            self.settle()

    @precondition(lambda self: self.doing is not None)
    @rule(done=st.booleans())
    def report(self, done: bool) -> None:
        """What was being done has ended, well or not."""
        assert self.doing is not None
        what, session = self.doing
        self.doing = None
        if what == "back_up":
            assert session is not None
            self.pool.backed_up(session, done=done)
            self.backed_up = done
        else:
            self.pool.parked(session, done=done or self.backed_up)
            self.backed_up = done or self.backed_up
        self.settle()

    @rule(done=st.booleans())
    def wake_ends(self, done: bool) -> None:
        for session in [s for s in self.pool.sessions.values() if s.phase is Phase.WAKER]:
            assert self.pool.place is Place.HOST
            assert self.backed_up, "nothing is woken without a backup"
            self.pool.woken(session, self.now, done=done)
        self.settle()

    @rule(session=sessions)
    def go(self, session: Session) -> None:
        """Only one thread serves a session: it reports what it does before it sees the end of its client."""
        if not self.live(session) or session.phase is Phase.WAKER or (self.doing and self.doing[1] is session):
            return
        self.gone.add(session.number)
        if session.holds_data:
            self.torn |= {key for key in SLOTS if SLOTS[key] in {SLOTS[one] for one in self.open}}
            self.open = set()
        todo = self.pool.gone(session)
        if todo is Todo.CLEAR:
            assert self.written is None, "what is committed is never cleared for its writer's death"
            self.pool.cleared(1)
        elif todo is Todo.PARK:
            assert self.doing is None
            self.doing = ("park", None)
        self.settle()

    @invariant()
    def one_writer_or_many_readers(self) -> None:
        phases = [session.phase for session in self.pool.sessions.values()]
        writers = phases.count(Phase.WRITER)
        assert writers <= 1
        if writers:
            assert not {Phase.READER, Phase.DATA_WRITER, Phase.LEAVING, Phase.WAKER} & set(phases)
        holders = [session for session in self.pool.sessions.values() if session.holds_data]
        assert len(holders) <= 1, "one writer of data"
        if holders:
            assert self.sealed
            assert not [s for s in self.pool.sessions.values() if s.phase in USING and s is not holders[0]]
        assert phases.count(Phase.WAKER) <= 1

    @invariant()
    def readers_read_what_was_committed(self) -> None:
        assert self.pool.layout_hash == self.written
        assert self.pool.committed == (self.written is not None and not self.sealed)
        data = self.pool.data
        assert (data is not None) == self.sealed
        if data is not None:
            assert (data.torn, data.written) == (self.torn, self.open)
        readers = [s for s in self.pool.sessions.values() if s.phase in (Phase.READER, Phase.LEAVING)]
        if readers:
            assert self.written is not None
            assert self.pool.place is Place.DEVICE, "nobody reads what was given back"

    @invariant()
    def what_is_not_on_the_device_is_in_a_backup(self) -> None:
        if self.pool.place is Place.HOST:
            assert self.pool.layout_hash is not None
            assert self.pool.backup_clean

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """After a settle, whoever waits has a reason to."""
        waiting = [s for s in self.pool.sessions.values() if s.phase is Phase.WAITING]
        assert all(session.deadline > self.now for session in waiting)
        if waiting and self.pool.activity is None and not self.pool.users():
            locks = {s.lock for s in waiting}
            if self.pool.data is not None and any(s.holds_data for s in self.pool.sessions.values()):
                return  # its writer is parked, and has the lock still
            if self.pool.data is not None:
                assert locks <= {Lock.READ_ONLY, Lock.READ_WRITE_OR_READ_ONLY, Lock.PARKED}, "it is sealed"
            elif self.pool.committed:
                assert locks <= DATA_LOCKS, "it is committed"
            else:
                assert locks <= {Lock.READ_ONLY, Lock.WRITE_DATA}, "the pool is free"

    @invariant()
    def an_activity_has_somebody_who_ends_it(self) -> None:
        if self.pool.activity is Activity.PARKING:
            assert self.doing is not None
        if self.pool.activity is Activity.WAKING:
            assert any(s.phase is Phase.WAKER for s in self.pool.sessions.values())
        assert self.pool.activity is not Activity.CLEARING


LockMachine.TestCase.settings = settings(max_examples=40, stateful_step_count=40, deadline=None)
TestLocks = LockMachine.TestCase
