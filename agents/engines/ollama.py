"""ollama: an empty prompt with keep_alive 0 unloads the model's runner, one with keep_alive -1 loads it and keeps it.

The server itself holds no device memory and keeps running. Any request for the model loads it again, so the gate is
closed meanwhile and the agent asks only /api/ps. A model that stays in "Stopping" (ollama/ollama#7606) is still
listed, so the park counts as refused; one that is no longer listed and keeps its memory is found by its bytes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import httpx

from ..errors import AgentError, EngineRefused
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import OLLAMA
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation
from .http_call import accepted, bearer, call, is_our_fault, json_object, objects

_STATUS_SECONDS: Final = 10.0
_POLL_SECONDS: Final = 0.25  # as its own wait for memory, which it gives up after 5 s
_STOPPING_SECONDS_MAX: Final = 5.0
_UNLOAD_SECONDS_MAX: Final = 30.0  # of a call that nobody waits for any more
_KEEP: Final = -1  # for ever


class OllamaAdapter:
    """One model of the server at ``base_url``. It asks for no key itself; a proxy before it may."""

    def __init__(self, base_url: str, model: str, api_key_file: Path | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._api_key_file = api_key_file

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            return (await self._get("/api/version")).status_code == 200
        except AgentError:
            return False

    async def capabilities(self) -> Capabilities:
        said = json_object(accepted(await self._get("/api/version")))
        version = str(said.get("version", ""))
        return OLLAMA.model_copy(update={"engine": f"ollama {version}".strip(), "version": version or None})

    async def observe(self) -> Observation:
        try:
            loaded = await self._is_loaded()
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if loaded:
            return Observation(EngineState.RUNNING)
        return Observation(EngineState.PARKED, (KV_CACHE, MODEL_WEIGHTS))

    async def _is_loaded(self) -> bool:
        reply = accepted(await self._get("/api/ps"))
        models: Any = json_object(reply).get("models")
        entries = objects(models)
        if not isinstance(models, list) or len(entries) != len(cast("Sequence[Any]", models)):
            raise EngineRefused(reply.status_code, f"odd /api/ps: {reply.text[:200]}")
        names = [entry.get(key) for entry in entries for key in ("name", "model")]
        return self._model in names or f"{self._model}:latest" in names

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        await self._generate({"keep_alive": 0}, seconds_max)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + min(_STOPPING_SECONDS_MAX, seconds_max)
        while await self._is_loaded():
            if loop.time() > deadline:
                raise EngineRefused(200, f"the model is still listed by /api/ps {_STOPPING_SECONDS_MAX:.0f} s later")
            await asyncio.sleep(_POLL_SECONDS)

    def unseen_seconds_max(self) -> float:
        """A model that is being unloaded is listed as one that is not."""
        return _UNLOAD_SECONDS_MAX

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        await self._generate({"keep_alive": _KEEP}, seconds_max)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """A runner that was just started needs nothing."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        asked = {
            "prompt": canary.prompt,
            "raw": True,
            "keep_alive": _KEEP,
            "options": {"temperature": 0, "seed": 0, "num_predict": canary.tokens},
        }
        said = await self._generate(asked, canary.deadline_seconds)
        text = said.get("response")
        if not isinstance(text, str) or not text:
            raise EngineRefused(200, f"odd answer: {str(said)[:200]}")
        return Answer(text)

    async def _generate(self, fields: dict[str, Any], seconds_max: float) -> dict[str, Any]:
        body = {"model": self._model, "stream": False, **fields}
        headers = bearer(self._api_key_file)
        reply = await call("POST", f"{self._base_url}/api/generate", seconds_max, body=body, headers=headers)
        return json_object(accepted(reply))

    async def _get(self, path: str) -> httpx.Response:
        return await call("GET", self._base_url + path, _STATUS_SECONDS, headers=bearer(self._api_key_file))
