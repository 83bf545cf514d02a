"""Plans from the report of what was learned to the loan that is stored with its prediction, on both databases."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable

import pytest

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.loans import LoanEvent, LoanState
from lull.agents.protocol.plans import Learned, ParkLearned
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptEnd, OpenLoan, Reason
from lull.scheduler import actions
from lull.scheduler.decide import decide
from lull.scheduler.errors import NotFound, Unsatisfiable
from lull.scheduler.requests import ParkRequest
from lull.scheduler.sql import database, snapshots
from lull.scheduler.store import Store
from lull.vmm.tags import RestoreMode
from tests.model_agent import GIB, ModelAgent, device, engine

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]

MODES = EnginePolicy().restore_modes
KV = {"kv_cache": RestoreMode.NONE}
ABLE = Capabilities(
    engine="an engine",
    plans=[ParkPlan(name="by tag", modes={tag: [mode] for tag, mode in MODES.items()}, any_subset=True)],
)
LEARNED = Learned(
    ways=[
        ParkLearned(modes=KV, freed_bytes={"gpu": GIB // 4}, park_seconds=0.5, wake_seconds=0.5, parks=1, seen_at=1.0),
        ParkLearned(modes=MODES, freed_bytes={"gpu": GIB // 2}, park_seconds=2.0, wake_seconds=3.0, parks=1),
    ]
)


async def node(store: Store) -> ModelAgent:
    """Its one device is filled by an engine: a half of it free, a quarter the KV cache, a quarter the weights."""
    alpha = engine("alpha", {"gpu": GIB // 2}, capabilities=ABLE, learned=LEARNED)
    agent = ModelAgent(store, devices=[device("gpu", free=GIB // 2)], engines=[alpha])
    await agent.register()
    return agent


async def test_a_plan_goes_to_the_node_and_stays_with_its_loan(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    agent = await node(store)
    assert (await store.get_engine("alpha")).learned == LEARNED
    await submit(hbm_bytes=3 * GIB // 4)
    await deciding()
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    plan = order.plans["alpha"]
    assert (plan.modes, plan.whole, plan.freed_bytes) == (KV, False, {"gpu": GIB // 4})
    assert (plan.park_seconds, plan.wake_seconds) == (0.5, 0.5)
    assert order.policies["alpha"].restore_modes == MODES, "the policy itself is never changed"
    loan = await store.get_loan(order.loan_id)
    assert loan.plans == {"alpha": plan}
    [open_loan] = (await store.load_snapshot(0.0)).loans
    assert (open_loan.is_narrow, open_loan.room_bytes) == (True, {"gpu": 3 * GIB // 4})

    # The plan does not hold there: the next loan parks the whole policy, until a park has worked.
    await agent.accept(order)
    reason = Reason(code="PlanNotHeld", sentence="it would free less")
    await agent.loan(order.loan_id, LoanEvent.PREFLIGHT_REFUSED, LoanState.CLOSED, reason=reason)
    await agent.end(order, order.attempts[0], AttemptEnd.NOT_STARTED, reason=reason)
    later = (await store.get_engine("alpha")).not_before + 1
    snapshot = await store.load_snapshot(later)
    assert snapshot.engines[0].trouble == reason
    [again] = [each for each in decide(snapshot, later + 3600) if isinstance(each, actions.OpenLoan)]
    assert [each.whole for each in again.plans.values()] == [True]


async def test_what_a_node_keeps_free_beside_every_job_is_given_to_none(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    keeps = device("gpu").model_copy(update={"spawn_margin_bytes": GIB // 8})
    agent = ModelAgent(store, devices=[keeps])
    await agent.register()
    with pytest.raises(Unsatisfiable, match="largest possible is 896 MiB"):
        await submit(hbm_bytes=GIB)
    await submit()
    await deciding()
    order = await agent.one_order()
    assert order.need_bytes_by_device == {"gpu": GIB - GIB // 8}
    assert order.attempts[0].hbm_bytes == GIB - GIB // 8
    await agent.report(keeps.model_copy(update={"spawn_margin_bytes": 7}))
    [row] = (await store.load_snapshot(0.0)).devices
    assert row.margin_bytes == 7


async def test_an_operator_s_wish_is_judged_by_the_node_of_the_engine_alone(
    store: Store, submit: Submit, database_url: str
) -> None:
    """However many engines there are elsewhere, and however many jobs wait."""
    await node(store)
    await submit(hbm_bytes=GIB // 4)
    beta = engine("beta", {"other": GIB // 2})
    other = ModelAgent(store, "elsewhere", devices=[device("other", free=GIB // 2)], engines=[beta])
    await other.register()
    plan = await store.engine_plan("alpha", 3 * GIB // 4, None, 1.0)
    assert plan.chosen is not None
    assert (plan.engine.id, plan.chosen.plan.modes, plan.blocker) == ("alpha", KV, None)
    read = database.ReadEngine(database.normalize_url(database_url))
    alone = read.run(lambda conn: snapshots.load_node(conn, "node"))
    read.dispose()
    assert ([row.id for row in alone.nodes], [row.id for row in alone.devices]) == (["node"], ["gpu"])
    assert ([row.id for row in alone.engines], alone.jobs, alone.loans) == (["alpha"], (), ())
    assert alone.engines[0] in (await store.load_snapshot(1.0)).engines
    operation = await store.park_engine("beta", ParkRequest(), "ann", None, time.time())
    plan = await store.engine_plan("beta", GIB // 4, None, 1.0)
    assert plan.blocker is not None
    assert plan.blocker.data == {"loan_id": operation.loan_id}
    with pytest.raises(NotFound, match="nope"):
        await store.engine_plan("nope", 1, None, 1.0)


async def test_a_plan_that_was_made_for_another_policy_opens_nothing(store: Store, submit: Submit) -> None:
    await node(store)
    await submit(hbm_bytes=3 * GIB // 4)
    wanted = decide(await store.load_snapshot(1.0), 1.0)
    policy = EnginePolicy(when="always", restore_modes={"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.CPU})
    await store.put_policy("alpha", policy, None, "someone", 2.0)
    assert await store.commit([each for each in wanted if isinstance(each, actions.OpenLoan)], 3.0) == 0
    assert (await store.load_snapshot(3.0)).loans == ()


async def test_what_was_learned_stays_known_while_an_agent_does_not_tell(store: Store) -> None:
    agent = await node(store)
    silent = engine("alpha", {"gpu": GIB // 2})
    await agent.report(silent)
    assert (await store.get_engine("alpha")).learned == LEARNED
    await agent.report(engine("alpha", {"gpu": GIB // 2}, learned=Learned()))
    assert (await store.get_engine("alpha")).learned == Learned(), "another configuration: nothing is known of it"
