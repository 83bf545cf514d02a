"""What all connections of one memory service share: the pools, the events, and the mutex.

A thread serves each connection, so a copy or a wait of one client stops nobody else. The mutex guards locks, layouts
and events; no driver call and no copy is made under it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .. import host_memory
from ..driver import Driver
from . import protocol
from .errors import ServiceRefused
from .held_pool import HeldPool
from .state import EventRing, Phase


@dataclass(frozen=True, slots=True)
class Limits:
    """Every bound of a service. Seconds and counts."""

    clients_max: int = 64
    pools_max: int = 64
    silent_seconds_max: float = 30.0  # for a client without a lock to say something
    crowded_silent_seconds_max: float = 1.0  # the same while all places are taken and another client wants one
    send_seconds_max: float = 10.0  # for a client to take an answer
    park_seconds_max: float = 600.0  # to wait for another client's park or wake
    oom_wait_seconds_max: float = 60.0  # for memory of the device to become free
    oom_retry_seconds: float = 0.5


class Holdings:
    """What the connections of one service share. Methods that say so want the mutex held."""

    def __init__(
        self,
        driver: Driver,
        limits: Limits = Limits(),
        *,
        copy_threads: int = 2,
        host_bytes_available: Callable[[], int] = host_memory.available_bytes,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self.driver = driver
        self.limits = limits
        self.mutex = threading.Lock()
        self.events = EventRing(clock)
        self.pools: dict[str, HeldPool] = {}
        self.stopping = False
        self._copy_threads = copy_threads
        self._host_bytes_available = host_bytes_available
        self._wakers: dict[int, int] = {}
        self._sessions = 0
        self._started_at = clock()

    def pool(self, name: str) -> HeldPool:
        """With the mutex held: the pool, new if there is none of that name."""
        if name not in self.pools:
            if len(self.pools) >= self.limits.pools_max:
                raise ServiceRefused(f"the service holds {self.limits.pools_max} pools already")
            self.pools[name] = HeldPool(
                name,
                self.driver,
                self.events,
                copy_threads=self._copy_threads,
                host_bytes_available=self._host_bytes_available,
            )
        return self.pools[name]

    def new_session(self, waker: int) -> int:
        """With the mutex held: the number of a session, whose thread is woken by the event descriptor ``waker``."""
        self._sessions += 1
        self._wakers[self._sessions] = waker
        return self._sessions

    def settle(self, pool: HeldPool) -> None:
        """With the mutex held, after every change of the pool: grants, and wakes who waits."""
        pool.state.settle(time.monotonic())
        for number in pool.state.sessions:
            os.eventfd_write(self._wakers[number], 1)

    def leave(self, pool: HeldPool, number: int) -> None:
        """With the mutex held: the session has ended. A pool that holds nothing and has no sessions is forgotten."""
        self._wakers.pop(number, None)
        self.settle(pool)
        state = pool.state
        if not (state.sessions or state.layout_hash or state.activity or pool.layout.slots):
            self.pools.pop(pool.name, None)

    def describe(self) -> dict[str, Any]:
        """What the service holds, for whoever asks."""
        with self.mutex:
            return {
                "version": protocol.VERSION,
                "pid": os.getpid(),
                "device": self.driver.device_uuid,
                "failed": self.driver.failed,
                "started_at": self._started_at,
                "pools": [_describe(pool) for pool in self.pools.values()],
            }


def _describe(pool: HeldPool) -> dict[str, Any]:
    state, now = pool.state, time.monotonic()
    return {
        "name": pool.name,
        "state": str(state.word()),
        "activity": None if state.activity is None else str(state.activity),
        "committed": state.committed,
        "generation": state.generation,
        "layout_hash": state.layout_hash,
        "tags": sorted({record.tag for record in pool.layout.slots.values()}),
        "allocations": len(pool.layout.slots),
        "entries": len(pool.layout.entries),
        "bytes": pool.layout.reserved_bytes,
        "resident_bytes": pool.resident_bytes(),
        "backup_bytes": pool.backup_bytes(),
        "backup_clean": state.backup_clean,
        "writer_pids": state.pids(Phase.WRITER, Phase.DATA_WRITER),
        "reader_pids": state.pids(Phase.READER, Phase.LEAVING),
        "parked_pids": state.pids(Phase.PARKED),
        "data": None
        if state.data is None
        else {
            "grants": state.data.grants,
            "written": len(state.data.written),
            "torn": len(state.data.torn),
            "survivor_pid": None if state.data.survivor is None else state.data.survivor[0],
        },
        "waiting": [
            {"pid": session.pid, "lock": str(session.lock), "seconds": round(now - session.since, 3)}
            for session in state.sessions.values()
            if session.phase in (Phase.WAITING, Phase.WAKER)
        ],
    }
