"""Engines that somebody else runs: lent by the same proofs, never started or stopped by the agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import GateState, RestartEngine, SetPolicy
from tests.agent_node import AgentNode, EngineUnderTest, agent_node


def alerts(node: AgentNode) -> list[str]:
    return [alert["code"] for alert in node.reports("alert")]


async def test_an_attached_engine_is_lent_and_comes_back(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(attached=True), capacities=[8 << 20]) as node:
        before = (await node.ask()).json()["choices"]
        job = node.job(["true"], hbm_bytes=6 << 20)
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == "exited"
        assert LoanStep.SETTLED in node.steps()
        assert (await node.ask()).json()["choices"] == before


async def test_an_attached_engine_that_wakes_wrong_stays_closed_until_its_owner_restarts_it(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(attached=True, faults=["lose-weights"])) as node:
        before = (await node.ask()).json()["choices"]
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.states()[-1:] == ["faulted"], "the loan is faulted")
        assert "wake_corrupt" in alerts(node)
        held = asyncio.create_task(node.ask())
        keeper = node.keeper()
        assert keeper.gate_state is GateState.CLOSED
        # A new canary would have no golden answer: the wrong engine must not give it one.
        other = EnginePolicy.model_validate({**keeper.policy.model_dump(), "canary": {"prompt": "other", "tokens": 4}})
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=other))
        first = keeper.incarnation
        node.kill_owned()
        await node.until(lambda: keeper.incarnation is None, "its end is seen")
        node.start_owned()
        await node.until_closed()
        assert keeper.incarnation != first
        assert (await held).json()["choices"] == before


async def test_an_attached_engine_is_nobody_s_to_restart(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(attached=True)) as node:
        keeper = node.keeper()
        await node.order(RestartEngine(engine_id=keeper.engine_id))
        other = EnginePolicy.model_validate(
            {**keeper.policy.model_dump(), "restore_modes": {"model_weights": "PINNED"}}
        )
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=other))
        assert [answer["outcome"] for answer in node.reports("order_answer")] == ["refused", "refused"]
        process = node.owned["alpha"]
        await node.stop()
        assert process.poll() is None, "the agent leaves it running"
        await node.start()
        await node.ready()
