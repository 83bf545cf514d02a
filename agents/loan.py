"""One loan, from closing traffic to opening it again: who may act, what was written down, what comes next.

The journal is written before each act; an agent that starts again takes up every open loan at the state that is
written down, looks at the engines and goes on. The agent finishes a loan with no scheduler in sight.

What happens in each state is in the modules beside this one: ``loan_release`` (draining, parking), ``loan_settle``,
``loan_work`` (lent, recalling) and ``loan_restore`` (waking, verifying, faulted).
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Coroutine, Iterable
from typing import Any, Final, TypeVar

import structlog

from . import loan_release, loan_restore, loan_settle, loan_without_job, loan_work
from .attempt_run import DISK_RESERVE, AttemptRun, Stop
from .engine_hand import StepSink
from .engine_keeper import EngineKeeper
from .journal import LoanRow, StepRow, boottime
from .node import Node
from .probe import DeviceFacts
from .protocol.loans import LoanEvent, LoanState, LoanStep, advance
from .protocol.parking import FOR_OVER
from .protocol.plans import Plan, narrowed
from .protocol.policy import EnginePolicy
from .protocol.wire import LOAN_OVER, AttemptEnd, AttemptSpec, HeldLoan, LoanChanged, Reason
from .tasks import end_on_fault

log = structlog.get_logger(__name__)
T = TypeVar("T")

HAND_SECONDS_MAX: Final = 10.0
UNKILLABLE: Final = "unkillable"
# Recall reasons that the agent gives itself; others come with the order.
RESTORE_BY: Final = "RestoreBy"


class Recalled(Exception):
    """A recall came while something that may be broken off was waited for."""


class Loan:
    """One open loan on this node. ``run`` takes it from where it is to its end."""

    def __init__(self, node: Node, row: LoanRow, keepers: dict[str, EngineKeeper]) -> None:
        self.node = node
        self.order = row.order
        self.loan_id = row.order.loan_id
        self.state = row.state
        self.reason = row.reason
        self.restore_by_boottime = row.restore_by_boottime
        self.engine_lost = set(row.engine_lost)
        self.engines = [keepers[engine_id] for engine_id in row.order.engine_ids]
        written = node.journal.steps(self.loan_id)
        # True in the agent that accepted it: everything that was looked at, was looked at by this very process.
        self.is_fresh = all(step.step is LoanStep.ACCEPTED for step in written)
        self.taken = {(row.step, row.engine_id) for row in written}
        self._intended = {row.attempt_id for row in written if row.step is LoanStep.SPAWN_INTENT}
        self.attempts: dict[str, AttemptRun] = {}
        self.closed = asyncio.Event()
        self.holding = asyncio.Event()  # set once this loan alone acts on its engines
        self.changed = asyncio.Event()  # something came in: a recall, an attempt, a new deadline
        self._given_up = False
        self._restoring: asyncio.Task[None] | None = None
        self._recalled = asyncio.Event()
        self.recall_reason = row.recalled
        # What was told since it was opened is not written down: an agent that starts again waits to be told anew.
        self.expects_more = row.order.expects_more or not self.is_fresh
        self.without_job = row.order.without_job
        self.asked_for: set[str] = set()  # engines that a request wants back: no more work is taken
        self._wanted: dict[str, asyncio.Task[None]] = {}  # who waits for a request, by engine
        self._settled: tuple[float, dict[str, DeviceFacts]] | None = None
        if row.recalled is not None:
            self._recalled.set()
        if row.boot_id != node.boot_id:
            # Its clock has begun anew, and whatever ran is over: nothing more is started in this loan.
            self.restore_by_boottime = None
            self.recall("NodeRebooted")
        self._hands: dict[str, asyncio.Lock] = {}
        self.unkillable = self._unkillable_before(row for row in written if row.step is LoanStep.EXIT_RECORDED)
        for spec, stop in node.journal.live_attempts(self.loan_id):
            self._add(spec, stop)

    def _unkillable_before(self, exits: Iterable[StepRow]) -> list[tuple[str, Reason]]:
        """What an earlier agent could not kill, by attempt; `clear` adds what this one could not."""
        ends = [self.node.journal.attempt_end(row.attempt_id) for row in exits if row.attempt_id is not None]
        return [(end.attempt_id, end.cleanup) for end in ends if end and end.cleanup and end.cleanup.code == UNKILLABLE]

    # ---- what it is -------------------------------------------------------------------------------------------

    def whole_policy_of(self, keeper: EngineKeeper) -> EnginePolicy:
        """The snapshot that rules this loan, whatever was set since."""
        return self.order.policies.get(keeper.engine_id, keeper.policy)

    def policy_of(self, keeper: EngineKeeper) -> EnginePolicy:
        """The same, with the tags that this loan's plan releases."""
        plan = self.plan_of(keeper)
        return self.whole_policy_of(keeper) if plan is None else narrowed(self.whole_policy_of(keeper), plan.modes)

    def plan_of(self, keeper: EngineKeeper) -> Plan | None:
        """None: its whole policy is parked, and what that frees is not predicted."""
        return self.order.plans.get(keeper.engine_id)

    def held(self) -> HeldLoan:
        return HeldLoan(
            loan_id=self.loan_id,
            epoch=self.order.epoch,
            state=self.state,
            device_ids=self.order.device_ids,
            engine_ids=self.order.engine_ids,
            attempt_ids=[run.attempt_id for run in self.attempts.values() if not run.over],
        )

    @property
    def recalled(self) -> bool:
        return self._recalled.is_set()

    @property
    def nothing_left(self) -> bool:
        """It is for jobs, none of them lives, and no other comes."""
        return self.without_job is None and not self.expects_more and not self.live_attempts

    @property
    def live_attempts(self) -> list[AttemptRun]:
        return [run for run in self.attempts.values() if not run.over]

    def settled(self, facts: dict[str, DeviceFacts]) -> None:
        self._settled = (boottime(), facts)

    @property
    def settled_facts(self) -> dict[str, DeviceFacts] | None:
        """The last sample of settling, as long as it is as good as a new one; nothing was spawned since."""
        if self._settled is None or boottime() - self._settled[0] > self.node.settings.settle_poll_seconds:
            return None
        return self._settled[1]

    # ---- what comes in ----------------------------------------------------------------------------------------

    def recall(self, reason: str) -> None:
        """The loan ends as soon as it safely can; running attempts are stopped and queued again."""
        if not self.recalled:
            self.recall_reason = reason
            self.node.journal.set_loan(self.loan_id, recalled=reason)
            self._recalled.set()
            self.changed.set()

    def expect_work(self, more: bool) -> None:
        """Whether jobs wait for this loan: without them it ends with its last attempt."""
        self.expects_more = more
        self.changed.set()

    def add_attempt(self, spec: AttemptSpec) -> Reason | None:
        """None if the loan has this attempt now, or had it before; else why it takes it not."""
        wanted_back = self.recalled or bool(self.asked_for)
        if wanted_back or self.state not in (
            LoanState.DRAINING,
            LoanState.PARKING,
            LoanState.SETTLING,
            LoanState.LENT,
        ):
            return Reason(code=LOAN_OVER, sentence="the loan takes no more work")
        if self.node.disk_is_short():
            return Reason(code=DISK_RESERVE, sentence="the agent's disk is too full to start a job")
        if self.node.journal.accept_attempt(self.loan_id, spec):
            self._add(spec, None)
            self.changed.set()
        return None

    def _add(self, spec: AttemptSpec, stop: str | None) -> None:
        run = AttemptRun(self.node, self.loan_id, spec, self, intended=spec.attempt_id in self._intended)
        self.attempts[spec.attempt_id] = run
        if stop is not None:
            run.stop(AttemptEnd.CANCELLED if stop == AttemptEnd.CANCELLED else AttemptEnd.PREEMPTED)

    def stop_attempt(self, attempt_id: str, end: Stop) -> bool:
        run = self.attempts.get(attempt_id)
        if run is None or run.over:
            return False
        self.node.journal.stop_attempt(attempt_id, end)
        run.stop(end)
        self.changed.set()
        return True

    def set_restore_by(self, seconds: float) -> None:
        self.restore_by_boottime = boottime() + seconds
        self.node.journal.set_loan(self.loan_id, restore_by=self.restore_by_boottime)
        for run in self.live_attempts:
            run.set_restore_by(self.restore_by_boottime)
        self.changed.set()

    def give_up(self) -> str | None:
        """An operator does not want its engines brought back: closed as it is; or why it is not."""
        if self.state is not LoanState.FAULTED:
            return f"the loan is {self.state}: only a faulted one can be given up"
        if self.unkillable:
            return self.unkillable[0][1].sentence
        lost = [engine for engine in self.engines if self.holds(engine)]
        try:
            for engine in lost:
                engine.give_up()
        except OSError as error:
            for engine in lost:
                engine.take_up()
            return f"it cannot be written down: {error}"
        names = ", ".join(engine.name for engine in lost)
        sentence = f"an operator gave the loan up; the gate of {names} stays closed until it is restarted by hand"
        self._given_up = True
        if self._restoring is not None:
            self._restoring.cancel()
        self.take(LoanEvent.GIVEN_UP, Reason(code="GivenUp", sentence=sentence))
        return None

    # ---- what is written down ---------------------------------------------------------------------------------

    def take(self, event: LoanEvent, reason: Reason | None = None, engine: EngineKeeper | None = None) -> LoanState:
        """Advances the machine by ``event``, durably, with its report."""
        self.state = advance(self.loan_id, self.state, event)
        if event is LoanEvent.ENGINE_LOST and engine is not None:
            self.engine_lost.add(engine.engine_id)
        self.reason = reason or self.reason
        journal = self.node.journal
        with journal.together():
            journal.set_loan(self.loan_id, state=self.state, reason=reason, engine_lost=frozenset(self.engine_lost))
            journal.report(
                LoanChanged(
                    loan_id=self.loan_id,
                    epoch=self.order.epoch,
                    event=event,
                    state=self.state,
                    reason=reason,
                    engine_id=None if engine is None else engine.engine_id,
                    engine_lost=bool(self.engine_lost),
                )
            )
        log.info("loan", loan=self.loan_id, loan_event=event, state=self.state, reason=reason and reason.sentence)
        self.node.on_change()
        return self.state

    def step(
        self,
        step: LoanStep,
        engine: EngineKeeper | None = None,
        attempt_id: str | None = None,
        data: dict[str, Any] | None = None,
    ) -> None:
        engine_id = None if engine is None else engine.engine_id
        self.node.journal.write_step(self.loan_id, step, engine_id=engine_id, attempt_id=attempt_id, data=data)
        self.taken.add((step, engine_id))

    def sink(self, engine: EngineKeeper) -> StepSink:
        """For what an engine's hand does on behalf of this loan."""

        def write(step: LoanStep, data: dict[str, Any]) -> None:
            self.step(step, engine, data=data)

        return write

    def has(self, step: LoanStep, engine: EngineKeeper) -> bool:
        return (step, engine.engine_id) in self.taken

    # ---- waiting ----------------------------------------------------------------------------------------------

    def seconds_left(self) -> float | None:
        return None if self.restore_by_boottime is None else self.restore_by_boottime - boottime()

    @property
    def sleeps_until_seconds(self) -> float | None:
        """How long its engines sleep for sure, unless an operator resumes them; None where a request, a job's end or
        the scheduler may wake them at any time."""
        if self.without_job is None or self.without_job.wake_on_request or self.recalled:
            return None
        left = self.seconds_left()
        return None if left is None else max(0.0, left)

    async def unless_recalled(self, act: Awaitable[T]) -> T:
        """The result of ``act``, which may be broken off; raises Recalled if a recall or ``restore_by`` comes first."""
        task = asyncio.ensure_future(act)
        watch = asyncio.ensure_future(self._recall_comes())
        try:
            await asyncio.wait((task, watch), return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                raise Recalled
            return await task
        finally:
            for left in (task, watch):
                left.cancel()
            await asyncio.gather(task, watch, return_exceptions=True)

    async def _recall_comes(self) -> None:
        while not self.recalled:
            left = self.seconds_left()
            if left is not None and left <= 0:
                self.recall(self.deadline_reason)
                return
            if self.nothing_left:
                self.recall("NothingLeftToRun")
                return
            self.changed.clear()
            try:
                async with asyncio.timeout(left):
                    await self.changed.wait()
            except TimeoutError:
                continue

    @property
    def deadline_reason(self) -> str:
        """Why it ends when `restore_by` is reached."""
        said = None if self.without_job is None else self.without_job.until_seconds
        return RESTORE_BY if said is None or said != self.order.restore_by_seconds else FOR_OVER

    def recall_event(self) -> LoanEvent:
        late = self.recall_reason in (RESTORE_BY, FOR_OVER)
        return LoanEvent.RESTORE_BY_REACHED if late else LoanEvent.RECALLED

    # ---- the whole --------------------------------------------------------------------------------------------

    async def run(self) -> None:
        """To the end. Cancelling it (the agent stops) leaves everything as it is for the next agent."""
        try:
            await self._take_hands()
            self.holding.set()
            for engine in self.engines:
                if self.has(LoanStep.GATE_CLOSED, engine):
                    self.watch_requests(engine)
            while self.state is not LoanState.CLOSED:
                await self._act()
            self._finish()
        finally:
            self.holding.set()
            for watch in self._wanted.values():
                watch.cancel()
            for engine in self.engines:
                self.give_back(engine)

    def watch_requests(self, engine: EngineKeeper) -> None:
        """The engine's gate is closed: from now on a request recalls a loan without a job that may be woken so."""
        if self.without_job is not None and self.without_job.wake_on_request and engine.engine_id not in self._wanted:
            task = asyncio.create_task(loan_without_job.until_wanted(self, engine))
            task.add_done_callback(end_on_fault)
            self._wanted[engine.engine_id] = task

    def give_back(self, engine: EngineKeeper) -> None:
        """The engine is its keeper's again; this loan does not act on it any more. Idempotent."""
        hand = self._hands.pop(engine.engine_id, None)
        if hand is not None:
            hand.release()
            engine.poke()

    def holds(self, engine: EngineKeeper) -> bool:
        return engine.engine_id in self._hands

    async def _take_hands(self) -> None:
        for engine in sorted(self.engines, key=lambda keeper: keeper.engine_id):
            bound = HAND_SECONDS_MAX if self.state is LoanState.DRAINING else None
            try:
                async with asyncio.timeout(bound):
                    await engine.hand.acquire()
                self._hands[engine.engine_id] = engine.hand
            except TimeoutError:
                sentence = f"engine {engine.name} is being looked after and cannot be lent now"
                self.take(LoanEvent.PREFLIGHT_REFUSED, Reason(code="EngineNotReady", sentence=sentence))
                return

    async def _act(self) -> None:
        match self.state:
            case LoanState.DRAINING:
                await loan_release.drain(self)
            case LoanState.PARKING:
                await loan_release.park(self)
            case LoanState.SETTLING:
                await loan_settle.settle(self)
            case LoanState.LENT:
                await loan_work.work(self)
            case LoanState.RECALLING:
                await loan_work.clear(self)
            case LoanState.WAKING | LoanState.VERIFYING:
                await self._until_given_up(loan_restore.restore(self))
            case LoanState.FAULTED:
                await self._until_given_up(loan_restore.recover(self))
            case LoanState.CLOSED:
                return

    async def _until_given_up(self, act: Coroutine[Any, Any, None]) -> None:
        self._restoring = asyncio.create_task(act)
        try:
            await asyncio.wait((self._restoring,))
        finally:
            self._restoring.cancel()
            await asyncio.gather(self._restoring, return_exceptions=True)
        if not self._given_up:
            self._restoring.result()

    def end_unstarted(self, reason: Reason | None) -> None:
        """Every attempt that was never started is over, proved: its job may be queued again."""
        for run in self.live_attempts:
            if not run.started:
                run.end_unstarted(reason)

    def _finish(self) -> None:
        self.end_unstarted(self.reason)
        self.node.host_ram.release(self.loan_id)
        self.step(LoanStep.CLOSED)
        self.closed.set()
        self.node.on_change()
