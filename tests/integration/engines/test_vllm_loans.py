"""Loans of a vLLM that lies, hangs and dies as users saw it: what reaches the operator, the job and the clients."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines import vllm as vllm_module
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import GateState
from tests.engines.engine_loans import answer_of, breaks, goes_on, lend, refused, serves_again
from tests.engines.spawned import MIB, ROOT
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node
from tests.engines.vllm_rig import DEV_MODE

QUICK: dict[str, Any] = {
    "park_call_seconds_max": 1.5,
    "resume_seconds_max": 3,
    "settle_seconds_max": 1,
    "canary": {"deadline_seconds": 1},
}
LOST = {"model_weights": "NONE", "kv_cache": "NONE"}


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vllm_module, "STATUS_SECONDS", 0.5)


def vllm(version: str, *flags: str, sleep_mode: bool = True, dev_mode: bool = True, **more: Any) -> StandInUnderTest:
    """The weights take 4 MiB and the KV cache 2, of a device of 16: its job fits only where both have gone."""
    policy = {**QUICK, **more.pop("policy", {})}
    env = {"PYTHONPATH": str(ROOT), **(DEV_MODE if dev_mode else {})}
    all_flags = ["--version", version, *(["--enable-sleep-mode"] if sleep_mode else []), *flags]
    settings = {"env": env, **more}
    return StandInUnderTest(kind="vllm", script="vllm_server.py", flags=all_flags, policy=policy, settings=settings)


async def test_lies_and_deaths_of_vllm(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm("0.33.0")) as node:
        answer = await answer_of(node)
        reason = await refused(node, 1, "frees_nothing", "HBMNotFreed", answer)  # vllm-project/vllm#47654
        assert "did not become free after the park of alpha" in reason["sentence"]
        await goes_on(node, 2, "late_free", answer)
        await breaks(node, 3, "sleep_500_freed", "EngineLost", answer, at_once=True)
        await breaks(node, 4, "garbage", "WakeCorrupt", answer, at_once=False, crash=True)  # #21336
        sleeps = [call for call in node.calls() if call == "POST /sleep"]
        assert len(sleeps) == 4, "one for each loan"


@pytest.mark.long
async def test_more_lies_and_deaths_of_vllm(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm("0.33.0")) as node:
        answer = await answer_of(node)
        await breaks(node, 1, "core_dies_on_sleep", "EngineLost", answer, at_once=True)  # #45520
        await breaks(node, 2, "wake_kills", "EngineLost", answer, at_once=False)  # #36753
        await breaks(node, 3, "half_wake", "EngineLost", answer, at_once=False, crash=True)  # #13941
        await breaks(node, 4, "wake_hangs", "EngineLost", answer, at_once=False)  # #45519
        await breaks(node, 5, "sleep_hangs", "EngineLost", answer, at_once=True, crash=True)  # #45519
        await breaks(node, 6, "cache_not_reset", "EngineLost", answer, at_once=False)  # #17103
        await breaks(node, 7, "answer_hangs_after_wake", "WakeCorrupt", answer, at_once=False)  # #39863


@pytest.mark.long
async def test_a_half_wake_of_an_old_vllm_is_a_restart_at_once(tmp_path: Path) -> None:
    """Before 0.25 a second wake would map the weights twice (vllm-project/vllm#34600)."""
    async with stand_in_node(tmp_path, vllm("0.22.1")) as node:
        answer = await answer_of(node)
        await breaks(node, 1, "half_wake", "EngineLost", answer, at_once=False)
        assert node.calls().count("POST /wake_up") == 1


async def test_a_key_that_is_wrong_or_gone_condemns_no_engine(tmp_path: Path) -> None:
    """It gave no wrong answer: it was not asked. It is asked again, its gate closed, and serves in the same process."""
    key, go = tmp_path / "api.key", tmp_path / "go"
    key.write_text("right")
    engine = vllm("0.33.0", "--api-key", "right", api_key_file=key)
    wait = ["sh", "-c", f"until [ -e '{go}' ]; do sleep 0.02; done"]
    async with stand_in_node(tmp_path, engine) as node:
        first = node.keeper().incarnation

        key.unlink()
        loan_id = await lend(node, 1)
        await node.until_closed(loan_id)
        reason = node.last_reason(loan_id)
        assert reason is not None
        assert (reason["code"], "could not be asked the canary" in reason["sentence"]) == ("EngineNotReady", True)
        assert LoanStep.PARK_SENT not in node.steps(loan_id)
        key.write_text("right")
        await node.ready()

        await node.open_loan(node.job(wait, hbm_bytes=13 * MIB), loan_id="loan-2", epoch=2)
        await node.until(lambda: LoanStep.SPAWNED in node.steps("loan-2"), "the job runs")
        key.write_text("wrong")
        go.touch()
        await node.until(lambda: "faulted" in node.states("loan-2"), "the canary was not answered")
        reason = node.last_reason("loan-2")
        assert reason is not None
        assert (reason["code"], "401" in reason["sentence"]) == ("EngineLost", True)
        assert node.keeper().gate_state is GateState.CLOSED
        key.write_text("right")
        await node.until_closed("loan-2")
        await node.ready()
        assert node.keeper().incarnation == first
        assert "wake_corrupt" not in [alert["code"] for alert in node.reports("alert")]


@pytest.mark.long
async def test_level_2_with_an_agent_that_dies_while_the_job_runs(tmp_path: Path) -> None:
    engine = vllm("0.33.0", policy={"restore_modes": LOST}, vllm={"reload": "reload_weights"})
    go = tmp_path / "go"
    async with stand_in_node(tmp_path, engine) as node:
        answer = await answer_of(node)
        job = node.job(["sh", "-c", f"until [ -e '{go}' ]; do sleep 0.02; done"], hbm_bytes=13 * MIB)
        await node.open_loan(job)
        await node.until(lambda: node.state() is LoanState.LENT and LoanStep.SPAWNED in node.steps(), "the job runs")
        await node.crash()
        await node.start()
        held = asyncio.create_task(node.ask())
        await node.until(lambda: node.daemon is not None and "loan-1" in node.daemon.loans, "the loan goes on")
        go.touch()
        await serves_again(node, "loan-1", answer)
        assert (await held).json()["choices"][0]["text"] == answer
        assert "faulted" not in node.states()
        assert "POST /collective_rpc" in node.calls()
        await breaks(node, 2, "reload_lies", "WakeCorrupt", answer, at_once=False)  # vllm-project/vllm#29341


@pytest.mark.long
async def test_an_adapter_that_is_lost_asleep_is_found_by_its_canary(tmp_path: Path) -> None:
    engine = vllm("0.27.1", "--enable-lora", "--lora", "french", vllm={"loras": ["french"]})
    async with stand_in_node(tmp_path, engine) as node:
        await breaks(node, 1, "lora_dropped", "WakeCorrupt", await answer_of(node), at_once=False)  # #53888


@pytest.mark.long
@pytest.mark.parametrize(
    ("version", "dev_mode", "says"),
    [("0.33.0", False, "VLLM_SERVER_DEV_MODE=1"), ("0.14.1", True, "vllm-project/vllm#15483")],
)
async def test_an_engine_that_cannot_be_parked_serves_and_is_not_lent(
    tmp_path: Path, version: str, dev_mode: bool, says: str
) -> None:
    async with stand_in_node(tmp_path, vllm(version, dev_mode=dev_mode)) as node:
        answer = await answer_of(node)
        loan_id = await lend(node, 1)
        await serves_again(node, loan_id, answer)
        reason = node.last_reason(loan_id)
        assert reason is not None
        assert reason["code"] == "PolicyRefused"
        assert says in reason["sentence"]
        told = node.reports("engine_changed")[-1]["capabilities"]
        assert says in told["unsupported"]
        assert "POST /sleep" not in node.calls()
        alerts = [alert["sentence"] for alert in node.reports("alert") if alert["code"] == "engine_not_lendable"]
        assert len(alerts) == 1
        assert alerts[0].startswith("engine alpha serves and is not lent: ")


@pytest.mark.long
async def test_without_sleep_mode_nothing_is_lent_and_nothing_breaks(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm("0.33.0", sleep_mode=False)) as node:
        await refused(node, 1, "", "HBMNotFreed", await answer_of(node))


@pytest.mark.long
async def test_a_worker_in_our_pools_is_lent_without_sleep_mode(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, vllm("0.33.0", "--pool-worker", sleep_mode=False)) as node:
        await goes_on(node, 1, "", await answer_of(node))
