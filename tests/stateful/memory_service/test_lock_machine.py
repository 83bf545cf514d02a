"""Random clients of one pool, against what must always hold of its locks."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, precondition, rule

from lull.vmm.service.errors import WrongLock
from lull.vmm.service.state import Activity, EventRing, Lock, Phase, Place, PoolState, Session, Todo

HASHES = ("a" * 64, "b" * 64)


class LockMachine(RuleBasedStateMachine):
    """The test does what the state asks to be done, now or later, as a server's threads would."""

    sessions = Bundle("sessions")

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.pool = PoolState("w", EventRing(lambda: self.now))
        self.count = 0
        self.gone: set[int] = set()
        self.written: str | None = None  # what a model knows to be committed
        self.backed_up = False
        self.doing: tuple[str, Session | None] | None = None  # what has to be reported back
        self.needs_clear: set[int] = set()  # writers that were granted and have not cleared yet

    def settle(self) -> None:
        self.pool.settle(self.now)
        for session in self.pool.sessions.values():
            if session.phase is Phase.WRITER and session.number not in self.needs_clear:
                self.needs_clear.add(session.number)
                self.pool.cleared(0)
                self.written, self.backed_up = None, False

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
        if session.phase is not Phase.WRITER:
            try:
                self.pool.commit(session, layout, self.now)
            except WrongLock:
                return
            raise AssertionError("only a writer commits")
        self.pool.commit(session, layout, self.now)
        self.written = layout
        self.settle()

    @precondition(lambda self: self.doing is None)
    @rule(session=sessions)
    def prepare_park(self, session: Session) -> None:
        if self.live(session) and session.phase is Phase.READER:
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
            assert not {Phase.READER, Phase.LEAVING, Phase.WAKER} & set(phases)
        assert phases.count(Phase.WAKER) <= 1

    @invariant()
    def readers_read_what_was_committed(self) -> None:
        assert (self.pool.layout_hash if self.pool.committed else None) == self.written
        readers = [s for s in self.pool.sessions.values() if s.phase in (Phase.READER, Phase.LEAVING)]
        if readers:
            assert self.written is not None
            assert self.pool.place is Place.DEVICE, "nobody reads what was given back"

    @invariant()
    def what_is_not_on_the_device_is_in_a_backup(self) -> None:
        if self.pool.place is Place.HOST:
            assert self.pool.committed
            assert self.pool.backup_clean

    @invariant()
    def nobody_waits_for_nothing(self) -> None:
        """After a settle, whoever waits has a reason to."""
        waiting = [s for s in self.pool.sessions.values() if s.phase is Phase.WAITING]
        assert all(session.deadline > self.now for session in waiting)
        if waiting and self.pool.activity is None and not self.pool.users():
            assert all(s.lock is Lock.READ_ONLY for s in waiting), "the pool is free"
            assert not self.pool.committed

    @invariant()
    def an_activity_has_somebody_who_ends_it(self) -> None:
        if self.pool.activity is Activity.PARKING:
            assert self.doing is not None
        if self.pool.activity is Activity.WAKING:
            assert any(s.phase is Phase.WAKER for s in self.pool.sessions.values())
        assert self.pool.activity is not Activity.CLEARING


LockMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=40, deadline=None)
TestLocks = LockMachine.TestCase
