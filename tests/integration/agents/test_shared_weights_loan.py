"""Two engines on one memory service: what a loan of them frees is what was predicted."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.plans import Plan, Sharer, frees_together, ways_of
from lull.agents.settings import MEMORY_SERVICE_FLAGS
from tests.agent_node import MIB, AgentNode, EngineUnderTest, agent_node
from tests.integration.agents.test_loan import FILL

CAPACITY, WEIGHTS, KV = 16 * MIB, 4 * MIB, 2 * MIB


def sharers(node: AgentNode, *names: str) -> list[Sharer]:
    """As the scheduler has them, from what was reported last; each is parked whole."""
    found: list[Sharer] = []
    for name in names:
        report = node.keeper(name).changed()
        assert report.learned is not None
        whole = ways_of(report.capabilities, node.keeper(name).policy, None, report.device_bytes, {})[0]
        found.append(Sharer(report.engine_id, whole.plan, report.device_bytes, report.learned.shared))
    return found


@pytest.mark.long
async def test_a_loan_frees_what_engines_share_when_all_of_them_are_parked(tmp_path: Path) -> None:
    engines = [EngineUnderTest(name, extra=[MEMORY_SERVICE_FLAGS]) for name in ("alpha", "beta")]
    async with agent_node(tmp_path, *engines, capacities=[CAPACITY]) as node:
        await node.ready("alpha", "beta")
        before = await node.ask("alpha")
        (device_id,) = node.device_ids
        assert node.daemon is not None
        free = (await node.daemon.node.look())[device_id].free_bytes
        assert free == CAPACITY - WEIGHTS - 2 * KV, "one copy of the weights"
        both = sharers(node, "alpha", "beta")
        for sharer in both:
            (pool,) = sharer.shared[device_id]
            assert (pool.bytes, pool.tags, pool.strangers) == (WEIGHTS, ["model_weights"], False)
            assert pool.engines == sorted(each.engine_id for each in both)
        assert free + frees_together(both, device_id) == CAPACITY

        # Beta keeps its weights: what is predicted becomes free, and nothing of the weights, though alpha parks whole.
        beta = node.keeper("beta")
        kept = Plan(modes={"kv_cache": beta.policy.restore_modes["kv_cache"]}, whole=False, known=False)
        plans = {"alpha": both[0].plan, "beta": kept}
        one = [both[0], replace(both[1], plan=kept.model_copy(update={"freed_bytes": {device_id: KV}}))]
        room = free + frees_together(one, device_id)
        assert room == CAPACITY - WEIGHTS
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=room)
        await node.open_loan(job, engines=["alpha", "beta"], plans=plans)
        await node.until_closed()
        assert LoanStep.SPAWNED in node.steps()
        assert node.data_of(LoanStep.SETTLED)["free_bytes"] == {device_id: room}

        # Both: the weights as well, and their backup is asked for once.
        other = node.job([sys.executable, "-c", FILL], hbm_bytes=CAPACITY)
        await node.open_loan(other, engines=["alpha", "beta"], loan_id="loan-2", epoch=2)
        await node.until_closed("loan-2")
        assert LoanStep.SPAWNED in node.steps("loan-2")
        assert node.data_of(LoanStep.SETTLED, "loan-2")["free_bytes"] == {device_id: CAPACITY}
        assert (await node.ask("alpha")).json()["choices"] == before.json()["choices"]
