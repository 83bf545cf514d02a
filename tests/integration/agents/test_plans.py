"""Plans of loans on real memory: a small job parks the KV cache alone, and what parks do is learned and kept."""

from __future__ import annotations

import sys
from pathlib import Path

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.plans import Plan, way_in, ways_of
from lull.vmm.tags import RestoreMode
from tests.agent_node import MIB, AgentNode, EngineUnderTest, agent_node

KV = {"kv_cache": RestoreMode.NONE}
WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
TRIAL = {"trial_park": True}
WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def plan_of(node: AgentNode, modes: dict[str, RestoreMode]) -> Plan:
    """As the scheduler makes it, of what the agent reports."""
    report = node.keeper().changed()
    ways = ways_of(
        report.capabilities, node.keeper().policy, report.learned, report.device_bytes, report.residual_bytes
    )
    return next(way.plan for way in ways if way.plan.modes == modes)


def parks_asked(node: AgentNode) -> int:
    return sum(line["kind"] == "control" and "release" in line.get("path", "") for line in node.witness())


async def test_a_trial_learns_each_way_and_a_small_job_parks_the_kv_cache_alone(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(more=TRIAL), capacities=[8 * MIB]) as node:
        learned = node.keeper().changed().learned
        assert learned is not None
        (device,) = node.device_ids
        freed = {tuple(sorted(way.modes)): way.freed_bytes for way in learned.ways}
        assert freed == {("kv_cache",): {device: 2 * MIB}, ("kv_cache", "model_weights"): {device: 6 * MIB}}
        assert all(way.park_seconds and way.wake_seconds and way.trouble is None for way in learned.ways)
        before = (await node.ask()).json()["choices"]

        job = node.job(WAITS, hbm_bytes=3 * MIB)
        await node.open_loan(job, plans={"alpha": plan_of(node, KV)})
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        held = node.keeper().bytes_on(await node.keeper().node.look())
        assert held == {device: 4 * MIB}, "the weights stayed on the device"
        assert node.data_of(LoanStep.PARK_SENT)["tags"] == ["kv_cache"]
        assert node.data_of(LoanStep.SETTLED)["freed_bytes"] == {device: 2 * MIB}
        node.loan().recall("test")
        await node.until_closed()
        assert node.states()[-3:] == ["waking", "verifying", "closed"]
        assert (await node.ask()).json()["choices"] == before
        again = node.keeper().changed()
        assert again.learned is not None
        seen = way_in(again.learned, KV)
        assert seen is not None
        assert seen.parks == 2
        assert again.residual_bytes == {device: 0}, "what a part of it keeps is not what the whole park keeps"

        # Kept: the next agent tries nothing again, and the engine is the same process.
        process = node.keeper().incarnation
        await node.stop()
        await node.start()
        await node.ready()
        assert node.keeper().incarnation == process
        assert node.keeper().changed().learned == again.learned


async def test_a_plan_that_does_not_hold_is_refused_before_anything_is_released(tmp_path: Path) -> None:
    async with agent_node(tmp_path, capacities=[8 * MIB]) as node:
        (device,) = node.device_ids
        never_seen = Plan(modes=KV, whole=False, freed_bytes={device: 2 * MIB})
        job = node.job(["true"], hbm_bytes=3 * MIB)
        await node.open_loan(job, plans={"alpha": never_seen})
        await node.until_closed()
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "PlanNotHeld"
        assert LoanStep.GATE_CLOSING not in node.steps()
        assert (await node.ask()).status_code == 200

        # It frees what was predicted, and that is not enough for the job.
        node.keeper().parks.parked(KV, {device: 2 * MIB}, {device: 4 * MIB}, seconds=1.0, at=0.0)
        await node.open_loan(
            node.job(["true"], hbm_bytes=5 * MIB), loan_id="loan-2", epoch=2, plans={"alpha": never_seen}
        )
        await node.until_closed("loan-2")
        reason = node.last_reason("loan-2")
        assert reason is not None
        assert reason["code"] == "PlanNotHeld"
        assert reason["data"] == {"device_id": device, "need_bytes": 5 * MIB, "would_have_bytes": 4 * MIB}

        # A plan is never more than the policy: the order is refused.
        wider = Plan(modes={**KV, "sampler": RestoreMode.NONE}, whole=False)
        await node.open_loan(node.job(["true"]), loan_id="loan-3", epoch=3, plans={"alpha": wider})
        reason = node.last_reason("loan-3")
        assert reason is not None
        assert "none of the policy's" in reason["sentence"]
