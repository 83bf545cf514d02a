"""The service as a process: waits, protection, room, stale layouts, and what parks cost the second time."""

from __future__ import annotations

import ctypes
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

from lull.vmm.errors import ContentsLost, OutOfDeviceMemory, UnsupportedMode
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.errors import (
    LayoutInvalid,
    LockTimeout,
    ServiceRefused,
    ServiceUnavailable,
    StaleLayout,
    WrongLock,
)
from lull.vmm.service.pool import Piece, ServicePool
from lull.vmm.service.scratch import ScratchRange
from lull.vmm.service.state import Lock
from lull.vmm.tags import RestoreMode
from tests.integration.memory_service.conftest import World
from tests.memory_clients import TAG
from tests.memory_services import MIB, host_service, memory_service
from tests.waiting import wait_until

RW, EITHER = Lock.READ_WRITE, Lock.READ_WRITE_OR_READ_ONLY


def filled(world: World, value: int = 0x5A, **given: Any) -> ServicePool:
    """A committed pool of 4 MiB."""
    pool = world.attach(EITHER, **given)
    assert pool.writer
    region = pool.build({"x": Piece(4 * MIB, {"n": 1})})["x"]
    ctypes.memset(region.address, value, region.nbytes)
    pool.commit()
    return pool


def content(pool: ServicePool) -> bytes:
    region = pool.regions()["x"]
    return ctypes.string_at(region.address, region.nbytes)


class Waiting:
    """Somebody who waits for a lock in a thread."""

    def __init__(self, world: World, lock: Lock, driver: HostDriver | None = None) -> None:
        self.outcome: ServicePool | Exception | None = None
        self._thread = threading.Thread(target=self._run, args=(world, lock, driver))
        self._thread.start()

    def _run(self, world: World, lock: Lock, driver: HostDriver | None) -> None:
        try:
            self.outcome = world.attach(lock, driver, wait_seconds=30)
        except Exception as error:
            self.outcome = error

    def ended(self) -> ServicePool:
        self._thread.join(30)
        assert isinstance(self.outcome, ServicePool), self.outcome
        return self.outcome


def waiting_locks(world: World) -> list[str]:
    return [one["lock"] for one in world.service.pool().get("waiting", [])]


def test_a_write_through_a_reader_s_mapping_is_fatal_for_its_process_alone(world: World) -> None:
    world.clients.hold("w")
    assert world.clients.write_to("w") == -signal.SIGSEGV
    assert world.clients.life() == 0, "the contents are as they were"


def test_a_writer_comes_before_readers_that_asked_later(world: World) -> None:
    reader = filled(world)
    writer = Waiting(world, RW)
    wait_until(lambda: waiting_locks(world) == ["read_write"], 10, "the writer waits")
    late = Waiting(world, EITHER)
    wait_until(lambda: len(waiting_locks(world)) == 2, 10, "the reader waits behind it")
    reader.close()
    pool = writer.ended()
    assert pool.writer
    assert pool.regions() == {}, "a new writer begins with nothing"
    assert late.outcome is None
    pool.close()
    second = late.ended()
    assert second.writer, "nothing is committed any more"
    second.close()


def test_a_wait_ends_at_its_deadline_and_says_who_is_in_the_way(world: World) -> None:
    holder = world.clients.hold("w")
    with pytest.raises(LockTimeout, match=rf"used by processes \[{holder}\]"):
        world.attach(RW, wait_seconds=0)
    with pytest.raises(LockTimeout, match="no read_write lock within"):
        world.attach(RW, wait_seconds=0.1)
    world.attach().close()


def test_a_reader_without_anything_committed_waits_and_is_told(world: World) -> None:
    with pytest.raises(LockTimeout, match="nothing is committed"):
        world.attach(wait_seconds=0.05)


def test_a_waiting_client_that_dies_is_forgotten(world: World) -> None:
    reader = filled(world)
    client = world.service.client()
    client._socket.sendall(  # type: ignore[union-attr]
        _frame('{"op":"hello","version":1,"pool":"w","lock":"read_write","wait_seconds":3000,"oom_wait_seconds":0}')
    )
    wait_until(lambda: waiting_locks(world) == ["read_write"], 10, "it waits")
    client.close()
    wait_until(lambda: waiting_locks(world) == [], 10, "it is forgotten")
    world.attach().close()
    reader.close()


def _frame(text: str) -> bytes:
    return len(text).to_bytes(4, "big") + text.encode()


def test_out_of_memory_is_retried_within_its_bound_and_seen_by_everybody(world: World) -> None:
    other = HostDriver(world.device)
    handle = other.create(14 * MIB)
    pool = world.attach(EITHER, oom_wait_seconds=0)
    last = len(world.service.events())
    with pytest.raises(OutOfDeviceMemory) as caught:
        pool.allocate(4 * MIB)
    assert (caught.value.requested_bytes, caught.value.free_bytes) == (4 * MIB, 2 * MIB)
    assert world.service.events()[-1] == "allocation_oom"
    pool.close()

    patient = world.attach(EITHER, oom_wait_seconds=20)
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(patient.allocate(4 * MIB)))
    thread.start()
    wait_until(lambda: world.service.events()[last + 1 :].count("allocation_oom") >= 1, 10, "it waits for room")
    other.release(handle)
    thread.join(20)
    assert len(got) == 1
    patient.close()


def test_the_wait_for_memory_stops_when_its_client_goes(world: World) -> None:
    other = HostDriver(world.device)
    handle = other.create(14 * MIB)
    pool = world.attach(EITHER, oom_wait_seconds=20)
    client = pool._there.client._socket
    assert client is not None
    client.sendall(_frame('{"op":"allocate","bytes":4194304,"tag":"model_weights","oom_wait_seconds":20}'))
    before = world.service.events()
    wait_until(lambda: world.service.events()[-1] == "allocation_oom", 10, f"it waits for room after {before}")
    pool.close()
    wait_until(lambda: world.service.events()[-1] == "writer_aborted", 5, "the wait stopped")
    other.release(handle)


def test_a_wake_without_room_leaves_everything_parked_and_can_be_asked_again(world: World) -> None:
    pool = filled(world)
    addresses = [allocation.address for allocation in pool.allocations()]
    pool.release([TAG])
    other = HostDriver(world.device)
    handle = other.create(14 * MIB)
    with pytest.raises(OutOfDeviceMemory):
        pool.resume([TAG])
    assert (pool.parked_tags(), world.service.pool()["state"]) == ({TAG}, "parked")
    other.release(handle)
    pool.resume([TAG])
    assert [allocation.address for allocation in pool.allocations()] == addresses
    assert content(pool) == b"\x5a" * (4 * MIB)
    pool.close()


def test_a_wake_that_is_undone_copies_nothing_and_loses_nothing(world: World) -> None:
    pool = filled(world)
    pool.prepare_release([TAG])
    pool.abort_release()
    assert content(pool) == b"\x5a" * (4 * MIB)
    pool.release([TAG])
    pool.prepare_resume([TAG])
    pool.abort_resume()
    assert world.service.pool()["state"] == "parked"
    assert world.device.free_bytes() == world.device.capacity_bytes
    pool.resume([TAG])
    assert content(pool) == b"\x5a" * (4 * MIB)
    pool.close()


@pytest.mark.parametrize(
    ("mode", "keep", "kept"),
    [(RestoreMode.CPU, False, False), (RestoreMode.CPU, True, True), (RestoreMode.PINNED, False, True)],
)
def test_a_backup_is_kept_over_the_wake_where_that_was_asked(
    world: World, mode: RestoreMode, keep: bool, kept: bool
) -> None:
    pool = filled(world, mode=mode, keep_backup=keep)
    for _ in range(2):
        pool.release([TAG])
        assert world.service.pool()["backup_bytes"] == 4 * MIB
        pool.resume([TAG])
        assert world.service.pool()["backup_bytes"] == (4 * MIB if kept else 0)
        assert world.service.pool()["backup_clean"] is kept, "a clean one is not made again"
    assert content(pool) == b"\x5a" * (4 * MIB)
    pool.close()


def test_a_parked_engine_whose_weights_were_replaced_is_told_and_reads_nothing_wrong(world: World) -> None:
    pool = filled(world)
    pool.release([TAG])
    writer = world.attach(RW)
    writer.build({"x": Piece(2 * MIB)})
    writer.commit()
    with pytest.raises(ContentsLost) as caught:
        pool.resume([TAG])
    assert isinstance(caught.value.__cause__, StaleLayout)
    assert caught.value.lost == (TAG,)
    pool.close()
    writer.close()


def test_new_contents_in_the_same_layout_are_taken(world: World) -> None:
    """Weights that are updated in place: structure is what a layout is about."""
    pool = filled(world)
    pool.release([TAG])
    writer = world.attach(RW)
    region = writer.build({"x": Piece(4 * MIB, {"n": 1})})["x"]
    ctypes.memset(region.address, 0x77, region.nbytes)
    writer.commit()
    writer.close()
    pool.resume([TAG])
    assert content(pool) == b"\x77" * (4 * MIB)
    pool.close()


def test_only_writers_write_and_only_readers_park(world: World) -> None:
    writer = world.attach(RW)
    with pytest.raises(WrongLock):
        writer.release([TAG])
    with pytest.raises(LayoutInvalid):
        writer.commit()
    allocation = writer.allocate(MIB)
    ctypes.memset(allocation.address, 1, MIB)  # a refused commit left it writable
    with pytest.raises(LayoutInvalid):
        writer.publish("x", allocation, MIB, 1)
    writer.publish("x", allocation, 0, MIB)
    garbage = writer.allocate(MIB)
    writer.publish("load-time", garbage, 0, 1)
    writer.free(garbage)
    writer.commit()
    assert list(writer.regions()) == ["x"]
    for act in (lambda: writer.allocate(1), writer.commit, lambda: writer.publish("y", allocation, 0, 1)):
        with pytest.raises(WrongLock):
            act()
    client = writer._there.client
    refused: list[tuple[str, dict[str, Any]]] = [("free", {"slot": 0}), ("commit", {}), ("delete", {"key": "x"})]
    for op, fields in refused:
        with pytest.raises(WrongLock):
            client.ask(op, **fields)
    other = world.attach()
    assert other.regions().keys() == {"x"}
    other.close()
    writer.close()


def test_a_standby_initialises_over_scratch_and_gets_real_memory_when_the_primary_has_died(world: World) -> None:
    primary = world.clients.hold("w")
    driver = HostDriver(world.device)
    blocker = driver.create(8 * MIB)
    scratch = ScratchRange(driver, 8 * MIB, block_bytes=2 * MIB)
    ctypes.memset(scratch.address, 1, 8 * MIB)
    standby = Waiting(world, RW, driver)
    wait_until(lambda: waiting_locks(world) == ["read_write"], 10, "the standby waits for the lease")
    world.clients.kill(primary)
    pool = standby.ended()
    assert pool.writer
    driver.release(blocker)
    scratch.replace(pool.create_unmapped)
    assert ctypes.string_at(scratch.address, 8 * MIB) == bytes(8 * MIB)
    assert world.service.pool()["resident_bytes"] == 8 * MIB, "it is the service's: the next standby waits for it"
    scratch.close()
    pool.close()


def test_a_pool_that_keeps_nothing_parks_without_a_commit_and_comes_back_empty(world: World) -> None:
    """A KV cache in the service: its lock is the lease, its contents are nobody's."""
    pool = world.attach(RW, tag="kv_cache", mode=RestoreMode.NONE)
    region = pool.build({"kv": Piece(6 * MIB, "blocks")}, slab_bytes=2 * MIB)["kv"]
    ctypes.memset(region.address, 1, region.nbytes)
    pool.prepare_release(["kv_cache"])
    pool.abort_release()
    assert ctypes.string_at(region.address, 1) == b"\1"
    for _ in range(2):
        pool.release(["kv_cache"])
        assert pool.parked_tags() == {"kv_cache"}
        assert world.device.free_bytes() == world.device.capacity_bytes
        with pytest.raises(LockTimeout):
            world.attach(RW, wait_seconds=0)  # the lease is kept
        other = HostDriver(world.device)
        handle = other.create(12 * MIB)
        with pytest.raises(OutOfDeviceMemory):
            pool.resume(["kv_cache"])
        assert world.device.free_bytes() == 4 * MIB
        other.release(handle)
        pool.resume(["kv_cache"])
        assert pool.regions() == {"kv": region}
        assert ctypes.string_at(region.address, region.nbytes) == bytes(region.nbytes)
        ctypes.memset(region.address, 1, region.nbytes)
    pool.close()
    pool = filled(world)
    pool._mode = RestoreMode.NONE
    with pytest.raises(UnsupportedMode):
        pool.release([TAG])
    pool.close()


def test_a_service_that_is_replaced_gets_the_memory_from_who_still_has_it(tmp_path: Path) -> None:
    with host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device):
        first = ServicePool(HostDriver(device), service.socket, "w")
        region = first.build({"x": Piece(4 * MIB, "v")})["x"]
        ctypes.memset(region.address, 3, region.nbytes)
        first.commit()
        service.kill()
        with pytest.raises(ServiceUnavailable):
            service.state()
        assert content(first) == b"\3" * (4 * MIB), "an engine that runs needs no service"
        service.start()
        first.prepare_release([TAG])
        assert service.device_bytes(device.uuid) == 4 * MIB, "handed over, not copied"
        assert device.free_bytes() == 12 * MIB
        first.commit_release()
        assert device.free_bytes() == 16 * MIB
        second = ServicePool(HostDriver(device), service.socket, "w")
        assert second.regions()["x"].value == "v"
        assert content(second) == b"\3" * (4 * MIB)
        second.close()
        first.resume([TAG])
        first.release([TAG])
        service.kill()
        service.start()
        with pytest.raises(ContentsLost):
            first.resume([TAG])
        first.close()


def test_a_unified_device_is_not_parked(tmp_path: Path) -> None:
    HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB, kind="unified")
    with memory_service(tmp_path, str(tmp_path / "device")) as service:
        device = HostDevice.open(tmp_path / "device")
        pool = ServicePool(HostDriver(device), service.socket, "w")
        pool.build({"x": Piece(MIB)})
        pool.commit()
        with pytest.raises(UnsupportedMode):
            pool.release([TAG])
        assert pool.parked_tags() == frozenset()
        pool.close()

        other = HostDevice.create(tmp_path / "other", capacity_bytes=16 * MIB)
        with pytest.raises(ServiceRefused, match="serves"):
            ServicePool(HostDriver(other), service.socket, "w")
