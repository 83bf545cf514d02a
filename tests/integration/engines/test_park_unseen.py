"""A park whose caller died goes on: the gate stays closed until it is done, or surely does nothing more."""

from __future__ import annotations

import asyncio
import shlex
import sys
from pathlib import Path

import pytest

from lull.agents.engines.base import Observation
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import EngineState, GateState
from tests.engines.spawned import HERE
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node
from tests.waiting import wait_until_async


def commands(faults: Path, **others: list[str]) -> dict[str, list[str]]:
    script = str(HERE / "park_command.py")
    usual = {
        f"{verb}_command": [sys.executable, "-I", "-S", script, verb, str(faults)]
        for verb in ("park", "resume", "observe")
    }
    return {**usual, **others}


async def test_what_a_park_command_leaves_at_work_parks_behind_a_closed_gate(tmp_path: Path) -> None:
    """It left the command's group, so that nothing ends it with the agent; it parks once it is told to."""
    faults, pipe = tmp_path / "alpha.engine" / "faults.json", tmp_path / "pipe"
    began = tmp_path / "began"
    park = shlex.join(commands(faults)["park_command"])
    work = f"touch {began}; read line < {pipe}; exec {park}"
    settings = commands(faults, park_command=["sh", "-c", f"mkfifo {pipe}; setsid -f sh -c '{work}'; sleep 600"])
    engine = StandInUnderTest(kind="command", script="lmdeploy_server.py", settings=settings, attached=True)
    async with stand_in_node(tmp_path, engine) as node:
        await node.open_loan(node.job(["true"]))
        await node.until(began.exists, "the work begins")
        await node.crash()
        await node.start()
        adapter = node.keeper().adapter
        looks: list[Observation] = []
        observe = adapter.observe

        async def counted() -> Observation:
            looks.append(await observe())
            return looks[-1]

        adapter.observe = counted  # type: ignore[method-assign]
        await node.until(lambda: [one.state for one in looks].count(EngineState.RUNNING) > 6, "it runs, look by look")
        assert node.keeper().gate_state is not GateState.OPEN
        assert LoanStep.GATE_OPENED not in node.steps()
        await asyncio.to_thread(pipe.write_text, "go on\n")
        await node.until_closed()
        assert LoanStep.PARKED_SEEN in node.steps()
        assert [one for one in node.calls() if "POST /sleep" in one or "POST /wake" in one] == [
            "POST /sleep",
            "POST /wakeup",
        ]
        await node.ready()
        assert (await node.ask()).status_code == 200


async def test_a_park_command_that_was_killed_counts_as_not_taken_at_the_deadline(tmp_path: Path) -> None:
    faults = tmp_path / "alpha.engine" / "faults.json"
    settings = commands(faults, park_command=["sleep", "600"])
    policy = {"park_call_seconds_max": 1.0}
    engine = StandInUnderTest(
        kind="command", script="lmdeploy_server.py", settings=settings, attached=True, policy=policy
    )
    async with stand_in_node(tmp_path, engine) as node:
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "ParkRefused"
        await node.ready()


async def test_a_process_that_ended_by_its_park_is_woken_also_where_it_is_never_restarted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = StandInUnderTest(kind="process", script="plain_server.py", policy={"restart": "never"})
    async with stand_in_node(tmp_path, engine) as node:
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: LoanStep.PARKED_SEEN in node.steps(), "it is parked")
        keeper = node.keeper()
        observe = keeper.adapter.observe
        failed: list[int] = []

        async def unreadable_once() -> Observation:
            if not failed:
                failed.append(1)
                raise OSError(5, "Input/output error")
            return await observe()

        monkeypatch.setattr(keeper.adapter, "observe", unreadable_once)
        await node.until_closed()
        assert failed
        assert "faulted" in node.states()
        await wait_until_async(lambda: keeper.verified, 30, "it serves")
