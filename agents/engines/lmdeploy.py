"""LMDeploy's api_server (0.16.0) with the PyTorch engine: /sleep, /wakeup, /is_sleeping.

``is_sleeping`` is set before the work and stays so when that fails; the calls answer an empty 200 whatever happened. So
its word says only whether it was asked, and bytes and canary say the rest. TurboMind answers alike and frees nothing,
and no route tells which of the two runs: the command does, where it is ours.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import httpx

from ..command_flags import flag
from ..errors import AgentError, EngineRefused
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities
from ..protocol.other_engines import LMDEPLOY
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import accepted, bearer, call, is_our_fault, json_object

_STATUS_SECONDS: Final = 10.0
_ROUTES: Final = ("/sleep", "/wakeup", "/is_sleeping")


class LmdeployAdapter:
    """``command``: what the agent starts it with; empty for an attached one."""

    def __init__(self, base_url: str, model: str, command: Sequence[str], api_key_file: Path | None = None) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._command = list(command)
        self._api_key_file = api_key_file

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            return (await self._get("/health")).status_code == 200  # "sleeping" counts as 200
        except AgentError:
            return False

    async def capabilities(self) -> Capabilities:
        reply = accepted(await self._get("/openapi.json"))
        paths = json_object(reply).get("paths")
        if not isinstance(paths, dict):
            raise EngineRefused(reply.status_code, f"odd /openapi.json: {reply.text[:200]}")
        return read_capabilities(list(cast("dict[str, Any]", paths)), self._command)

    async def observe(self) -> Observation:
        try:
            asleep = json_object(accepted(await self._get("/is_sleeping"))).get("is_sleeping")
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if asleep is True:
            return Observation(EngineState.PARKED, (KV_CACHE, MODEL_WEIGHTS))
        if asleep is False:
            return Observation(EngineState.RUNNING)
        return Observation(EngineState.UNREACHABLE, detail=f"odd is_sleeping: {asleep!r}")

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy  # one way only: level 2 would want the weights sent as serialised tensors
        await self._post("/sleep?level=1", seconds_max)

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        await self._post("/wakeup", seconds_max)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """The wake has rebuilt model, graphs and cache; the canary is its warm-up."""

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(self._base_url, self._model, canary, bearer(self._api_key_file))

    async def _get(self, path: str) -> httpx.Response:
        return await call("GET", self._base_url + path, _STATUS_SECONDS, headers=bearer(self._api_key_file))

    async def _post(self, target: str, seconds_max: float) -> None:
        headers = bearer(self._api_key_file)
        accepted(await call("POST", self._base_url + target, seconds_max, body={}, headers=headers))


def read_capabilities(paths: Sequence[str], command: Sequence[str]) -> Capabilities:
    missing = [route for route in _ROUTES if route not in paths]
    if missing:
        why = f"this LMDeploy has no {', '.join(missing)}; its sleep routes are there from 0.8 on"
        return Capabilities(engine="LMDeploy", unsupported=why)
    backend = flag(command, "--backend")
    if backend == "turbomind":
        why = "LMDeploy's TurboMind engine answers 200 to /sleep and frees nothing; start it with --backend pytorch"
        return Capabilities(engine="LMDeploy (TurboMind)", unsupported=why)
    fragile = None
    if backend != "pytorch":
        fragile = "no route tells whether TurboMind runs, which frees nothing: give --backend pytorch"
    return LMDEPLOY.model_copy(update={"fragile": fragile})
