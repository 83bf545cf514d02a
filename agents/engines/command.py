"""An engine that the operator's own commands park, wake and observe; bytes and canary decide all the same.

A command is an argv, never a shell's text. It gets the engine's name, URL, pid and tags in its environment, a bound on
its time and an end of its output that is kept for the operator. Exit codes mean:

observe  0 running, 10 parked, 11 changing, 12 failed; any other: it cannot be told
park     0 done, 10 refused and nothing changed; any other: unknown, so the engine is observed
resume   as park
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import structlog

from ..errors import AgentError, EngineRefused, EngineTimedOut, EngineUnreachable
from ..processes import boot_id, identity, is_same
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import COMMAND
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState, ProcessIdentity
from ..settings import EngineSettings
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import bearer, call
from .ledger import Ledger
from .outside import EngineOutside

log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 10.0
_OUTPUT_BYTES_MAX: Final = 64 << 10
_WORDS_MAX: Final = 500
_KILLED_SECONDS_MAX: Final = 5.0  # to be gone after SIGKILL

# What the ledger's `state` says. Nothing in it: no command of ours is at work on the engine.
PARKING: Final = "parking"  # its command runs, or is about to be started, or has ended by itself
PARK_KILLED: Final = "park_killed"
WAKING: Final = "waking"
WAKE_KILLED: Final = "wake_killed"

DONE: Final = 0
PARKED: Final = 10
REFUSED: Final = 10
CHANGING: Final = 11
FAILED: Final = 12
_STATES: Final = {
    DONE: EngineState.RUNNING,
    PARKED: EngineState.PARKED,
    CHANGING: EngineState.PARKING,
    FAILED: EngineState.FAILED,
}


@dataclass(frozen=True, slots=True)
class Ended:
    code: int
    words: str  # the last line that it wrote


class CommandAdapter:
    """``ledger``: which command is at work on the engine; it is of the node's boot, not of a process of the engine."""

    def __init__(self, settings: EngineSettings, ledger: Ledger, outside: EngineOutside) -> None:
        self._settings = settings
        self._base_url = settings.url.rstrip("/")
        self._ledger = ledger
        self._ledger.incarnation = boot_id
        self._outside = outside
        self._unkillable: asyncio.subprocess.Process | None = None  # or on its way to its end

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        """A parked engine may have no server; then its own command says what it is."""
        try:
            reply = await call("GET", self._base_url + self._settings.health_path, _STATUS_SECONDS)
        except EngineUnreachable:
            return (await self.observe()).state is EngineState.PARKED
        except AgentError:
            return False
        return reply.status_code == 200

    async def capabilities(self) -> Capabilities:
        return COMMAND

    async def observe(self) -> Observation:
        at_work = self._at_work()
        if at_work is not None:  # of an agent that died: what the engine says meanwhile may not last
            return at_work
        try:
            ended = await self._run(self._settings.observe_command, (), self._settings.observe_seconds_max)
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=_cannot_run(error))
        state = _STATES.get(ended.code)
        if state is None:
            detail = f"the observe command ended with code {ended.code}: {ended.words}"
            return Observation(EngineState.UNREACHABLE, detail=detail)
        return Observation(state, (KV_CACHE, MODEL_WEIGHTS) if state is EngineState.PARKED else (), detail=ended.words)

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        _judge("park", await self._change(self._settings.park_command, policy, seconds_max, PARKING, PARK_KILLED))

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        _judge("resume", await self._change(self._settings.resume_command, policy, seconds_max, WAKING, WAKE_KILLED))

    def unseen_seconds_max(self) -> float:
        """Until its command has ended by itself: what one that was killed had begun elsewhere may go on."""
        told = self._ledger.read()
        unknown = told.get("state") == PARK_KILLED or (told.get("state") == PARKING and not told.get("processes"))
        return math.inf if unknown else 0.0

    def _at_work(self) -> Observation | None:
        """Changing, while a command that an earlier agent has begun lives."""
        told = self._ledger.read()
        state = {PARKING: EngineState.PARKING, WAKING: EngineState.WAKING}.get(told.get("state", ""))
        for process in [ProcessIdentity.model_validate(one) for one in told.get("processes") or ()]:
            if state is not None and is_same(process):
                return Observation(state, detail=f"the command that does it still runs: process {process.pid}")
        return None

    async def _change(
        self, argv: Sequence[str] | None, policy: EnginePolicy, seconds_max: float, state: str, killed: str
    ) -> Ended:
        """Runs a command that changes the engine. That it begins, as which process, and its end are in the ledger."""
        self._ledger.intend(state=state, processes=[])

        def begun(pid: int) -> None:
            process = identity(pid)
            self._note(processes=[] if process is None else [process.model_dump()])

        try:
            ended = await self._run(argv, sorted(policy.restore_modes), seconds_max, begun)
        except EngineUnreachable:  # it was not started
            self._note(state=None, processes=[])
            raise
        except BaseException:
            self._note(state=killed)
            raise
        self._note(state=None, processes=[])
        return ended

    def _note(self, **values: Any) -> None:
        """Where it cannot be written the intent stands: then nobody knows whether the command is at work."""
        try:
            self._ledger.write(**values)
        except OSError as error:
            log.error("the ledger of an engine could not be written", engine=self._settings.name, error=str(error))

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """The operator's resume command does all that is to be done."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(
            self._base_url, self._settings.models[0], canary, bearer(self._settings.api_key_file)
        )

    async def _run(
        self,
        argv: Sequence[str] | None,
        tags: Sequence[str],
        seconds_max: float,
        on_begin: Callable[[int], None] = lambda pid: None,
    ) -> Ended:
        """Raises EngineUnreachable if it cannot be started, EngineTimedOut at its bound, where it is killed."""
        assert argv is not None, "settings refuse this kind without its commands"
        if (left := self._unkillable) is not None and left.returncode is None:
            raise EngineUnreachable(f"nothing else is started beside an earlier command: process {left.pid} still runs")
        incarnation = self._outside.incarnation
        environment = {
            # What these commands start is the operator's: it carries none of the marks by which we know what is ours.
            **{name: value for name, value in os.environ.items() if not name.startswith("LULL_")},
            "LULL_ENGINE_NAME": self._settings.name,
            "LULL_ENGINE_URL": self._base_url,
            "LULL_ENGINE_PID": "" if incarnation is None else incarnation.split(":")[1],
            "LULL_TAGS": ",".join(tags),
        }
        try:
            reading, writing = os.pipe()
        except OSError as error:
            raise EngineUnreachable(f"{argv[0]} cannot be started: {error.strerror}") from error
        os.set_blocking(reading, False)
        output = _Output(reading)
        loop = asyncio.get_running_loop()
        loop.add_reader(reading, output.read)
        try:
            process = await _start(argv, environment, writing)
            on_begin(process.pid)
            code = await self._end_of(process, argv[0], seconds_max)
            output.read()
        finally:
            loop.remove_reader(reading)
            os.close(reading)
        return Ended(code, output.last_line())

    async def _end_of(self, process: asyncio.subprocess.Process, name: str, seconds_max: float) -> int:
        """The exit code. At its bound the command is killed."""
        try:
            async with asyncio.timeout(seconds_max):
                return await process.wait()
        except TimeoutError as error:
            await self._kill(process)
            ends = "was killed" if process.returncode is not None else f"cannot be killed: process {process.pid} runs"
            raise EngineTimedOut(f"{name} did not end within {seconds_max:g} s and {ends}") from error
        except asyncio.CancelledError:
            await self._kill(process)
            raise

    async def _kill(self, process: asyncio.subprocess.Process) -> None:
        """With all that it started and that did not leave its group. One that became root refuses the signal, and one
        in an uninterruptible wait does not end of it: neither is waited for without end."""
        self._unkillable = process
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(_KILLED_SECONDS_MAX):
                await process.wait()


async def _start(argv: Sequence[str], environment: dict[str, str], output: int) -> asyncio.subprocess.Process:
    try:
        return await asyncio.create_subprocess_exec(
            *argv,
            stdin=asyncio.subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment,
            start_new_session=True,
        )
    except OSError as error:
        raise EngineUnreachable(f"{argv[0]} cannot be started: {error.strerror}") from error
    finally:
        os.close(output)


class _Output:
    """Everything is read, so a command never blocks on its output; the end of it is kept."""

    def __init__(self, fd: int) -> None:
        self._fd = fd
        self._kept = b""

    def read(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(self._fd, _OUTPUT_BYTES_MAX):
                self._kept = (self._kept + chunk)[-_OUTPUT_BYTES_MAX:]
            asyncio.get_running_loop().remove_reader(self._fd)  # nobody has it open for writing any more

    def last_line(self) -> str:
        lines = self._kept.decode(errors="replace").strip().splitlines()
        return lines[-1][:_WORDS_MAX] if lines else "it wrote nothing"


def _judge(verb: str, ended: Ended) -> None:
    if ended.code == REFUSED:
        raise EngineRefused(ended.code, f"the {verb} command refused: {ended.words}")
    if ended.code != DONE:
        raise EngineTimedOut(f"the {verb} command ended with code {ended.code}: {ended.words}")


def _cannot_run(error: AgentError) -> bool:
    """A command that cannot be started says nothing about the engine."""
    return isinstance(error, EngineUnreachable)
