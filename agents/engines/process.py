"""Any engine that the agent starts: parked by ending it, woken by starting it again. Its price is a slow wake.

Nothing is asked of the engine but its health route. That it was ended on purpose is written down before it is told to
end, with the process that is meant; ending twice is ending once, so an agent that died in the middle finishes it.
"""

from __future__ import annotations

import asyncio
from typing import Final

import structlog

from ..engine_process import EngineProcess, EngineWillNotDie
from ..errors import AgentError, EngineRefused, EngineTimedOut
from ..processes import boot_id
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import PROCESS
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from ..settings import EngineSettings
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import bearer, call, is_our_fault
from .ledger import Ledger
from .outside import EngineOutside

log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05
_POLL_SECONDS_MAX: Final = 1.0


class ProcessAdapter:
    """``outside`` has the process, ``ledger`` what became of it; the ledger is of the node's boot, not of a process."""

    def __init__(self, settings: EngineSettings, ledger: Ledger, outside: EngineOutside) -> None:
        self._base_url = settings.url.rstrip("/")
        self._model = settings.models[0]
        self._ledger = ledger
        self._ledger.incarnation = boot_id
        self._outside = outside
        self._health_path = settings.health_path
        self._stop_seconds_max = settings.stop_seconds_max
        self._api_key_file = settings.api_key_file

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            reply = await call("GET", self._base_url + self._health_path, _STATUS_SECONDS)
        except AgentError:
            return False
        return reply.status_code == 200

    async def capabilities(self) -> Capabilities:
        return PROCESS

    async def observe(self) -> Observation:
        meant = self._ledger.read().get("ending")
        now = self._outside.incarnation
        if now is None:
            if meant is None:
                return Observation(EngineState.GONE)
            return Observation(EngineState.PARKED, (KV_CACHE, MODEL_WEIGHTS))
        if now == meant:
            try:
                await self._end()  # an agent died in the middle of it
            except EngineTimedOut as error:
                return Observation(EngineState.PARKING, detail=str(error))
            return Observation(EngineState.PARKED, (KV_CACHE, MODEL_WEIGHTS))
        try:
            reply = await call("GET", self._base_url + self._health_path, _STATUS_SECONDS)
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if reply.status_code == 200:
            return Observation(EngineState.RUNNING)
        return Observation(EngineState.UNREACHABLE, detail=f"GET {self._health_path}: HTTP {reply.status_code}")

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy, seconds_max  # bounded by the engine's own stop time
        self._ledger.intend(ending=self._outside.incarnation)
        await self._end()

    async def _end(self) -> None:
        try:
            await self._process().stop(self._stop_seconds_max)
        except EngineWillNotDie as error:
            raise EngineTimedOut(str(error)) from error

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        process = self._process()
        if not process.alive:
            await self._end()  # what it may have left behind
            process.start(policy)
        try:
            self._ledger.clear()
        except OSError as error:  # it says that another process was ended, which is true
            log.error("the ledger of an engine could not be written", engine=self._model, error=str(error))
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds_max, _POLL_SECONDS
        while not await self.healthy():
            if not process.alive:
                raise EngineRefused(0, f"it ended while it started; see {process.log_path}")
            if loop.time() + pause > deadline:
                raise EngineTimedOut(f"it did not answer GET {self._health_path} with 200 within {seconds_max} s")
            await asyncio.sleep(pause)
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """A process that was just started needs nothing; the canary is its warm-up."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(self._base_url, self._model, canary, bearer(self._api_key_file))

    def _process(self) -> EngineProcess:
        process = self._outside.process
        assert process is not None, "settings refuse this kind without a command"
        return process
