"""The shell around ``decide``: lead, load, decide, commit. It wakes on every commit that a decision could depend on,
and on a tick. The only use of apscheduler: its jobs set flags and never work.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import time
from collections.abc import Callable
from typing import Final

import structlog
from apscheduler.schedulers.asyncio import AsyncIOScheduler

from .actions import Action, MarkSilent
from .decide import decide
from .errors import DatabaseUnavailable, NotLeader
from .leases import LeaseBook
from .model import Snapshot
from .settings import ServerSettings
from .store import Store

RENEW_SECONDS: Final = 2.0
TRIM_SECONDS: Final = 3600.0
_INLINE_ROWS_MAX: Final = 300  # above this, deciding would hold up the event loop: it goes to a thread

_log = structlog.get_logger("lull.scheduler")


class SchedulerLoop:
    """One per server. Several servers on one database may run it: one leads."""

    def __init__(self, store: Store, settings: ServerSettings) -> None:
        self._store = store
        self._settings = settings
        self._holder = f"{socket.gethostname()}:{os.getpid()}"
        self._leases = LeaseBook(settings.lease_grantor_seconds, settings.new_leader_grace_seconds)
        self._wake = asyncio.Event()
        self._renew_due = True
        self._trim_due = False
        self._stopping = False
        self._trouble: str | None = None
        self._task: asyncio.Task[None] | None = None
        self._unsubscribe: Callable[[], None] = lambda: None
        self._timers = AsyncIOScheduler(timezone="UTC", job_defaults={"coalesce": True, "max_instances": 1})

    @property
    def leads(self) -> bool:
        return self._store.term != 0

    async def start(self) -> None:
        """Returns once it leads or has seen that another does."""
        # A SQLite file belongs to one server; the term still guards against one that was only paused.
        await self._store.lead(
            self._holder, self._settings.leader_ttl_seconds, take_over=self._store.url.startswith("sqlite")
        )
        self._renew_due = False
        self._unsubscribe = self._store.subscribe(self._on_commit)
        self._timers.add_job(self._on_tick, "interval", seconds=self._settings.tick_seconds, misfire_grace_time=None)
        self._timers.add_job(self._on_renew, "interval", seconds=RENEW_SECONDS, misfire_grace_time=None)
        self._timers.add_job(self._on_trim, "interval", seconds=TRIM_SECONDS, misfire_grace_time=None)
        self._timers.start()
        self._wake.set()
        self._task = asyncio.create_task(self._run(), name="scheduler-loop")

    async def stop(self) -> None:
        """Ends after the pass that runs, and lets another lead at once."""
        task, self._task = self._task, None
        if task is None:
            return
        self._stopping = True
        self._unsubscribe()
        self._timers.shutdown(wait=False)
        self._wake.set()
        await task
        with contextlib.suppress(DatabaseUnavailable):
            await self._store.resign()

    def _on_commit(self, topics: frozenset[str]) -> None:
        if "decide" in topics:
            self._wake.set()

    # apscheduler runs plain functions in a thread of its own pool; coroutines run in the event loop.
    async def _on_tick(self) -> None:
        self._wake.set()

    async def _on_renew(self) -> None:
        self._renew_due = True
        self._wake.set()

    async def _on_trim(self) -> None:
        self._trim_due = True
        self._wake.set()

    async def _run(self) -> None:
        while not self._stopping:
            await self._wake.wait()
            self._wake.clear()
            try:
                await self._pass()
            except NotLeader as error:
                self._leases.forget()
                _log.warning("leadership lost", detail=str(error))
            except DatabaseUnavailable as error:
                # Nothing could be heard meanwhile: that says nothing about the nodes.
                self._leases.forget()
                self._note_trouble(str(error))
            except Exception:  # noqa: BLE001 - one bad pass must not end deciding; the tick tries again
                _log.exception("a scheduling pass failed")
            else:
                self._note_trouble(None)

    async def _pass(self) -> None:
        if self._renew_due:
            self._renew_due = False
            if await self._store.lead(self._holder, self._settings.leader_ttl_seconds) is None:
                self._leases.forget()
        if not self.leads:
            return
        snapshot = await self._store.load_snapshot(time.time())
        actions = await self._decide(snapshot)
        if actions:
            await self._store.commit(actions, time.time())
        if self._trim_due:
            self._trim_due = False
            await self._store.trim(time.time())

    async def _decide(self, snapshot: Snapshot) -> tuple[Action, ...]:
        late = self._leases.overdue(snapshot.nodes, time.monotonic())
        if late:
            # Marked first: the decision that follows the commit does not count on them any more.
            return tuple(MarkSilent(node.id, node.heard_count) for node in late)
        now = time.time()
        rows = len(snapshot.jobs) + len(snapshot.devices) + len(snapshot.attempts)
        if rows <= _INLINE_ROWS_MAX:
            return decide(snapshot, now)
        return await asyncio.to_thread(decide, snapshot, now)

    def _note_trouble(self, trouble: str | None) -> None:
        """Said once when it comes and once when it goes."""
        if trouble == self._trouble:
            return
        if trouble is None:
            _log.info("the database is back")
        else:
            _log.error("no decisions: the database cannot be used", detail=trouble)
        self._trouble = trouble
