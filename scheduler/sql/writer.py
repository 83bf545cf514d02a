"""The one thread that writes. It takes whatever was asked while the last commit ran and commits it together.

Each request runs in a savepoint, so a bad one fails alone. Callers are answered after the commit has been flushed.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Generic, TypeVar

from sqlalchemy import URL, BigInteger, Connection, Engine, bindparam, exc, insert, update

from ..errors import DatabaseUnavailable, SchedulerError, WriterBusy
from ..tables import counters, events
from . import database

T = TypeVar("T")

_QUEUE_MAX: Final = 2000
_BATCH_MAX: Final = 200
_TRIES_MAX: Final = 5

# Built once: building a statement costs more than running it.
_COUNT_UP: Final = (
    update(counters)
    .where(counters.c.name == "events")
    .values(value=counters.c.value + bindparam("more", type_=BigInteger))
    .returning(counters.c.value)
)
_INSERT_EVENTS: Final = insert(events)


@dataclass(slots=True)
class Tx:
    """One request's view of the transaction. Its events and topics count only if it succeeds."""

    conn: Connection
    events: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    topics: set[str] = field(default_factory=set[str])

    def touch(self, *topics: str) -> None:
        self.topics.update(topics)

    def event(
        self,
        type_: str,
        sentence: str,
        at: float,
        *,
        actor: str = "scheduler",
        severity: str = "info",
        from_state: str | None = None,
        to_state: str | None = None,
        data: Mapping[str, Any] | None = None,
        job_id: str | None = None,
        attempt_id: str | None = None,
        loan_id: str | None = None,
        engine_id: str | None = None,
        device_id: str | None = None,
        node_id: str | None = None,
    ) -> None:
        row: dict[str, Any] = {
            "at": at,
            "type": type_,
            "severity": severity,
            "actor": actor,
            "sentence": sentence,
            "from_state": from_state,
            "to_state": to_state,
            "data": dict(data or {}),
            "job_id": job_id,
            "attempt_id": attempt_id,
            "loan_id": loan_id,
            "engine_id": engine_id,
            "device_id": device_id,
            "node_id": node_id,
        }
        self.events.append(row)
        self.topics.add("events")

    def mark(self) -> tuple[int, set[str]]:
        """Where ``undo_to`` comes back to when a savepoint inside the request is rolled back."""
        return len(self.events), set(self.topics)

    def undo_to(self, mark: tuple[int, set[str]]) -> None:
        del self.events[mark[0] :]
        self.topics.clear()
        self.topics.update(mark[1])


@dataclass(slots=True)
class _Request(Generic[T]):
    work: Callable[[Tx], T]
    future: asyncio.Future[T]
    result: T | None = None
    error: BaseException | None = None


class Writer:
    """``submit`` from the event loop; the thread answers there too."""

    def __init__(self, url: URL, loop: asyncio.AbstractEventLoop, notify: Callable[[frozenset[str]], None]) -> None:
        self._url = url
        self._loop = loop
        self._notify = notify
        self._queue: queue.Queue[_Request[Any] | None] = queue.Queue(_QUEUE_MAX + 1)
        self._thread = threading.Thread(target=self._run, name="lull-writer", daemon=True)
        self._engine: Engine | None = None
        self._connection: Connection | None = None
        self._connection_used = 0
        self._committing = False

    def start(self) -> None:
        self._thread.start()

    def stop(self, seconds_max: float = 30.0) -> None:
        self._queue.put(None)
        self._thread.join(seconds_max)

    async def submit(self, work: Callable[[Tx], T]) -> T:
        if self._queue.qsize() >= _QUEUE_MAX:
            raise WriterBusy(f"{_QUEUE_MAX} writes are waiting already")
        request: _Request[T] = _Request(work, self._loop.create_future())
        self._queue.put_nowait(request)
        return await request.future

    # ---- in the thread ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        ending = False
        while not ending:
            batch: list[_Request[Any]] = []
            item = self._queue.get()
            while True:
                if item is None:
                    ending = True
                    break
                batch.append(item)
                if len(batch) == _BATCH_MAX:
                    break
                try:
                    item = self._queue.get_nowait()
                except queue.Empty:
                    break
            if batch:
                self._answer(batch, self._commit(batch))
        self._disconnect()

    def _commit(self, batch: list[_Request[Any]]) -> frozenset[str]:
        """Runs the batch in one transaction; returns its topics. Fills in every request's result or error."""
        failure: Exception = DatabaseUnavailable("the database ended the connection again and again")
        for tries_left in range(_TRIES_MAX - 1, -1, -1):
            for request in batch:
                request.result = request.error = None
            try:
                return self._commit_once(batch)
            except exc.DBAPIError as error:
                fresh = self._connection_used == 1
                self._disconnect()
                if tries_left and database.may_run_again(error):
                    continue
                if error.connection_invalidated and not self._committing and not fresh:
                    continue  # the connection had died since its last use; nothing of this was committed
                failure = database.unavailable(error)
            except exc.SQLAlchemyError as error:
                self._disconnect()
                failure = database.unavailable(error)
            except Exception as error:  # noqa: BLE001 - the callers get it; the thread has to live on
                self._disconnect()
                failure = error
            break
        for request in batch:
            request.error = failure
        return frozenset()

    def _commit_once(self, batch: list[_Request[Any]]) -> frozenset[str]:
        connection = self._connect()
        self._connection_used += 1
        self._committing = False
        rows: list[dict[str, Any]] = []
        topics: set[str] = set()
        alone = len(batch) == 1
        with connection.begin() as transaction:
            for request in batch:
                tx = Tx(connection)
                savepoint = None if alone else connection.begin_nested()
                try:
                    request.result = request.work(tx)
                except Exception as error:
                    if isinstance(error, exc.SQLAlchemyError) and not database.is_fault_of_the_request(error):
                        raise
                    request.error = _as_answer(error)
                    if savepoint is None:
                        transaction.rollback()
                        return frozenset()
                    savepoint.rollback()
                    continue
                if savepoint is not None:
                    savepoint.commit()
                rows += tx.events
                topics |= tx.topics
            _write_events(connection, rows)
            self._committing = True  # from here on a lost connection leaves open what became of it
        return frozenset(topics)

    def _connect(self) -> Connection:
        if self._connection is None:
            if self._engine is None:
                self._engine = database.open_engine(self._url, writes=True)
            self._connection = self._engine.connect()
            self._connection_used = 0
        return self._connection

    def _disconnect(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.invalidate()
            connection.close()
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.dispose()

    def _answer(self, batch: list[_Request[Any]], topics: frozenset[str]) -> None:
        def resolve() -> None:
            for request in batch:
                if request.future.done():  # the caller went away
                    continue
                if request.error is not None:
                    request.future.set_exception(request.error)
                else:
                    request.future.set_result(request.result)
            if topics:
                self._notify(topics)

        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(resolve)


def _as_answer(error: Exception) -> Exception:
    if isinstance(error, SchedulerError) or not isinstance(error, exc.SQLAlchemyError):
        return error
    return database.refused(error)


def _write_events(connection: Connection, rows: list[dict[str, Any]]) -> None:
    """Last in the transaction: the counter's row lock is held to the commit, so that seqs appear in their order
    even with several writers on PostgreSQL, and no reader who has seen seq n can miss one below it."""
    if not rows:
        return
    last = connection.execute(_COUNT_UP, {"more": len(rows)}).scalar_one()
    for seq, row in enumerate(rows, start=last - len(rows) + 1):
        row["seq"] = seq
    connection.execute(_INSERT_EVENTS, rows)
