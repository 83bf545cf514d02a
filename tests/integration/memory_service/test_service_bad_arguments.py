"""What is asked for wrongly is said before anything is sent, and costs no lock, no memory and nothing written."""

from __future__ import annotations

from typing import Any

import pytest

from lull.vmm import Lock, Piece, Runtime, ServicePool
from lull.vmm.errors import OutOfDeviceMemory, PoolClosed, TransitionRefused, UnsupportedMode
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.errors import LayoutInvalid, ServiceUnavailable
from lull.vmm.tags import InvalidTag, RestoreMode
from tests.integration.memory_service.conftest import World
from tests.memory_services import MIB
from tests.waiting import wait_until

EITHER = Lock.READ_WRITE_OR_READ_ONLY
BAD_PIECES: list[tuple[Any, Any]] = [
    ("c", Piece(0)),
    ("c", Piece(-1)),
    ("c", Piece(5.5)),  # type: ignore[arg-type]
    ("c", Piece(True)),
    ("c", Piece(1 << 62)),
    ("c", Piece(5, "v" * 20000)),
    ("c", Piece(5, object())),
    ("c", Piece(5, float("nan"))),
    ("", Piece(5)),
    ("a b", Piece(5)),
    ("k" * 513, Piece(5)),
    (None, Piece(5)),
]


def test_bad_pieces_and_places_leave_the_pool_as_it_was(world: World) -> None:
    with_all = world.attach(EITHER)
    with_all.build({"base": Piece(MIB, {"n": 1})})
    (allocation,) = with_all.allocations()
    for key, piece in BAD_PIECES:
        with pytest.raises(LayoutInvalid, match="entry "):
            with_all.build({"good": Piece(5), key: piece})
    for offset, nbytes in [(-1, 5), (0, 0), (0, MIB + 1), (2 * MIB, 5), (0, -5), (1 << 70, 1), (0.5, 1)]:
        with pytest.raises(LayoutInvalid, match="entry k"):
            with_all.publish("k", allocation, offset, nbytes)  # type: ignore[arg-type]
    for bad_bytes in (0, -1, 1.5, "x", None, 1 << 62):
        with pytest.raises(ValueError, match="nbytes is"):
            with_all.allocate(bad_bytes)  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="nbytes is"):
            with_all.create_unmapped(bad_bytes)  # type: ignore[arg-type]
    assert (with_all.writer, with_all.failed, with_all.allocations()) == (True, None, (allocation,))
    with_all.commit()
    assert list(with_all.regions()) == ["base"]
    with_all.close()


def test_a_build_without_room_leaves_nothing_behind(world: World) -> None:
    pool = world.attach(EITHER, oom_wait_seconds=0)
    with pytest.raises(OutOfDeviceMemory):
        pool.build({"a": Piece(4 * MIB), "b": Piece(32 * MIB)}, slab_bytes=4 * MIB)
    assert (pool.allocations(), pool.regions(), world.device.free_bytes()) == ((), {}, world.device.capacity_bytes)
    pool.close()


def test_a_writer_that_lost_its_lock_says_what_became_of_the_pool(world: World) -> None:
    pool = world.attach(EITHER)
    pool.build({"base": Piece(MIB)})
    assert pool._there.client._socket is not None
    pool._there.client._socket.shutdown(2)
    wait_until(lambda: world.service.pool()["state"] == "gone", 10, "the service has cleared it")
    assert pool.failed is not None
    assert "the service has cleared this pool; build the engine again" in pool.failed
    for again in (pool.commit, lambda: pool.allocate(MIB), lambda: pool.build({"x": Piece(1)})):
        with pytest.raises(ServiceUnavailable, match="has cleared this pool"):
            again()
    pool.close()


def test_a_closed_pool_says_so(world: World) -> None:
    pool = world.attach(EITHER)
    pool.build({"base": Piece(MIB)})
    pool.commit()
    runtime = Runtime(pool)
    with runtime.step(), pytest.raises(TransitionRefused, match="1 step"):
        pool.close()
    assert pool.regions()["base"].nbytes == MIB
    pool.release([pool.tag])
    pool.close()
    assert runtime.status().state == "failed"
    assert pool.failed == "pool w is closed"
    for again in (pool.commit, lambda: pool.allocate(MIB), lambda: pool.resume([pool.tag])):
        with pytest.raises(PoolClosed, match="pool w is closed; make another"):
            again()
    wait_until(lambda: world.service.pool()["parked_pids"] == [], 10, "the closed pool forgotten")
    pool.close()


@pytest.mark.parametrize(
    ("settings", "kind", "match"),
    [
        ({"name": ""}, ValueError, "name is ''"),
        ({"name": "../x"}, ValueError, "name is"),
        ({"name": None}, ValueError, "name is None"),
        ({"tag": "A b"}, InvalidTag, "tag is 'A b'"),
        ({"tag": None}, InvalidTag, "tag is None"),
        ({"mode": "cpu"}, UnsupportedMode, "cpu"),
        ({"mode": 5}, UnsupportedMode, "5"),
        ({"lock": "nope"}, ValueError, "lock is 'nope'"),
        ({"lock": Lock.PARKED}, ValueError, "lock is"),
        ({"wait_seconds": -1}, ValueError, "wait_seconds is -1"),
        ({"wait_seconds": float("nan")}, ValueError, "wait_seconds is nan"),
        ({"wait_seconds": "1"}, ValueError, "wait_seconds is '1'"),
        ({"oom_wait_seconds": 1e9}, ValueError, "oom_wait_seconds is"),
        ({"park_seconds_max": 0}, ValueError, "park_seconds_max is 0"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_is_asked(
    world: World, settings: dict[str, Any], kind: type[Exception], match: str
) -> None:
    given: dict[str, Any] = {"name": "w", **settings}
    with pytest.raises(kind, match=match):
        ServicePool(HostDriver(world.device), world.service.socket, **given)
    assert world.service.state()["pools"] == []


def test_the_exact_name_of_a_mode_is_that_mode(world: World) -> None:
    mode: Any = "PINNED"
    pool = world.attach(EITHER, mode=mode)
    assert pool._mode is RestoreMode.PINNED
    pool.close()
