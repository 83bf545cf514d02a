"""The agent dies right before or right after a call to an engine: the next one knows what was asked, and of which."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from lull.agents.engines import llama_server, lmdeploy, ollama, sglang, vllm
from tests.agent_node import MIB
from tests.engines.spawned import ROOT
from tests.engines.stand_in_node import StandInNode, StandInUnderTest, stand_in_node
from tests.engines.vllm_rig import DEV_MODE

# A crash here is a cancellation, which now and then catches httpx between two of its own coroutines.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")

NONE = {"model_weights": "NONE", "kv_cache": "NONE"}
SGLANG = [
    *(("/pause_generation", 1), ("/flush_cache", 1), ("/release_memory_occupation", 1)),
    *(("/resume_memory_occupation", 1), ("/update_weights_from_disk", 1), ("/resume_memory_occupation", 2)),
    *(("/flush_cache", 2), ("/continue_generation", 1)),
]


def die_at(
    monkeypatch: pytest.MonkeyPatch, module: ModuleType, path: str, nth: int, *, before: bool
) -> Callable[[], bool]:
    """Whoever makes the ``nth`` such call from now on does nothing more; returns whether it came to that."""
    call = module.call
    seen: list[str] = []

    async def dies(method: str, url: str, *given: Any, **named: Any) -> Any:
        hit = method == "POST" and path in url
        if hit:
            seen.append(url)
        if hit and before and len(seen) == nth:
            raise asyncio.CancelledError
        reply = await call(method, url, *given, **named)
        if hit and not before and len(seen) == nth:
            raise asyncio.CancelledError
        return reply

    monkeypatch.setattr(module, "call", dies)
    return lambda: len(seen) >= nth


async def _die_everywhere(
    node: StandInNode, monkeypatch: pytest.MonkeyPatch, module: ModuleType, points: list[tuple[str, int]]
) -> None:
    answer = (await node.ask()).json()["choices"][0]["text"]
    first = node.keeper().incarnation
    cases = [(path, nth, before) for path, nth in points for before in (True, False)]
    for number, (path, nth, before) in enumerate(cases, 1):
        with monkeypatch.context() as patch:
            died = die_at(patch, module, path, nth, before=before)
            await node.open_loan(node.job(["true"], hbm_bytes=12 * MIB), loan_id=f"loan-{number}", epoch=number)
            await node.until(died, f"call {nth} of {path}")
            await node.crash()
        await node.start()
        await node.until_closed(f"loan-{number}")
        await node.ready()
        assert (await node.ask()).json()["choices"][0]["text"] == answer, (path, nth, before)
        assert node.keeper().incarnation == first, f"it was lost: {path} {nth} {before}"


@pytest.mark.long
async def test_sglang(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not one of them ends it, and every wrong call would."""
    monkeypatch.setattr(sglang, "_STILL_SECONDS", 0.3)
    engine = StandInUnderTest(flags=["--enable-memory-saver"], policy={"restore_modes": NONE})
    async with stand_in_node(tmp_path, engine) as node:
        await _die_everywhere(node, monkeypatch, sglang, SGLANG)


VLLM_LEVEL_2 = [
    *(("/sleep", 1), ("tags=weights", 1), ("/collective_rpc", 1), ("tags=kv_cache", 1), ("/reset_prefix_cache", 1)),
]
VLLM_KV_ONLY = [("/sleep", 1), ("/release_kv_cache_memory", 1), ("/wake_up", 1)]


@pytest.mark.long
@pytest.mark.parametrize(("modes", "points"), [(NONE, VLLM_LEVEL_2), ({"kv_cache": "NONE"}, VLLM_KV_ONLY)])
async def test_vllm(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: dict[str, str], points: list[tuple[str, int]]
) -> None:
    engine = StandInUnderTest(
        kind="vllm",
        script="vllm_server.py",
        flags=["--version", "0.33.0", "--enable-sleep-mode"],
        policy={"restore_modes": modes, "settle_seconds_max": 0.5},
        settings={"env": {"PYTHONPATH": str(ROOT), **DEV_MODE}, "vllm": {"reload": "reload_weights"}},
    )
    async with stand_in_node(tmp_path, engine) as node:
        await _die_everywhere(node, monkeypatch, vllm, points)


@pytest.mark.long
@pytest.mark.parametrize(
    ("kind", "script", "module", "points"),
    [
        ("lmdeploy", "lmdeploy_server.py", lmdeploy, [("/sleep", 1), ("/wakeup", 1)]),
        ("llama-server", "llama_server.py", llama_server, [("/models/unload", 1), ("/models/load", 1)]),
    ],
)
async def test_others(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
    script: str,
    module: ModuleType,
    points: list[tuple[str, int]],
) -> None:
    async with stand_in_node(tmp_path, StandInUnderTest(kind=kind, script=script)) as node:
        await _die_everywhere(node, monkeypatch, module, points)


@pytest.mark.long
async def test_ollama(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with stand_in_node(tmp_path, StandInUnderTest(kind="ollama", script="ollama_server.py")) as node:
        # Canary, unload, load.
        await _die_everywhere(node, monkeypatch, ollama, [("/api/generate", 2), ("/api/generate", 3)])
