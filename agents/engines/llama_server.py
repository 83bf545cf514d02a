"""llama-server in router mode: an unload ends the model's child process, so nothing of it stays; a load starts one.

Both calls answer before the work is done. A request to a model that is not loaded loads it, unless the router was
started with --no-models-autoload: the gate is closed meanwhile, and nothing of ours asks the engine.
Sleeping by --sleep-idle-seconds is the router's own affair and keeps some 600 MiB (ggml-org/llama.cpp#19379).
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, cast

import httpx

from ..errors import AgentError, EngineRefused, EngineTimedOut
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import LLAMA_SERVER
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import accepted, bearer, call, is_our_fault, json_object, objects

_STATUS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.05
_POLL_SECONDS_MAX: Final = 1.0
_UNLOAD_SECONDS_MAX: Final = 30.0  # of a call that nobody waits for any more

_STATES: Final = {
    "loaded": EngineState.RUNNING,
    "sleeping": EngineState.RUNNING,  # the next request wakes it, as the canary does
    "loading": EngineState.WAKING,
    "downloading": EngineState.WAKING,
    "unloaded": EngineState.PARKED,
}


class LlamaServerAdapter:
    """One model of the router at ``base_url``."""

    def __init__(self, base_url: str, model: str, api_key_file: Path | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._api_key_file = api_key_file

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            return (await self._get("/health")).status_code == 200
        except AgentError:
            return False

    async def capabilities(self) -> Capabilities:
        try:
            await self._status()
        except EngineRefused as error:
            return Capabilities(
                engine="llama-server", unsupported=f"llama-server cannot unload this model: {error.text}"
            )
        return LLAMA_SERVER

    async def observe(self) -> Observation:
        try:
            status = await self._status()
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        state = _STATES.get(str(status.get("value")), EngineState.UNREACHABLE)
        detail = "" if state is not EngineState.UNREACHABLE else f"odd status {status.get('value')!r}"
        if status.get("failed"):
            detail = f"its child ended with code {status.get('exit_code')}"
        tags = (KV_CACHE, MODEL_WEIGHTS) if state is EngineState.PARKED else ()
        return Observation(state, tags, detail=detail)

    async def _status(self) -> dict[str, Any]:
        """The model's status object; EngineRefused where the server lists no such model or has no router."""
        for entry in objects(json_object(accepted(await self._get("/models"))).get("data")):
            if entry.get("id") == self._model:
                if isinstance(status := entry.get("status"), dict):
                    return cast("dict[str, Any]", status)
                raise EngineRefused(200, 'it runs without router mode (started with -m); use kind = "process"')
        raise EngineRefused(200, f"GET /models does not list {self._model!r}")

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        deadline = asyncio.get_running_loop().time() + seconds_max
        await self._post("/models/unload", seconds_max)
        await self._until("unloaded", deadline)

    def unseen_seconds_max(self) -> float:
        """The unload is answered before it is done, and the model is listed as loaded until then."""
        return _UNLOAD_SECONDS_MAX

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        deadline = asyncio.get_running_loop().time() + seconds_max
        await self._post("/models/load", seconds_max)
        await self._until("loaded", deadline)

    async def _until(self, wanted: str, deadline: float) -> None:
        pause = _POLL_SECONDS
        while (status := await self._status()).get("value") != wanted:
            if status.get("failed"):
                raise EngineRefused(200, f"the model's child ended with code {status.get('exit_code')}")
            if asyncio.get_running_loop().time() + pause > deadline:
                raise EngineTimedOut(f"the model is {status.get('value')!r} and not {wanted} yet")
            await asyncio.sleep(pause)
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """A child that was just started needs nothing."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(self._base_url, self._model, canary, bearer(self._api_key_file))

    async def _get(self, path: str) -> httpx.Response:
        return await call("GET", self._base_url + path, _STATUS_SECONDS, headers=bearer(self._api_key_file))

    async def _post(self, path: str, seconds_max: float) -> None:
        body = {"model": self._model}
        accepted(await call("POST", self._base_url + path, seconds_max, body=body, headers=bearer(self._api_key_file)))
