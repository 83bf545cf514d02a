"""The locks of one pool as a table: who asks, what holds, who gets it."""

from __future__ import annotations

import pytest

from lull.vmm.service.errors import LockTimeout, StaleLayout, WrongLock
from lull.vmm.service.state import EventRing, Lock, Phase, Place, PoolState, PoolWord, Session, Todo

HASH, OTHER = "a" * 64, "b" * 64
RW, RO, EITHER = Lock.READ_WRITE, Lock.READ_ONLY, Lock.READ_WRITE_OR_READ_ONLY
ADOPT, DATA = Lock.WRITE_DATA, Lock.WRITE_DATA_OR_READ_WRITE


class Box:
    """A pool with sessions by name, and a clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0
        self.events = EventRing(lambda: self.now)
        self.pool = PoolState("w", self.events)
        self._count = 0

    def ask(self, lock: Lock, *, wait: float = 100.0, expect: str | None = None) -> Session:
        self._count += 1
        session = self.pool.request(self._count, 1000 + self._count, lock, self.now, wait, expect)
        self.pool.settle(self.now)
        return session

    def leave(self, session: Session) -> Todo:
        todo = self.pool.gone(session)
        if todo is Todo.CLEAR:
            self.pool.cleared(1)
        self.pool.settle(self.now)
        return todo

    def committed(self) -> Session:
        writer = self.ask(RW)
        self.pool.commit(writer, HASH, self.now)
        return writer

    def sealed(self) -> Session:
        writer = self.ask(DATA)
        self.pool.seal(writer, HASH, "seal-1", {"a": 0, "b": 0, "c": 1}, self.now)
        return writer

    def park(self, session: Session) -> Todo:
        """As a client does: prepared, committed, and what has to be done is done."""
        if self.pool.prepare_park(session) is Todo.BACK_UP:
            self.pool.backed_up(session, done=True)
        todo = self.pool.commit_park(session, self.now)
        if todo is Todo.PARK:
            self.pool.parked(session, done=True)
        self.pool.settle(self.now)
        return todo

    def kinds(self) -> list[str]:
        return [event.kind for event in self.events.after(0)]


@pytest.mark.parametrize(
    ("held", "asked", "granted"),
    [
        ("nothing", RW, Phase.WRITER),
        ("nothing", RO, Phase.WAITING),
        ("nothing", EITHER, Phase.WRITER),
        ("writer", RW, Phase.WAITING),
        ("writer", RO, Phase.WAITING),
        ("writer", EITHER, Phase.WAITING),
        ("committed", RW, Phase.WRITER),
        ("committed", RO, Phase.READER),
        ("committed", EITHER, Phase.READER),
        ("reader", RW, Phase.WAITING),
        ("reader", RO, Phase.READER),
        ("reader", EITHER, Phase.READER),
        ("parked", RW, Phase.WRITER),
        ("parked", RO, Phase.WAKER),
        ("parked", EITHER, Phase.WAKER),
        ("nothing", ADOPT, Phase.WAITING),
        ("nothing", DATA, Phase.WRITER),
        ("committed", ADOPT, Phase.WAITING),
        ("committed", DATA, Phase.WAITING),
        ("sealed", ADOPT, Phase.DATA_WRITER),
        ("sealed", DATA, Phase.DATA_WRITER),
        ("sealed", RO, Phase.WAITING),
        ("sealed", EITHER, Phase.WAITING),
        ("sealed", RW, Phase.WRITER),
        ("data writer", DATA, Phase.WAITING),
        ("data writer", RW, Phase.WAITING),
        ("data writer", RO, Phase.WAITING),
        ("parked data writer", DATA, Phase.WAITING),
        ("parked data writer", RW, Phase.WAITING),
        ("dead parked data writer", DATA, Phase.WAKER),
        ("dead parked data writer", RW, Phase.WRITER),
    ],
)
def test_who_gets_a_lock(held: str, asked: Lock, granted: Phase) -> None:
    box = Box()
    if held == "writer":
        box.ask(RW)
    elif held.endswith(("sealed", "data writer")):
        first = box.sealed()
        if "parked" in held:
            box.park(first)
        if held in ("sealed", "dead parked data writer"):
            box.leave(first)
    elif held != "nothing":
        first = box.committed()
        if held == "committed":
            box.leave(first)
        elif held == "parked":
            box.park(first)
    assert box.ask(asked).phase is granted


def test_a_waiting_writer_keeps_new_readers_out_and_comes_first() -> None:
    box = Box()
    reader = box.committed()
    writer, late, either = box.ask(RW), box.ask(RO), box.ask(EITHER)
    assert [writer.phase, late.phase, either.phase] == [Phase.WAITING] * 3
    box.leave(reader)
    assert [writer.phase, late.phase, either.phase] == [Phase.WRITER, Phase.WAITING, Phase.WAITING]
    box.pool.cleared(1)
    assert box.leave(writer) is Todo.CLEAR
    assert (late.phase, either.phase) == (Phase.WAITING, Phase.WRITER), "nothing is committed: the first one writes"


def test_readers_get_in_after_a_waiting_writer_has_timed_out() -> None:
    box = Box()
    box.committed()
    writer, late = box.ask(RW, wait=5), box.ask(RO, wait=60)
    box.now = 5
    box.pool.settle(box.now)
    assert isinstance(writer.refusal, LockTimeout)
    assert "used by processes [1001]" in str(writer.refusal)
    box.pool.settle(box.now)
    assert late.phase is Phase.READER


def test_a_waiting_client_that_goes_is_forgotten() -> None:
    box = Box()
    reader = box.committed()
    writer, late = box.ask(RW), box.ask(RO)
    assert box.leave(writer) is Todo.NOTHING
    assert late.phase is Phase.READER
    assert box.pool.word() is PoolWord.READING
    box.leave(reader)
    box.leave(late)
    assert box.pool.word() is PoolWord.COMMITTED


def test_an_uncommitted_writer_that_dies_is_cleared_before_anybody_gets_in() -> None:
    box = Box()
    writer, waiting = box.ask(RW), box.ask(RW)
    assert box.pool.gone(writer) is Todo.CLEAR
    box.pool.settle(box.now)
    assert waiting.phase is Phase.WAITING, "its memory is still being given back"
    box.pool.cleared(3)
    box.pool.settle(box.now)
    assert waiting.phase is Phase.WRITER
    assert box.kinds() == ["writer_connected", "writer_aborted", "allocations_cleared", "writer_connected"]


def test_only_a_writer_commits_and_only_once() -> None:
    box = Box()
    reader = box.committed()
    with pytest.raises(WrongLock):
        box.pool.commit(reader, HASH, box.now)


@pytest.mark.parametrize("act", ["prepare_park", "abort_park"])
def test_only_readers_park(act: str) -> None:
    box = Box()
    writer = box.ask(RW)
    with pytest.raises(WrongLock):
        getattr(box.pool, act)(writer)


def test_the_last_user_makes_the_backup_before_anything_is_given_up() -> None:
    box = Box()
    first, second = box.committed(), box.ask(RO)
    assert box.pool.prepare_park(first) is Todo.NOTHING
    assert box.pool.prepare_park(second) is Todo.BACK_UP
    assert box.ask(RO).phase is Phase.WAITING, "nobody comes in while it is copied"
    box.pool.backed_up(second, done=True)
    assert box.pool.commit_park(first, box.now) is Todo.NOTHING
    assert box.pool.place is Place.DEVICE


def test_a_backup_that_fails_changes_nothing() -> None:
    box = Box()
    reader = box.committed()
    assert box.pool.prepare_park(reader) is Todo.BACK_UP
    box.pool.backed_up(reader, done=False)
    assert (reader.phase, box.pool.word()) == (Phase.READER, PoolWord.READING)
    assert box.pool.prepare_park(reader) is Todo.BACK_UP


def test_another_s_park_is_waited_for() -> None:
    box = Box()
    first, second = box.committed(), box.ask(RO)
    box.pool.prepare_park(first)
    assert box.pool.prepare_park(second) is Todo.BACK_UP
    assert box.pool.commit_park(first, box.now) is Todo.WAIT
    box.pool.backed_up(second, done=True)
    assert box.pool.commit_park(first, box.now) is Todo.NOTHING


def test_the_death_of_the_last_user_parks_for_those_who_had_parked() -> None:
    box = Box()
    first, second = box.committed(), box.ask(RO)
    assert box.park(first) is Todo.NOTHING
    assert box.leave(second) is Todo.PARK
    box.pool.parked(None, done=True)
    assert box.pool.word() is PoolWord.PARKED


def test_without_anybody_parked_the_memory_stays_on_the_device() -> None:
    box = Box()
    assert box.leave(box.committed()) is Todo.NOTHING
    assert box.pool.word() is PoolWord.COMMITTED


def test_a_clean_backup_is_not_made_again() -> None:
    box = Box()
    reader = box.committed()
    box.park(reader)
    box.pool.request_again(reader, box.now, 10, HASH)
    box.pool.settle(box.now)
    assert reader.phase is Phase.WAKER
    box.pool.woken(reader, box.now, done=True)
    assert box.pool.prepare_park(reader) is Todo.NOTHING
    assert box.pool.commit_park(reader, box.now) is Todo.PARK


def test_a_wake_that_fails_leaves_everything_parked_and_can_be_asked_again() -> None:
    box = Box()
    reader = box.committed()
    box.park(reader)
    for done in (False, True):
        box.pool.request_again(reader, box.now, 10, HASH)
        box.pool.settle(box.now)
        box.pool.woken(reader, box.now, done=done)
        assert reader.phase is (Phase.READER if done else Phase.PARKED)
    assert box.pool.place is Place.DEVICE


@pytest.mark.parametrize("lock", [RO, EITHER, Lock.PARKED])
def test_whoever_was_built_on_another_layout_is_refused_at_once(lock: Lock) -> None:
    box = Box()
    reader = box.committed()
    assert isinstance(box.ask(lock, expect=OTHER).refusal, StaleLayout)
    box.leave(reader)
    box.leave(box.ask(RW))
    stale = box.ask(lock, expect=HASH)
    assert isinstance(stale.refusal, StaleLayout), "what it knew was cleared"


def test_a_parked_user_finds_that_a_writer_has_replaced_what_it_knew() -> None:
    box = Box()
    parked = box.committed()
    box.park(parked)
    writer = box.ask(RW)
    assert writer.phase is Phase.WRITER, "whoever is parked holds nothing and stops nobody"
    box.pool.cleared(1)
    box.pool.commit(writer, OTHER, box.now)
    box.pool.request_again(parked, box.now, 10, HASH)
    box.pool.settle(box.now)
    assert isinstance(parked.refusal, StaleLayout)
    assert parked.phase is Phase.PARKED


def test_a_backup_is_not_dropped_while_somebody_is_about_to_need_it() -> None:
    box = Box()
    first, second = box.committed(), box.ask(RO)
    assert box.pool.may_drop_backup()
    box.pool.prepare_park(first)
    assert not box.pool.may_drop_backup()
    box.pool.abort_park(first)
    assert box.pool.may_drop_backup()
    box.park(first)
    box.park(second)
    assert not box.pool.may_drop_backup()


def test_only_so_many_events_are_kept_and_numbers_go_on() -> None:
    ring = EventRing(lambda: 0.0, events_max=3)
    for number in range(5):
        ring.add("kind", "pool", n=number)
    assert [(event.number, event.data["n"]) for event in ring.after(0)] == [(3, 2), (4, 3), (5, 4)]
    assert [event.number for event in ring.after(4)] == [5]
