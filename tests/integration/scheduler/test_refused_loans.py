"""Loans that do not come to be, on both databases: what refuses is left alone for a while, whoever waits."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanEvent, LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    AttemptEnd,
    HostPressure,
    LoanChanged,
    OpenLoan,
    OrderAnswer,
    Reason,
)
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]


async def types(store: Store, type_: str) -> list[Any]:
    return await store.events_after(0, 1000, types=[type_])


REFUSED = Reason(code="LoanRefused", sentence="the agent's disk is too full to keep a journal")


async def refuse(agent: ModelAgent, how: str) -> OpenLoan:
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    if how == "loan":
        refused = LoanChanged(
            loan_id=order.loan_id, epoch=order.epoch, event=None, state=LoanState.CLOSED, reason=REFUSED
        )
        await agent.report(refused, OrderAnswer(seq=agent.after, outcome="accepted"))
    else:
        await agent.report(OrderAnswer.model_validate({"seq": agent.after, "outcome": how, "detail": "not this one"}))
    return order


@pytest.mark.parametrize("how", ["loan", "refused", "stale", "unsupported"])
async def test_an_engine_whose_node_refuses_the_loan_is_left_alone_for_longer_and_longer(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding, how: str
) -> None:
    """Else every job in the queue would try it once, in a row."""
    for _ in range(3):
        await submit(hbm_bytes=GIB // 2)
    began = time.time()
    for seconds in (5.0, 10.0, 20.0):
        assert await deciding(seconds) > 0
        await refuse(agent, how)
        row = await store.get_engine("alpha")
        assert row.not_before >= began + seconds
        await deciding()
        assert await agent.orders() == []
    assert len(await types(store, "park_failed")) == 3
    [waits] = {(each.code) for job in (await store.list_jobs())[0] for each in job.reasons[:1]} - {"QueuedBehind"}
    assert waits == ("LoanRefused" if how == "loan" else "OrderRefused")
    await deciding(100.0)
    lent = await agent.one_order()
    await agent.lend(lent)
    assert (await store.get_engine("alpha")).not_before == 0.0


@pytest.mark.parametrize("how", ["loan", "unsupported", "ForeignProcess"])
async def test_a_device_without_an_engine_is_left_alone_too(
    store: Store, submit: Submit, deciding: Deciding, how: str
) -> None:
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    jobs = [await submit(hbm_bytes=GIB) for _ in range(3)]
    await deciding()
    if how == "ForeignProcess":
        order = await agent.one_order()
        await agent.accept(order)
        reason = Reason(code=how, sentence="process 7 holds memory on the device", data={"pids": [7]})
        await agent.loan(order.loan_id, LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE, LoanState.CLOSED, reason=reason)
    else:
        order = await refuse(agent, how)
    await deciding()
    assert await agent.orders() == []
    [first] = (await store.get_job(jobs[1])).reasons[:1]
    assert "device gpu is left alone for a while" in first.sentence
    assert first.next_check is not None
    await deciding(6.0)
    again = await agent.one_order()
    await agent.lend(again)
    [row] = (await store.load_snapshot(0.0)).devices
    assert (row.not_before, row.trouble) == (0.0, None)


async def test_a_loan_that_just_came_too_late_leaves_nothing_alone(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    await submit(hbm_bytes=GIB)
    await deciding()
    order = await agent.one_order()
    await agent.accept(order)
    reason = Reason(code="RecalledByOperator", sentence="recalled")
    await agent.loan(order.loan_id, LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE, LoanState.CLOSED, reason=reason)
    [row] = (await store.load_snapshot(0.0)).devices
    assert row.not_before == 0.0


@pytest.mark.parametrize("last", [LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING, LoanState.LENT])
async def test_an_engine_that_dies_in_its_park_is_left_alone_once_it_is_back(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding, last: LoanState
) -> None:
    """Every job in the queue would kill it once."""
    for _ in range(2):
        await submit(hbm_bytes=GIB // 2, priority=1)
    await deciding()
    order = await agent.one_order()
    await agent.accept(order)
    way = {
        LoanEvent.DRAINED: LoanState.PARKING,
        LoanEvent.PARKED: LoanState.SETTLING,
        LoanEvent.MEMORY_FREE: LoanState.LENT,
    }
    for event, state in way.items():
        if last in (LoanState.DRAINING, agent.loans[order.loan_id].state):
            break
        await agent.loan(order.loan_id, event, state)
    dies = Reason(code="EngineLost", sentence="engine alpha ended while it was parked")
    after = LoanState.LENT if last is LoanState.LENT else LoanState.FAULTED
    await agent.loan(order.loan_id, LoanEvent.ENGINE_LOST, after, reason=dies, engine_id="alpha")
    first = (await store.get_engine("alpha")).not_before
    if last is LoanState.LENT:
        assert first == 0.0, "its park has worked"
        return
    assert first > time.time()
    for spec in order.attempts:
        await agent.end(order, spec, AttemptEnd.NOT_STARTED, reason=dies)
    await agent.loan(order.loan_id, LoanEvent.ENGINE_BACK, LoanState.CLOSED)
    assert (await store.get_engine("alpha")).not_before > first, "while it was gone nobody could park it anyway"
    await submit(hbm_bytes=GIB // 2)
    await deciding()
    assert await agent.orders() == []
    assert await deciding(60.0) > 0


@pytest.mark.parametrize("how", ["loan", "refused", "stale", "unsupported"])
async def test_under_pressure_a_sleep_that_the_node_refuses_is_not_opened_again_at_once(
    store: Store, agent: ModelAgent, deciding: Deciding, how: str
) -> None:
    policy = EnginePolicy(on_pressure=True, pressure_free_bytes_min=2)
    await store.put_policy("alpha", policy, None, "ann", time.time())
    await agent.orders()
    pressed = HostPressure(available_bytes=1, bound_bytes=2, idle_seconds_min=300.0)
    await agent.report(engine("alpha", {"gpu": GIB // 2}, pressure=pressed))
    for seconds in (0.0, 6.0, 18.0):
        assert await deciding(seconds) == 1
        await refuse(agent, how)
        assert await deciding() == 0
    assert await deciding(100.0) == 1
