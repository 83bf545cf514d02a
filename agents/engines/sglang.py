"""SGLang with torch_memory_saver (0.5.23): an engine that dies of a call in the wrong state and cannot tell its state.

Release twice, release with a request in flight, resume of what is not released: each of them ends the whole server
(sgl-project/sglang#24123, closed unmerged). So what was asked is written down before it is asked, a call is never made
again on the strength of its missing answer, and what such a call did is read from the bytes of the processes, once the
scheduler answers again (it takes one request after the other).

The order: pause, idle by /flush_cache, ONE release. Back: weights, their contents from disk where no backup was kept,
KV cache, flush, go on. Nothing here generates: /health would, and a token on released memory ends the server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import httpx
import structlog

from ...vmm.tags import RestoreMode
from ..errors import AgentError, EngineAuthRefused, EngineRefused
from ..processes import environ_value
from ..protocol.capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities, ParkPlan
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState
from .base import Answer, Observation
from .completion import ask_completion
from .http_call import accepted, bearer, call, is_our_fault, json_object
from .ledger import Ledger
from .outside import EngineOutside

log = structlog.get_logger(__name__)

_STATUS_SECONDS: Final = 10.0
_IDLE_POLL_SECONDS: Final = 0.05
_IDLE_POLL_SECONDS_MAX: Final = 1.0
_IDLE_SHARE: Final = 0.5  # of the park call's time: the rest is the release's
_CHANGED_SHARE: Final = 0.02  # of the bytes before a call: less than this is the engine's own breathing
# How long its bytes must not have changed, with its scheduler idle, before a lost release counts as not done: ranks may
# still unmap after the answer (THUDM/slime#579).
_STILL_SECONDS: Final = 2.0

_NAMES: Final = {MODEL_WEIGHTS: "weights", KV_CACHE: "kv_cache"}  # ours to theirs
_GRAPHS: Final = "cuda_graph"  # released and woken with the weights, where the server keeps graphs in its saver

# What the ledger's `state` says. Nothing in it: nothing is released and nobody of ours has paused it.
PAUSING: Final = "pausing"  # nothing is released
RELEASING: Final = "releasing"  # the one call is made, or about to be
RELEASED: Final = "released"
RESUMING: Final = "resuming"
RESUMED: Final = "resumed"  # all memory is there, and it is paused still


class SglangAdapter:
    """Drives the server at ``base_url``. ``admin_key_file`` for control, ``api_key_file`` for all else."""

    def __init__(
        self,
        base_url: str,
        model: str,
        ledger: Ledger,
        outside: EngineOutside,
        *,
        admin_key_file: Path | None = None,
        api_key_file: Path | None = None,
    ) -> None:
        self._base_url = base_url.rstrip("/")
        self._model = model
        self._ledger = ledger
        self._outside = outside
        self._still_since: float | None = None
        self._ready_of: str | None = None  # the incarnation that was ready once
        self._admin_key_file = admin_key_file or api_key_file
        self._api_key_file = api_key_file or admin_key_file

    async def aclose(self) -> None:
        """Nothing is kept open between calls."""

    async def healthy(self) -> bool:
        try:
            return (await self._get("/server_info")).status_code == 200
        except AgentError:
            return False

    async def capabilities(self) -> Capabilities:
        return read_capabilities(json_object(accepted(await self._get("/server_info"))))

    # ---- what state it is in ------------------------------------------------------------------------------------

    async def observe(self) -> Observation:
        try:
            ready = (await self._get("/ready")).status_code
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        if ready not in (200, 503):
            return Observation(EngineState.UNREACHABLE, detail=f"GET /ready: HTTP {ready}", is_our_fault=ready == 401)
        kept = self._ledger.read()
        match kept.get("state"):
            case "pausing":
                return await self._let_go_on()
            case "releasing":
                return await self._after_lost_release(kept)
            case "released":
                return Observation(EngineState.PARKED, _ours(kept["tags"]))
            case "resuming":
                return await self._after_lost_resume(kept)
            case "resumed":
                return Observation(EngineState.RUNNING)  # `after_resume` lets it go on
            case _ if ready == 200:
                self._note_ready(kept)
                return Observation(EngineState.RUNNING)
            case _ if self._was_ready(kept):
                words = "somebody else has paused it (POST /continue_generation lets it go on)"
                return Observation(EngineState.UNREACHABLE, detail=words, is_held=True)
            case _:
                return Observation(EngineState.UNREACHABLE, detail="it starts: GET /ready: HTTP 503")

    def _note_ready(self, kept: Mapping[str, Any]) -> None:
        """From now on this process is not starting any more: when it is not ready, somebody has paused it."""
        if not self._was_ready(kept):
            self._ready_of = self._outside.incarnation
            self._write_after(ready=True)

    def _was_ready(self, kept: Mapping[str, Any]) -> bool:
        now = self._outside.incarnation
        return bool(kept.get("ready")) or (now is not None and self._ready_of == now)

    async def _let_go_on(self) -> Observation:
        """An agent ended, or gave up, between the pause and the release: nothing is released."""
        try:
            accepted(await self._control("/continue_generation", {}, _STATUS_SECONDS))
        except AgentError as error:
            return Observation(EngineState.UNREACHABLE, detail=str(error), is_our_fault=is_our_fault(error))
        self._write_after(state=None)
        return Observation(EngineState.RUNNING)

    async def _after_lost_release(self, kept: Mapping[str, Any]) -> Observation:
        """No answer came to the one release. Its bytes tell what it did, once it is over."""
        if not await self._scheduler_answers():
            return Observation(EngineState.PARKING, detail="the release is not over: its scheduler does not answer")
        held = await self._looked(kept)
        if held is None:
            return self._not_known(kept)
        if not _differs(held, kept["bytes"]):
            now = asyncio.get_running_loop().time()
            self._still_since = self._still_since or now
            if now - self._still_since < _STILL_SECONDS:
                return Observation(EngineState.PARKING, detail="its release was not answered and frees nothing so far")
            log.warning("the release was not done", engine=self._model, bytes=held)
            self._write_after(state=PAUSING)
            return await self._let_go_on()
        self._write_after(state=RELEASED)
        return Observation(EngineState.PARKED, _ours(kept["tags"]), detail="by its bytes; the call was not answered")

    async def _after_lost_resume(self, kept: Mapping[str, Any]) -> Observation:
        if not await self._scheduler_answers():
            return Observation(EngineState.WAKING, detail="the resume is not over: its scheduler does not answer")
        held = await self._looked(kept)
        if held is None:
            return self._not_known(kept)
        if _differs(held, kept["bytes"]):
            self._note_resumed(kept["calling"])
        else:
            self._write_after(state=RELEASED)
        return await self._by_ledger()

    async def _looked(self, kept: Mapping[str, Any]) -> dict[str, int] | None:
        """Its bytes; None where they cannot be told, or where the process that ``kept`` is about has ended."""
        try:
            held = await self._outside.held_bytes()
        except (AgentError, OSError) as error:
            log.warning("the bytes of an engine are not known", engine=self._model, error=str(error))
            return None
        return held if self._ledger.read() == kept else None

    def _not_known(self, kept: Mapping[str, Any]) -> Observation:
        if self._ledger.read() != kept:
            return Observation(EngineState.UNREACHABLE, detail="its process ended while it was looked at")
        return Observation(EngineState.UNREACHABLE, detail="its bytes are not known", is_our_fault=True)

    async def _by_ledger(self) -> Observation:
        kept = self._ledger.read()
        if kept.get("state") == RELEASED:
            return Observation(EngineState.PARKED, _ours(kept["tags"]))
        return Observation(EngineState.RUNNING)

    async def _scheduler_answers(self) -> bool:
        """Its internal state comes from the scheduler, which takes requests in order: all before it are over."""
        try:
            return (await self._get("/server_info")).status_code == 200
        except AgentError:
            return False

    # ---- park ---------------------------------------------------------------------------------------------------

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        kept = self._ledger.read()
        if kept.get("state") not in (None, PAUSING, RESUMED):
            # A second release would end the server.
            raise EngineRefused(409, f"it was asked to release its memory before (ledger: {kept['state']})")
        info = json_object(accepted(await self._get("/server_info")))
        deadline = asyncio.get_running_loop().time() + seconds_max
        self._ledger.intend(state=PAUSING)
        accepted(await self._control("/pause_generation", {"mode": "abort"}, _STATUS_SECONDS))
        await self._wait_idle(seconds_max * _IDLE_SHARE)
        tags = [_NAMES[tag] for tag in sorted(policy.restore_modes)]
        if "weights" in tags and self._saves_graphs(info):
            tags.append(_GRAPHS)
        before = await self._outside.held_bytes()
        reload = info.get("model_path") if "weights" in tags and loses_weights(info) else None
        self._still_since = None
        self._ledger.intend(state=RELEASING, tags=tags, bytes=before, reload=reload)
        left = max(1.0, deadline - asyncio.get_running_loop().time())
        try:
            accepted(await self._control("/release_memory_occupation", {"tags": tags}, left))
        except EngineAuthRefused:
            self._write_after(state=PAUSING)  # refused before the scheduler heard of it
            raise
        self._write_after(state=RELEASED)

    def _saves_graphs(self, info: Mapping[str, Any]) -> bool:
        """By the environment that it was started with; /server_info does not tell. Between several ranks a graph hangs
        after it was woken unless NCCL left its buffers unregistered (fzyzcjy/torch_memory_saver#88)."""
        incarnation = self._outside.incarnation
        if incarnation is None:
            return False
        pid = int(incarnation.split(":")[1])
        if environ_value(pid, "SGLANG_MEMORY_SAVER_CUDA_GRAPH") not in ("1", "true"):
            return False
        return info.get("tp_size", 1) == 1 or environ_value(pid, "NCCL_GRAPH_REGISTER") == "0"

    async def _wait_idle(self, seconds_max: float) -> None:
        """Nothing runs and nothing waits: /flush_cache does its work only then."""
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds_max, _IDLE_POLL_SECONDS
        while True:
            reply = await self._control("/flush_cache", {}, _STATUS_SECONDS)
            if reply.status_code != 400:
                accepted(reply)
                return
            if loop.time() + pause > deadline:
                raise EngineRefused(
                    400, f"requests still run {seconds_max:.0f} s after the pause; nothing was released"
                )
            await asyncio.sleep(pause)
            pause = min(_IDLE_POLL_SECONDS_MAX, pause * 1.5)

    # ---- resume -------------------------------------------------------------------------------------------------

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        kept = self._ledger.read()
        if kept.get("state") not in (RELEASED, RELEASING):
            raise EngineRefused(409, f"nothing is released (ledger: {kept.get('state')})")
        deadline = asyncio.get_running_loop().time() + seconds_max
        if "weights" in kept["tags"]:
            await self._resume([tag for tag in ("weights", _GRAPHS) if tag in kept["tags"]], deadline)
        await self._reload(deadline)  # before the KV cache takes its room
        if "kv_cache" in kept["tags"]:
            await self._resume(["kv_cache"], deadline)

    async def _resume(self, tags: list[str], deadline: float) -> None:
        before = await self._outside.held_bytes()
        self._ledger.intend(state=RESUMING, calling=tags, bytes=before)
        left = max(1.0, deadline - asyncio.get_running_loop().time())
        try:
            accepted(await self._control("/resume_memory_occupation", {"tags": tags}, left))
        except EngineAuthRefused:
            self._write_after(state=RELEASED)
            raise
        self._note_resumed(tags)

    def _note_resumed(self, tags: list[str]) -> None:
        left = [tag for tag in self._ledger.read().get("tags", ()) if tag not in tags]
        self._write_after(state=RELEASED if left else RESUMED, tags=left, calling=[])

    async def _reload(self, deadline: float) -> None:
        """Contents that were not backed up, from disk; also those of a draft model, which otherwise are lost silently
        (sgl-project/sglang#31674)."""
        path = self._ledger.read().get("reload")
        if path is None:
            return
        left = max(1.0, deadline - asyncio.get_running_loop().time())
        reply = await self._control("/update_weights_from_disk", {"model_path": path}, left)
        said = json_object(accepted(reply))
        if said.get("success") is not True:
            raise EngineRefused(reply.status_code, f"the weights were not loaded again: {said.get('message')}")
        self._write_after(reload=None)

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        del policy
        if self._ledger.read().get("state") != RESUMED:
            return
        await self._reload(asyncio.get_running_loop().time() + seconds_max)
        accepted(await self._control("/flush_cache", {}, _STATUS_SECONDS))
        accepted(await self._control("/continue_generation", {"torch_empty_cache": True}, _STATUS_SECONDS))
        self._write_after(state=None)

    def _write_after(self, **values: Any) -> None:
        """What was done. Where it cannot be written the intent stands, and the bytes will tell."""
        try:
            self._ledger.write(**values)
        except OSError as error:
            log.error("the ledger of an engine could not be written", engine=self._model, error=str(error))

    # ---- calls --------------------------------------------------------------------------------------------------

    async def answer(self, canary: CanaryPolicy) -> Answer:
        return await ask_completion(self._base_url, self._model, canary, bearer(self._api_key_file))

    async def _get(self, path: str) -> httpx.Response:
        return await call("GET", self._base_url + path, _STATUS_SECONDS, headers=bearer(self._api_key_file))

    async def _control(self, path: str, body: Any, seconds_max: float) -> httpx.Response:
        return await call("POST", self._base_url + path, seconds_max, body=body, headers=bearer(self._admin_key_file))


def loses_weights(info: Mapping[str, Any]) -> bool:
    """True if a release leaves weights without a backup, those of a draft model included."""
    if not info.get("enable_weights_cpu_backup"):
        return True
    return bool(info.get("speculative_algorithm")) and not info.get("enable_draft_weights_cpu_backup")


def read_capabilities(info: Mapping[str, Any]) -> Capabilities:
    version = str(info["version"]) if info.get("version") else None
    name = f"SGLang {version or '(version not told)'}"
    if not info.get("enable_memory_saver"):
        why = f"{name} was started without --enable-memory-saver: its release answers 200 and frees nothing"
        return Capabilities(engine=name, version=version, unsupported=why)
    keeps = bool(info.get("enable_weights_cpu_backup"))
    fragile = None
    if keeps and loses_weights(info):
        fragile = (
            "the draft model has no backup (--enable-draft-weights-cpu-backup): all weights are loaded from disk again"
        )
    notes = ["NCCL buffers and the CUDA context stay on the device, and CUDA graphs but where they are saved too"]
    if not keeps:
        notes.append("without --enable-weights-cpu-backup the weights are loaded from disk at every wake")
    weights = [RestoreMode.CPU, RestoreMode.PINNED] if keeps else [RestoreMode.NONE]
    modes = {MODEL_WEIGHTS: weights, KV_CACHE: [RestoreMode.NONE]}
    return Capabilities(
        engine=name,
        version=version,
        fragile=fragile,
        plans=[ParkPlan(name="release", modes=modes, any_subset=True)],
        can_reload_weights=True,
        tells_state=False,
        tells_tags=False,
        notes=notes,
    )


def _ours(theirs: list[str]) -> tuple[str, ...]:
    return tuple(tag for tag, name in _NAMES.items() if name in theirs)


def _differs(now: Mapping[str, int], before: Mapping[str, int]) -> bool:
    """True if the bytes of any device are others, by more than an engine's own breathing."""
    return any(
        abs(now.get(key, 0) - before.get(key, 0)) > max(now.get(key, 0), before.get(key, 0)) * _CHANGED_SHARE
        for key in {*now, *before}
    )
