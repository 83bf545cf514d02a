"""One attempt inside a loan: its runner is started early, told to go once the memory is proved, followed to its end.

`spawn_intent` is flushed before the runner may start the job. Whatever happens to agent or runner, the attempt is
started at most once: its directory is used for one execution, and only this class says `go`.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Awaitable, Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, Literal, TypeVar

import structlog

from .attempts import (
    AttemptDir,
    AttemptError,
    AttemptOutcome,
    AttemptProcess,
    RunnerSpec,
)
from .disk_reserve import FULL
from .errors import SpawnRefused
from .node import Node, cuda_visible
from .processes import descendants, kill_leftovers, send_signal
from .protocol.loans import LoanStep
from .protocol.wire import GPU_LOST, AttemptChanged, AttemptEnd, AttemptSpec, AttemptState, ProcessIdentity, Reason
from .tasks import end_on_fault

if TYPE_CHECKING:
    from .loan import Loan

log = structlog.get_logger(__name__)
T = TypeVar("T")

DISK_RESERVE: Final = "DiskReserve"
_GO_SECONDS_MAX: Final = 600.0
_INHERITED: Final = ("PATH", "HOME", "LANG", "LC_ALL", "USER", "TZ")
_AGAIN_SECONDS: Final = 1.0
_SILENT_SECONDS: Final = 15.0  # beyond its grace and its own bound, before a runner is ended from outside
_SWEEP_SECONDS_MAX: Final = 60.0

Check = Callable[["AttemptRun"], Awaitable[None]]
Stop = Literal[AttemptEnd.CANCELLED, AttemptEnd.PREEMPTED]


class AttemptRun:
    """``over`` once its end is written down. ``started`` once the job may have been started."""

    def __init__(self, node: Node, loan_id: str, spec: AttemptSpec, loan: Loan, *, intended: bool) -> None:
        self.node = node
        self.loan_id = loan_id
        self.spec = spec
        self.loan = loan
        self.started = intended
        self.ended = asyncio.Event()
        self.unkillable: Reason | None = None
        self.peak_hbm_bytes = 0
        self.directory = AttemptDir(attempt_path(node, spec.attempt_id))
        self._stop: Stop | None = None
        self._launched: asyncio.Task[AttemptProcess | AttemptOutcome] | None = None
        self._task: asyncio.Task[None] | None = None
        self._process: AttemptProcess | None = None
        self._runner: ProcessIdentity | None = None
        self._changed = asyncio.Event()
        node.owners.attempts[spec.attempt_id] = self.pids

    @property
    def attempt_id(self) -> str:
        return self.spec.attempt_id

    @property
    def over(self) -> bool:
        return self.ended.is_set()

    @property
    def adoptable(self) -> bool:
        """A runner may be there: it has to be asked, or waited for."""
        return self._launched is not None or self.directory.path.exists()

    @property
    def running(self) -> bool:
        return self.started and not self.over

    def pids(self) -> set[int]:
        if self._runner is None:
            return set()
        return {self._runner.pid, *descendants(self._runner.pid)}

    # ---- what the loan asks for -------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Starts the runner, which waits for our word. Idempotent."""
        if self._launched is None and not self.over:
            self._launched = asyncio.create_task(self._adopt_or_launch(), name=f"launch {self.attempt_id}")

    def begin(self, check: Check) -> None:
        """Lets it run once ``check`` does not raise SpawnRefused. Idempotent."""
        if self._task is None and not self.over:
            self._task = asyncio.create_task(self._run(check), name=f"attempt {self.attempt_id}")
            self._task.add_done_callback(end_on_fault)

    def stop(self, end: Stop) -> None:
        """The first wish counts, but a cancel outranks a preemption: that job must not come back."""
        outranks = self._stop is AttemptEnd.PREEMPTED and end is AttemptEnd.CANCELLED
        if self._stop is None or outranks:
            self._stop = end
            self._changed.set()
            if self._task is None and not self.adoptable and not self.started:
                self.end_unstarted(None)

    def set_restore_by(self, restore_by_boottime: float) -> None:
        if self._process is not None and self.running:
            asyncio.get_running_loop().create_task(self._tell_restore_by(self._process, restore_by_boottime))

    async def _tell_restore_by(self, process: AttemptProcess, restore_by_boottime: float) -> None:
        try:
            await process.set_restore_by(restore_by_boottime)
        except AttemptError as error:
            log.warning("the runner did not take restore_by", attempt=self.attempt_id, error=str(error))

    def end_unstarted(self, reason: Reason | None) -> None:
        """Over without a start, proved: only this class says go, and it never did."""
        assert not self.started
        if self._launched is not None:
            asyncio.get_running_loop().create_task(self._dismiss(self._launched))
        end = AttemptEnd.CANCELLED if self._stop is AttemptEnd.CANCELLED else AttemptEnd.NOT_STARTED
        self._write_end(AttemptOutcome(end=end, ended_at=time.time(), reason=reason))

    async def _dismiss(self, launched: asyncio.Task[AttemptProcess | AttemptOutcome]) -> None:
        try:
            process = await launched
            if isinstance(process, AttemptProcess):
                await process.stop(AttemptEnd.PREEMPTED)
        except (AttemptError, OSError) as error:
            log.info("the waiting runner ended by itself", attempt=self.attempt_id, error=str(error))

    # ---- the course of it -------------------------------------------------------------------------------------

    async def _adopt_or_launch(self) -> AttemptProcess | AttemptOutcome:
        if self.directory.path.exists():
            adopted = await AttemptProcess.adopt(self.directory)
            if adopted.process is not None:
                return adopted.process
            if adopted.outcome is not None:
                return adopted.outcome
        elif self.started:
            return await self._lost()
        if self._stop is not None:
            reason = Reason(code="Stopped", sentence="stopped before it was started")
            return AttemptOutcome(end=AttemptEnd.NOT_STARTED, ended_at=time.time(), reason=reason)
        return await AttemptProcess.launch(self.directory, self._runner_spec(), spares=self.node.spares)

    async def _lost(self) -> AttemptOutcome:
        """It may have been told to go. Without its directory nobody can say how far it came: it is never told again."""
        swept = await asyncio.to_thread(kill_leftovers, self.attempt_id, None, _SWEEP_SECONDS_MAX)
        reason = Reason(code="runner_lost", sentence="the attempt's directory is gone; what was left was killed")
        cleanup = None
        if swept.remaining:
            pids = list(swept.remaining)
            cleanup = Reason(code="unkillable", sentence=f"processes {pids} survive SIGKILL", data={"pids": pids})
        return AttemptOutcome(end=AttemptEnd.RUNNER_LOST, ended_at=time.time(), reason=reason, cleanup=cleanup)

    def _runner_spec(self) -> RunnerSpec:
        settings, spec = self.node.settings, self.spec
        return RunnerSpec(
            attempt_id=spec.attempt_id,
            job_id=spec.job_id,
            argv=spec.argv,
            env=self._environment(),
            workdir=spec.workdir,
            time_limit_seconds=spec.time_limit_seconds,
            restore_by_boottime=self.loan.restore_by_boottime,
            kill_grace_seconds=spec.kill_grace_seconds,
            go_seconds_max=_GO_SECONDS_MAX,
            unkillable_seconds_max=settings.unkillable_seconds_max,
            log_head_bytes=settings.log_head_bytes // 2,  # of either stream
            log_tail_bytes=settings.log_tail_bytes // 2,
        )

    def _environment(self) -> dict[str, str]:
        spec = self.spec
        checkpoints = Path(self.node.settings.data_dir) / "checkpoints" / spec.job_id
        checkpoints.mkdir(parents=True, exist_ok=True, mode=0o700)
        left = self.loan.seconds_left()
        devices = [self.node.devices[device_id] for device_id in spec.device_ids]
        return {
            **{name: os.environ[name] for name in _INHERITED if name in os.environ},
            **spec.env,
            "LULL_JOB_ID": spec.job_id,
            "LULL_ATTEMPT": spec.attempt_id,
            "LULL_DEVICES": ",".join(spec.device_ids),
            "LULL_HOST_DEVICE": ":".join(device.path for device in devices if device.path),
            "LULL_HBM_BYTES": str(spec.hbm_bytes),
            "LULL_CHECKPOINT_DIR": str(checkpoints),
            "CUDA_VISIBLE_DEVICES": cuda_visible(devices),  # empty on host memory: such a job sees no GPU
            **({} if left is None else {"LULL_RESTORE_BY_SECONDS": f"{max(0.0, left):.0f}"}),
        }

    async def _run(self, check: Check) -> None:
        self.prepare()
        assert self._launched is not None
        try:
            found = await self._launched
        except (AttemptError, OSError) as error:
            log.error("the runner did not come up", attempt=self.attempt_id, error=str(error))
            found = await self._until_known(partial(self._without_runner, error))
        outcome = found if isinstance(found, AttemptOutcome) else await self._follow(found, check)
        if outcome is not None:
            if outcome.end is AttemptEnd.NOT_STARTED and self._stop is AttemptEnd.CANCELLED:
                outcome = replace(outcome, end=AttemptEnd.CANCELLED)
            self._record(await self._with_lost_gpu(outcome))

    async def _with_lost_gpu(self, outcome: AttemptOutcome) -> AttemptOutcome:
        """A job whose GPU is lost ends by whatever its program makes of that: the reason is ours to say."""
        devices = [self.node.devices[device_id] for device_id in self.spec.device_ids]
        failed = outcome.exit_code != 0 and outcome.end is not AttemptEnd.NOT_STARTED
        if not failed or outcome.reason is not None or not any(device.is_cuda for device in devices):
            return outcome
        await self.node.look()
        lost = next(filter(None, map(self.node.absences.lost, self.spec.device_ids)), None)
        return outcome if lost is None else replace(outcome, reason=Reason(code=GPU_LOST, sentence=lost.sentence))

    async def _until_known(self, look: Callable[[], Awaitable[T]]) -> T:
        """What ``look`` finds, as soon as it can: a runner that holds the lock decides first, and what the node lacks
        for a look (descriptors, a disk that answers) says nothing about the attempt."""
        while True:
            try:
                return await look()
            except (AttemptError, OSError) as error:
                log.warning("attempt cannot be judged yet", attempt=self.attempt_id, error=str(error))
                await asyncio.sleep(_AGAIN_SECONDS)

    async def _without_runner(self, error: AttemptError | OSError) -> AttemptProcess | AttemptOutcome:
        """Whatever lies in the directory says whether anything was executed."""
        if self.directory.path.exists():
            adopted = await AttemptProcess.adopt(self.directory)
            if adopted.process is not None:
                return adopted.process
            settled = adopted.outcome
            outcome = settled if settled is not None else await asyncio.to_thread(self.directory.settle)
            if outcome.end is AttemptEnd.NOT_STARTED and (_is_full(error) or self.node.disk_is_short()):
                outcome = replace(outcome, reason=_no_room(error))
            return outcome
        if self.started:
            return await self._lost()
        if isinstance(error, OSError):  # not even a directory: nothing of it was executed
            return AttemptOutcome(end=AttemptEnd.NOT_STARTED, ended_at=time.time(), reason=_no_room(error))
        reason = Reason(code="spawn_failed", sentence=str(error))
        return AttemptOutcome(end=AttemptEnd.SPAWN_FAILED, ended_at=time.time(), reason=reason)

    async def _follow(self, process: AttemptProcess, check: Check) -> AttemptOutcome | None:
        self._process, self._runner = process, process.runner
        if self.over:
            return None
        stopper = asyncio.create_task(self._stop_when_asked(process), name=f"stop {self.attempt_id}")
        stopper.add_done_callback(end_on_fault)
        try:
            if self.started and await self._waits(process):
                self.started = False  # the agent that meant to start it died before it said so
            if not self.started and not await self._may_start(check):
                return None
            await self._say_go(process)
            return await self._until_known(process.wait_ended)
        finally:
            stopper.cancel()

    async def _waits(self, process: AttemptProcess) -> bool:
        """Whether the runner waits for `go` still, by its own word. It takes what it is told in order, so nothing that
        an earlier agent said is under way to it."""
        while True:
            try:
                return (await process.status()).state == "waiting"
            except AttemptError as error:
                log.warning("the runner does not say how far it is", attempt=self.attempt_id, error=str(error))
            if await process.wait_exited(_AGAIN_SECONDS):
                return False

    async def _may_start(self, check: Check) -> bool:
        """Whether the job may be started now, which is written down then; else its end is."""
        try:
            if self._stop is not None:
                raise SpawnRefused("Stopped", "stopped before it was started")
            await check(self)
        except SpawnRefused as refused:
            self.end_unstarted(Reason(code=refused.code, sentence=refused.sentence))
            return False
        if self.over or self._stop is not None:
            self.end_unstarted(None)
            return False
        if not self._write_intent():
            sentence = "the agent's disk is full: that this job was started could not be written down"
            self.end_unstarted(Reason(code=DISK_RESERVE, sentence=sentence))
            return False
        self.started = True
        return True

    async def _say_go(self, process: AttemptProcess) -> None:
        """Until the runner, which executes once however often it hears it, has answered; not once a stop is wanted."""
        while self._stop is None:
            try:
                await process.go()
                break
            except AttemptError as error:
                log.warning("go was not answered; it is said again", attempt=self.attempt_id, error=str(error))
            if await process.wait_exited(_AGAIN_SECONDS):
                return
        else:
            return
        self._report_running(process)
        if self.loan.restore_by_boottime is not None:  # it may have moved while the runner waited
            await self._tell_restore_by(process, self.loan.restore_by_boottime)

    def _write_intent(self) -> bool:
        """False if it is not on disk: an agent that starts after a crash would not know that the job may have run."""
        journal = self.node.journal
        if not journal.in_memory:
            self.loan.step(LoanStep.SPAWN_INTENT, attempt_id=self.attempt_id)
        return not journal.in_memory  # this very write may have been the one that did not fit

    async def _stop_when_asked(self, process: AttemptProcess) -> None:
        told: Stop | None = None
        deadline: float | None = None
        loop = asyncio.get_running_loop()
        bound = self.node.settings.unkillable_seconds_max
        while not self.over:
            self._changed.clear()
            if self._stop is not None and told is not self._stop:
                deadline = deadline or loop.time() + self.spec.kill_grace_seconds + bound + _SILENT_SECONDS
                told = self._stop if await self._tell_stop(process, self._stop) else told
            if deadline is not None and loop.time() > deadline:
                self._end_runner(process)
                deadline = loop.time() + bound
            waits = self._stop is None or told is self._stop
            left = None if deadline is None else deadline - loop.time()
            try:
                async with asyncio.timeout(left if waits else _AGAIN_SECONDS):
                    await self._changed.wait()
            except TimeoutError:
                continue

    async def _tell_stop(self, process: AttemptProcess, end: Stop) -> bool:
        try:
            return await process.stop(end)
        except AttemptError as error:
            log.warning("the runner did not take the stop", attempt=self.attempt_id, error=str(error))
            return False

    def _end_runner(self, process: AttemptProcess) -> None:
        """It had every chance: without it the record is ours to write, and what the job left is ours to kill."""
        sentence = f"the runner of attempt {self.attempt_id} did not end its job; it is killed"
        self.node.alert("critical", "runner_silent", sentence, loan_id=self.loan_id)
        try:
            send_signal(process.runner, signal.SIGKILL)
        except OSError as error:
            log.error("the runner could not be signalled", attempt=self.attempt_id, error=str(error))

    def _report_running(self, process: AttemptProcess) -> None:
        try:
            started = self.directory.started()
        except (AttemptError, OSError) as error:
            started = None
            log.warning("started.json cannot be read", attempt=self.attempt_id, error=str(error))
        self.loan.step(LoanStep.SPAWNED, attempt_id=self.attempt_id)
        processes = {"runner": process.runner}
        if started is not None:
            processes["job"] = started.job
        self.node.journal.report(
            AttemptChanged(
                attempt_id=self.attempt_id,
                job_id=self.spec.job_id,
                loan_id=self.loan_id,
                state=AttemptState.RUNNING,
                started_at=time.time() if started is None else started.at,
                processes=processes,
            )
        )
        self.node.on_change()

    def _record(self, outcome: AttemptOutcome) -> None:
        if outcome.cleanup is not None and outcome.cleanup.code == "unkillable":
            self.unkillable = outcome.cleanup
        if not self.over:
            with self.node.journal.together():
                self.loan.step(
                    LoanStep.EXIT_RECORDED, attempt_id=self.attempt_id, data={"record_boottime": outcome.boottime}
                )
                self._write_end(outcome)

    def _write_end(self, outcome: AttemptOutcome) -> None:
        if self.over:
            return
        self.node.journal.end_attempt(
            AttemptChanged(
                attempt_id=self.attempt_id,
                job_id=self.spec.job_id,
                loan_id=self.loan_id,
                state=AttemptState.ENDED,
                end=outcome.end,
                exit_code=outcome.exit_code,
                signal=outcome.signal,
                started_at=outcome.started_at,
                ended_at=outcome.ended_at,
                peak_hbm_bytes=self.peak_hbm_bytes or None,
                cleanup=outcome.cleanup or _swept(outcome),
                reason=outcome.reason,
            )
        )
        self.ended.set()
        self.node.owners.attempts.pop(self.attempt_id, None)
        self.loan.changed.set()
        self.node.on_attempt_end(self.attempt_id)
        self.node.on_change()


def _is_full(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in FULL


def _no_room(error: BaseException) -> Reason:
    return Reason(code=DISK_RESERVE, sentence=f"the agent's disk does not take what a job needs there: {error}")


def _swept(outcome: AttemptOutcome) -> Reason | None:
    """What the job left running, said apart from its result."""
    if not outcome.stragglers_killed:
        return None
    sentence = f"{outcome.stragglers_killed} processes that the job left behind were ended"
    return Reason(code="stragglers_killed", sentence=sentence, data={"count": outcome.stragglers_killed})


def attempt_path(node: Node, attempt_id: str) -> Path:
    return Path(node.settings.data_dir) / "attempts" / attempt_id
