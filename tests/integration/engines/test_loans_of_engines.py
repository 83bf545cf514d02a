"""A loan of every kind of engine: parked by its own means, a job in its place, an agent that dies in the middle, the
same answers afterwards, and no request at the engine while it is parked."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanState, LoanStep
from tests.agent_node import MIB
from tests.engines.spawned import HERE
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node

NONE = {"model_weights": "NONE", "kv_cache": "NONE"}


def own_commands(root: Path) -> dict[str, Any]:
    script, faults = str(HERE / "park_command.py"), str(root / "alpha.engine" / "faults.json")
    return {
        f"{verb}_command": [sys.executable, "-I", "-S", script, verb, faults] for verb in ("park", "resume", "observe")
    }


def engine_of(kind: str, root: Path) -> StandInUnderTest:
    """The weights take 4 MiB and the KV cache 2."""
    match kind:
        case "sglang":
            flags = ["--enable-memory-saver", "--enable-weights-cpu-backup"]
            return StandInUnderTest(kind=kind, script="sglang_server.py", flags=flags)
        case "sglang-from-disk":
            policy = {"restore_modes": NONE}
            flags = ["--enable-memory-saver"]
            return StandInUnderTest(kind="sglang", script="sglang_server.py", flags=flags, policy=policy)
        case "lmdeploy":
            return StandInUnderTest(kind=kind, script="lmdeploy_server.py", flags=["--backend", "pytorch"])
        case "llama-server":
            return StandInUnderTest(kind=kind, script="llama_server.py")
        case "ollama":
            return StandInUnderTest(kind=kind, script="ollama_server.py")
        case "process":
            return StandInUnderTest(kind=kind, script="plain_server.py")
        case "command":
            settings = own_commands(root)
            return StandInUnderTest(kind=kind, script="lmdeploy_server.py", settings=settings, attached=True)
    raise AssertionError(kind)


# A node costs seconds: these two cross every hook of the agent, the others run with the long tests.
KINDS = ["sglang", "process"]
MORE_KINDS = ["sglang-from-disk", "lmdeploy", "llama-server", "ollama", "command"]


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
