"""Any CUDA program, by the driver's own checkpoints: lock all of its processes, checkpoint all; restore, unlock.

The program knows nothing of it: its calls to the driver wait while it is locked. All that it had on the GPU lies in
host memory meanwhile, the KV cache too, and comes back to the same GPU at the same addresses.

Which processes are meant is written down, with their start times, before the first is locked: the driver lists a
checkpointed process nowhere. What became of each is asked of the driver, so an agent that died in the middle goes on
from there. Whatever is locked and was not checkpointed is unlocked again; that is always safe. A restore that failed
is never tried again: the process is beyond help then (cuda-checkpoint#44), and is started anew by policy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import structlog

from ..engine_process import listening_pid
from ..errors import AgentError, EngineLost, EngineRefused, EngineTimedOut
from ..processes import descendants, identity, is_same
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import CUDA_CHECKPOINT
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState, ProcessIdentity
from ..settings import EngineSettings
from .base import Answer, Observation
from .checkpoint_driver import (
    INVALID_VALUE,
    NOT_INITIALIZED,
    CheckpointBusy,
    CheckpointDriver,
    CheckpointMissing,
    Code,
    ProcessState,
)
from .completion import ask_completion
from .http_call import bearer, call, is_our_fault
from .ledger import Ledger
from .outside import EngineOutside

log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 10.0
_UNLOCK_SECONDS: Final = 10.0
_LOCK_GRACE_SECONDS: Final = 5.0  # beyond the driver's own time-out: it hangs with NCCL (cuda-checkpoint#30, #45)
_DRIVER_VERSION_MIN: Final = 12080  # CUDA 12.8, driver R570
_TAGS: Final = (KV_CACHE, MODEL_WEIGHTS)

# What the ledger's `state` says. Nothing in it: nobody of ours has touched it.
PARKING: Final = "parking"
PARKED: Final = "parked"
RESTORING: Final = "restoring"
LOST: Final = "lost"


@dataclass(frozen=True, slots=True)
class Judged:
    """``to_unlock``: pids that are locked and that a call of ours which was cut off has left so."""

    state: EngineState
    detail: str = ""
    to_unlock: tuple[int, ...] = ()
    is_held: bool = False


def judge(states: Mapping[int, ProcessState], told: str | None) -> Judged:
    """What the engine's state is by those of its processes, and by what the ledger says was begun. Pure."""

    def those(state: ProcessState) -> list[int]:
        return [pid for pid, one in states.items() if one is state]

    if failed := those(ProcessState.FAILED):
        return Judged(EngineState.FAILED, f"the driver says that pid {failed[0]} failed; only a restart helps")
    if those(ProcessState.CHECKPOINTING):
        return Judged(EngineState.PARKING)
    if those(ProcessState.RESTORING):
        return Judged(EngineState.WAKING)
    locked, kept = those(ProcessState.LOCKED), those(ProcessState.CHECKPOINTED)
    if kept:
        rest = [pid for pid in states if pid not in kept]
        # Its bytes tell whether that frees enough; a resume restores those, and unlocks the others.
        return Judged(EngineState.PARKED, f"pids {rest} are not checkpointed, {kept} are" if rest else "")
    if locked and told is None:
        words = f"somebody else has locked pid {locked[0]} (cuda-checkpoint --action unlock --pid {locked[0]})"
        return Judged(EngineState.UNREACHABLE, words, is_held=True)
    return Judged(EngineState.RUNNING, to_unlock=tuple(locked))


class _Untold(EngineTimedOut):
    """The driver does not tell the state of a process, or tells one that this version does not know."""


class _NotForUs(_Untold):
    """It tells the state to others."""


class CudaCheckpointAdapter:
    def __init__(self, settings: EngineSettings, ledger: Ledger, outside: EngineOutside) -> None:
        self._settings = settings
        self._options = settings.cuda_checkpoint
        self._base_url = settings.url.rstrip("/")
        self._ledger = ledger
        self._outside = outside
        locks, devices = ledger.path.parent.parent, sorted(settings.device_indexes)
        self._driver = CheckpointDriver([locks / f"checkpoint{index}.lock" for index in devices])

    async def aclose(self) -> None:
        self._driver.close()

    async def healthy(self) -> bool:
        """One that is checkpointed may not answer, and is well."""
        if self._ledger.read().get("state") and (await self.observe()).state is EngineState.PARKED:
            return True
        try:
            return (await self._health()) == 200
        except AgentError:
            return False

    async def _health(self) -> int:
        reply = await call("GET", self._base_url + self._settings.health_path, _STATUS_SECONDS)
        return reply.status_code

    # ---- which processes ------------------------------------------------------------------------------------------

    def _candidates(self) -> list[int]:
        """The engine's processes that have the CUDA driver loaded."""
        pids = self._outside.pids()
        if self._options.pids_from == "port":
            pid = listening_pid(int(self._base_url.rsplit(":", 1)[1]))
            pids = set[int]() if pid is None else {pid, *descendants(pid)}
        return sorted(pid for pid in pids if _may_use_cuda(pid))

    async def _cuda_processes(self) -> dict[int, ProcessState]:
        """Of the engine's processes, those with a CUDA context. Raises _Untold where the driver does not say."""
        found: dict[int, ProcessState] = {}
        for pid in self._candidates():
            code = await self._ask_state(pid)
            if code.is_success:
                found[pid] = _state_of(code)
            elif code.code not in (NOT_INITIALIZED, INVALID_VALUE):  # it has no context, or has just ended
                raise _NotForUs(f"the state of pid {pid} is not told: {code.name}; {_WHOSE}")
        return found

    async def _ask_state(self, pid: int) -> Code:
        """Raises _Untold without an answer, CheckpointMissing where none can be had."""
        try:
            return await self._driver.call("state", pid, _STATUS_SECONDS)
        except EngineTimedOut as error:
            raise _Untold(str(error)) from error

    def _recorded(self) -> list[ProcessIdentity]:
        return [ProcessIdentity.model_validate(one) for one in self._ledger.read().get("processes", ())]

    async def capabilities(self) -> Capabilities:
        try:
            version = await self._driver.call("version", 0, _STATUS_SECONDS)
            states = await self._states() or await self._cuda_processes()
            threads = [await self._driver.call("thread", pid, _STATUS_SECONDS) for pid in states]
        except (CheckpointMissing, _NotForUs, EngineLost) as error:
            return Capabilities(engine="a CUDA program", unsupported=str(error))
        return read_capabilities(
            version.value or 0,
            {pid: code.value for pid, code in zip(states, threads, strict=True)},
            self._options.processes_max,
            len(self._settings.device_indexes),
        )

    # ---- what state it is in --------------------------------------------------------------------------------------

    async def _states(self) -> dict[int, ProcessState]:
        """Of the processes that are written down. Raises EngineLost where one is gone, _Untold where the driver does
        not say."""
        found: dict[int, ProcessState] = {}
        for process in self._recorded():
            if not is_same(process):
                raise EngineLost(f"pid {process.pid} ended while it was checkpointed")
            code = await self._ask_state(process.pid)
            if not code.is_success:
                raise _Untold(f"the state of pid {process.pid} is not told: {code.name}")
            found[process.pid] = _state_of(code)
        return found

    async def observe(self) -> Observation:
        if self._outside.incarnation is None:
            return Observation(EngineState.GONE)
        kept = self._ledger.read()
        told: str | None = kept.get("state")
        if told == LOST:
            return Observation(EngineState.FAILED, detail=str(kept.get("why")))
        if self._driver.is_changing:  # then `told` says what: it is written down before the first such call
            return Observation(EngineState.WAKING if told == RESTORING else EngineState.PARKING)
        try:
            judged = await self._judged(told)
        except CheckpointMissing as error:
            if told is not None:
                return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=True)
            judged = Judged(EngineState.RUNNING)  # never touched, and nothing can be: its health route decides
        except CheckpointBusy as error:
            return Observation(EngineState.WAKING if told == RESTORING else EngineState.PARKING, detail=str(error))
        except EngineLost as error:
            return Observation(EngineState.FAILED, detail=str(error))
        except _Untold as error:
            return await self._by_health(told, str(error))
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error))
        if judged.state is not EngineState.RUNNING:
            tags = _TAGS if judged.state is EngineState.PARKED else ()
            return Observation(judged.state, tags, detail=judged.detail, is_held=judged.is_held)
        return await self._running(told)

    async def _by_health(self, told: str | None, why: str) -> Observation:
        """The driver does not tell: that says nothing of one that serves, nor of one that we have stopped."""
        try:
            serves = told is not None or (await self._health()) == 200
        except AgentError as error:
            serves, why = is_our_fault(error), f"{why}; {error}"
        return Observation(EngineState.UNREACHABLE, detail=why, is_our_fault=serves)

    async def _judged(self, told: str | None) -> Judged:
        judged = judge(await self._states() or await self._cuda_processes(), told)
        if not judged.to_unlock:
            return judged
        for pid in judged.to_unlock:
            await self._unlock(pid)
        return judge(await self._states() or await self._cuda_processes(), told)

    async def _running(self, told: str | None) -> Observation:
        if told is not None:
            self._write_after(state=None, processes=[])
        try:
            status = await self._health()
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if status != 200:
            return Observation(EngineState.UNREACHABLE, detail=f"GET {self._settings.health_path}: HTTP {status}")
        return Observation(EngineState.RUNNING)

    async def _unlock(self, pid: int) -> None:
        """Raises EngineTimedOut where it did not get through, CheckpointBusy where somebody else is at work."""
        code = await self._driver.call("unlock", pid, _UNLOCK_SECONDS)
        # A call of an earlier agent may have come first, and changed its state.
        if not code.is_success and (await self._ask_state(pid)).value == ProcessState.LOCKED:
            raise EngineTimedOut(f"pid {pid} is locked and was not unlocked: {code.name}")

    # ---- park -----------------------------------------------------------------------------------------------------

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy  # settings allow no other than all of it, to host memory
        if (await self._health()) != 200:
            raise EngineRefused(0, "it is not healthy")
        states = await self._cuda_processes()
        self._refuse_unless_ready(states)
        deadline = asyncio.get_running_loop().time() + seconds_max
        processes = [known for pid in states if (known := identity(pid)) is not None]
        self._ledger.intend(state=PARKING, processes=[process.model_dump() for process in processes])
        await self._lock_all(list(states), deadline)
        await self._checkpoint_all(list(states), deadline)
        self._write_after(state=PARKED)

    def _refuse_unless_ready(self, states: Mapping[int, ProcessState]) -> None:
        if not states:
            raise EngineRefused(0, "none of its processes has a CUDA context")
        if len(states) > self._options.processes_max:
            raise EngineRefused(0, _too_many(len(states), self._options.processes_max))
        for pid, state in states.items():
            if state is not ProcessState.RUNNING:
                raise EngineRefused(409, f"pid {pid} is {state.name}")

    async def _lock_all(self, pids: Sequence[int], deadline: float) -> None:
        """All or none: raises EngineRefused with every one unlocked again."""
        locked: list[int] = []
        for pid in pids:
            seconds = min(self._options.lock_seconds_max, max(1.0, deadline - asyncio.get_running_loop().time()))
            why = ""
            try:
                code = await self._driver.call(
                    "lock",
                    pid,
                    seconds + _LOCK_GRACE_SECONDS,
                    timeout_ms=int(seconds * 1000),
                    wait_seconds=seconds,
                )
                why = "" if code.is_success else code.name
            except AgentError as error:
                why = str(error)
            if why:
                await self._let_go(locked, doubtful=pid)
                raise EngineRefused(0, f"pid {pid} was not locked: {why}; nothing was released")
            locked.append(pid)
        late = set(await self._cuda_processes()) - set(pids)
        if late:
            await self._let_go(locked)
            raise EngineRefused(0, f"pid {min(late)} began to use CUDA meanwhile; nothing was released")

    async def _let_go(self, locked: Sequence[int], doubtful: int | None = None) -> None:
        """Unlocks in reverse. What cannot be unlocked now is unlocked at a later look: the ledger still says so."""
        pids = [*([] if doubtful is None else [doubtful]), *reversed(locked)]
        try:
            for pid in pids:
                code = await self._driver.call("state", pid, _STATUS_SECONDS)
                if code.is_success and code.value == ProcessState.LOCKED:
                    await self._unlock(pid)
        except AgentError as error:
            raise EngineTimedOut(f"a lock failed, and it cannot be told whether all are unlocked: {error}") from error
        self._write_after(state=None, processes=[])

    async def _checkpoint_all(self, pids: Sequence[int], deadline: float) -> None:
        done: list[int] = []
        for pid in pids:
            left = max(1.0, deadline - asyncio.get_running_loop().time())
            code = await self._driver.call("checkpoint", pid, left, wait_seconds=left)
            if code.is_success:
                done.append(pid)
                continue
            now = await self._driver.call("state", pid, _STATUS_SECONDS)
            if now.value == ProcessState.FAILED:
                self._lose(f"the checkpoint of pid {pid} failed: {code.name}")
                raise EngineTimedOut(f"the checkpoint of pid {pid} failed: {code.name}; only a restart helps")
            if not done and now.value == ProcessState.LOCKED:
                await self._let_go(pids)
                raise EngineRefused(code.code, f"pid {pid} was not checkpointed: {code.name}; nothing was released")
            raise EngineTimedOut(f"pid {pid} was not checkpointed: {code.name}; {done} were")

    # ---- resume ---------------------------------------------------------------------------------------------------

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        deadline = asyncio.get_running_loop().time() + seconds_max
        states = await self._states()
        if not states:  # checkpointed by somebody else: then the driver's word is all there is
            states = await self._cuda_processes()
            processes = [known for pid in states if (known := identity(pid)) is not None]
            self._ledger.intend(processes=[process.model_dump() for process in processes])
        if not any(state is ProcessState.CHECKPOINTED for state in states.values()):
            raise EngineRefused(409, f"nothing is checkpointed: {_words(states)}")
        self._ledger.intend(state=RESTORING)
        for pid, state in states.items():
            if state is ProcessState.CHECKPOINTED:
                await self._restore(pid, max(1.0, deadline - asyncio.get_running_loop().time()))
        for pid, state in (await self._states()).items():
            if state is ProcessState.LOCKED:
                await self._unlock(pid)
        self._write_after(state=None, processes=[])

    async def _restore(self, pid: int, seconds_max: float) -> None:
        code = await self._driver.call("restore", pid, seconds_max, wait_seconds=seconds_max)
        if code.is_success:
            return
        # A call of an earlier agent, which waited for the same device, may have done it first.
        if (await self._ask_state(pid)).value not in (ProcessState.LOCKED, ProcessState.RUNNING):
            why = f"the restore of pid {pid} failed: {code.name}; it cannot be restored any more (cuda-checkpoint#44)"
            self._lose(why)
            raise EngineRefused(code.code, why)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """All of it is as it was."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        key = self._settings.api_key_file
        return await ask_completion(self._base_url, self._settings.models[0], canary, bearer(key))

    def _lose(self, why: str) -> None:
        log.error("an engine is beyond restoring", engine=self._settings.name, why=why)
        self._write_after(state=LOST, why=why)

    def _write_after(self, **values: Any) -> None:
        """What was done. Where it cannot be written the intent stands, and the driver will tell."""
        try:
            self._ledger.write(**values)
        except OSError as error:
            log.error("the ledger of an engine could not be written", engine=self._settings.name, error=str(error))


_WHOSE: Final = "the agent has to run as the same user, or with CAP_SYS_PTRACE"


def read_capabilities(
    version: int, threads: Mapping[int, int | None], processes_max: int, devices: int
) -> Capabilities:
    """``version``: the driver's, as 1000 * major + 10 * minor; ``threads``: the thread by which each process is
    restored, by pid."""
    text = f"{version // 1000}.{version % 1000 // 10}"
    name = f"a CUDA program on a driver for CUDA {text}"
    told = CUDA_CHECKPOINT.model_copy(update={"engine": name, "version": text})
    if version < _DRIVER_VERSION_MIN:
        why = "checkpoints need a driver for CUDA 12.8 (R570) or newer"
        return told.model_copy(update={"unsupported": why})
    if not threads:
        return told.model_copy(update={"unsupported": "none of its processes has a CUDA context"})
    if len(threads) > processes_max:
        return told.model_copy(update={"unsupported": _too_many(len(threads), processes_max)})
    for pid, thread in threads.items():
        if thread is None or not Path(f"/proc/{pid}/task/{thread}").exists():
            why = f"the thread that restores pid {pid} is not one of its threads here: another PID namespace?"
            return told.model_copy(update={"fragile": why})
    if len(threads) > 1 or devices > 1:
        why = (
            f"{len(threads)} processes on {devices} devices: two-GPU engines are known not to restore"
            " (cuda-checkpoint#27), and NCCL needs NCCL_CUMEM_HOST_ENABLE=0 (nccl#2350)"
        )
        return told.model_copy(update={"fragile": why})
    return told


def _too_many(processes: int, processes_max: int) -> str:
    return (
        f"{processes} of its processes use CUDA and processes_max is {processes_max}: a lock of one rank hangs while"
        " the others wait for it in NCCL (cuda-checkpoint#30, #45). Raise cuda_checkpoint.processes_max if yours do not"
    )


def _state_of(code: Code) -> ProcessState:
    """Raises _Untold for a state that a newer driver has and we do not know."""
    try:
        return ProcessState(-1 if code.value is None else code.value)
    except ValueError:
        raise _Untold(f"the driver tells a state that this version does not know: {code.value}") from None


def _words(states: Mapping[int, ProcessState]) -> str:
    return ", ".join(f"pid {pid} is {state.name}" for pid, state in states.items()) or "it has no CUDA process"


def _may_use_cuda(pid: int) -> bool:
    """The driver's library is mapped there; also where that cannot be seen."""
    try:
        return b"libcuda.so" in Path(f"/proc/{pid}/maps").read_bytes()
    except PermissionError:
        return True
    except OSError:
        return False  # it has ended
