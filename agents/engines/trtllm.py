"""TensorRT-LLM's runtime memory control (NVIDIA/TensorRT-LLM#19016), and the reference engine that speaks it too.

Every attempt gets a new timestamp, nonce and signature and a connection of its own (a server that answered 500 closes
its keep-alive connections). Replies come in three error shapes and are read here only. A 200 from release or
resume arrives after the whole operation and still proves nothing about memory. Restore modes are fixed when
the engine starts, so a policy is honoured by the flags of its command, never by a call.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final

import httpx

from ...vmm.lifecycle import MemoryState
from ...vmm.signing import new_headers
from ..errors import AgentError, EngineAuthRefused, EngineRefused, EngineTimedOut, EngineUnreachable
from ..key_files import KeyUnusable, read_key
from ..protocol.capabilities import Capabilities, trtllm_capabilities
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import accepted, bearer, call, is_our_fault

_STATUS_SECONDS: Final = 10.0
_INTERNAL_ERROR: Final = 500
_DIVERGED: Final = "diverged across workers"
# Ranks change one after the other, each within an acknowledgement's 30 s. What they disagree on for longer stays so.
DIVERGED_SECONDS_MAX: Final = 35.0

_STATES: Final = {
    MemoryState.RUNNING: EngineState.RUNNING,
    MemoryState.PARKING: EngineState.PARKING,
    MemoryState.PARKED: EngineState.PARKED,
    MemoryState.WAKING: EngineState.WAKING,
    MemoryState.FAILED: EngineState.FAILED,
}


class TrtllmAdapter:
    """Drives the engine at ``base_url`` (loopback): ``key_file`` signs control, ``api_key_file`` is for the canary.

    Keys are read again at every call, so they can be rotated.
    """

    def __init__(
        self,
        base_url: str,
        model: str,
        key_file: Path,
        api_key_file: Path | None = None,
        *,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._key_file = key_file
        self._api_key_file = api_key_file
        self._now = now
        self._diverged_since: float | None = None

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            reply = await call("GET", f"{self._base_url}/health", _STATUS_SECONDS)
        except (EngineUnreachable, EngineTimedOut):
            return False
        return reply.status_code == 200

    async def observe(self) -> Observation:
        try:
            reply = await self._control("GET", "/memory_status", None, _STATUS_SECONDS)
        except AgentError as error:
            return Observation(self._without_status(error), detail=str(error), is_our_fault=is_our_fault(error))
        self._diverged_since = None
        skew = self._clock_skew(reply)
        try:
            body = reply.json()
            state = _STATES[MemoryState(body["state"])]
            tags = tuple(str(tag) for tag in body["parked_tags"])
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return Observation(
                EngineState.UNREACHABLE, clock_skew_seconds=skew, detail=f"odd status: {reply.text[:200]}"
            )
        # In `parking` and `failed` the engine's list of tags is not to be trusted.
        return Observation(state, tags if state is EngineState.PARKED else (), skew)

    def _without_status(self, error: AgentError) -> EngineState:
        """Failed once its ranks have disagreed for too long: nothing but a restart mends that."""
        if not (isinstance(error, EngineRefused) and error.status == _INTERNAL_ERROR and _DIVERGED in str(error)):
            self._diverged_since = None
            return EngineState.UNREACHABLE
        now = time.monotonic()
        self._diverged_since = self._diverged_since or now
        over = now - self._diverged_since >= DIVERGED_SECONDS_MAX
        return EngineState.FAILED if over else EngineState.UNREACHABLE

    async def capabilities(self) -> Capabilities:
        return trtllm_capabilities()

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        await self._control("POST", "/release_memory", {"tags": sorted(policy.restore_modes)}, seconds_max)

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        await self._control("POST", "/resume_memory", None, seconds_max)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """The server goes on by itself."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(self._base_url, self._model, canary, bearer(self._api_key_file))

    async def _control(self, method: str, path: str, body: Any, seconds_max: float) -> httpx.Response:
        raw = None if body is None else json.dumps(body).encode()
        headers = new_headers(self._read_key(), method, path, raw or b"", now=self._now())
        return accepted(await call(method, self._base_url + path, seconds_max, body=raw, headers=headers))

    def _read_key(self) -> bytes:
        try:
            return read_key(self._key_file)
        except KeyUnusable as error:
            raise EngineAuthRefused(f"the control key {self._key_file} {error}") from error

    def _clock_skew(self, reply: httpx.Response) -> float | None:
        date = reply.headers.get("date")
        if date is None:
            return None
        try:
            return parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, TypeError):
            return None
