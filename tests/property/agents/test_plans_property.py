"""The planner: it never frees too little, nothing cheaper would do, and no order of telling changes its answer."""

from __future__ import annotations

import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.plans import (
    COMBINATIONS_MAX,
    WAYS_MAX,
    Learned,
    ParkLearned,
    Way,
    cheapest,
    combinations,
    narrowed,
    ways_of,
    worth_trying,
)
from lull.agents.protocol.policy import EnginePolicy
from lull.vmm.tags import TRTLLM_TAGS, RestoreMode

DEVICES = ("d0", "d1")
MODES = st.sampled_from(list(RestoreMode))


@st.composite
def policies(draw: st.DrawFn) -> EnginePolicy:
    tags = draw(st.lists(st.sampled_from(TRTLLM_TAGS), min_size=1, max_size=5, unique=True))
    return EnginePolicy(restore_modes={tag: draw(MODES) for tag in tags})


@st.composite
def able(draw: st.DrawFn, policy: EnginePolicy) -> Capabilities:
    """It can do what the policy wants, one way or another."""
    modes = {tag: list(RestoreMode) for tag in policy.restore_modes}
    plans = [ParkPlan(name="all", modes=modes, any_subset=draw(st.booleans()))]
    for number in range(draw(st.integers(0, 2))):
        some = draw(st.lists(st.sampled_from(sorted(modes)), min_size=1, unique=True))
        plans.append(ParkPlan(name=f"way {number}", modes={tag: modes[tag] for tag in some}))
    return Capabilities(engine="an engine", plans=plans, can_reload_weights=True)


@st.composite
def learned(draw: st.DrawFn, policy: EnginePolicy) -> Learned:
    tags = sorted(policy.restore_modes)
    sets = draw(st.lists(st.sets(st.sampled_from(tags), min_size=1).map(frozenset), max_size=6, unique=True))
    seconds = st.none() | st.floats(0.01, 100)
    return Learned(
        ways=[
            ParkLearned(
                modes={tag: policy.restore_modes[tag] for tag in some},
                freed_bytes={each: draw(st.integers(0, 50)) for each in DEVICES},
                park_seconds=draw(seconds),
                wake_seconds=draw(seconds),
                parks=1,
                trouble=draw(st.sampled_from([None, None, None, "it went wrong"])),
            )
            for some in sets
        ]
    )


@st.composite
def engines(draw: st.DrawFn) -> tuple[EnginePolicy, Capabilities, Learned, dict[str, int], tuple[Way, ...]]:
    policy = draw(policies())
    can, known = draw(able(policy)), draw(learned(policy))
    held = {each: draw(st.integers(0, 60)) for each in DEVICES}
    return policy, can, known, held, ways_of(can, policy, known, held, {})


@given(engines())
@settings(max_examples=40, deadline=None)
def test_ways_are_parts_of_the_policy_that_the_engine_can_release_and_somebody_has_seen(of: tuple) -> None:
    policy, can, known, held, ways = of
    assert 1 <= len(ways) <= WAYS_MAX
    assert sum(way.plan.whole for way in ways) == 1
    for way in ways:
        assert narrowed(policy, way.plan.modes).restore_modes == way.plan.modes, "restore modes are never changed"
        assert all(way.plan.freed_bytes.get(each, 0) <= held[each] for each in DEVICES), "no more than it holds"
        if not way.plan.whole:
            [seen] = [each for each in known.ways if each.modes == way.plan.modes]
            assert seen.trouble is None
            assert all(way.plan.freed_bytes[each] <= seen.freed_bytes[each] for each in DEVICES)
            offered = [plan for plan in can.plans if plan.any_subset or set(plan.modes) == set(way.plan.modes)]
            assert any(set(way.plan.modes) <= set(plan.modes) for plan in offered), "the engine offers it"
    # What has nothing to go by is parked whole.
    assert [way.plan.whole for way in ways_of(None, policy, known, held, {})] == [True]
    assert [way.plan.whole for way in ways_of(can, policy, None, held, {})] == [True]


@given(engines())
@settings(max_examples=40, deadline=None)
def test_less_work_never_counts_as_dearer(of: tuple) -> None:
    ways = of[-1]
    for one, other in itertools.permutations(ways, 2):
        if set(one.plan.modes) < set(other.plan.modes):
            assert one.cost_seconds <= other.cost_seconds
            assert one.order < other.order


@given(st.lists(engines(), min_size=1, max_size=3), st.data())
@settings(max_examples=40, deadline=None)
def test_the_cheapest_that_is_enough_whatever_comes_first(several: list[tuple], data: st.DataObject) -> None:
    ways = [of[-1] for of in several]
    need = {each: data.draw(st.integers(0, 120)) for each in DEVICES}
    chosen = cheapest(ways, need)
    every = list(itertools.product(*ways))

    def is_enough(combination: tuple[Way, ...]) -> bool:
        return all(
            sum(way.plan.freed_bytes.get(each, 0) for way in combination) >= bytes_ for each, bytes_ in need.items()
        )

    enough = [combination for combination in every if is_enough(combination)]
    if chosen is None:
        assert not enough or len(every) > COMBINATIONS_MAX
        return
    assert is_enough(chosen), "it frees too little"
    if len(every) <= COMBINATIONS_MAX:
        cost = sum(way.cost_seconds for way in chosen)
        assert all(cost <= sum(way.cost_seconds for way in each) for each in enough), "another one is cheaper"
    rng = data.draw(st.randoms(use_true_random=False))
    assert cheapest([_shuffled(each, rng) for each in ways], need) == chosen


def _shuffled(ways: tuple[Way, ...], rng: random.Random) -> list[Way]:
    mixed = list(ways)
    rng.shuffle(mixed)
    return mixed


@given(policies(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_trial_tries_the_smallest_first_and_always_the_whole(policy: EnginePolicy, data: st.DataObject) -> None:
    can = data.draw(able(policy))
    tried = worth_trying(can, policy)
    assert tried[-1] == policy.restore_modes
    assert len(tried) <= WAYS_MAX
    assert [len(each) for each in tried] == sorted(len(each) for each in tried)
    assert all(tried.count(each) == 1 for each in tried)
    kv = {tag: mode for tag, mode in policy.restore_modes.items() if tag == "kv_cache"}
    if kv and can.plans[0].any_subset:
        assert kv in tried


def test_too_many_combinations_leave_the_cheapest_and_the_whole() -> None:
    policy = EnginePolicy(restore_modes=dict.fromkeys(TRTLLM_TAGS[4:], RestoreMode.NONE))
    modes = {tag: list(RestoreMode) for tag in TRTLLM_TAGS}
    can = Capabilities(engine="x", plans=[ParkPlan(name="all", modes=modes, any_subset=True)])
    seen = [
        ParkLearned(
            modes={tag: RestoreMode.NONE},
            freed_bytes={"d0": 1},
            park_seconds=float(number),
            wake_seconds=0.0,
            parks=1,
        )
        for number, tag in enumerate(policy.restore_modes, 1)
    ]
    ways = ways_of(can, policy, Learned(ways=seen), {"d0": 10}, {})
    both = combinations([ways] * 4)
    assert [all(way.plan.whole for way in each) for each in both] == [False, True]
    assert cheapest([ways] * 4, {"d0": 40}) == both[1]
    assert cheapest([ways] * 4, {"d0": 4}) == both[0]
