"""A service that is stopped, not dead: nobody waits for it as for one that has work to do."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from lull.vmm.service import client
from lull.vmm.service.errors import LockTimeout, ServiceUnavailable
from lull.vmm.service.pool import Piece
from lull.vmm.service.state import Lock
from tests.frozen import freeze
from tests.integration.memory_service.conftest import World
from tests.memory_clients import TAG
from tests.memory_services import MIB

pytestmark = pytest.mark.usefixtures("quick")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "ALIVE_EVERY_SECONDS", 0.1)
    monkeypatch.setattr(client, "ALIVE_SECONDS_MAX", 1.0)


@contextmanager
def stopped(world: World) -> Iterator[None]:
    freeze(world.service.pid)
    try:
        yield
    finally:
        os.kill(world.service.pid, signal.SIGCONT)


def test_an_attach_to_a_stopped_service_ends_soon_whatever_it_may_wait_for(world: World) -> None:
    began = time.monotonic()
    with stopped(world), pytest.raises(ServiceUnavailable, match="no answer to hello, and"):
        world.attach(wait_seconds=300)
    assert time.monotonic() - began < 30


def test_an_engine_whose_park_finds_a_stopped_service_runs_on_and_parks_later(world: World) -> None:
    pool = world.attach(Lock.READ_WRITE)
    region = pool.build({"x": Piece(MIB)})["x"]
    ctypes.memset(region.address, 5, MIB)
    pool.commit()
    with stopped(world), pytest.raises(ServiceUnavailable, match="no answer to prepare_park"):
        pool.release([TAG])
    assert ctypes.string_at(region.address, MIB) == b"\5" * MIB
    pool.release([TAG])
    assert world.device.free_bytes() == world.device.capacity_bytes
    with stopped(world), pytest.raises(ServiceUnavailable, match="no answer to resume"):
        pool.resume([TAG])
    pool.resume([TAG])
    assert ctypes.string_at(region.address, MIB) == b"\5" * MIB
    pool.close()


def test_a_service_that_is_waited_for_and_answers_others_is_waited_for_to_the_end(world: World) -> None:
    pool = world.attach(Lock.READ_WRITE)
    with pytest.raises(LockTimeout, match=r"within 1\.0 s"):
        world.attach(wait_seconds=1)  # several looks on the way
    pool.close()
