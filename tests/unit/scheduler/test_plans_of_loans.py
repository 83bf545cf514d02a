"""Which tags of an engine a loan releases, which engine costs least, and what `lull engine plan` says of it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.plans import Learned, ParkLearned
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineState, GateState, Reason
from lull.scheduler.actions import OpenLoan, StartAttempt
from lull.scheduler.decide import decide
from lull.scheduler.model import (
    Device,
    DeviceId,
    Engine,
    EngineId,
    Loan,
    LoanId,
)
from lull.scheduler.plan_answer import PlanAnswer, answer
from lull.vmm.tags import RestoreMode
from tests.scheduler_rows import NODE, job, snapshot
from tests.scheduler_rows import device as rows_device
from tests.scheduler_rows import engine as rows_engine

WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
KV = {"kv_cache": RestoreMode.NONE}
ALWAYS = EnginePolicy(when="always", restore_modes=WHOLE)
ABLE = Capabilities(
    engine="an engine",
    plans=[ParkPlan(name="by tag", modes={tag: [mode] for tag, mode in WHOLE.items()}, any_subset=True)],
)


def device(name: str, free: int = 40, **more: Any) -> Device:
    return rows_device(name, free, **more)


def learned(*devices: str, kv: float | None = 1.0, whole: float | None = 30.0, margin: int = 0) -> Learned:
    """The KV cache is 20, the weights 40 on each device; ``kv`` and ``whole`` are seconds for park and wake each."""
    ways = [
        ParkLearned(
            modes=modes, freed_bytes=dict.fromkeys(devices, freed), park_seconds=cost, wake_seconds=cost, parks=1
        )
        for modes, freed, cost in ((KV, 20, kv), (WHOLE, 60, whole))
    ]
    return Learned(ways=ways, margin_bytes=margin)


def engine(name: str, *devices: str, **more: Any) -> Engine:
    values: dict[str, Any] = {"policy": ALWAYS, "capabilities": ABLE, "learned": learned(*devices), **more}
    return rows_engine(name, *devices, **values)


def opened(*rows: Any) -> OpenLoan:
    [action] = [each for each in decide(snapshot(*rows), 0.0) if isinstance(each, OpenLoan)]
    return action


def tags(action: OpenLoan, name: str = "a") -> tuple[str, ...]:
    return action.plans[EngineId(name)].tags


def test_a_small_job_leaves_the_weights_where_they_are() -> None:
    small = opened(device("d0"), engine("a", "d0"), job("j", 60))
    assert (tags(small), small.room_bytes) == (("kv_cache",), {"d0": 60})
    large = opened(device("d0"), engine("a", "d0"), job("j", 61))
    assert (tags(large), large.room_bytes) == (("kv_cache", "model_weights"), {"d0": 100})
    assert large.plans[EngineId("a")].whole


@pytest.mark.parametrize(
    "more",
    [
        {"learned": None},
        {"capabilities": None},
        {"capabilities": ABLE.model_copy(update={"plans": [ABLE.plans[0].model_copy(update={"any_subset": False})]})},
        {"policy": EnginePolicy(when="always", restore_modes={**WHOLE, "kv_cache": RestoreMode.CPU})},
        {"trouble": Reason(code="PlanNotHeld", sentence="it would free less")},
        {"trouble": Reason(code="HBMNotFreed", sentence="it kept its memory")},
    ],
)
def test_what_is_not_known_or_not_trusted_or_cannot_be_done_is_the_whole_park(more: dict[str, Any]) -> None:
    action = opened(device("d0"), engine("a", "d0", **more), job("j", 50))
    assert action.room_bytes == {"d0": 100}
    assert all(plan.whole for plan in action.plans.values())


def test_the_plan_is_sized_for_the_whole_set_of_the_loan() -> None:
    both = opened(device("d0"), engine("a", "d0"), job("j", 30), job("k", 30, created_at=2.0))
    assert (tags(both), len(both.places)) == (("kv_cache",), 2)
    more = opened(device("d0"), engine("a", "d0"), job("j", 30), job("k", 40, created_at=2.0))
    assert (tags(more), len(more.places)) == (("kv_cache", "model_weights"), 2)
    # One that runs later, once the first has ended, has to find its bytes too.
    later = opened(device("d0"), engine("a", "d0"), job("j", 60), job("k", 90, created_at=2.0))
    assert (tags(later), later.later_job_ids) == (("kv_cache", "model_weights"), ("k",))


def test_the_node_s_margin_is_kept_free_by_plans_that_know_of_it() -> None:
    margin = {"learned": learned("d0", margin=10)}
    assert tags(opened(device("d0"), engine("a", "d0", **margin), job("j", 50))) == ("kv_cache",)
    assert opened(device("d0"), engine("a", "d0", **margin), job("j", 51)).plans[EngineId("a")].whole


def test_engines_that_share_a_device_are_parked_in_the_cheapest_ways_together() -> None:
    slow = engine("b", "d0", device_bytes={"d0": 30}, learned=learned("d0", kv=50.0, whole=80.0))
    rows = [device("d0", 10), engine("a", "d0"), slow]
    action = opened(*rows, job("j", 50))
    assert (tags(action, "a"), tags(action, "b")) == (("kv_cache",), ("kv_cache",))
    action = opened(*rows, job("j", 60))
    assert (tags(action, "a"), tags(action, "b")) == (("kv_cache", "model_weights"), ("kv_cache",))
    assert action.room_bytes == {"d0": 90}


def test_of_two_engines_the_one_that_costs_less_is_parked() -> None:
    rows = [device("d0"), device("d1")]
    fast, slow = engine("b", "d1", idle_since=20.0), engine("a", "d0", idle_since=10.0)
    slow = replace(slow, learned=learned("d0", kv=40.0, whole=400.0))
    assert opened(*rows, slow, fast, job("j", 50)).engine_ids == ("b",)
    # Much the same costs: the one that has been idle longest.
    assert opened(*rows, replace(slow, learned=learned("d0", kv=0.9)), fast, job("j", 50)).engine_ids == ("a",)
    # What was never measured may cost anything.
    unknown = replace(slow, learned=None)
    assert opened(*rows, unknown, fast, job("j", 50)).engine_ids == ("b",)
    # It counts what this job needs: the KV cache of `a` is cheap, all of it is not.
    dear = replace(slow, learned=learned("d0", kv=0.1, whole=400.0))
    cheap = replace(fast, learned=learned("d1", kv=5.0, whole=5.0))
    assert opened(*rows, dear, cheap, job("j", 50)).engine_ids == ("a",)
    assert opened(*rows, dear, cheap, job("j", 90)).engine_ids == ("b",)


def test_a_large_job_is_not_overtaken_for_ever_under_a_plan_that_is_too_small_for_it() -> None:
    loan = Loan(
        LoanId("l"),
        NODE.id,
        (DeviceId("d0"),),
        (EngineId("a"),),
        LoanState.LENT,
        60,
        {DeviceId("d0"): 60},
        is_narrow=True,
        expects_more=True,
    )
    rows = [device("d0"), engine("a", "d0", state=EngineState.PARKED, gate=GateState.CLOSED), loan]
    large, small = job("large", 90, priority=1), job("small", 30, created_at=2.0)
    started = [each for each in decide(snapshot(*rows, large, small), 0.0) if isinstance(each, StartAttempt)]
    assert started == [], "the small one would keep the loan open, and the large one never gets its whole park"
    wide = replace(loan, is_narrow=False, room_bytes={DeviceId("d0"): 100})
    assert isinstance(decide(snapshot(*rows[:2], wide, large), 0.0)[0], StartAttempt)


# ---- lull engine plan -------------------------------------------------------------------------------------------


def asked(need: int, *rows: Any, gpus: int | None = None) -> PlanAnswer:
    found = answer(snapshot(*rows), EngineId("a"), need, gpus, 0.0)
    assert found is not None
    return found


def test_the_plan_for_a_need_with_what_else_there_is_and_why_not() -> None:
    rows = [device("d0"), engine("a", "d0")]
    small = asked(50, *rows)
    assert small.chosen is not None
    assert (small.chosen.plan.tags, small.chosen.room_bytes) == (("kv_cache",), {"d0": 60})
    assert [(other.plan.tags, other.why_not) for other in small.alternatives] == [
        (("kv_cache", "model_weights"), "it is predicted to take 60.0 s, the chosen one 2.0 s")
    ]
    large = asked(61, *rows)
    assert large.chosen is not None
    assert large.chosen.plan.whole
    assert [other.why_not for other in large.alternatives] == ["device d0 would have 60 bytes of 61 bytes"]


def test_why_nothing_suffices_and_why_not_now() -> None:
    none = asked(101, device("d0"), engine("a", "d0"))
    assert none.chosen is None
    assert none.nothing_suffices is not None
    assert "would have 100 bytes of 101 bytes" in none.nothing_suffices
    foreign = asked(70, device("d0", 5, foreign_bytes=35), engine("a", "d0"))
    assert foreign.nothing_suffices is not None
    assert "others hold 35 bytes of it" in foreign.nothing_suffices
    assert "2 devices" in (asked(1, device("d0"), engine("a", "d0"), gpus=2).nothing_suffices or "")
    manual = engine("a", "d0", policy=EnginePolicy(restore_modes=WHOLE))
    assert asked(1, device("d0"), manual).blocker is not None
    assert answer(snapshot(device("d0")), EngineId("a"), 1, None, 0.0) is None


def test_ways_that_nobody_has_tried_say_so() -> None:
    unknown = asked(50, device("d0"), engine("a", "d0", learned=None))
    assert unknown.chosen is not None
    assert (unknown.chosen.plan.whole, unknown.chosen.plan.known) == (True, False)
    assert [(other.plan.tags, "trial_park" in (other.why_not or "")) for other in unknown.alternatives] == [
        (("kv_cache",), True)
    ]
    wrong = Learned(ways=[ParkLearned(modes=KV, trouble="it answered otherwise", parks=0)])
    [other] = asked(50, device("d0"), engine("a", "d0", learned=wrong)).alternatives
    assert other.why_not == "a trial of it went wrong: it answered otherwise"
