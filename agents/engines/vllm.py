"""vLLM's sleep mode, 0.7.3 to 0.33: levels 1 and 2, the KV cache alone, and what each version gets wrong.

The engine forgets at which level it sleeps and says so wrongly, a wake that failed looks like a sleep, and before 0.25
asking again makes it worse. So what was asked is in the ledger before it is asked, and state is what the engine says
read in that light. Parameters go into the query: a JSON body is ignored, which makes every sleep a level 1 and every
wake a whole one. /resume is never called: on a sleeping engine it is accepted and the next request ends it.

The gate has drained before a park; what the engine's own metrics still show came past the gate, and the park is refused
for it, unless the policy lets requests be aborted and this version's /sleep can abort them.
"""

from __future__ import annotations

import asyncio
import re
import time
from typing import Any, Final

import httpx
import structlog

from ...vmm.tags import KEEPS_CONTENTS
from ..errors import AgentError, EngineRefused, EngineTimedOut, EngineUnreachable
from ..gates.counting import sum_of_gauges
from ..processes import command_line
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from ..settings import EngineSettings
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import accepted, bearer, call, is_our_fault, json_object
from .ledger import Ledger
from .outside import EngineOutside
from .vllm_facts import (
    COLLECTIVE_RPC,
    IS_SLEEPING,
    RELEASE_KV,
    RESET_PREFIX_CACHE,
    SLEEP,
    WAKE_UP,
    VllmFacts,
    capabilities_of,
    facts_of,
)

log = structlog.get_logger(__name__)

STATUS_SECONDS: Final = 5.0
_IDLE_POLL_SECONDS: Final = 0.05
_IDLE_POLL_SECONDS_MAX: Final = 1.0
_IDLE_SHARE: Final = 0.25  # of the park call's time: the rest is the sleep's
_BUSY: Final = 409
_NOT_FOUND: Final = 404
_INTERNAL_ERROR: Final = 500
_COUNTS: Final = re.compile(r"^(vllm:num_requests_(?:running|waiting))[{ \t]", re.MULTILINE)

_NO_COUNT: Final = (
    "its /sleep cannot abort requests, and /metrics does not tell how many run: start it without --disable-log-stats,"
    ' or set the policy\'s on_drain_deadline = "abort_loan"'
)

# The ledger. `park` and `wake` say how the one call went; `level` is 0 for the KV cache alone; `reload` is true while
# the weights are lost.
SENT: Final = "sent"  # or about to be; its answer was not seen
DONE: Final = "done"
FAILED: Final = "failed"  # 5xx: something may have changed
UNKNOWN: Final = "unknown"  # no answer within its time
RELOAD_FAILED: Final = "reload_failed"
_WAKES_FAILED_MAX: Final = 3
_NAMES: Final = {MODEL_WEIGHTS: "weights", KV_CACHE: "kv_cache"}  # ours to theirs


class VllmAdapter:
    """Drives the server of ``settings``. ``outside`` tells its process, whose command line holds its flags."""

    def __init__(self, settings: EngineSettings, ledger: Ledger, outside: EngineOutside) -> None:
        self._url = settings.url
        self._settings = settings
        self._options = settings.vllm
        self._ledger = ledger
        self._outside = outside
        self._facts: VllmFacts | None = None
        self._facts_of: str | None = None  # the incarnation that they are of

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    # ---- what it is -------------------------------------------------------------------------------------------

    async def capabilities(self) -> Capabilities:
        facts = await self._probe()
        can_reload = self._options.reload is not None
        return capabilities_of(facts, can_reload=can_reload, allow_fragile=self._options.allow_fragile)

    async def _probe(self) -> VllmFacts:
        incarnation = self._outside.incarnation
        said = await self._get_if_there("/version")
        version = None if said is None else json_object(said).get("version")
        shown = await self._get_if_there("/openapi.json")
        openapi = None if shown is None else json_object(shown)
        has_dev_routes = openapi is None and await self._get_if_there(IS_SLEEPING) is not None
        facts = facts_of(
            None if version is None else str(version), openapi, self._words(incarnation), has_dev_routes=has_dev_routes
        )
        self._facts, self._facts_of = facts, incarnation
        return facts

    def _words(self, incarnation: str | None) -> list[str]:
        """How it was started: an attached engine's from its process, as far as it may be read."""
        if self._settings.command is not None:
            return self._settings.command
        return [] if incarnation is None else command_line(int(incarnation.split(":")[1]))

    async def _known(self) -> VllmFacts:
        if self._facts is None or self._facts_of != self._outside.incarnation:
            return await self._probe()
        return self._facts

    async def healthy(self) -> bool:
        try:
            return (await self._get("/health")).status_code == 200
        except (EngineUnreachable, EngineTimedOut):
            return False

    async def observe(self) -> Observation:
        try:
            facts = await self._known()
            said = await self._get(IS_SLEEPING if IS_SLEEPING in facts.routes else "/health")
            if said.status_code >= _INTERNAL_ERROR:
                accepted(said)
        except AgentError as error:
            if isinstance(error, EngineRefused) and error.status >= _INTERNAL_ERROR:
                # The core is dead, or its data-parallel ranks disagree: nothing but a restart mends either.
                return Observation(EngineState.FAILED, detail=str(error))
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        told = self._ledger.read()
        sleeping: Any = told.get("park") == DONE and told.get("wake") != DONE
        try:
            accepted(said)
            if IS_SLEEPING in facts.routes:
                sleeping = json_object(said).get("is_sleeping")
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if not isinstance(sleeping, bool):
            return Observation(EngineState.UNREACHABLE, detail=f"odd {IS_SLEEPING}: {said.text[:200]}")
        state, detail = _state(facts, told, sleeping=sleeping)
        if state is not EngineState.PARKED:
            return Observation(state, detail=detail)
        # Asleep by somebody else's word, it is taken for wholly asleep: a wake without tags brings back all there is.
        return Observation(state, tuple(told.get("tags", _NAMES)), detail=detail)

    # ---- park -------------------------------------------------------------------------------------------------

    def level_of(self, policy: EnginePolicy) -> int:
        """1 keeps the weights in host memory, 2 loses them; 0: the KV cache alone."""
        weights = policy.restore_modes.get(MODEL_WEIGHTS)
        if weights is None:
            return 0
        return 1 if weights in KEEPS_CONTENTS else 2

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        deadline = time.monotonic() + seconds_max
        facts = await self._known()
        may_abort = policy.on_drain_deadline == "abort_requests"
        mode = "abort" if may_abort else "wait"
        if not may_abort or not facts.takes_mode:
            # Without `mode` nothing aborts them, and the memory would go under requests that run.
            await self._wait_idle(seconds_max * _IDLE_SHARE, is_drained=not may_abort)
        if not facts.pauses and RESET_PREFIX_CACHE in facts.routes:
            accepted(await self._post(RESET_PREFIX_CACHE, STATUS_SECONDS))  # it keeps hashes of lost blocks (#17103)
        level = self.level_of(policy)
        tags = sorted(policy.restore_modes)
        self._ledger.intend(park=SENT, wake=None, wakes_failed=0, level=level, tags=tags, reload=level == 2)
        left = max(1.0, deadline - time.monotonic())
        if level == 0:
            await self._park_kv_cache(self.sleep_query(facts, 0, "abort" if may_abort else "keep"), left)
        else:
            await self._park_call(SLEEP, self.sleep_query(facts, level, mode), left)
        self._ledger.write(park=DONE)

    @staticmethod
    def sleep_query(facts: VllmFacts, level: int, mode: str) -> dict[str, str]:
        query = {"level": str(level)}
        return {**query, "mode": mode} if facts.takes_mode else query

    async def _park_call(self, path: str, query: dict[str, str], seconds_max: float) -> None:
        """One call that may change memory; the ledger says how it went before anything is raised."""
        try:
            reply = await self._post(path, seconds_max, query)
        except EngineUnreachable:
            self._ledger.clear()  # nobody took it
            raise
        except EngineTimedOut:
            self._ledger.write(park=UNKNOWN)
            raise
        if reply.status_code >= _INTERNAL_ERROR:
            self._ledger.write(park=FAILED)
        elif reply.status_code != 200:
            self._ledger.clear()
        accepted(reply)

    async def _park_kv_cache(self, query: dict[str, str], seconds_max: float) -> None:
        await self._park_call(SLEEP, query, seconds_max)
        try:
            reply = await self._post(RELEASE_KV, seconds_max)
        except EngineTimedOut:
            self._ledger.write(park=UNKNOWN)
            raise
        if reply.status_code == 200:
            return
        # Nothing was released, and its scheduler is paused: it goes on, or only a restart helps.
        went_on = await self._post(WAKE_UP, seconds_max)
        if went_on.status_code == 200:
            self._ledger.clear()
        else:
            self._ledger.write(park=FAILED)
        accepted(reply)

    async def _wait_idle(self, seconds_max: float, *, is_drained: bool) -> None:
        """Until the engine's own count of requests is zero; refused past the time, and where it tells no count and the
        gate may not have drained (``is_drained``)."""
        deadline = time.monotonic() + seconds_max
        pause = _IDLE_POLL_SECONDS
        while True:
            requests = _requests(await self._get("/metrics"))
            if requests is None and not is_drained:
                raise EngineRefused(_BUSY, _NO_COUNT)
            if not requests:
                return  # none, or it does not tell: its gate has drained
            if time.monotonic() > deadline:
                raise EngineRefused(_BUSY, f"{requests} requests run in the engine that did not come through its gate")
            await asyncio.sleep(pause)
            pause = min(_IDLE_POLL_SECONDS_MAX, pause * 1.5)

    # ---- wake -------------------------------------------------------------------------------------------------

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy  # what was released is in the ledger, whatever the policy is by now
        facts, told = await self._known(), self._ledger.read()
        if told.get("wake") in (SENT, FAILED) and not facts.may_wake_again:
            raise EngineRefused(_BUSY, "a wake of this version that did not succeed is not asked for again")
        deadline = time.monotonic() + seconds_max
        self._ledger.intend(wake=SENT)
        if told.get("level") == 0:
            # An agent may have died before the release: then the scheduler alone waits, and has a tag of its own.
            await self._wake_call(["kv_cache", "scheduling"], deadline)
        elif told.get("reload") and facts.wakes_in_stages and facts.data_parallel == 1:
            await self._wake_call(["weights"], deadline)
            try:
                await self._reload(deadline)
            except AgentError:
                self._ledger.write(wake=RELOAD_FAILED)
                raise
            await self._wake_call(["kv_cache"], deadline)
        else:
            await self._wake_call([], deadline)
        self._ledger.write(wake=DONE)

    async def _wake_call(self, tags: list[str], deadline: float) -> None:
        try:
            reply = await self._post(WAKE_UP, _left(deadline), {"tags": tags} if tags else {})
        except EngineUnreachable:
            self._ledger.write(wake=None)
            raise
        except EngineTimedOut:
            self._ledger.write(wake=UNKNOWN)
            raise
        if reply.status_code != 200:
            failures = int(self._ledger.read().get("wakes_failed", 0)) + 1
            self._ledger.write(wake=FAILED, wakes_failed=failures)
        accepted(reply)

    async def _reload(self, deadline: float) -> None:
        """Weights from disk into the memory that is there again."""
        left = _left(deadline)
        accepted(await call("POST", self._url + COLLECTIVE_RPC, left, body={"method": self._options.reload}))
        self._ledger.write(reload=False)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        told = self._ledger.read()
        if not told:
            return
        facts, deadline = await self._known(), time.monotonic() + seconds_max
        if told.get("reload"):
            await self._reload(deadline)
        if RESET_PREFIX_CACHE in facts.routes:
            reply = accepted(await self._post(RESET_PREFIX_CACHE, _left(deadline)))
            if reply.content and json_object(reply).get("success") is False:
                raise EngineRefused(reply.status_code, "its prefix cache still names blocks that are lost")
        try:
            self._ledger.clear()
        except OSError as error:  # what is left says that it woke, which is right
            log.warning("the ledger of an engine was not cleared", engine=self._settings.name, error=str(error))

    # ---- the canary -------------------------------------------------------------------------------------------

    async def answer(self, canary: CanaryPolicy) -> Answer:
        """Of the model and of every adapter that is declared: a sleep may lose one silently (#53888)."""
        headers = bearer(self._settings.api_key_file)
        answers = [
            await ask_completion(self._url, model, canary, headers, return_token_ids=True)
            for model in (self._settings.models[0], *self._options.loras)
        ]
        return answers[0] if len(answers) == 1 else _joined(answers)

    # ---- calls ------------------------------------------------------------------------------------------------

    async def _get(self, path: str) -> httpx.Response:
        return await call("GET", self._url + path, STATUS_SECONDS)

    async def _get_if_there(self, path: str) -> httpx.Response | None:
        reply = await self._get(path)
        return None if reply.status_code == _NOT_FOUND else accepted(reply)

    async def _post(self, path: str, seconds_max: float, query: dict[str, Any] | None = None) -> httpx.Response:
        url = httpx.URL(self._url + path, params=query) if query else httpx.URL(self._url + path)
        return await call("POST", str(url), seconds_max)


def _requests(reply: httpx.Response) -> int | None:
    """How many run or wait; None where it does not tell. A count that is no number is no zero: EngineRefused."""
    told = set(_COUNTS.findall(reply.text)) if reply.status_code == 200 else set[str]()
    if not told:
        return None
    try:
        return sum_of_gauges(reply.text, sorted(told))
    except ValueError as error:
        raise EngineRefused(_BUSY, f"its /metrics cannot be read: {error}") from error


def _state(facts: VllmFacts, told: dict[str, Any], *, sleeping: bool) -> tuple[EngineState, str]:
    """What ``sleeping`` means, given what the engine was asked."""
    park, wake = told.get("park"), told.get("wake")
    if park == FAILED:
        return EngineState.FAILED, "its /sleep failed: memory may be gone that it takes for its own"
    if wake == RELOAD_FAILED:
        return EngineState.FAILED, "its weights could not be loaded again"
    if not sleeping:
        # A pause is the first thing that a sleep does, so an engine that is not paused did not take the call (0.17).
        still = park == UNKNOWN or (park == SENT and not facts.pauses)
        return (EngineState.PARKING if still and wake is None else EngineState.RUNNING), ""
    if wake is None:
        return EngineState.PARKED, ""
    if int(told.get("wakes_failed", 0)) >= _WAKES_FAILED_MAX:
        return EngineState.FAILED, f"it did not wake {_WAKES_FAILED_MAX} times, with room for it"
    if wake in (SENT, FAILED):
        if facts.may_wake_again:
            return EngineState.PARKED, "an earlier wake did not succeed"
        if wake == FAILED:
            return EngineState.FAILED, "its wake failed halfway, and this version cannot be asked again"
    return EngineState.WAKING, "it was asked to wake and still sleeps"


def _left(deadline: float) -> float:
    return max(1.0, deadline - time.monotonic())


def _joined(answers: list[Answer]) -> Answer:
    """One after the other; token ids and log-probabilities only where every one has them."""
    ids = [answer.token_ids for answer in answers]
    logprobs = [answer.token_logprobs for answer in answers]
    return Answer(
        "\n".join(answer.text for answer in answers),
        None if None in ids else tuple(token for one in ids for token in one or ()),
        None if None in logprobs else tuple(value for one in logprobs for value in one or ()),
    )
