"""Data under a sealed layout: one writer, whose death leaves the layout, what it wrote, and what it may have torn."""

from __future__ import annotations

import pytest

from lull.vmm.service.data_seal import DataSeal
from lull.vmm.service.errors import LayoutInvalid, LockTimeout, StaleLayout, WrongLock
from lull.vmm.service.state import EventRing, Lock, Phase, Place, PoolState, PoolWord, Session, Todo

HASH, OTHER = "a" * 64, "b" * 64
SLOTS = {"a": 0, "b": 0, "c": 1}
DATA = Lock.WRITE_DATA_OR_READ_WRITE


class Box:
    def __init__(self) -> None:
        self.now = 0.0
        self.events = EventRing(lambda: self.now)
        self.pool = PoolState("kv", self.events)
        self._count = 0

    def ask(self, lock: Lock = DATA, *, wait: float = 100.0, expect: str | None = None) -> Session:
        self._count += 1
        session = self.pool.request(self._count, 1000 + self._count, lock, self.now, wait, expect)
        self.pool.settle(self.now)
        return session

    def sealed(self) -> Session:
        writer = self.ask()
        self.pool.seal(writer, HASH, "seal-1", SLOTS, self.now)
        return writer

    def data(self) -> DataSeal:
        assert self.pool.data is not None
        return self.pool.data

    def park(self, session: Session) -> Todo:
        if self.pool.prepare_park(session) is Todo.BACK_UP:
            self.pool.backed_up(session, done=True)
        todo = self.pool.commit_park(session, self.now)
        if todo is Todo.PARK:
            self.pool.parked(session, done=True)
        self.pool.settle(self.now)
        return todo


def test_a_sealed_layout_survives_several_writers_and_counts_them() -> None:
    box = Box()
    writer = box.sealed()
    assert box.pool.word() is PoolWord.WRITING_DATA
    for takeover in range(3):
        waiting = box.ask()
        assert waiting.phase is Phase.WAITING
        assert box.pool.gone(writer) is Todo.NOTHING, "nothing is cleared"
        box.pool.settle(box.now)
        assert waiting.phase is Phase.DATA_WRITER
        assert box.data().grants == 2 + takeover
        writer = waiting
    box.pool.gone(writer)
    assert box.pool.word() is PoolWord.SEALED
    assert (box.pool.layout_hash, box.data().identity) == (HASH, "seal-1")


def test_only_what_shares_an_allocation_with_what_was_being_written_is_torn() -> None:
    box = Box()
    writer = box.sealed()
    data = box.pool.writing_data(writer)
    data.begin(["a"])
    data.begin(["c"])
    data.end(["c"], whole=True)
    box.pool.gone(writer)
    assert data.torn == {"a", "b"}, "b lies beside a, and was writable with it"
    successor = box.ask()
    again = box.pool.writing_data(successor)
    again.begin(["a"])
    again.end(["a"], whole=True)
    assert again.torn == {"b"}
    with pytest.raises(LayoutInvalid, match="b"):
        box.pool.commit(successor, HASH, box.now)
    again.end(["b"], whole=True)
    again.end(["c"], whole=False)
    assert again.torn == {"c"}
    again.end(None, whole=True)
    box.pool.commit(successor, HASH, box.now)
    assert (successor.phase, box.pool.data, successor.holds_data) == (Phase.READER, None, False)


def test_torn_entries_come_in_pages_and_unknown_ones_are_refused() -> None:
    seal = DataSeal("s", {f"k{n:03}": n for n in range(100)})
    seal.begin(None)
    seal.writer_gone(None)
    found: list[str] = []
    while page := list(seal.page(found[-1] if found else None, 100)):
        found += page
    assert found == sorted(seal.slot_of)
    for act in (seal.begin, lambda keys: seal.end(keys, whole=True)):
        with pytest.raises(LayoutInvalid, match="nowhere"):
            act(["nowhere"])


def test_a_writer_that_lives_on_without_its_connection_keeps_everybody_out_until_it_has_ended() -> None:
    box = Box()
    writer = box.sealed()
    box.pool.gone(writer, (77, 5))
    late = [box.ask(wait=5), box.ask(Lock.READ_WRITE, wait=5)]
    assert [one.phase for one in late] == [Phase.WAITING] * 2
    box.now = 5
    box.pool.settle(box.now)
    assert isinstance(late[0].refusal, LockTimeout)
    assert "process 77 has lost its connection" in str(late[0].refusal)
    box.data().survivor_gone(back=False)
    assert box.ask().phase is Phase.DATA_WRITER
    assert box.data().torn == set(SLOTS), "it may have written anywhere meanwhile"


def test_a_writer_that_is_back_or_left_in_order_tears_nothing() -> None:
    box = Box()
    writer = box.sealed()
    box.pool.gone(writer, (77, 5))
    box.data().survivor_gone(back=True)
    back = box.ask()
    assert back.phase is Phase.DATA_WRITER
    back.left = True
    box.pool.gone(back, (77, 5))
    assert (box.data().survivor, box.data().torn) == (None, set())


def test_a_parked_writer_keeps_its_lock_and_its_death_leaves_the_backup() -> None:
    box = Box()
    writer = box.sealed()
    box.pool.writing_data(writer).begin(["a"])
    with pytest.raises(WrongLock, match="being written"):
        box.pool.prepare_park(writer)
    box.pool.writing_data(writer).end(["a"], whole=True)
    assert box.park(writer) is Todo.PARK
    assert box.pool.word() is PoolWord.PARKED
    standby = box.ask()
    box.pool.request_again(writer, box.now, 5, HASH)
    box.pool.settle(box.now)
    assert (writer.phase, standby.phase) == (Phase.WAKER, Phase.WAITING), "it comes back before whoever waits"
    box.pool.woken(writer, box.now, done=True)
    assert writer.phase is Phase.DATA_WRITER
    assert box.data().grants == 1, "it never gave its lock up"
    box.park(writer)
    box.pool.gone(writer)
    box.pool.settle(box.now)
    assert standby.phase is Phase.WAKER
    box.pool.woken(standby, box.now, done=False)
    assert standby.phase is Phase.REFUSED
    assert (box.pool.place, box.data().grants) == (Place.HOST, 1), "whoever could not wake it never had it"
    box.pool.settle(box.now)
    assert box.ask().phase is Phase.WAKER


def test_a_park_of_data_that_fails_or_is_undone_leaves_its_writer() -> None:
    box = Box()
    writer = box.sealed()
    assert box.pool.prepare_park(writer) is Todo.BACK_UP
    box.pool.backed_up(writer, done=False)
    assert writer.phase is Phase.DATA_WRITER
    box.pool.prepare_park(writer)
    box.pool.backed_up(writer, done=True)
    box.pool.abort_park(writer)
    assert writer.phase is Phase.DATA_WRITER


def test_a_successor_that_was_built_on_another_layout_is_refused_at_once() -> None:
    box = Box()
    box.sealed()
    stale = box.ask(Lock.WRITE_DATA, expect=OTHER)
    assert isinstance(stale.refusal, StaleLayout)


def test_why_a_lock_was_not_had_is_said() -> None:
    box = Box()
    writer = box.sealed()
    box.park(writer)
    parked = box.ask(wait=0)
    box.pool.gone(writer)
    reader = box.ask(Lock.READ_ONLY, wait=0)
    box.pool.settle(box.now)
    assert "process [1001] has its data lock" in str(parked.refusal)
    assert "adopt it (write_data)" in str(reader.refusal)


def test_only_a_writer_seals_and_only_a_data_writer_writes_data() -> None:
    box = Box()
    writer = box.sealed()
    with pytest.raises(WrongLock):
        box.pool.seal(writer, HASH, "s", SLOTS, box.now)
    reader = box.ask(Lock.READ_ONLY)
    with pytest.raises(WrongLock):
        box.pool.writing_data(reader)
