"""What `lull engine plan` says would be released is what a loan for just that job releases."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.protocol.capabilities import Capabilities, ParkPlan
from lull.agents.protocol.plans import Learned, ParkLearned
from lull.agents.protocol.policy import EnginePolicy
from lull.scheduler.actions import OpenLoan
from lull.scheduler.decide import decide
from lull.scheduler.model import EngineId, Snapshot
from lull.scheduler.plan_answer import answer
from lull.vmm.tags import RestoreMode
from tests.scheduler_rows import device, engine, job, snapshot

WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
KV = {"kv_cache": RestoreMode.NONE}
WEIGHTS = {"model_weights": RestoreMode.CPU}
ABLE = Capabilities(
    engine="e", plans=[ParkPlan(name="by tag", modes={tag: [mode] for tag, mode in WHOLE.items()}, any_subset=True)]
)
HELD = 60


@st.composite
def worlds(draw: st.DrawFn) -> tuple[Snapshot, int, int]:
    """One engine on one to three devices, a need, and on how many of them."""
    names = [f"d{index}" for index in range(draw(st.integers(1, 3)))]
    kv = {name: draw(st.integers(0, HELD)) for name in names}
    ways = [
        ParkLearned(modes=modes, freed_bytes=freed, park_seconds=seconds, wake_seconds=seconds, parks=1)
        for modes, freed, seconds in (
            (KV, kv, 1.0),
            (WEIGHTS, {name: HELD - nbytes for name, nbytes in kv.items()}, draw(st.sampled_from([0.5, 10.0]))),
            (WHOLE, dict.fromkeys(names, HELD), 20.0),
        )
        if modes is WHOLE or draw(st.booleans())
    ]
    margin = draw(st.sampled_from([0, 5]))
    policy = EnginePolicy(when="always", restore_modes=WHOLE)
    learned = Learned(ways=ways, margin_bytes=margin)
    rows = [device(name, free=draw(st.integers(0, 40))) for name in names]
    need, gpus = draw(st.integers(1, 100)), draw(st.integers(1, len(names)))
    return snapshot(*rows, engine("a", *names, policy=policy, capabilities=ABLE, learned=learned)), need, gpus


@given(worlds())
@settings(max_examples=150, deadline=None)
def test_the_plan_that_is_shown_is_the_plan_of_the_loan(world: tuple[Snapshot, int, int]) -> None:
    rows, need, gpus = world
    shown = answer(rows, EngineId("a"), need, gpus, 0.0)
    assert shown is not None
    wants = job("j", need, gpus=gpus)
    actions = decide(snapshot(*rows.devices, *rows.engines, wants), 0.0)
    opened = [each for each in actions if isinstance(each, OpenLoan)]
    if shown.chosen is None:
        assert opened == []
        return
    [loan] = opened
    assert loan.plans[EngineId("a")] == shown.chosen.plan
    assert loan.room_bytes == shown.chosen.room_bytes
