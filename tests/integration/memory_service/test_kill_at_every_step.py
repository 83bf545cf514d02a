"""kill -9 at every step of the protocol: of the client, in the middle of what it asked for and after the answer."""

from __future__ import annotations

import ctypes
import signal

import pytest

from lull.vmm.service.pool import ServicePool
from tests.integration.memory_service.conftest import World
from tests.memory_clients import A_BYTES, B_BYTES, DEVICE_BYTES
from tests.waiting import wait_until

STEPS_MIN = 13  # of one life: fewer means that the killing did not happen


def contents_right(pool: ServicePool) -> bool:
    regions = pool.regions()
    a = ctypes.string_at(regions["a"].address, A_BYTES)
    b = ctypes.string_at(regions["b"].address, B_BYTES)
    return a == b"\x5a" * A_BYTES and b == b"\xa5" * B_BYTES


def check_what_a_death_left(world: World) -> str:
    """Nothing half-built, nothing wrong, nothing lost that was committed, nothing leaked: which of the two it is."""

    def settled() -> bool:
        pool = world.service.pool()
        users = [*pool.get("writer_pids", []), *pool["reader_pids"], *pool.get("parked_pids", [])]
        return not users and not pool.get("activity")

    wait_until(settled, 10, "the dead client forgotten")
    pool = world.service.pool()
    if pool["state"] == "gone":
        assert world.service.device_bytes(world.device.uuid) == 0
        assert world.device.free_bytes() == world.device.capacity_bytes
        return "gone"
    assert pool["state"] in ("committed", "parked")
    assert pool["resident_bytes"] == (DEVICE_BYTES if pool["state"] == "committed" else 0)
    assert world.device.capacity_bytes - world.device.free_bytes() == pool["resident_bytes"]
    reader = world.attach()
    assert contents_right(reader)
    reader.close()
    return "kept"


@pytest.mark.parametrize(
    ("start", "moment"),
    [
        ("empty", "answered"),
        pytest.param("committed", "sent", marks=pytest.mark.long),
        pytest.param("empty", "sent", marks=pytest.mark.long),
        pytest.param("committed", "answered", marks=pytest.mark.long),
    ],
)
def test_a_client_killed_at_any_step_leaves_all_or_nothing(world: World, start: str, moment: str) -> None:
    world.clear()
    before = world.service.footprint_at_rest()
    outcomes: list[str] = []
    for step in range(1, 100):
        if start == "committed":
            assert world.clients.life() == 0
        code = world.clients.life(kill_at=step, moment=moment)
        if code == 0:
            break
        assert code == -signal.SIGKILL
        outcomes.append(check_what_a_death_left(world))
        world.clear()
        wait_until(lambda: world.service.footprint() == before, 10, "nothing of it left in the service")
    assert len(outcomes) >= STEPS_MIN
    if start == "committed":
        assert set(outcomes) == {"kept"}, "what is committed survives every death of a reader"
    else:
        first_kept = outcomes.index("kept")
        assert set(outcomes[:first_kept]) == {"gone"}
        assert set(outcomes[first_kept:]) == {"kept"}


def test_a_user_who_came_after_a_park_takes_it_back(world: World) -> None:
    parked = world.clients.hold("w", "release")
    reading = world.clients.hold("w")
    waking = world.service.pool()
    assert (waking["state"], waking["reader_pids"], waking["parked_pids"]) == ("reading", [reading], [parked])
    world.clients.kill(reading)
    wait_until(lambda: world.service.pool()["state"] == "committed", 10, "the reader gone")
    assert world.service.events()[-1] == "user_gone", "it had come back after the park: nobody asked for one since"


def test_a_park_takes_effect_when_the_other_user_dies(world: World) -> None:
    reading = world.clients.hold("w")
    world.clients.hold("w", "release")
    assert world.service.pool()["state"] == "reading"
    assert world.device.free_bytes() == world.device.capacity_bytes - DEVICE_BYTES
    world.clients.kill(reading)
    wait_until(lambda: world.service.pool()["state"] == "parked", 10, "the memory given back")
    assert world.device.free_bytes() == world.device.capacity_bytes
