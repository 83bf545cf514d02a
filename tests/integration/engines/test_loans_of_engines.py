"""A loan of every kind of engine: parked by its own means, a job in its place, an agent that dies in the middle, the
same answers afterwards, and no request at the engine while it is parked."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines import sglang
from lull.agents.protocol.loans import LoanState, LoanStep
from tests.agent_node import MIB
from tests.engines.engine_loans import breaks, goes_on, lend, refused, serves_again
from tests.engines.spawned import HERE, ROOT
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node

# A crash here is a cancellation, which now and then catches httpx between two of its own coroutines.
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def own_commands(root: Path) -> dict[str, Any]:
    script, faults = str(HERE / "park_command.py"), str(root / "alpha.engine" / "faults.json")
    return {
        f"{verb}_command": [sys.executable, "-I", "-S", script, verb, faults] for verb in ("park", "resume", "observe")
    }


def engine_of(kind: str, root: Path) -> StandInUnderTest:
    """The weights take 4 MiB and the KV cache 2."""
    saver, backup = "--enable-memory-saver", "--enable-weights-cpu-backup"
    kinds: dict[str, dict[str, Any]] = {
        "sglang": {"script": "sglang_server.py", "flags": [saver, backup]},
        "sglang-from-disk": {
            "kind": "sglang",
            "script": "sglang_server.py",
            "flags": [saver],
            "policy": {"restore_modes": {"model_weights": "NONE", "kv_cache": "NONE"}},
        },
        "lmdeploy": {"script": "lmdeploy_server.py", "flags": ["--backend", "pytorch"]},
        "llama-server": {"script": "llama_server.py"},
        "ollama": {"script": "ollama_server.py"},
        "process": {"script": "plain_server.py"},
        "command": {"script": "lmdeploy_server.py", "settings": own_commands(root), "attached": True},
    }
    values: dict[str, Any] = {"kind": kind, **kinds[kind]}
    return StandInUnderTest(**values)


# A node costs seconds: this one crosses every hook of the agent, the others run with the long tests.
KINDS = ["process"]
MORE_KINDS = ["sglang", "sglang-from-disk", "lmdeploy", "llama-server", "ollama", "command"]


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.long) for kind in MORE_KINDS)])
async def test_a_loan_with_an_agent_that_dies_in_the_middle(tmp_path: Path, kind: str) -> None:
    go = tmp_path / "go"
    async with stand_in_node(tmp_path, engine_of(kind, tmp_path)) as node:
        before = (await node.ask()).json()["choices"][0]["text"]
        job = node.job(
            ["sh", "-c", f"until [ -e '{go}' ]; do sleep 0.02; done"], hbm_bytes=13 * MIB
        )  # it fits only where the engine has gone
        await node.open_loan(job)
        await node.until(lambda: node.state() is LoanState.LENT and LoanStep.SPAWNED in node.steps(), "the job runs")
        while_lent = len(node.calls())
        await node.crash()
        await node.start()
        held = asyncio.create_task(node.ask())  # it would load the model again
        await node.until(lambda: node.daemon is not None and "loan-1" in node.daemon.loans, "the loan goes on")
        asked = [call for call in node.calls()[while_lent:] if "completions" in call or call == "POST /api/generate"]
        assert asked == [], "a request reached a parked engine"
        go.touch()
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert (await held).json()["choices"][0]["text"] == before
        assert LoanStep.VERIFIED in node.steps()
        assert "faulted" not in node.states()
        assert "GET /health" not in node.calls() or kind != "sglang"


# ---- faults ----------------------------------------------------------------------------------------------------------
# One node drives all faults of its kind, one loan each: after each the engine serves rightly again.


def hasty_sglang(root: Path) -> StandInUnderTest:
    engine = engine_of("sglang", root)
    engine.policy = {
        "park_call_seconds_max": 1.5,
        "resume_seconds_max": 4,
        "settle_seconds_max": 1,
        "canary": {"deadline_seconds": 1},
    }
    return engine


async def test_a_lie_and_a_death_of_sglang(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, hasty_sglang(tmp_path)) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await refused(node, 1, "frees_nothing", "HBMNotFreed", answer)  # sgl-project/sglang#4336
        await breaks(node, 2, "dies_on_release", "EngineLost", answer, at_once=True)  # sgl-project/sglang#24123
        assert node.calls().count("POST /release_memory_occupation") == 2


@pytest.mark.long
async def test_more_lies_of_sglang(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, hasty_sglang(tmp_path)) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await refused(node, 1, "half_free", "HBMNotFreed", answer)
        await refused(node, 2, "never_idle", "ParkRefused", answer)
        await goes_on(node, 3, "late_free", answer)  # THUDM/slime#579
        await goes_on(node, 4, "release_answer_lost", answer)
        assert node.calls().count("POST /release_memory_occupation") == 3


@pytest.mark.long
async def test_an_sglang_that_wakes_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_STATUS_SECONDS", 0.5)  # so long each look at a scheduler that hangs takes
    engine = engine_of("sglang", tmp_path)
    engine.policy = {"park_call_seconds_max": 1, "resume_seconds_max": 3, "canary": {"deadline_seconds": 1}}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await breaks(node, 1, "garbage_after_resume", "WakeCorrupt", answer, at_once=False)  # #6367, #15246
        await breaks(node, 2, "hangs_after_resume", "WakeCorrupt", answer, at_once=False)  # torch_memory_saver#88
        await breaks(node, 3, "resume_hangs", "EngineLost", answer, at_once=False)
        await breaks(node, 4, "continue_refused", "EngineLost", answer, at_once=False)
        await breaks(node, 5, "release_hangs", "EngineLost", answer, at_once=True)


@pytest.mark.long
async def test_an_sglang_whose_reload_lies(tmp_path: Path) -> None:
    async with stand_in_node(tmp_path, engine_of("sglang-from-disk", tmp_path)) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await breaks(node, 1, "reload_lies", "WakeCorrupt", answer, at_once=False)


@pytest.mark.long
async def test_lies_of_lmdeploy(tmp_path: Path) -> None:
    engine = engine_of("lmdeploy", tmp_path)
    engine.policy = {"park_call_seconds_max": 1.5, "settle_seconds_max": 1}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await refused(node, 1, "frees_nothing", "HBMNotFreed", answer)  # what TurboMind does
        await refused(node, 2, "sleep_fails", "HBMNotFreed", answer)  # its flag is set before the work
        await goes_on(node, 3, "late_free", answer)
        await goes_on(node, 4, "sleep_hangs", answer)
        await breaks(node, 5, "half_wake", "EngineLost", answer, at_once=False)


@pytest.mark.long
async def test_lies_of_llama_server(tmp_path: Path) -> None:
    engine = engine_of("llama-server", tmp_path)
    engine.policy = {"park_call_seconds_max": 1, "resume_seconds_max": 4, "settle_seconds_max": 1}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await refused(node, 1, "unload_lies", "ParkRefused", answer)
        await goes_on(node, 2, "slow_child", answer)
        loan_id = await lend(node, 3, "load_fails")
        alerts = node.reports
        await node.until(
            lambda: any(alert["code"] == "wake_out_of_memory" for alert in alerts("alert")), "a load that fails is told"
        )
        node.set_faults()
        await serves_again(node, loan_id, answer)


@pytest.mark.long
async def test_lies_of_ollama(tmp_path: Path) -> None:
    engine = engine_of("ollama", tmp_path)
    engine.policy = {"park_call_seconds_max": 1, "settle_seconds_max": 10}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await refused(node, 1, "stuck_stopping", "ParkRefused", answer)  # ollama/ollama#7606
        await goes_on(node, 2, "late_free", answer)


@pytest.mark.long
async def test_an_engine_that_does_not_end_at_sigterm_or_start(tmp_path: Path) -> None:
    engine = engine_of("process", tmp_path)
    engine.settings = {"stop_seconds_max": 0.3}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        await goes_on(node, 1, "ignores_sigterm", answer)
        await breaks(node, 2, "ends_at_start", "EngineLost", answer, at_once=False)


@pytest.mark.long
async def test_commands_that_refuse_lie_hang_and_fail(tmp_path: Path) -> None:
    engine = engine_of("command", tmp_path)
    engine.policy = {"park_call_seconds_max": 0.5, "resume_seconds_max": 5}
    async with stand_in_node(tmp_path, engine) as node:
        answer = (await node.ask()).json()["choices"][0]["text"]
        for number, fault in enumerate(("park_refuses", "park_fails", "park_lies", "park_hangs"), 1):
            await refused(node, number, fault, "ParkRefused", answer)
        await refused(node, 5, "frees_nothing", "HBMNotFreed", answer)
        reason = node.last_reason("loan-1")
        assert reason is not None
        assert "somebody is looking at it" in reason["sentence"]
        loan_id = await lend(node, 6, "resume_fails")
        await node.until(lambda: LoanStep.RESUME_SENT in node.steps(loan_id), "it is asked to resume")
        node.set_faults()
        await serves_again(node, loan_id, answer)


@pytest.mark.long
async def test_commands_that_stop_and_start_a_unit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parked, it has no process at all; an agent that starts then has to believe the command."""
    root = tmp_path / "alpha.engine"
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    script = str(HERE / "unit_command.py")
    verbs = ("park", "resume", "observe")
    settings = {f"{verb}_command": [sys.executable, "-S", script, verb, str(root)] for verb in verbs}
    engine = StandInUnderTest(kind="command", script="plain_server.py", settings=settings, attached=True)
    go = tmp_path / "go"
    async with stand_in_node(tmp_path, engine) as node:
        (root / "argv.json").write_text(json.dumps(node.commands["alpha"]))
        try:
            answer = (await node.ask()).json()["choices"][0]["text"]
            job = node.job(["sh", "-c", f"until [ -e '{go}' ]; do sleep 0.02; done"], hbm_bytes=13 * MIB)
            await node.open_loan(job)
            await node.until(lambda: LoanStep.SPAWNED in node.steps(), "the job runs")
            assert node.keeper().incarnation is None
            await node.crash()
            await node.start()
            go.touch()
            await serves_again(node, "loan-1", answer)
            assert "faulted" not in node.states()
            await node.stop()
            pid = (root / "pid").read_text()
            await _run_by_hand(settings["park_command"], engine.port, pid)
            await node.start()
            await node.ready()
            assert (await node.ask()).json()["choices"][0]["text"] == answer
        finally:
            os.kill(int((root / "pid").read_text()), signal.SIGKILL)


async def _run_by_hand(argv: list[str], port: int, pid: str) -> None:
    environment = {**os.environ, "LULL_ENGINE_URL": f"http://127.0.0.1:{port}", "LULL_ENGINE_PID": pid}
    process = await asyncio.create_subprocess_exec(*argv, env=environment)
    assert await process.wait() == 0
