"""Memory that several engines map: counted once, and freed only by a park of all of them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lull.agents.protocol.plans import Plan, SharedBytes, Sharer, frees_together, held_together
from lull.vmm.tags import RestoreMode

DEVICE = "HOST-1"
WEIGHTS, KV = {"model_weights": RestoreMode.CPU}, {"kv_cache": RestoreMode.NONE}
SHARED, OWN = 40, 10  # of each engine


def sharer(
    engine_id: str,
    modes: dict[str, RestoreMode] = WEIGHTS | KV,
    *,
    freed: int = SHARED + OWN,
    users: tuple[str, ...] = ("a", "b"),
    strangers: bool = False,
    pool_bytes: int = SHARED,
) -> Sharer:
    pool = SharedBytes(pool="w", bytes=pool_bytes, tags=["model_weights"], engines=list(users), strangers=strangers)
    plan = Plan(modes=modes, whole=modes == WEIGHTS | KV, freed_bytes={DEVICE: freed})
    return Sharer(engine_id, plan, {DEVICE: pool_bytes + OWN}, {DEVICE: [pool]})


@pytest.mark.parametrize(
    ("sharers", "freed"),
    [
        ([sharer("a"), sharer("b")], SHARED + 2 * OWN),
        ([sharer("a")], OWN),  # b is awake, and has the pool
        ([sharer("a", users=("a",))], SHARED + OWN),  # nobody else has it
        ([sharer("a"), sharer("b", KV, freed=OWN)], 2 * OWN),  # b keeps its weights
        ([sharer("a", KV, freed=OWN), sharer("b", KV, freed=OWN)], 2 * OWN),
        ([sharer("a", users=("a",)), sharer("b")], SHARED + 2 * OWN),  # a's report is older than b
        ([sharer("a", users=("a",), strangers=True)], OWN),
        ([sharer("a", users=("a", "b", "c")), sharer("b", users=("a", "b"))], 2 * OWN),  # c is not parked
        ([sharer("a", freed=OWN // 2), sharer("b", freed=OWN // 2)], OWN),  # never more than was seen
        ([sharer("a", pool_bytes=30), sharer("b")], SHARED + 2 * OWN),
    ],
)
def test_a_pool_is_freed_once_and_only_by_all_that_use_it(sharers: list[Sharer], freed: int) -> None:
    assert frees_together(sharers, DEVICE) == freed
    assert frees_together(sharers, "HOST-2") == 0


def test_engines_that_share_nothing_free_what_their_plans_say() -> None:
    plan = Plan(modes=KV, whole=True, freed_bytes={DEVICE: 7})
    assert frees_together([Sharer("a", plan, {DEVICE: 9}), Sharer("b", plan, {DEVICE: 7})], DEVICE) == 14


def test_a_backup_of_what_is_shared_is_made_once() -> None:
    pools = {DEVICE: [SharedBytes(pool="w", bytes=SHARED)]}
    assert held_together([({DEVICE: SHARED + OWN}, pools), ({DEVICE: SHARED + OWN}, pools)]) == SHARED + 2 * OWN
    assert held_together([({DEVICE: 5, "HOST-2": 6}, {})]) == 11
    elsewhere = {"HOST-2": pools[DEVICE]}  # another device's pool of the same name is another pool
    assert held_together([({DEVICE: SHARED}, pools), ({"HOST-2": SHARED}, elsewhere)]) == 2 * SHARED


@given(
    own=st.lists(st.integers(0, 50), min_size=1, max_size=4),
    shared=st.integers(0, 100),
    parked=st.sets(st.integers(0, 3)),
)
def test_a_prediction_is_what_really_becomes_free(own: list[int], shared: int, parked: set[int]) -> None:
    users = [f"e{n}" for n in range(len(own))]
    pool = SharedBytes(pool="w", bytes=shared, tags=["model_weights"], engines=users)
    sharers = [
        Sharer(
            users[n],
            Plan(modes=WEIGHTS, whole=True, freed_bytes={DEVICE: shared + own[n]}),
            {DEVICE: shared + own[n]},
            {DEVICE: [pool]},
        )
        for n in sorted(parked)
        if n < len(own)
    ]
    truth = sum(own[n] for n in parked if n < len(own))
    if len(sharers) == len(own):
        truth += shared
    assert frees_together(sharers, DEVICE) == truth
