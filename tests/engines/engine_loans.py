"""Loans of a stand-in that misbehaves, and how they may end: refused, delayed, or broken until it is started anew."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import EngineState, GateState
from tests.engines.spawned import MIB
from tests.engines.stand_in_node import StandInNode


def alerts(node: StandInNode) -> list[str]:
    return [alert["code"] for alert in node.reports("alert")]


async def answer_of(node: StandInNode) -> str:
    return str((await node.ask()).json()["choices"][0]["text"])


async def lend(node: StandInNode, number: int, *faults: str) -> str:
    """Opens a loan for a job that ends at once and needs the engine's memory on each of its devices; the faults hold
    until the next one."""
    node.set_faults(*faults)
    loan_id = f"loan-{number}"
    job = node.job(["true"], hbm_bytes=13 * MIB, device_ids=node.device_ids[: len(node.engines[0].devices)])
    await node.open_loan(job, loan_id=loan_id, epoch=number)
    return loan_id


async def serves_again(node: StandInNode, loan_id: str, answer: str) -> None:
    await node.until_closed(loan_id)
    await node.ready()
    assert await answer_of(node) == answer


async def refused(node: StandInNode, number: int, fault: str, code: str, answer: str) -> dict[str, Any]:
    """Nothing is lent, no job starts and it is queued again, the engine was asked to park once at most and goes on."""
    loan_id = await lend(node, number, fault)
    await serves_again(node, loan_id, answer)
    reason = node.last_reason(loan_id)
    assert reason is not None
    assert reason["code"] == code, (fault, reason)
    assert LoanStep.SPAWNED not in node.steps(loan_id), fault
    assert node.steps(loan_id).count(LoanStep.PARK_SENT) <= 1, fault
    ends = [one for one in node.reports("attempt_changed") if one["loan_id"] == loan_id and one["state"] == "ended"]
    assert [end["end"] for end in ends] == ["not_started"], fault
    return reason


async def goes_on(node: StandInNode, number: int, fault: str, answer: str) -> None:
    """The fault delays the loan or costs an answer, and changes nothing about its end."""
    loan_id = await lend(node, number, fault)
    await serves_again(node, loan_id, answer)
    assert LoanStep.SPAWNED in node.steps(loan_id), (fault, node.last_reason(loan_id))
    assert "faulted" not in node.states(loan_id), (fault, node.last_reason(loan_id))


async def breaks(
    node: StandInNode, number: int, fault: str, code: str, answer: str, *, at_once: bool, crash: bool = False
) -> None:
    """The loan is faulted with the gate closed, and the engine is started anew once the fault is over.

    ``at_once``: before any job was started. ``crash``: the agent dies then, and another one goes on.
    """
    first = node.keeper().incarnation
    loan_id = await lend(node, number, fault)
    await node.until(lambda: "faulted" in node.states(loan_id), f"{fault} breaks the loan")
    reason = node.last_reason(loan_id)
    assert reason is not None
    assert reason["code"] == code, (fault, reason)
    assert (LoanStep.SPAWNED in node.steps(loan_id)) is not at_once, fault
    assert node.keeper().gate_state is GateState.CLOSED, fault
    if crash:
        await node.crash()
        await node.start()
    held = asyncio.create_task(node.ask())
    node.set_faults()
    await serves_again(node, loan_id, answer)
    assert (await held).json()["choices"][0]["text"] == answer, fault
    assert node.keeper().incarnation != first, fault


async def held_and_served_again(
    node: StandInNode, stop: Callable[[], Awaitable[object]], let_go_on: Callable[[], Awaitable[object]]
) -> None:
    """No traffic reaches one that does not run, also by the next agent's word; nothing else is done to it."""
    keeper = node.keeper()
    first, answer = keeper.incarnation, await answer_of(node)
    await stop()
    await node.until(lambda: "engine_held" in alerts(node), "the alert")
    assert (keeper.gate_state, keeper.verified, keeper.state) == (GateState.CLOSED, False, EngineState.UNREACHABLE)
    assert keeper.reason is not None
    assert "not by this agent" in keeper.reason.sentence
    await node.crash()
    await node.start()
    waiting = asyncio.create_task(answer_of(node))
    await node.until(lambda: alerts(node).count("engine_held") == 2, "the next agent's alert")
    assert not waiting.done()
    await let_go_on()
    assert await waiting == answer
    await node.ready()
    assert node.keeper().incarnation == first
    assert "engine_not_running" not in alerts(node)
