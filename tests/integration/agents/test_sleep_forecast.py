"""An engine that sleeps for a time that nothing but an operator ends: clients are told that time."""

from __future__ import annotations

from pathlib import Path

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.wire import OpenLoan, RecallLoan, WithoutJob
from tests.agent_node import EngineUnderTest, agent_node


async def test_clients_are_told_how_long_the_engine_sleeps(tmp_path: Path) -> None:
    policy = {"settle_seconds_max": 30, "hold_seconds_max": 30.0}
    async with agent_node(tmp_path, EngineUnderTest(policy=policy)) as node:
        keeper = node.keeper()
        order = OpenLoan(
            loan_id="loan-1",
            epoch=1,
            device_ids=keeper.device_ids,
            engine_ids=[keeper.engine_id],
            need_bytes=0,
            restore_by_seconds=400.0,
            policies={keeper.engine_id: keeper.policy},
            attempts=[],
            expects_more=False,
            without_job=WithoutJob(until_seconds=400.0, wake_on_request=False),
        )
        await node.order(order)
        await node.until(lambda: node.state("loan-1") is LoanState.LENT, "the engine sleeps")
        reply = await node.ask()
        assert (reply.status_code, reply.json()["code"]) == (503, "opens_too_late")
        assert 300 < int(reply.headers["Retry-After"]) <= 400
        await node.order(RecallLoan(loan_id="loan-1", reason="resume"))
        await node.until_closed()
        assert (await node.ask()).status_code == 200
