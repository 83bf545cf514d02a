"""Engines that sleep without a job, on both databases: who may put one to sleep, what jobs do with it, what is told."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanEvent, LoanState, LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    LOAN_OVER,
    AttemptEnd,
    AttemptState,
    EngineState,
    HostPressure,
    LoanStepTaken,
    OpenLoan,
    OrderAnswer,
    Reason,
    RecallLoan,
    RequestAnswered,
    StartAttempt,
    WithoutJob,
)
from lull.scheduler.errors import Conflict, IdempotencyMismatch, NotFound, PolicyNotHonoured
from lull.scheduler.requests import ParkRequest
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device, engine, silence

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]
PARK = ParkRequest()


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})])
    await agent.register()
    return agent


async def events(store: Store, type_: str) -> list[Any]:
    return await store.events_after(0, 1000, types=[type_])


async def asleep(store: Store, agent: ModelAgent, request: ParkRequest = PARK, key: str | None = None) -> OpenLoan:
    """Parked by an operator, and `lent`."""
    await store.park_engine("alpha", request, "ann", key, time.time())
    order = await agent.one_order()
    assert isinstance(order, OpenLoan)
    await _parks(agent, order)
    return order


async def _parks(agent: ModelAgent, order: OpenLoan) -> None:
    await agent.accept(order)
    await agent.loan(order.loan_id, LoanEvent.DRAINED, LoanState.PARKING)
    await agent.loan(order.loan_id, LoanEvent.PARKED, LoanState.SETTLING)
    for engine_id in order.engine_ids:
        await agent.report(
            LoanStepTaken(loan_id=order.loan_id, step=LoanStep.SETTLED, engine_id=engine_id, monotonic_seconds=1.0)
        )
        parked = engine(engine_id, {"gpu": 0}, state=EngineState.PARKED, gate="closed", verified=False)
        await agent.report(parked, device("gpu", free=GIB))
    await agent.loan(order.loan_id, LoanEvent.MEMORY_FREE, LoanState.LENT)


async def _wakes(agent: ModelAgent, order: OpenLoan, code: str) -> None:
    await agent.loan(
        order.loan_id, LoanEvent.RECALLED, LoanState.RECALLING, reason=Reason(code=code, sentence="recalled")
    )
    await agent.loan(order.loan_id, LoanEvent.GROUPS_EMPTY, LoanState.WAKING)
    await agent.loan(order.loan_id, LoanEvent.RUNNING, LoanState.VERIFYING)
    await agent.report(engine(order.engine_ids[0], {"gpu": GIB}), device("gpu", free=0))
    await agent.loan(order.loan_id, LoanEvent.CANARY_RIGHT, LoanState.CLOSED)


async def test_an_operator_puts_an_engine_to_sleep_and_a_request_wakes_it(store: Store, agent: ModelAgent) -> None:
    began = await store.park_engine("alpha", ParkRequest(for_seconds=7200), "ann", None, time.time())
    assert (began.kind, began.state, began.loan_state) == ("park", "running", LoanState.DRAINING)
    order = await agent.one_order()
    assert order.without_job == WithoutJob(until_seconds=7200)
    assert (order.attempts, order.need_bytes, order.engine_ids, order.device_ids) == ([], 0, ["alpha"], ["gpu"])
    assert (order.restore_by_seconds, order.loan_id) == (7200, began.loan_id)
    await _parks(agent, order)
    assert (await store.get_operation(began.id)).state == "succeeded"
    row = await store.get_engine("alpha")
    assert row.parked is not None
    assert (row.parked.id, row.parked.without_job) == (order.loan_id, order.without_job)
    await _wakes(agent, order, "Request")
    answered = RequestAnswered(loan_id=order.loan_id, engine_id="alpha", seconds=1.25)
    await agent.report(answered)
    await agent.report(answered.model_copy(update={"seconds": 9.0}))
    assert (await store.get_loan(order.loan_id)).first_byte_seconds == 1.25
    row = await store.get_engine("alpha")
    assert row.parked is None
    assert row.last_wake is not None
    assert (row.last_wake["loan_id"], row.last_wake["first_byte_seconds"]) == (order.loan_id, 1.25)
    [woken] = await events(store, "engine_woken")
    assert (woken.engine_id, woken.loan_id, woken.data) == ("alpha", order.loan_id, {"first_byte_seconds": 1.25})
    [asked] = await events(store, "engine_park_ordered")
    assert (asked.actor, asked.engine_id) == ("ann", "alpha")
    assert (await store.get_operation(began.id)).state == "succeeded"


async def test_the_policy_bounds_the_time_and_manual_is_no_obstacle(store: Store) -> None:
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})], when="manual")
    await agent.register()
    order = await asleep(store, agent, ParkRequest(for_seconds=100_000, wake_on_request=False))
    assert order.restore_by_seconds == EnginePolicy().park_seconds_max
    assert order.without_job == WithoutJob(until_seconds=100_000, wake_on_request=False)


async def test_asked_again_nothing_more_is_done_and_other_terms_are_refused(store: Store, agent: ModelAgent) -> None:
    first = await store.park_engine("alpha", PARK, "ann", "key", time.time())
    for key in ("key", None, "other"):
        assert (await store.park_engine("alpha", PARK, "ann", key, time.time())).id == first.id
    with pytest.raises(IdempotencyMismatch):
        await store.park_engine("alpha", ParkRequest(for_seconds=60), "ann", "key", time.time())
    with pytest.raises(Conflict, match=r"parked already.*lull engine resume alpha"):
        await store.park_engine("alpha", ParkRequest(for_seconds=60), "ann", None, time.time())
    assert isinstance(await agent.one_order(), OpenLoan)
    assert len(await events(store, "engine_park_ordered")) == 1


async def test_an_operator_wakes_it_once(store: Store, agent: ModelAgent) -> None:
    with pytest.raises(Conflict, match="alpha is running: it is not parked") as refused:
        await store.resume_engine("alpha", "ann", None, time.time())
    assert refused.value.state == "running"
    order = await asleep(store, agent)
    first = await store.resume_engine("alpha", "bob", "key", time.time())
    assert (first.kind, first.state) == ("resume", "running")
    for key in ("key", None):
        assert (await store.resume_engine("alpha", "bob", key, time.time())).id == first.id
    assert await agent.one_order() == RecallLoan(loan_id=order.loan_id, reason="Resumed")
    with pytest.raises(Conflict, match="is being woken"):
        await store.park_engine("alpha", PARK, "ann", None, time.time())
    await _wakes(agent, order, "Resumed")
    assert (await store.get_operation(first.id)).state == "succeeded"
    assert [event.actor for event in await events(store, "engine_resume_ordered")] == ["bob"]


async def test_a_silent_node_takes_no_order_to_resume(store: Store, agent: ModelAgent) -> None:
    await asleep(store, agent)
    await silence(store)
    with pytest.raises(Conflict, match="silent"):
        await store.resume_engine("alpha", "ann", None, time.time())
    assert await events(store, "engine_resume_ordered") == []


async def test_a_resume_that_the_node_had_not_taken_is_ordered_anew(store: Store, agent: ModelAgent) -> None:
    order = await asleep(store, agent)
    await store.resume_engine("alpha", "bob", None, time.time())
    await agent.register(use=False)
    assert await agent.one_order() == RecallLoan(loan_id=order.loan_id, reason="Resumed")


async def test_while_a_job_holds_the_devices_both_are_refused_with_the_way_out(store: Store, running: OpenLoan) -> None:
    for call in (
        store.park_engine("alpha", PARK, "ann", None, time.time()),
        store.resume_engine("alpha", "ann", None, time.time()),
    ):
        with pytest.raises(Conflict, match=f"lull loan recall {running.loan_id}") as refused:
            await call
        assert refused.value.state == "lent"


async def test_the_way_out_ends_the_loan_and_its_job_is_queued_again(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    for _ in range(2):
        assert (await store.recall_loan(running.loan_id, "ann", time.time())).recall_ordered
    assert await agent.one_order() == RecallLoan(loan_id=running.loan_id, reason="RecalledByOperator")
    [event] = await events(store, "loan_recall_ordered")
    assert (event.actor, event.loan_id) == ("ann", running.loan_id)
    with pytest.raises(NotFound):
        await store.recall_loan("nope", "ann", time.time())


async def test_what_stands_against_a_park_is_said(store: Store, agent: ModelAgent) -> None:
    with pytest.raises(NotFound, match="nope"):
        await store.park_engine("nope", PARK, "ann", None, time.time())
    await agent.report(engine("alpha", {"gpu": GIB}, state=EngineState.STARTING, verified=False))
    with pytest.raises(Conflict, match=r"starting.*lull engine show alpha") as refused:
        await store.park_engine("alpha", PARK, "ann", None, time.time())
    assert refused.value.state == "starting"
    able = {"engine": "vLLM 0.9", "unsupported": "vLLM 0.9 has no sleep mode"}
    await agent.report(engine("alpha", {"gpu": GIB}, capabilities=able))
    with pytest.raises(PolicyNotHonoured, match="no sleep mode"):
        await store.park_engine("alpha", PARK, "ann", None, time.time())
    await silence(store)
    with pytest.raises(Conflict, match="silent"):
        await store.park_engine("alpha", PARK, "ann", None, time.time())
    assert await agent.orders() == []


async def test_an_engine_that_shares_its_device_is_not_parked_alone(store: Store) -> None:
    both = [engine("alpha", {"gpu": GIB // 2}), engine("beta", {"gpu": GIB // 2})]
    await ModelAgent(store, devices=[device("gpu", free=0)], engines=both).register()
    with pytest.raises(Conflict, match="engines alpha, beta live on the same devices"):
        await store.park_engine("alpha", PARK, "ann", None, time.time())


async def test_a_park_that_fails_says_why(store: Store, agent: ModelAgent) -> None:
    began = await store.park_engine("alpha", PARK, "ann", None, time.time())
    order = await agent.one_order()
    await agent.accept(order)
    reason = Reason(code="WaitingForDrain", sentence="3 requests did not end")
    await agent.loan(order.loan_id, LoanEvent.DRAIN_DEADLINE_ABORTED, LoanState.CLOSED, reason=reason)
    failed = await store.get_operation(began.id)
    assert (failed.state, failed.reason) == ("failed", reason)
    # An operator may ask again at once, whatever back-off jobs are held to.
    assert (await store.park_engine("alpha", PARK, "ann", None, time.time())).id != began.id


async def test_while_its_node_is_silent_an_operation_says_so(store: Store, agent: ModelAgent) -> None:
    began = await store.park_engine("alpha", PARK, "ann", None, time.time())
    await silence(store)
    row = await store.get_operation(began.id)
    assert row.reason is not None
    assert (row.state, row.reason.code) == ("running", "NodeUnreachable")


@pytest.mark.parametrize("state", [LoanState.LENT, LoanState.WAKING])
async def test_a_registration_that_is_ahead_of_its_reports_is_no_failure(
    store: Store, agent: ModelAgent, state: LoanState
) -> None:
    began = await store.park_engine("alpha", PARK, "ann", None, time.time())
    order = await agent.one_order()
    await agent.accept(order)
    agent.loans[order.loan_id] = agent.loans[order.loan_id].model_copy(update={"state": state})
    await agent.register()
    assert (await store.get_operation(began.id)).state == ("succeeded" if state is LoanState.LENT else "running")
    await agent.report(
        LoanStepTaken(loan_id=order.loan_id, step=LoanStep.SETTLED, engine_id="alpha", monotonic_seconds=1.0)
    )
    assert (await store.get_operation(began.id)).state == "succeeded"


async def test_of_two_parks_at_once_one_opens_a_loan(store: Store, agent: ModelAgent) -> None:
    asked = [store.park_engine("alpha", PARK, f"u{n}", f"k{n}", time.time()) for n in range(4)]
    assert len({operation.id for operation in await asyncio.gather(*asked)}) == 1
    assert isinstance(await agent.one_order(), OpenLoan)


async def test_of_a_park_and_a_job_at_once_one_has_the_devices(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    await submit()
    results = await asyncio.gather(
        deciding(), store.park_engine("alpha", PARK, "ann", None, time.time()), return_exceptions=True
    )
    orders = [envelope.order for envelope in await agent.orders()]
    assert [type(order) for order in orders] == [OpenLoan]
    assert isinstance(results[1], Conflict) or orders[0].without_job is not None, results


# ---- jobs --------------------------------------------------------------------------------------------------------


async def test_a_job_that_fits_runs_in_the_sleep(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    order = await asleep(store, agent)
    job_id = await submit(hbm_bytes=GIB // 2)
    await deciding()
    start = await agent.one_order()
    assert isinstance(start, StartAttempt)
    assert (start.loan_id, start.attempt.job_id) == (order.loan_id, job_id)
    with pytest.raises(Conflict, match=f"job {job_id} holds.*lull loan recall {order.loan_id}"):
        await store.resume_engine("alpha", "ann", None, time.time())


async def test_no_job_runs_in_the_sleep_of_an_engine_that_is_not_lent_to_jobs(
    store: Store, submit: Submit, deciding: Deciding
) -> None:
    agent = ModelAgent(store, devices=[device("gpu", free=0)], engines=[engine("alpha", {"gpu": GIB})], when="manual")
    await agent.register()
    order = await asleep(store, agent)
    job_id = await submit(hbm_bytes=GIB // 2)
    await deciding()
    assert await agent.orders() == []
    [reason] = (await store.get_job(job_id)).reasons
    assert (reason.code, reason.data["loan_id"]) == ("LoanOpen", order.loan_id)


@pytest.mark.parametrize("wake_on_request", [True, False])
async def test_a_job_that_needs_more_devices_ends_the_sleep_unless_it_is_to_stay(
    store: Store, submit: Submit, deciding: Deciding, wake_on_request: bool
) -> None:
    two = [device("gpu", free=0), device("gpu1", index=1)]
    agent = ModelAgent(store, devices=two, engines=[engine("alpha", {"gpu": GIB})])
    await agent.register()
    order = await asleep(store, agent, ParkRequest(wake_on_request=wake_on_request))
    await submit(gpus=2)
    await deciding()
    orders = [envelope.order for envelope in await agent.orders()]
    if not wake_on_request:
        assert orders == []
        return
    assert orders == [RecallLoan(loan_id=order.loan_id, reason="NeededByJob")]
    await deciding()
    assert await agent.orders() == [], "it is ended once"
    await _wakes(agent, order, "NeededByJob")
    await deciding()
    opened = await agent.one_order()
    assert (sorted(opened.device_ids), opened.engine_ids, opened.without_job) == (["gpu", "gpu1"], ["alpha"], None)


async def test_a_sleep_that_takes_no_more_jobs_is_not_filled_and_ends_for_the_next_one(
    store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding
) -> None:
    """A request wants the engine back while a job runs: the node answers every other job that the loan is over."""
    order = await asleep(store, agent)
    first = await submit(hbm_bytes=GIB // 4)
    await deciding()
    runs = await agent.one_order()
    assert runs.attempt.job_id == first
    await agent.run(runs, runs.attempt)
    others = [await submit(hbm_bytes=GIB // 4) for _ in range(2)]
    await deciding()
    over = Reason(code=LOAN_OVER, sentence="the loan takes no more work")
    for start in [envelope.order for envelope in await agent.orders()]:
        await agent.attempt(start, start.attempt, AttemptState.ENDED, end=AttemptEnd.NOT_STARTED, reason=over)
    others.append(await submit(hbm_bytes=GIB // 4))
    for _ in range(2):
        await deciding()
        assert await agent.orders() == [], "nobody is placed where the node takes no more"
    for job_id in others:
        reasons = [reason.code for reason in (await store.get_job(job_id)).reasons]
        assert ("LoanOpen" in reasons, LOAN_OVER in reasons) == (True, False), "it has no back-off"
    # The request was given up: the engine would sleep on.
    await agent.end(runs, runs.attempt, AttemptEnd.EXITED, exit_code=0)
    await deciding()
    assert await agent.one_order() == RecallLoan(loan_id=order.loan_id, reason="NeededByJob")
    await _wakes(agent, order, "NeededByJob")
    await deciding()
    opened = await agent.one_order()
    assert (sorted(spec.job_id for spec in opened.attempts), opened.without_job) == (sorted(others), None)


# ---- pressure ----------------------------------------------------------------------------------------------------

PRESSED = HostPressure(available_bytes=1, bound_bytes=2, idle_seconds_min=300.0)


async def test_under_pressure_an_idle_engine_is_put_to_sleep_once(
    store: Store, agent: ModelAgent, deciding: Deciding
) -> None:
    await agent.report(engine("alpha", {"gpu": GIB}, pressure=PRESSED))
    assert await deciding() == 0, "its policy does not say so"
    policy = EnginePolicy(on_pressure=True, pressure_free_bytes_min=2, park_seconds_max=900)  # when: manual
    await store.put_policy("alpha", policy, None, "ann", time.time())
    await agent.orders()
    assert await deciding() == 1
    order = await agent.one_order()
    assert order.without_job == WithoutJob(wanted_by="pressure")
    assert (order.restore_by_seconds, order.engine_ids) == (900, ["alpha"])
    assert await deciding() == 0
    await _parks(agent, order)
    await _wakes(agent, order, "Request")
    assert await deciding() == 0, "its agent says nothing of pressure any more"
    with pytest.raises(Conflict, match="not parked"):
        await store.resume_engine("alpha", "ann", None, time.time())


async def test_a_park_that_failed_under_pressure_is_not_tried_again_at_once(
    store: Store, agent: ModelAgent, deciding: Deciding
) -> None:
    policy = EnginePolicy(on_pressure=True, pressure_free_bytes_min=2)
    await store.put_policy("alpha", policy, None, "ann", time.time())
    await agent.orders()
    await agent.report(engine("alpha", {"gpu": GIB}, pressure=PRESSED))
    await deciding()
    order = await agent.one_order()
    await agent.accept(order)
    await agent.loan(order.loan_id, LoanEvent.PREFLIGHT_REFUSED, LoanState.CLOSED)
    assert await deciding() == 0
    assert await deciding(30.0) == 1
    await agent.report(OrderAnswer(seq=agent.after, outcome="accepted"))


async def test_jobs_come_before_pressure(store: Store, agent: ModelAgent, submit: Submit, deciding: Deciding) -> None:
    policy = EnginePolicy(when="always", on_pressure=True, pressure_free_bytes_min=2)
    await store.put_policy("alpha", policy, None, "ann", time.time())
    await agent.orders()
    await agent.report(engine("alpha", {"gpu": GIB}, pressure=PRESSED))
    await submit()
    await deciding()
    assert (await agent.one_order()).without_job is None
