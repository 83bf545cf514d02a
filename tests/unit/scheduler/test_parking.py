"""Engines that sleep without a job: when one is put to sleep by itself, and what jobs get of its devices."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptState, EngineState, GateState, WithoutJob
from lull.scheduler.actions import OpenLoan, RecallLoan, SetReasons, StartAttempt
from lull.scheduler.decide import decide
from lull.scheduler.model import (
    Attempt,
    AttemptId,
    Device,
    DeviceId,
    Engine,
    Job,
    JobId,
    Loan,
    LoanId,
    Snapshot,
)
from lull.scheduler.parking import obstacle, sleep
from lull.scheduler.placement import build_groups
from tests import scheduler_rows as rows
from tests.scheduler_rows import NODE

PRESSED = EnginePolicy(on_pressure=True, pressure_free_bytes_min=1, park_seconds_max=900)
GPU, GPU1 = DeviceId("d0"), DeviceId("d1")


def device(name: DeviceId = GPU, free: int = 40, **more: Any) -> Device:
    return rows.device(name, free, **more)


def engine(name: str = "a", on: DeviceId = GPU, policy: EnginePolicy = PRESSED, **more: Any) -> Engine:
    values: dict[str, Any] = {"is_pressed": True, **more}
    return rows.engine(name, on, policy=policy, **values)


def asleep(**more: Any) -> tuple[Engine, Loan]:
    """An engine that sleeps, and its loan, which was opened before it was known what the engine keeps."""
    policy = EnginePolicy(when="always")
    parked = engine(policy=policy, state=EngineState.PARKED, gate=GateState.CLOSED, device_bytes={GPU: 10})
    values: dict[str, Any] = {"state": LoanState.LENT, "expects_more": False, "without_job": WithoutJob(), **more}
    loan = Loan(LoanId("l"), NODE.id, (GPU,), (parked.id,), need_bytes=0, room_bytes={GPU: 100}, **values)
    return replace(parked, residual_bytes={GPU: 10}), loan


def job(name: str = "j", hbm: int | None = 50, **more: Any) -> Job:
    return rows.job(name, hbm, **more)


def decided(*given: Any, now: float = 0.0) -> list[Any]:
    return [action for action in decide(rows.snapshot(*given), now) if not isinstance(action, SetReasons)]


# ---- pressure ----------------------------------------------------------------------------------------------------


def test_an_engine_under_pressure_is_put_to_sleep() -> None:
    [action] = decided(device(), engine())
    assert isinstance(action, OpenLoan)
    assert (action.without_job, action.places, action.engine_ids) == (WithoutJob(wanted_by="pressure"), (), ("a",))
    assert (action.restore_by_seconds, action.room_bytes, action.need_bytes) == (900, {GPU: 100}, 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"is_pressed": False},
        {"policy": EnginePolicy()},
        {"not_before": 1.0},
        {"state": EngineState.PARKED},
        {"verified": False},
        {"gate": GateState.CLOSED},
        {"refused": "it cannot"},
    ],
)
def test_one_that_is_not_or_may_not_or_cannot_is_left(changes: dict[str, Any]) -> None:
    assert decided(device(), engine(**changes)) == []


def test_engines_that_share_a_device_sleep_together_or_not_at_all() -> None:
    both = [engine("a", device_bytes={GPU: 30}), engine("b", device_bytes={GPU: 30})]
    [action] = decided(device(), *both)
    assert action.engine_ids == ("a", "b")
    assert decided(device(), both[0], replace(both[1], is_pressed=False)) == []


def test_a_job_comes_before_pressure() -> None:
    always = PRESSED.model_copy(update={"when": "always"})
    [action] = decided(device(), engine(policy=always), job(hbm=90))
    assert (action.without_job, len(action.places)) == (None, 1)


def test_a_device_that_is_lent_quarantined_or_silent_is_no_bed() -> None:
    assert decided(device(quarantined=True), engine()) == []
    _, loan = asleep()
    assert decided(device(), engine(), loan) == []


# ---- an operator -------------------------------------------------------------------------------------------------


def test_an_operator_may_park_what_jobs_do_not_get_and_what_is_in_back_off() -> None:
    manual = engine(policy=EnginePolicy(), is_pressed=False, not_before=1e9)
    [group] = build_groups(Snapshot((NODE,), (device(),), (manual,)), 0.0)
    assert obstacle(group, wanted_by_name=True) is None
    opened = sleep(group, WithoutJob(until_seconds=60.0))
    assert opened.restore_by_seconds == 60.0
    assert sleep(group, WithoutJob(until_seconds=1e6)).restore_by_seconds == EnginePolicy().park_seconds_max


def test_an_operator_who_names_one_does_not_mean_its_neighbour() -> None:
    [group] = build_groups(Snapshot((NODE,), (device(),), (engine("a"), engine("b"))), 0.0)
    blocker = obstacle(group, wanted_by_name=True)
    assert blocker is not None
    assert blocker.code == "SharedDevices"


# ---- jobs --------------------------------------------------------------------------------------------------------


def test_a_job_gets_no_more_of_a_sleep_than_its_engine_leaves() -> None:
    parked, loan = asleep()
    [start] = decided(device(free=90), parked, loan, job(hbm=90))
    assert isinstance(start, StartAttempt)
    assert decided(device(free=90), parked, loan, job(hbm=91)) == []


def test_a_job_gets_no_more_of_a_sleep_than_is_seen_to_be_free() -> None:
    parked, loan = asleep()
    for here in (device(free=60), device(free=65, margin_bytes=5)):
        [start] = decided(here, parked, loan, job(hbm=60))
        assert isinstance(start, StartAttempt)
        assert decided(here, parked, loan, job(hbm=61)) == []
    # Looked at before the park, or while the last job was still there: that is not what is there now.
    for late in (device(free=20, engine_bytes=70), device(free=10, engine_bytes=10, job_bytes=70)):
        [start] = decided(late, parked, loan, job(hbm=80))
        assert isinstance(start, StartAttempt)
        assert decided(late, parked, loan, job(hbm=81)) == []


def test_a_sleep_in_which_a_job_has_just_been_started_is_not_ended_for_another() -> None:
    parked, loan = asleep()
    actions = decided(device(free=90), device(GPU1, 100), parked, loan, job("j", 50), job("k", 60, gpus=2))
    assert [type(action) for action in actions] == [OpenLoan]  # of the device without an engine
    actions = decided(device(free=90), parked, loan, job("j", 50), job("k", 60, created_at=2.0))
    assert [type(action) for action in actions] == [StartAttempt]


def test_a_sleep_is_ended_for_a_job_that_needs_more_devices_and_only_then() -> None:
    parked, loan = asleep()
    other = device(GPU1, 100)
    assert decided(device(free=90), other, parked, loan, job(gpus=2)) == [RecallLoan(loan.id, NODE.id, "NeededByJob")]
    assert decided(device(free=90), other, parked, loan, job(gpus=3)) == []
    kept = replace(loan, without_job=WithoutJob(wake_on_request=False))
    assert decided(device(free=90), other, parked, kept, job(gpus=2)) == []
    busy = Attempt(AttemptId("x"), JobId("y"), loan.id, NODE.id, (GPU,), 10, AttemptState.RUNNING)
    assert decided(device(free=90), other, parked, loan, busy, job(gpus=2)) == []


def test_a_node_is_not_asked_to_expect_work_for_a_sleep() -> None:
    parked, loan = asleep(expects_more=None)
    assert decided(device(free=90), parked, loan) == []
