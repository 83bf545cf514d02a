"""Data that outlives its writers: adopted, torn or not, parked, and kept from two writers at once."""

from __future__ import annotations

import ctypes
import os
import signal
import socket as sockets
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lull.vmm.driver import Driver
from lull.vmm.errors import ContentsLost, PoolClosed, TransitionInProgress, TransitionRefused
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.data_pool import DataPool
from lull.vmm.service.errors import LayoutInvalid, LockTimeout, StaleLayout, WrongLock
from lull.vmm.service.pool import Piece, ServicePool
from lull.vmm.service.state import Lock
from lull.vmm.tags import RestoreMode
from tests.integration.memory_service.conftest import World
from tests.memory_clients import B_BYTES
from tests.memory_services import MIB, host_service
from tests.waiting import wait_until

TAG = "kv_cache"
STEPS_MIN = 16  # of one life: fewer means that the killing did not happen


@pytest.fixture(autouse=True)
def nothing_left(world: World) -> Iterator[None]:
    yield
    if world.service.pool("kv")["state"] != "gone":
        data(world, lock=Lock.READ_WRITE, wait_seconds=2).close()


def data(world: World, driver: Driver | None = None, **given: Any) -> DataPool:
    given.setdefault("wait_seconds", 20)
    return DataPool(driver or HostDriver(world.device), world.service.socket, "kv", **given)


def built(world: World, **given: Any) -> DataPool:
    """What every engine does, the first and the later ones."""
    pool = data(world, **given)
    pool.build({"a": Piece(B_BYTES, [1]), "b": Piece(B_BYTES, [2])}, slab_bytes=B_BYTES)
    pool.seal()
    return pool


def put(pool: DataPool, key: str, value: int) -> None:
    with pool.writing(key) as regions:
        ctypes.memset(regions[key].address, value, B_BYTES)


def content(pool: ServicePool, key: str) -> bytes:
    region = pool.regions()[key]
    return ctypes.string_at(region.address, region.nbytes)


def values_of(content_bytes: bytes) -> set[int]:
    return set(content_bytes)


def check_what_a_death_left(world: World) -> str:
    """Gone whole, or sealed with each entry either whole or said to be torn."""

    def settled() -> bool:
        pool = world.service.pool("kv")
        return not pool.get("writer_pids") and not pool.get("parked_pids") and not pool.get("activity")

    wait_until(settled, 10, "the dead client forgotten")
    pool = world.service.pool("kv")
    if pool["state"] == "gone":
        assert world.device.free_bytes() == world.device.capacity_bytes
        return "gone"
    assert pool["state"] in ("sealed", "parked")
    successor = built(world)
    assert successor.adopted
    for key in ("a", "b"):
        if key not in successor.torn:
            assert len(values_of(content(successor, key))) == 1, "a write that is not said to be torn is whole"
    torn = successor.torn
    assert len(torn) <= 1
    for key in torn:
        put(successor, key, 7)
    assert successor.torn == ()
    successor.release([TAG])
    assert world.device.free_bytes() == world.device.capacity_bytes
    successor.resume([TAG])
    assert not torn or content(successor, torn[0]) == b"\7" * B_BYTES
    successor.close()
    return "torn" if torn else "whole"


@pytest.mark.parametrize("moment", ["answered", pytest.param("sent", marks=pytest.mark.long)])
def test_a_data_writer_killed_at_any_step_leaves_its_layout_and_says_what_is_torn(world: World, moment: str) -> None:
    before = world.service.footprint_at_rest()
    outcomes: list[str] = []
    for step in range(1, 100):
        code = world.clients.data_life(kill_at=step, moment=moment)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        outcomes.append(check_what_a_death_left(world))
        if outcomes[-1] != "gone":
            data(world, lock=Lock.READ_WRITE, wait_seconds=2).close()
        wait_until(lambda: world.service.footprint() == before, 10, "nothing of it left in the service")
    assert len(outcomes) >= STEPS_MIN
    first = next(n for n, outcome in enumerate(outcomes) if outcome != "gone")
    assert set(outcomes[:first]) == {"gone"}
    assert set(outcomes[first:]) == {"whole", "torn"}


def test_several_takeovers_keep_contents_places_and_addresses(world: World) -> None:
    pool = built(world)
    put(pool, "a", 1)
    put(pool, "b", 2)
    places = {key: region.address for key, region in pool.regions().items()}
    identities = {world.service.pool("kv")["layout_hash"]}
    pool.close()
    for takeover in range(3):
        pool = built(world)
        assert pool.adopted
        assert pool.torn == ()
        assert values_of(content(pool, "a")) == {1 + takeover}
        assert values_of(content(pool, "b")) == {2}
        assert pool.same_addresses
        assert {key: region.address for key, region in pool.regions().items()} == places
        put(pool, "a", 2 + takeover)
        identities.add(world.service.pool("kv")["layout_hash"])
        pool.close()
    assert len(identities) == 1
    assert world.service.pool("kv")["data"]["grants"] == 4


def test_addresses_that_are_taken_here_are_said_to_be_others(world: World) -> None:
    pool = built(world)
    region = pool.regions()["a"]
    pool.close()
    driver = HostDriver(world.device)
    assert driver.reserve_at(region.address, 2 * MIB)
    other = built(world, driver=driver)
    assert not other.same_addresses
    assert other.regions()["a"].address != region.address
    put(other, "a", 5)
    other.close()
    driver.free_address(region.address, 2 * MIB)


def test_half_a_write_is_torn_and_nothing_else_is(world: World) -> None:
    first = built(world)
    put(first, "a", 1)
    put(first, "b", 2)
    first.close()
    world.clients.kill(world.clients.write_half())
    successor = built(world)
    assert successor.torn == ("a",)
    assert values_of(content(successor, "a")) == {1, 3}
    assert values_of(content(successor, "b")) == {2}
    with pytest.raises(LayoutInvalid, match="a are not written whole"):
        successor.commit()
    successor.close()
    again = built(world)
    assert again.torn == ("a",), "until somebody has written it"
    with pytest.raises(RuntimeError), again.writing("b"):
        raise RuntimeError("the write failed")
    assert again.torn == ("a", "b")
    again.close()
    assert built_torn(world) == ("a", "b")


def built_torn(world: World) -> tuple[str, ...]:
    pool = data(world)
    torn = pool.torn
    pool.close()
    return torn


def test_a_write_that_was_not_announced_is_fatal(world: World) -> None:
    built(world).close()
    assert world.clients.write_outside() == -signal.SIGSEGV
    assert built_torn(world) == ()


def test_one_writer_at_a_time_and_no_readers_until_the_data_is_committed(world: World) -> None:
    pool = built(world)
    for lock in (Lock.WRITE_DATA, Lock.WRITE_DATA_OR_READ_WRITE, Lock.READ_WRITE):
        with pytest.raises(LockTimeout, match=str(os.getpid())):
            data(world, lock=lock, wait_seconds=0)
    with pytest.raises(LockTimeout, match=str(os.getpid())):
        ServicePool(HostDriver(world.device), world.service.socket, "kv", lock=Lock.READ_ONLY, wait_seconds=0)
    put(pool, "a", 1)
    put(pool, "b", 2)
    pool.commit()
    reader = ServicePool(HostDriver(world.device), world.service.socket, "kv", tag=TAG, lock=Lock.READ_ONLY)
    assert values_of(content(reader, "b")) == {2}
    with pytest.raises(WrongLock, match="committed"), pool.writing("a"):
        pass
    with pytest.raises(LockTimeout, match="committed, so only read"):
        data(world, wait_seconds=0)
    reader.close()
    pool.release([TAG])
    pool.resume([TAG])
    pool.close()


def test_an_engine_that_asks_for_another_layout_is_told(world: World) -> None:
    built(world).close()
    pool = data(world)
    with pytest.raises(StaleLayout, match="there is 1048576"):
        pool.allocate(B_BYTES + 1)
    first = pool.allocate(B_BYTES)
    with pytest.raises(StaleLayout, match="entry a"):
        pool.publish("a", first, 0, B_BYTES, [3])
    with pytest.raises(StaleLayout, match="1 of 2"):
        pool.seal()
    pool.allocate(B_BYTES)
    with pytest.raises(StaleLayout, match="no more"):
        pool.allocate(B_BYTES)
    with pytest.raises(WrongLock):
        pool.free(first)
    with pytest.raises(WrongLock):
        pool.create_unmapped(B_BYTES)
    pool.close()
    with pytest.raises(PoolClosed):
        pool.allocate(B_BYTES)


def test_a_park_waits_for_no_write_and_nothing_is_written_over_a_park(world: World) -> None:
    pool = built(world)
    with pool.writing("a"):
        with pytest.raises(TransitionRefused, match="a are being written"):
            pool.release([TAG])
        with pytest.raises(TransitionInProgress, match="another block"), pool.writing("a"):
            pass
        put(pool, "b", 2)
    put(pool, "a", 1)
    pool.release([TAG])
    with pytest.raises(TransitionInProgress), pool.writing("a"):
        pass
    with pytest.raises(LockTimeout, match="has its data lock"):
        data(world, wait_seconds=0)
    pool.resume([TAG])
    assert (values_of(content(pool, "a")), values_of(content(pool, "b"))) == ({1}, {2})
    put(pool, "a", 3)
    pool.release([TAG])
    pool.close()  # as a death while it is parked: the next one gets what was written
    successor = built(world)
    assert (values_of(content(successor, "a")), successor.torn) == ({3}, ())
    successor.close()


def test_a_kept_backup_is_copied_once_and_again_after_a_write(world: World) -> None:
    pool = built(world, keep_backup=True)
    put(pool, "a", 1)
    pool.release([TAG])
    pool.resume([TAG])
    kept = world.service.pool("kv")
    assert (kept["backup_clean"], kept["backup_bytes"]) == (True, 2 * B_BYTES)
    put(pool, "a", 2)
    written = world.service.pool("kv")
    assert (written["backup_clean"], written["backup_bytes"]) == (False, 0)
    pool.release([TAG])
    pool.resume([TAG])
    assert values_of(content(pool, "a")) == {2}
    pool.close()


def cut(pool: DataPool) -> None:
    """The connection ends, and neither of the two processes."""
    connection = pool._there.client._socket
    assert connection is not None
    connection.shutdown(sockets.SHUT_RDWR)


def test_a_writer_that_has_lost_its_connection_keeps_others_out_while_it_lives(world: World) -> None:
    pool = built(world)
    put(pool, "a", 1)
    cut(pool)
    wait_until(lambda: world.service.pool("kv")["data"]["survivor_pid"] == os.getpid(), 10, "the loss seen")
    before = world.service.pool("kv")["data"]["grants"]
    put(pool, "a", 2)  # nobody else can have it
    pool.release([TAG])  # and comes back by itself
    assert world.service.pool("kv")["data"]["grants"] == before + 1
    pool.resume([TAG])
    assert values_of(content(pool, "a")) == {2}
    assert pool.failed is None
    pool.close()
    assert built_torn(world) == (), "it left in order"


def test_a_stopped_writer_is_a_writer_until_it_has_ended(world: World) -> None:
    built(world).close()
    pid = world.clients.write_half()
    os.kill(pid, signal.SIGSTOP)
    waiting: list[DataPool] = []
    thread = threading.Thread(target=lambda: waiting.append(data(world)))
    thread.start()
    wait_until(lambda: bool(world.service.pool("kv")["waiting"]), 10, "the successor waits")
    assert not waiting, "a stopped writer is a writer"
    world.clients.kill(pid)
    thread.join(20)
    assert waiting[0].torn == ("a",)
    waiting[0].close()


def test_a_writer_hands_its_data_to_a_service_that_was_started_since(tmp_path: Path) -> None:
    with host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device):

        def new(**given: Any) -> DataPool:
            pool = DataPool(HostDriver(device), service.socket, "kv", wait_seconds=20, **given)
            pool.build({"a": Piece(B_BYTES), "b": Piece(B_BYTES)}, slab_bytes=B_BYTES)
            pool.seal()
            return pool

        pool = new()
        put(pool, "a", 1)
        with pytest.raises(RuntimeError), pool.writing("b"):
            raise RuntimeError("torn")
        service.kill()
        put(pool, "a", 4)
        service.start()
        pool.prepare_release([TAG])
        pool.abort_release()
        assert service.pool("kv")["data"]["torn"] == 1
        put(pool, "a", 5)
        pool.close()
        successor = new()
        assert (successor.torn, values_of(content(successor, "a"))) == (("b",), {5})
        successor.release([TAG])
        service.kill()
        service.start()
        with pytest.raises(ContentsLost):
            successor.resume([TAG])
        successor.close()

        running = new()
        service.kill()
        service.start()
        new().close()  # another one has begun anew there
        with pytest.raises(StaleLayout, match="another engine"):
            running.release([TAG])
        assert "another engine" in str(running.failed)
        with pytest.raises(StaleLayout), running.writing("a"):
            pass
        running.close()
        new().close()  # the lock is free


def test_modes_and_locks_that_cannot_be_are_refused(world: World) -> None:
    with pytest.raises(ValueError, match="use CPU or PINNED"):
        data(world, mode=RestoreMode.NONE)
    with pytest.raises(ValueError, match=r"Lock\.WRITE_DATA"):
        data(world, lock=Lock.READ_ONLY)
    with pytest.raises(ValueError, match=r"Lock\.READ_ONLY"):
        ServicePool(HostDriver(world.device), world.service.socket, "kv", lock=Lock.WRITE_DATA)
    pool = data(world)
    pool.build({"a": Piece(B_BYTES)})
    with pytest.raises(WrongLock, match="seal it"):
        pool.release([TAG])
    with pytest.raises(WrongLock, match="not sealed yet"), pool.writing("a"):
        pass
    pool.seal()
    with pytest.raises(LayoutInvalid, match="nowhere"), pool.writing("nowhere"):
        pass
    pool.close()
