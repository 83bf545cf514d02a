"""What an operator orders a node to do, with a real engine and a real gateway."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.protocol.wire import EngineState, GateState, GiveUpLoan, RestartEngine
from tests.agent_node import EngineUnderTest, agent_node


@pytest.mark.long
async def test_a_loan_that_was_given_up_leaves_its_engine_closed_until_it_is_restarted_by_hand(tmp_path: Path) -> None:
    policy = {"restart": "never", "hold_seconds_max": 0.2}
    async with agent_node(tmp_path, EngineUnderTest(faults=["lose-weights"], policy=policy)) as node:
        keeper = node.keeper()
        await node.open_loan(node.job(["true"]))
        await node.order(GiveUpLoan(loan_id="loan-1"))
        await node.order(RestartEngine(engine_id=keeper.engine_id))
        answers = [(one["outcome"], one["detail"]) for one in node.reports("order_answer")][-2:]
        assert [outcome for outcome, _ in answers] == ["refused", "refused"]
        assert "only a faulted one" in answers[0][1]
        assert "in loan loan-1" in answers[1][1]
        await node.until(lambda: node.states()[-1:] == ["faulted"], "faulted")
        await node.order(GiveUpLoan(loan_id="loan-1"))
        assert node.reports("order_answer")[-1]["outcome"] == "accepted"
        await node.until_closed()
        assert node.reports("loan_changed")[-1]["reason"]["code"] == "GivenUp"
        await node.until(lambda: keeper.state is EngineState.FAILED and not keeper.hand.locked(), "left alone")
        assert (await node.ask()).status_code == 503, "its gate stays closed"

        await node.stop()
        await node.start()  # the next agent leaves it alone too
        keeper = node.keeper()
        await node.until(lambda: keeper.reason is not None and keeper.reason.code == "GivenUp", "left alone")
        before = keeper.incarnation
        await node.order(RestartEngine(engine_id=keeper.engine_id))
        await node.ready()
        assert keeper.incarnation != before
        assert keeper.gate_state is GateState.OPEN
        assert (await node.ask()).status_code == 200
