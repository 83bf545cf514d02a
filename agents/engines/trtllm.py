"""TensorRT-LLM's runtime memory control (NVIDIA/TensorRT-LLM#19016), and the reference engine that speaks it too.

Every attempt gets a new timestamp, nonce and signature and a connection of its own (a server that answered 500 closes
its keep-alive connections). Replies come in three error shapes and are read here only. A 200 from release or
resume arrives after the whole operation and still proves nothing about memory. Restore modes are fixed when
the engine starts, so a policy is honoured by the flags of its command, never by a call.
"""

from __future__ import annotations

import asyncio
import errno
import json
import time
from collections.abc import Callable
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import Any, Final, cast

import httpx

from ...vmm.lifecycle import MemoryState
from ...vmm.signing import new_headers
from ..errors import EngineAuthRefused, EngineRefused, EngineTimedOut, EngineUnreachable
from ..loopback import loopback_client
from ..protocol.capabilities import Capabilities, trtllm_capabilities
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation

_CONNECT_SECONDS: Final = 5.0
_STATUS_SECONDS: Final = 10.0
_LOCAL_WANTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})
CANARY_HEADER: Final = "x-lull-canary"

_STATES: Final = {
    MemoryState.RUNNING: EngineState.RUNNING,
    MemoryState.PARKING: EngineState.PARKING,
    MemoryState.PARKED: EngineState.PARKED,
    MemoryState.WAKING: EngineState.WAKING,
    MemoryState.FAILED: EngineState.FAILED,
}


class TrtllmAdapter:
    """Drives the engine at ``base_url`` (loopback). The key is read again at every call, so it can be rotated."""

    def __init__(self, base_url: str, model: str, key_file: Path, *, now: Callable[[], float] = time.time) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._key_file = key_file
        self._now = now

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            reply = await self._send("GET", "/health", b"", {}, _STATUS_SECONDS)
        except (EngineUnreachable, EngineTimedOut):
            return False
        return reply.status_code == 200

    async def observe(self) -> Observation:
        try:
            reply = await self._control("GET", "/memory_status", None, _STATUS_SECONDS)
        except (EngineUnreachable, EngineTimedOut, EngineRefused) as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=_is_local(error))
        except EngineAuthRefused as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=True)
        skew = self._clock_skew(reply)
        try:
            body = reply.json()
            state = _STATES[MemoryState(body["state"])]
            tags = tuple(str(tag) for tag in body["parked_tags"])
        except (ValueError, KeyError, TypeError, AttributeError):
            return Observation(
                EngineState.UNREACHABLE, clock_skew_seconds=skew, detail=f"odd status: {reply.text[:200]}"
            )
        # In `parking` and `failed` the engine's list of tags is not to be trusted.
        return Observation(state, tags if state is EngineState.PARKED else (), skew)

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
        body = {
            "model": self._model,
            "prompt": canary.prompt,
            "max_tokens": canary.tokens,
            "temperature": 0,
            "logprobs": 1,
        }
        raw = json.dumps(body).encode()
        headers = {"content-type": "application/json", CANARY_HEADER: "1"}
        reply = await self._send("POST", "/v1/completions", raw, headers, canary.deadline_seconds)
        if reply.status_code != 200:
            raise EngineRefused(reply.status_code, _error_text(reply))
        try:
            return _parse_answer(reply.json())
        except (ValueError, KeyError, TypeError, IndexError, AttributeError, OverflowError) as error:
            raise EngineRefused(reply.status_code, f"odd completion: {error!r}") from error

    async def _control(self, method: str, path: str, body: Any, seconds_max: float) -> httpx.Response:
        raw = b"" if body is None else json.dumps(body).encode()
        headers = new_headers(self._read_key(), method, path, raw, now=self._now())
        if raw:
            headers["content-type"] = "application/json"
        reply = await self._send(method, path, raw, headers, seconds_max)
        if reply.status_code == 200:
            return reply
        if reply.status_code == 401:
            raise EngineAuthRefused(_error_text(reply))
        raise EngineRefused(reply.status_code, _error_text(reply))

    def _read_key(self) -> bytes:
        try:
            return self._key_file.read_bytes().strip()
        except OSError as error:
            raise EngineAuthRefused(f"the control key {self._key_file} cannot be read: {error.strerror}") from error

    async def _send(
        self, method: str, path: str, body: bytes, headers: dict[str, str], seconds_max: float
    ) -> httpx.Response:
        limits = httpx.Timeout(seconds_max, connect=min(_CONNECT_SECONDS, seconds_max))
        try:
            # httpx bounds each read, not the whole: an engine that trickles its answer would hold us for ever.
            async with asyncio.timeout(seconds_max + _CONNECT_SECONDS), loopback_client(limits) as client:
                return await client.request(method, self._base_url + path, content=body, headers=headers)
        except httpx.ConnectError as error:
            raise EngineUnreachable(f"{self._base_url}: {error}") from error
        except httpx.ConnectTimeout as error:
            raise EngineUnreachable(f"{self._base_url}: no connection within {_CONNECT_SECONDS} s") from error
        except TimeoutError as error:
            raise EngineTimedOut(f"{method} {path}: not answered whole within {seconds_max} s") from error
        except httpx.HTTPError as error:
            raise EngineTimedOut(f"{method} {path}: {type(error).__name__} {error}") from error

    def _clock_skew(self, reply: httpx.Response) -> float | None:
        date = reply.headers.get("date")
        if date is None:
            return None
        try:
            return parsedate_to_datetime(date).timestamp() - self._now()
        except (ValueError, TypeError):
            return None


def _is_local(error: BaseException | None) -> bool:
    """True if a want of this process's own (descriptors, ports, memory) is behind it."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _LOCAL_WANTS:
            return True
        error = error.__cause__ or error.__context__
    return False


def _parse_answer(body: dict[str, Any]) -> Answer:
    choice = body["choices"][0]
    ids = choice.get("token_ids")
    kept: dict[str, Any] = choice.get("logprobs") or {}
    logprobs = kept.get("token_logprobs")
    return Answer(
        str(choice["text"]),
        None if ids is None else tuple(int(i) for i in ids),
        None if logprobs is None else tuple(float(p) for p in logprobs),
    )


def _error_text(reply: httpx.Response) -> str:
    """The text in any of the three shapes: {"detail": s}, {"error": {"message": s}}, {"error": s}."""
    try:
        body = reply.json()
    except ValueError:
        return reply.text[:500]
    if isinstance(body, dict):
        fields = cast("dict[str, Any]", body)
        error: Any = fields.get("detail", fields.get("error", fields))
        if isinstance(error, dict):
            error = cast("dict[str, Any]", error).get("message", error)
        return str(error)[:500]
    return str(body)[:500]
