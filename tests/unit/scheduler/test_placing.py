"""Which device a job gets, what runs under one park, and why a job waits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptState, EngineState, GateState, Reason
from lull.scheduler.actions import ExpectWork, OpenLoan, SetReasons, StartAttempt, StopAttempt
from lull.scheduler.decide import LATER_JOBS_MAX, PASSED_OVER_SECONDS_MAX, decide
from lull.scheduler.model import (
    Attempt,
    AttemptId,
    DeviceId,
    EngineId,
    JobId,
    Loan,
    LoanId,
    Node,
    NodeId,
    Snapshot,
)
from lull.scheduler.placement import largest_possible
from tests.scheduler_rows import NODE, device, engine, job, snapshot


def one(actions: tuple[Any, ...]) -> Any:
    [action] = actions
    return action


def reason(actions: tuple[Any, ...], job_id: str = "j") -> Any:
    return next(action for action in actions if isinstance(action, SetReasons) and action.job_id == job_id).reasons[0]


def lent(name: str = "l", room: int = 100, **more: Any) -> Loan:
    where = DeviceId("d0")
    values: dict[str, Any] = {"state": LoanState.LENT, "need_bytes": 0, "room_bytes": {where: room}}
    values |= {"expects_more": False, **more}
    return Loan(LoanId(name), NODE.id, (where,), (EngineId("a"),), **values)


def live(name: str = "x", hbm: int = 50, **more: Any) -> Attempt:
    return Attempt(
        AttemptId(name),
        JobId(f"job-{name}"),
        LoanId("l"),
        NODE.id,
        (DeviceId("d0"),),
        hbm,
        AttemptState.RUNNING,
        **more,
    )


PARKABLE = engine("a", "d0")
PARKED = engine("a", "d0", state=EngineState.PARKED, gate=GateState.CLOSED, held=0)


def test_a_device_without_an_engine_comes_first() -> None:
    action = one(decide(snapshot(device("d0", 40), engine("a", "d0"), device("d1"), job("j")), 0.0))
    assert (action.device_ids, action.engine_ids, action.restore_by_seconds) == (("d1",), (), None)


def test_then_the_engine_that_is_idle_longest() -> None:
    rows = [device("d0", 40), device("d1", 40), device("d2", 40)]
    engines = [engine("a", "d0"), engine("b", "d1", idle_since=20.0), engine("c", "d2", idle_since=10.0)]
    assert one(decide(snapshot(*rows, *engines, job("j")), 0.0)).engine_ids == ("c",)
    assert one(decide(snapshot(*rows, *engines[:2], job("j", 100)), 0.0)).engine_ids == ("b",)


def test_all_devices_of_a_parked_engine_join_the_loan() -> None:
    action = one(decide(snapshot(device("d0", 40), device("d1", 40), engine("a", "d0", "d1"), job("j")), 0.0))
    assert action.device_ids == ("d0", "d1")
    assert action.places[0].device_ids == ("d0",)
    assert action.need_bytes == 50


def test_each_device_has_to_show_what_is_used_of_it() -> None:
    """A large one and a small one under one engine: neither bounds what the other is asked for."""
    small = replace(device("d1", 10), capacity_bytes=30)
    rows = [device("d0", 40), small, engine("a", "d0", "d1", device_bytes={"d0": 60, "d1": 20})]
    action = one(decide(snapshot(*rows, job("j", 90)), 0.0))
    assert (action.device_ids, action.need_bytes) == (("d0", "d1"), 30)
    assert action.need_bytes_by_device == {"d0": 90}


def test_one_large_engine_is_parked_rather_than_two() -> None:
    rows = [device("d0", 40), device("d1", 40), device("d2", 40)]
    engines = [engine("a", "d0", idle_since=1.0), engine("b", "d1", "d2", idle_since=2.0)]
    assert one(decide(snapshot(*rows, *engines, job("j", gpus=2)), 0.0)).engine_ids == ("b",)
    assert one(decide(snapshot(*rows, *engines, job("j", gpus=3)), 0.0)).engine_ids == ("a", "b")


def test_an_engine_of_another_node_holds_up_nothing() -> None:
    ghost = replace(engine("a", "d0", state=EngineState.GONE), node_id=NodeId("other"))
    action = one(
        decide(snapshot(Node(NodeId("other"), "x", up=False, silent=True), device("d0"), ghost, job("j")), 0.0)
    )
    assert (action.device_ids, action.engine_ids) == (("d0",), ())


def test_what_an_engine_keeps_is_not_there() -> None:
    kept = engine("a", "d0", residual_bytes={"d0": 30})
    assert isinstance(one(decide(snapshot(device("d0", 40), kept, job("j", 70)), 0.0)), OpenLoan)
    waits = reason(decide(snapshot(device("d0", 40), kept, job("j", 71)), 0.0))
    assert (waits.code, waits.data["nodes"]["box"]["code"]) == ("Unsatisfiable", "Unsatisfiable")
    whole = one(decide(snapshot(device("d0", 40), kept, job("j", None)), 0.0))
    assert whole.places[0].hbm_bytes == 70


def test_what_the_node_keeps_free_beside_every_job_is_not_there() -> None:
    """The agent adds its margin to the need of every job, with an engine on the device or without."""
    for rows, engines in (([device("d0", margin_bytes=10)], ()), ([device("d0", 40, margin_bytes=10), PARKABLE], "a")):
        whole = one(decide(snapshot(*rows, job("j", None)), 0.0))
        assert (whole.engine_ids, whole.places[0].hbm_bytes) == (tuple(engines), 90)
        assert (whole.need_bytes_by_device, whole.room_bytes) == ({"d0": 90}, {"d0": 90})
        assert isinstance(one(decide(snapshot(*rows, job("j", 90)), 0.0)), OpenLoan)
        assert reason(decide(snapshot(*rows, job("j", 91)), 0.0)).code == "Unsatisfiable"
        both = one(decide(snapshot(*rows, job("j", 45), job("k", 45)), 0.0))
        assert [place.job_id for place in both.places] == ["j", "k"]


def test_jobs_that_fit_under_one_park_run_under_one_park() -> None:
    jobs = [job("j1", 50), job("j2", 50, created_at=2.0), job("j3", 60, created_at=3.0), job("j4", 500, created_at=4.0)]
    rows = [device("d0", 40), engine("a", "d0"), device("d1", 40), engine("b", "d1")]
    actions = decide(snapshot(*rows, *jobs), 0.0)
    opened: Any = actions[0]
    assert [place.job_id for place in opened.places] == ["j1", "j2"]
    assert opened.later_job_ids == ("j3",)
    assert (opened.need_bytes, len(actions)) == (100, 2)
    assert reason(actions, "j4").code == "Unsatisfiable"


def test_a_long_queue_is_worth_a_second_park() -> None:
    jobs = [job(f"j{number:03}", 90, created_at=float(number)) for number in range(LATER_JOBS_MAX + 2)]
    rows = [device("d0", 40), engine("a", "d0"), device("d1", 40), engine("b", "d1")]
    opened = [action for action in decide(snapshot(*rows, *jobs), 0.0) if isinstance(action, OpenLoan)]
    assert [len(action.later_job_ids) for action in opened] == [LATER_JOBS_MAX, 0]


def test_priority_first_then_age() -> None:
    jobs = [job("old", 90), job("new", 90, created_at=2.0, priority=1)]
    action = next(each for each in decide(snapshot(device("d0"), *jobs), 0.0) if isinstance(each, OpenLoan))
    assert [place.job_id for place in action.places] == ["new"]


def test_the_plan_never_grows_inside_a_loan() -> None:
    start = one(decide(snapshot(device("d0"), PARKED, lent(), live(hbm=50), job("j", 50)), 0.0))
    assert isinstance(start, StartAttempt)
    assert reason(decide(snapshot(device("d0"), PARKED, lent(), live(hbm=51), job("j", 50)), 0.0)).code == "LoanOpen"


def test_a_job_waits_for_a_loan_that_is_being_opened_rather_than_park_another_engine() -> None:
    rows = [device("d0", 0), PARKED, device("d1", 40), engine("b", "d1"), live(hbm=50)]
    actions = decide(snapshot(*rows, lent(state=LoanState.PARKING), job("j")), 0.0)
    assert reason(actions).code == "LoanOpen"
    assert [type(action) for action in actions] == [ExpectWork, SetReasons]
    assert isinstance(one(decide(snapshot(*rows, lent(state=LoanState.WAKING), job("j")), 0.0)), OpenLoan)


def test_a_member_of_the_set_waits_for_its_loan() -> None:
    rows = [device("d0", 0), PARKED, device("d1", 40), engine("b", "d1"), lent(), live(hbm=90)]
    member = job("j", 90, assigned_loan_id=LoanId("l"))
    assert reason(decide(snapshot(*rows, member), 0.0)).data == {"loan_id": "l"}
    start = one(decide(snapshot(*rows[:-1], member), 0.0))
    assert (start.loan_id, start.place.hbm_bytes) == ("l", 90)
    assert isinstance(one(decide(snapshot(*rows, replace(member, assigned_loan_id=LoanId("gone"))), 0.0)), OpenLoan)


def test_a_member_of_the_set_takes_what_is_free_elsewhere() -> None:
    rows = [device("d0", 0), PARKED, lent(), live(hbm=90)]
    member = job("j", 90, assigned_loan_id=LoanId("l"))
    opened = one(decide(snapshot(*rows, device("d1"), member), 0.0))
    assert (opened.device_ids, opened.engine_ids) == (("d1",), ())
    other = Loan(LoanId("m"), NODE.id, (DeviceId("d1"),), (), LoanState.LENT, 0, {DeviceId("d1"): 100})
    other = replace(other, expects_more=False)
    start = one(decide(snapshot(*rows, device("d1"), other, member), 0.0))
    assert (start.loan_id, start.place.device_ids) == ("m", ("d1",))


def test_a_member_of_the_set_does_not_wait_for_a_loan_without_its_engine() -> None:
    rows = [device("d0", 0), PARKED, device("d1", 40), engine("b", "d1"), lent(engine_lost=True), live(hbm=90)]
    action = one(decide(snapshot(*rows, job("j", 90, assigned_loan_id=LoanId("l"))), 0.0))
    assert action.engine_ids == ("b",)


def test_lower_priorities_do_not_go_on_with_what_a_job_waits_for() -> None:
    """The small ones would keep the loan open, and the large one waiting, for as long as they come."""
    rows = [device("d0", 0), PARKED, lent(), live(hbm=30)]
    large, small = job("j", 90, priority=1), job("k", 10, created_at=9.0)
    actions = decide(snapshot(*rows, large, small), 0.0)
    assert [type(action) for action in actions] == [ExpectWork, SetReasons, SetReasons]
    assert reason(actions, "k").code == "LoanOpen"
    hopeless = decide(snapshot(*rows, replace(large, gpus=2), small), 0.0)
    assert isinstance(hopeless[0], StartAttempt), "what no node has keeps nothing from anybody"
    member = replace(large, assigned_loan_id=LoanId("l"))
    assert not any(isinstance(action, StartAttempt) for action in decide(snapshot(*rows, member, small), 0.0))
    equal = decide(snapshot(*rows, replace(large, priority=0), small), 0.0)
    assert isinstance(equal[0], StartAttempt)


def test_of_one_priority_nobody_is_filled_in_before_a_job_that_has_waited_for_too_long() -> None:
    rows = [device("d0", 0), PARKED, lent(), live(hbm=30)]
    large, small = job("j", 90), job("k", 10, created_at=9.0)
    soon, late = PASSED_OVER_SECONDS_MAX, PASSED_OVER_SECONDS_MAX + 1.0  # they were submitted at 1.0 and 9.0
    assert any(isinstance(action, StartAttempt) for action in decide(snapshot(*rows, large, small), soon))
    actions = decide(snapshot(*rows, large, small), late)
    assert [type(action) for action in actions] == [ExpectWork, SetReasons, SetReasons]
    assert actions[0] == MORE, "the loan is kept for it"
    assert reason(actions, "k").code == "LoanOpen"
    start: Any = decide(snapshot(*rows[:3], large, small), late)[0]
    assert start.place.job_id == "j"
    first = decide(snapshot(*rows, large, replace(small, created_at=0.5)), late)
    assert isinstance(first[0], StartAttempt), "who was there before it is not kept from anything"
    above = decide(snapshot(*rows, large, replace(small, priority=1)), late)
    assert isinstance(above[0], StartAttempt)
    member = replace(large, assigned_loan_id=LoanId("l"))
    assert not any(isinstance(action, StartAttempt) for action in decide(snapshot(*rows, member, small), late))


def test_nobody_is_filled_into_a_new_loan_before_a_job_that_has_waited_for_too_long() -> None:
    first, large, small = job("i", 50, created_at=0.0), job("j", 60), job("k", 40, created_at=9.0)
    for rows in ([device("d0")], [device("d0", 40), engine("a", "d0")]):
        for now, places in ((0.0, ["i", "k"]), (PASSED_OVER_SECONDS_MAX + 1.0, ["i"])):
            opened: Any = decide(snapshot(*rows, first, large, small), now)[0]
            assert [place.job_id for place in opened.places] == places


def test_a_job_on_two_devices_gets_the_second_before_a_lower_priority_does() -> None:
    other = Loan(LoanId("m"), NODE.id, (DeviceId("d1"),), (), LoanState.LENT, 0, {DeviceId("d1"): 100})
    rows = [device("d0", 0), PARKED, lent(), live(hbm=30), device("d1")]
    large, small = job("j", 90, priority=1, gpus=2), job("k", 10, created_at=9.0)
    actions = decide(snapshot(*rows, large, small), 0.0)
    assert [type(action) for action in actions] == [SetReasons, SetReasons], "the bare device is kept"
    actions = decide(snapshot(*rows, other, large, small), 0.0)
    assert [action for action in actions if isinstance(action, ExpectWork)] == [ExpectWork(LoanId("m"), NODE.id, False)]
    assert not any(isinstance(action, StartAttempt) for action in actions)


NOTHING = ExpectWork(LoanId("l"), NODE.id, False)
MORE = replace(NOTHING, more=True)


def test_a_node_is_told_once_and_ahead_of_the_end_that_nothing_waits_for_a_loan() -> None:
    assert one(decide(snapshot(device("d0"), PARKED, lent(expects_more=None)), 0.0)) == NOTHING
    assert one(decide(snapshot(device("d0"), PARKED, lent(expects_more=True), live()), 0.0)) == NOTHING
    assert decide(snapshot(device("d0"), PARKED, lent(expects_more=False), live()), 0.0) == ()
    assert decide(snapshot(device("d0"), PARKED, lent(recall_ordered=True, expects_more=None)), 0.0) == ()
    backed_off = decide(snapshot(device("d0"), PARKED, lent(expects_more=True), job("j", not_before=5.0)), 0.0)
    assert backed_off[0] == NOTHING


def test_a_loan_is_kept_for_jobs_that_fit_once_those_that_run_have_ended() -> None:
    rows = [device("d0", 0), PARKED, lent(expects_more=False), live(hbm=90)]
    assert decide(snapshot(*rows, job("j", 20)), 0.0)[0] == MORE
    assert decide(snapshot(*rows, job("j", 20, assigned_loan_id=LoanId("l"))), 0.0)[0] == MORE
    large = decide(snapshot(*rows, job("j", 5000)), 0.0)
    assert not any(isinstance(action, ExpectWork) for action in large), "no loan is kept for what can never fit"
    lost = [device("d0", 0), PARKED, lent(expects_more=False, engine_lost=True), live(hbm=90)]
    assert not any(isinstance(action, ExpectWork) for action in decide(snapshot(*lost, job("j", 20)), 0.0))


def test_a_loan_without_its_engine_takes_no_more_jobs() -> None:
    actions = decide(snapshot(device("d0"), PARKED, lent(engine_lost=True, expects_more=True), job("j", 10)), 0.0)
    assert [type(action) for action in actions] == [ExpectWork, SetReasons]


def test_a_stop_is_ordered_once_and_not_to_a_silent_node() -> None:
    rows = snapshot(device("d0"), PARKED, lent(), live(stop_wanted=True))
    assert isinstance(one(decide(rows, 0.0)), StopAttempt)
    assert decide(replace(rows, attempts=(live(stop_wanted=True, stop_ordered=True),)), 0.0) == ()
    assert decide(replace(rows, nodes=(replace(NODE, up=False, silent=True),)), 0.0) == ()


@pytest.mark.parametrize(
    ("row", "code"),
    [
        (engine("a", "d0", policy=EnginePolicy()), "EngineManual"),
        (engine("a", "d0", refused="it has no sleep"), "PolicyRefused"),
        (engine("a", "d0", state=EngineState.UNREACHABLE), "EngineNotReady"),
        (engine("a", "d0", gate=GateState.UNKNOWN), "EngineNotReady"),
        (engine("a", "d0", verified=False), "EngineNotReady"),
        (engine("a", "d0", "d9"), "EngineNotReady"),
        (engine("a", "d0", not_before=9.0, trouble=Reason(code="HBMNotFreed", sentence="it lied")), "HBMNotFreed"),
        (lent(state=LoanState.WAKING), "LoanOpen"),
    ],
)
def test_why_a_job_waits(row: Any, code: str) -> None:
    waits = reason(decide(snapshot(device("d0", 40), row, job("j")), 0.0))
    assert waits.code == code
    assert waits.data["nodes"]["box"]["code"] == code


def test_why_a_job_waits_on_the_device_itself() -> None:
    assert reason(decide(snapshot(device("d0", quarantined=True), job("j")), 0.0)).code == "DeviceQuarantined"
    assert reason(decide(snapshot(device("d0", 10, foreign_bytes=90), job("j")), 0.0)).code == "ForeignProcess"
    assert reason(decide(snapshot(device("d0", 10), job("j", None)), 0.0)).code == "HBMNotFreed"
    assert reason(decide(snapshot(device("d0"), job("j", gpus=2)), 0.0)).code == "Unsatisfiable"
    assert reason(decide(Snapshot(jobs=(job("j"),)), 0.0)).code == "NoNode"
    silent = replace(snapshot(device("d0"), job("j")), nodes=(replace(NODE, up=False, silent=True),))
    assert reason(decide(silent, 0.0)).code == "NodeUnreachable"


def test_a_trouble_that_goes_away_is_said_before_what_can_never_be() -> None:
    """On one node the engine is left alone for a while, the other one has too small a device."""
    small = replace(device("d1"), capacity_bytes=10, node_id=NodeId("m"))
    left = engine("a", "d0", not_before=9.0, trouble=Reason(code="PlanNotHeld", sentence="it would free less"))
    waits = reason(
        decide(snapshot(Node(NodeId("m"), "other", True, False), small, device("d0", 40), left, job("j")), 0.0)
    )
    assert (waits.code, waits.next_check) == ("PlanNotHeld", 9.0)
    refused = device("d0", not_before=9.0, trouble=Reason(code="LoanRefused", sentence="the disk is full"))
    waits = reason(decide(snapshot(refused, job("j")), 0.0))
    assert (waits.code, waits.next_check, waits.data["device_id"]) == ("LoanRefused", 9.0, "d0")
    assert decide(snapshot(refused, job("j")), 9.0) != ()


def test_a_job_in_back_off_says_the_trouble_and_blocks_nobody() -> None:
    trouble = Reason(code="HBMNotFreed", sentence="it lied")
    actions = decide(snapshot(device("d0"), job("j", not_before=7.0, trouble=trouble), job("k", created_at=9.0)), 0.0)
    assert isinstance(actions[0], OpenLoan)
    assert (reason(actions).code, reason(actions).next_check) == ("HBMNotFreed", 7.0)


def test_reasons_are_written_when_they_change_and_keep_their_since() -> None:
    told = one(decide(Snapshot(jobs=(job("j"),)), 5.0)).reasons
    assert decide(Snapshot(jobs=(job("j", reasons=told),)), 6.0) == ()
    other = one(decide(snapshot(device("d0", 10), job("j", reasons=told)), 7.0))
    assert other.reasons[0].since == 7.0


def test_the_largest_possible() -> None:
    assert largest_possible([[10, 30, 20], [25]], 1) == 30
    assert largest_possible([[10, 30, 20], [25]], 2) == 20
    assert largest_possible([[10]], 2) == 0
