"""Loans of engines with two ranks on two devices, where one rank does what the other does not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines import trtllm as trtllm_module
from lull.agents.engines import vllm as vllm_module
from lull.agents.protocol.loans import LoanStep
from tests.engines.engine_loans import answer_of, breaks, goes_on, refused
from tests.engines.spawned import ROOT
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node

QUICK: dict[str, Any] = {"park_call_seconds_max": 5, "resume_seconds_max": 5, "settle_seconds_max": 4}
KEY = "0123456789abcdef0123456789abcdef"


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "STATUS_SECONDS", 1.0)
    monkeypatch.setattr(trtllm_module, "DIVERGED_SECONDS_MAX", 0.5)


def two_ranks(kind: str, script: str, *flags: str, **settings: Any) -> StandInUnderTest:
    return StandInUnderTest(
        kind=kind, script=script, flags=list(flags), devices=[0, 1], policy=QUICK, settings=settings
    )


def vllm(*flags: str) -> StandInUnderTest:
    env = {"PYTHONPATH": str(ROOT), "VLLM_SERVER_DEV_MODE": "1"}
    return two_ranks("vllm", "vllm_server.py", "--enable-sleep-mode", "--tensor-parallel-size", "2", *flags, env=env)


def sglang(*flags: str) -> StandInUnderTest:
    return two_ranks("sglang", "sglang_server.py", "--enable-memory-saver", "--enable-weights-cpu-backup", *flags)


def trtllm(root: Path) -> StandInUnderTest:
    key_file = root / "key"
    key_file.write_text(KEY)
    key_file.chmod(0o600)
    env = {"PYTHONPATH": str(ROOT), "TRTLLM_RUNTIME_CONTROL_API_KEY": KEY}
    return two_ranks("trtllm", "trtllm_server.py", "{restore_mode_flags}", env=env, control_key_file=key_file)


async def test_ranks_of_vllm_that_disagree(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm()) as node:
        answer = await answer_of(node)
        reason = await refused(node, 1, "rank_keeps", "HBMNotFreed", answer)
        assert "did not become free after the park of alpha" in reason["sentence"]
        await breaks(node, 2, "rank_half_wake", "EngineLost", answer, at_once=False)


@pytest.mark.long
async def test_ranks_of_vllm_that_are_late_or_die(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm()) as node:
        answer = await answer_of(node)
        await goes_on(node, 1, "rank_late", answer)
        await breaks(node, 2, "rank_dies_at_release", "EngineLost", answer, at_once=True, crash=True)
        await breaks(node, 3, "rank_dies_at_wake", "EngineLost", answer, at_once=False)


@pytest.mark.long
async def test_ranks_of_sglang_that_disagree(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, sglang()) as node:
        answer = await answer_of(node)
        await refused(node, 1, "rank_keeps", "HBMNotFreed", answer)
        await goes_on(node, 2, "rank_late", answer)
        assert node.calls().count("POST /release_memory_occupation") == 2, "once for each loan"


@pytest.mark.long
async def test_ranks_of_sglang_that_wake_in_part_or_die(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, sglang()) as node:
        answer = await answer_of(node)
        await breaks(node, 1, "rank_half_wake", "EngineLost", answer, at_once=False)
        await breaks(node, 2, "rank_dies_at_release", "EngineLost", answer, at_once=True)
        await breaks(node, 3, "rank_dies_at_wake", "EngineLost", answer, at_once=False, crash=True)


@pytest.mark.long
async def test_ranks_of_tensorrt_llm_that_disagree(tmp_path: Path) -> None:
    """The status of all ranks is one answer, and 500 when they differ (NVIDIA/TensorRT-LLM#19016)."""
    async with stand_in_node(tmp_path, trtllm(tmp_path)) as node:
        answer = await answer_of(node)
        await goes_on(node, 1, "", answer)
        await breaks(node, 2, "rank_keeps", "EngineLost", answer, at_once=True)
        assert node.steps("loan-2").count(LoanStep.PARK_SENT) == 1


@pytest.mark.long
async def test_ranks_of_tensorrt_llm_that_wake_in_part_or_die(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, trtllm(tmp_path)) as node:
        answer = await answer_of(node)
        await breaks(node, 1, "rank_half_wake", "EngineLost", answer, at_once=False)
        await breaks(node, 2, "rank_dies_at_release", "EngineLost", answer, at_once=True)
        await breaks(node, 3, "rank_dies_at_wake", "EngineLost", answer, at_once=False)
