"""An engine sleeps without a job, on real memory, with no scheduler in sight: what wakes it, and what it answers then."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.journal import boottime
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import OpenLoan, RecallLoan, StartAttempt, WithoutJob
from tests.agent_node import AgentNode, EngineUnderTest, agent_node

STATES = ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying", "closed"]


async def park(node: AgentNode, *, loan_id: str = "loan-1", epoch: int = 1, **terms: Any) -> None:
    """As the scheduler orders it."""
    without_job = WithoutJob(**terms)
    keepers = [node.keeper(engine.name) for engine in node.engines]
    order = OpenLoan(
        loan_id=loan_id,
        epoch=epoch,
        device_ids=sorted({device for keeper in keepers for device in keeper.device_ids}),
        engine_ids=[keeper.engine_id for keeper in keepers],
        need_bytes=0,
        restore_by_seconds=min(600.0, without_job.until_seconds or 600.0),
        policies={keeper.engine_id: keeper.policy for keeper in keepers},
        attempts=[],
        expects_more=False,
        without_job=without_job,
    )
    await node.order(order)


async def asleep(node: AgentNode, loan_id: str = "loan-1") -> None:
    await node.until(lambda: node.state(loan_id) is LoanState.LENT, "the engine sleeps")


async def test_a_request_wakes_the_engine_and_is_answered(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        assert sum((await node.keeper().held_bytes()).values()) == 0
        # Longer than a loan is kept that no job comes to.
        await node.until(lambda: _seconds_since(node, LoanStep.SETTLED) > 0.5, "half a second of sleep")
        assert node.state() is LoanState.LENT
        reply = await node.ask()
        assert (reply.status_code, reply.json()["choices"]) == (200, before)
        await node.until_closed()
        assert node.states() == STATES
        assert node.daemon is not None
        assert [one["reason"] for one in node.reports("loan_changed")][4]["code"] == "Request"
        [answered] = await node.until(lambda: node.reports("request_answered"), "the first byte is told")
        slept = _at(node, LoanStep.GATE_OPENED) - _at(node, LoanStep.SETTLED)
        assert 0 < answered["seconds"] < slept + 5
        assert (answered["loan_id"], answered["engine_id"]) == ("loan-1", node.keeper().engine_id)
        assert all(line["state"] == "running" for line in node.witness())


def _at(node: AgentNode, step: LoanStep) -> float:
    assert node.daemon is not None
    return next(row.boottime for row in node.daemon.journal.steps("loan-1") if row.step is step)


def _seconds_since(node: AgentNode, step: LoanStep) -> float:
    return boottime() - _at(node, step)


async def test_it_ends_by_its_time_and_by_an_operator(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        await park(node, until_seconds=1.0)
        await node.until_closed()
        assert node.states() == STATES
        assert _at(node, LoanStep.ROOM_PROVED) - _at(node, LoanStep.ACCEPTED) >= 1.0
        codes = [one["reason"] and one["reason"]["code"] for one in node.reports("loan_changed")]
        assert codes[4] == "ForOver"
        await park(node, loan_id="loan-2", epoch=2)
        await asleep(node, "loan-2")
        await node.order(RecallLoan(loan_id="loan-2", reason="Resumed"))
        await node.until_closed("loan-2")
        assert node.states("loan-2") == STATES
        assert (await node.ask()).json()["choices"] == before
        assert node.reports("request_answered") == [], "nobody waited"
