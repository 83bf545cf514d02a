"""The one door to SQL. Every write goes through one thread that commits in groups; readers have connections of
their own. State, events and orders of one change commit together. The statements are in ``sql/``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from sqlalchemy import Connection

from ..agents.protocol.policy import EnginePolicy
from ..agents.protocol.wire import Order, OrderEnvelope, Register, Registered, ReportBatch, ReportsAnswer
from . import plan_answer
from .actions import Action
from .errors import DatabaseUnavailable, DuplicateIdentity, NotFound, NotLeader, StaleIncarnation
from .lifecycle import JobState
from .model import (
    AttemptRow,
    EngineRow,
    EventRow,
    Interval,
    JobRow,
    LoanRow,
    LogTail,
    NodeRow,
    OperationRow,
    PolicyRow,
    Snapshot,
    SubmitResult,
)
from .requests import JobRequest, ParkRequest
from .sql import (
    agent_writes,
    database,
    decisions,
    engine_sleep,
    job_writes,
    leadership,
    log_tails,
    operations,
    operator_verbs,
    policies,
    reading,
    registration,
    reports,
    retention,
    snapshots,
)
from .sql.writer import Tx, Writer

T = TypeVar("T")

_READERS = 4
_REFUSED_MAX = 1000


class Store:
    """Jobs, nodes, engines, loans, orders, reports, events and history.

    Raises the classes of ``errors``; DatabaseUnavailable means that nothing was promised. A method that returns
    has committed.
    """

    def __init__(self, url: str, *, queue_jobs_max: int = 10_000, lease_seconds: float = 30.0) -> None:
        """``url``: ``sqlite:///PATH`` or ``postgresql://…`` (psycopg)."""
        self._url = database.normalize_url(url)
        self._queue_jobs_max = queue_jobs_max
        self._lease_seconds = lease_seconds
        self._subscribers: dict[object, Callable[[frozenset[str]], None]] = {}
        self._writer: Writer | None = None
        self._readers: ThreadPoolExecutor | None = None
        self._engine: database.ReadEngine | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._term = 0
        self._refused: list[str] = []  # agents that were told that their node's id is another one's

    @property
    def url(self) -> str:
        """The address without its password."""
        return database.display_url(self._url)

    @property
    def term(self) -> int:
        """The term that this store's writes of decisions are guarded by; 0 while it does not lead."""
        return self._term

    async def start(self) -> None:
        """Migrates to head and starts the writer. Raises SchemaTooNew, DatabaseUnavailable."""
        self._loop = asyncio.get_running_loop()
        await asyncio.to_thread(database.migrate, self._url)
        self._engine = database.ReadEngine(self._url)
        self._readers = ThreadPoolExecutor(_READERS, thread_name_prefix="lull-read")
        self._writer = Writer(self._url, self._loop, self._notify)
        self._writer.start()

    async def close(self) -> None:
        """Ends after what was asked before has been answered."""
        writer, self._writer = self._writer, None
        if writer is not None:
            await asyncio.to_thread(writer.stop)
        readers, self._readers = self._readers, None
        if readers is not None:
            await asyncio.to_thread(readers.shutdown)
        if self._engine is not None:
            self._engine.dispose()
            self._engine = None
        self._subscribers.clear()

    def subscribe(self, callback: Callable[[frozenset[str]], None]) -> Callable[[], None]:
        """Calls ``callback(topics)`` in the event loop after each commit; returns what ends it.

        Topics: ``jobs``, ``engines``, ``nodes``, ``loans``, ``events``, ``decide`` (something that a decision looks
        at) and ``orders:<node_id>``.
        """
        key = object()
        self._subscribers[key] = callback
        return lambda: (self._subscribers.pop(key, None), None)[1]

    # ---- users ------------------------------------------------------------------------------------------------

    async def submit_job(
        self, request: JobRequest, principal: str, idempotency_key: str | None, body_sha256: str, now: float
    ) -> SubmitResult:
        """Raises IdempotencyMismatch, QueueFull, Unsatisfiable. Returned means committed and flushed."""
        return await self._write(
            lambda tx: job_writes.submit(
                tx, request, principal, idempotency_key, body_sha256, now, self._queue_jobs_max
            )
        )

    async def get_job(self, job_id: str, now: float | None = None) -> JobRow:
        """With its attempts and, while it waits, its reasons. Raises NotFound."""
        return await self._read(lambda conn: reading.job(conn, job_id, _now(now)))

    async def list_jobs(
        self,
        *,
        states: Sequence[JobState] = (),
        project: str | None = None,
        limit: int = 100,
        cursor: str | None = None,
        now: float | None = None,
    ) -> tuple[list[JobRow], str | None]:
        """Newest first, and the cursor of the next page. Raises InvalidRequest for a foreign cursor."""
        return await self._read(lambda conn: reading.jobs_page(conn, states, project, limit, cursor, _now(now)))

    async def list_attempts(self, job_id: str) -> list[AttemptRow]:
        """Oldest first. Raises NotFound."""
        return list((await self.get_job(job_id)).attempts)

    async def get_attempt(self, attempt_id: str) -> AttemptRow:
        """Raises NotFound."""
        return await self._read(lambda conn: reading.attempt(conn, attempt_id))

    async def cancel_job(self, job_id: str, principal: str, now: float) -> JobRow:
        """Cancelled at once while queued, else `stopping` until the attempt is over. A second call changes
        nothing. Raises NotFound; Conflict with the real state once the job has ended otherwise."""
        await self._write(lambda tx: job_writes.cancel(tx, job_id, principal, now))
        return await self.get_job(job_id, now)

    async def hold_job(self, job_id: str, principal: str, now: float) -> JobRow:
        """A queued job waits until it is released. Raises NotFound; Conflict unless it is queued or held."""
        await self._write(lambda tx: job_writes.hold(tx, job_id, principal, now))
        return await self.get_job(job_id, now)

    async def release_job(self, job_id: str, principal: str, now: float) -> JobRow:
        """Raises NotFound; Conflict unless it is held or queued."""
        await self._write(lambda tx: job_writes.release(tx, job_id, principal, now))
        return await self.get_job(job_id, now)

    async def retry_job(self, job_id: str, principal: str, idempotency_key: str | None, now: float) -> SubmitResult:
        """Submits anew what an ended job asked for; its own result stays. Asked again within a day, it answers the job
        that was made so, as long as that has not ended. Raises NotFound, Conflict unless the job has ended without
        success, and what ``submit_job`` raises."""
        return await self._write(
            lambda tx: job_writes.retry(tx, job_id, principal, idempotency_key, now, self._queue_jobs_max)
        )

    async def resolve_attempt(
        self, attempt_id: str, outcome: operator_verbs.Outcome, principal: str, now: float, *, confirmed: bool = False
    ) -> AttemptRow:
        """Ends an attempt of unknown fate by an operator's word. `requeue` may run its job twice, which has to be
        ``confirmed``. Raises NotFound; Conflict with the state of one that is not unknown; InvalidRequest."""
        await self._write(
            lambda tx: operator_verbs.resolve_attempt(tx, attempt_id, outcome, principal, now, confirmed=confirmed)
        )
        return await self.get_attempt(attempt_id)

    async def give_up_loan(self, loan_id: str, principal: str, now: float) -> LoanRow:
        """Orders a faulted loan to be closed as it is. Raises NotFound; Conflict with the state of any other."""
        await self._write(lambda tx: operator_verbs.give_up_loan(tx, loan_id, principal, now))
        return await self.get_loan(loan_id)

    async def restart_engine(self, id_or_name: str, principal: str, now: float) -> EngineRow:
        """Orders a supervised engine to be restarted. Raises NotFound; Conflict while its devices are lent, while it
        is parked, and for an attached one."""
        engine_id = await self._write(lambda tx: operator_verbs.restart_engine(tx, id_or_name, principal, now))
        return await self.get_engine(engine_id)

    async def park_engine(
        self, id_or_name: str, request: ParkRequest, principal: str, idempotency_key: str | None, now: float
    ) -> OperationRow:
        """Orders an engine to be parked without a job. Raises NotFound, PolicyNotHonoured, IdempotencyMismatch; and
        Conflict with the way out."""
        operation_id = await self._write(
            lambda tx: engine_sleep.park(tx, id_or_name, request, principal, idempotency_key, now)
        )
        return await self.get_operation(operation_id)

    async def resume_engine(
        self, id_or_name: str, principal: str, idempotency_key: str | None, now: float
    ) -> OperationRow:
        """Orders an engine that is parked without a job to be woken. Raises NotFound, IdempotencyMismatch; and Conflict
        with the way out."""
        operation_id = await self._write(
            lambda tx: engine_sleep.resume(tx, id_or_name, principal, idempotency_key, now)
        )
        return await self.get_operation(operation_id)

    async def get_operation(self, operation_id: str) -> OperationRow:
        """Raises NotFound."""
        return await self._read(lambda conn: operations.operation(conn, operation_id))

    async def recall_loan(self, loan_id: str, principal: str, now: float) -> LoanRow:
        """Orders a loan to be ended early; its jobs are queued again. Raises NotFound; Conflict once it is over."""
        await self._write(lambda tx: engine_sleep.recall(tx, loan_id, principal, now))
        return await self.get_loan(loan_id)

    async def list_engines(self) -> list[EngineRow]:
        return await self._read(reading.engine_rows)

    async def get_engine(self, id_or_name: str) -> EngineRow:
        """Raises NotFound; Conflict if the name belongs to engines of several nodes."""
        return await self._read(lambda conn: reading.engine(conn, id_or_name))

    async def engine_plan(
        self, id_or_name: str, need_bytes: int, gpus: int | None, now: float
    ) -> plan_answer.PlanAnswer:
        """What a loan would release of the engine. Raises NotFound; Conflict as ``get_engine`` does."""

        def read(conn: Connection) -> plan_answer.PlanAnswer:
            row = reading.engine(conn, id_or_name)
            found = plan_answer.answer(snapshots.load_node(conn, row.node_id), row.id, need_bytes, gpus, now)
            if found is None:
                raise NotFound("device of engine", row.name)
            return found

        return await self._read(read)

    async def get_policy(self, id_or_name: str) -> PolicyRow:
        return await self._read(lambda conn: reading.policy(conn, id_or_name))

    async def put_policy(
        self, id_or_name: str, policy: EnginePolicy, expected_version: int | None, principal: str, now: float
    ) -> PolicyRow:
        """Raises NotFound, PolicyLocked, VersionConflict. Loans that are open keep their snapshot."""
        return await self._write(lambda tx: policies.put(tx, id_or_name, policy, expected_version, principal, now))

    async def list_nodes(self) -> list[NodeRow]:
        return await self._read(reading.node_rows)

    async def get_node(self, node_id: str) -> NodeRow:
        """By id or name. Raises NotFound."""
        return await self._read(lambda conn: reading.node(conn, node_id))

    async def list_loans(
        self, *, open_only: bool = False, limit: int = 100, cursor: str | None = None
    ) -> tuple[list[LoanRow], str | None]:
        """Newest first, without steps."""
        return await self._read(lambda conn: reading.loans_page(conn, open_only, limit, cursor))

    async def get_loan(self, loan_id: str) -> LoanRow:
        """With its steps. Raises NotFound."""
        return await self._read(lambda conn: reading.loan(conn, loan_id))

    async def events_after(self, seq: int, limit: int = 500, types: Sequence[str] = ()) -> list[EventRow]:
        """In the order of commits: an event that was not there yet never appears below one that was returned."""
        return await self._read(lambda conn: reading.events_after(conn, seq, limit, types))

    async def last_event_seq(self) -> int:
        return await self._read(reading.last_event_seq)

    async def usage(
        self, device_id: str | None, since: float, until: float, now: float | None = None
    ) -> list[Interval]:
        """Exact intervals that touch [since, until), cut to it; `unknown` after a silent node's last sign of life."""
        return await self._read(lambda conn: reading.usage(conn, device_id, since, until, _now(now)))

    # ---- agents -----------------------------------------------------------------------------------------------

    async def register(self, register: Register, now: float) -> Registered:
        """Raises DuplicateIdentity, InvalidRequest. Nothing is concluded from what the node does not hold until
        it uses this registration (``orders_after`` or ``take_reports``)."""
        led_by = self._term
        register = Register.model_validate(reports.storable(register.model_dump()))

        def work(tx: Tx) -> tuple[int, Registered]:
            # The term first: whoever decides locks the leader's row before a node's.
            raised = leadership.raise_term(tx, register.term, led_by)
            return raised, registration.register(tx, register, now, self._lease_seconds)

        try:
            raised, answer = await self._write(work)
        except DuplicateIdentity as error:
            await self._note_duplicate(register, str(error), now)
            raise
        if self._term == led_by:
            self._term = raised
        return answer

    async def _note_duplicate(self, register: Register, sentence: str, now: float) -> None:
        """An alert, once per process of an agent: it comes back every few seconds."""
        who = f"{register.node_id} {register.machine_id} {register.boot_id} {register.start_id}"
        if who not in self._refused:
            self._refused = [*self._refused[-_REFUSED_MAX:], who]
            await self._write(lambda tx: agent_writes.note_duplicate(tx, register, sentence, now))

    async def take_reports(self, batch: ReportBatch, now: float) -> ReportsAnswer:
        """Also an empty batch is a sign of life. Raises NotFound (register first), StaleIncarnation, InvalidRequest."""
        try:
            return await self._write(lambda tx: reports.take(tx, batch, now))
        except StaleIncarnation as error:
            if batch.incarnation > error.current:
                await self._write(lambda tx: agent_writes.raise_incarnation(tx, batch.node_id, batch.incarnation))
            raise

    async def orders_after(self, node_id: str, seq: int, limit: int = 100) -> list[OrderEnvelope]:
        """Orders above ``seq``. The first call after a registration, with the ``orders_after`` that it answered or
        more, puts that registration in use. Raises NotFound; StaleIncarnation if ``seq`` is of an older one."""
        found, unconfirmed = await self._read(lambda conn: reading.orders_after(conn, node_id, seq, limit))
        if unconfirmed:
            await self._write(lambda tx: registration.confirm(tx, node_id, seq, _now(None)))
        return found

    async def keep_log_tail(self, attempt_id: str, stream: str, offset: int, data: bytes, now: float) -> None:
        """The last bytes of a stream of an ended attempt. Raises NotFound; InvalidRequest for too many bytes."""
        await self._write(lambda tx: log_tails.keep(tx, attempt_id, stream, offset, data, now))

    async def log_tail(self, attempt_id: str, stream: str) -> LogTail | None:
        """None if none is kept (any more)."""
        return await self._read(lambda conn: log_tails.read(conn, attempt_id, stream))

    async def add_order(self, node_id: str, order: Order, now: float | None = None) -> int:
        """Appends an order that is no decision (FetchLog); returns its seq. Raises NotFound."""
        return await self._write(lambda tx: agent_writes.add_order(tx, node_id, order, _now(now)))

    # ---- deciding ---------------------------------------------------------------------------------------------

    async def lead(self, holder: str, ttl_seconds: float, *, take_over: bool = False) -> int | None:
        """Tries to become or stay leader; the term, or None while another leads. ``take_over`` does not wait for
        the other's expiry: for SQLite at start, whose file belongs to one server."""
        before = self._term
        term = await self._write(lambda tx: leadership.lead(tx, holder, ttl_seconds, before, take_over=take_over))
        if self._term == before:  # else a registration has raised it meanwhile
            self._term = term or 0
        return self._term or None

    async def resign(self) -> None:
        """Lets another lead at once."""
        term, self._term = self._term, 0
        if term:
            await self._write(lambda tx: leadership.resign(tx, term))

    async def load_snapshot(self, now: float) -> Snapshot:
        return await self._read(lambda conn: snapshots.load(conn, now))

    async def commit(self, actions: Sequence[Action], now: float) -> int:
        """Writes decisions in one transaction, each guarded: one that came too late is left out and its neighbours
        are not. Returns how many took effect. Raises NotLeader."""
        term = self._term
        if term == 0:
            raise NotLeader(term)
        try:
            return await self._write(lambda tx: decisions.commit(tx, actions, term, now))
        except NotLeader:
            if self._term == term:
                self._term = 0
            raise

    async def trim(self, now: float) -> int:
        """Deletes what is past its retention; returns how many rows. Bounded per call."""
        return await self._write(lambda tx: retention.trim(tx, now))

    # ---- inside -----------------------------------------------------------------------------------------------

    async def _write(self, work: Callable[[Tx], T]) -> T:
        if self._writer is None:
            raise DatabaseUnavailable("the store is not open")
        return await self._writer.submit(work)

    async def _read(self, work: Callable[[Connection], T]) -> T:
        if self._readers is None or self._engine is None or self._loop is None:
            raise DatabaseUnavailable("the store is not open")
        return await self._loop.run_in_executor(self._readers, self._engine.run, work)

    def _notify(self, topics: frozenset[str]) -> None:
        for callback in tuple(self._subscribers.values()):
            callback(topics)


def _now(now: float | None) -> float:
    return time.time() if now is None else now
