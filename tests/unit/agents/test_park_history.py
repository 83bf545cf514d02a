"""What parks were seen to do: kept by configuration, judged against what was learned first, and by process."""

from __future__ import annotations

from typing import Any

import pytest

from lull.agents.equal_samples import EqualSamples
from lull.agents.park_history import RESIDUALS_MAX, TRIALS_MAX, ParkHistory
from lull.agents.protocol.plans import ParkLearned, way_in
from lull.vmm.tags import RestoreMode

KV = {"kv_cache": RestoreMode.NONE}
WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}


class Engine:
    """The facts of an engine, as its file keeps them."""

    def __init__(self) -> None:
        self.data: dict[str, Any] = {}
        self.key = "configured so"
        self.incarnation: str | None = "1"

    def history(self) -> ParkHistory:
        """As the next agent makes it."""
        return ParkHistory(
            lambda: self.data,
            lambda parks: self.data.update(parks=parks),
            lambda: self.key,
            lambda: self.incarnation,
            lambda: WHOLE,
            margin_bytes=7,
        )

    def park(self, freed: int, kept: int = 10, modes: dict[str, RestoreMode] = WHOLE) -> None:
        self.history().parked(modes, {"d0": freed}, {"d0": kept}, seconds=2.0, at=5.0)

    def fall_short(self, freed: int, modes: dict[str, RestoreMode] = WHOLE, *, released: bool = True) -> None:
        self.history().fell_short(modes, {"d0": freed}, {"d0": 100 - freed}, released=released)

    def way(self, modes: dict[str, RestoreMode] = WHOLE) -> ParkLearned:
        found = way_in(self.history().learned(), modes)
        assert found is not None
        return found


@pytest.fixture
def engine() -> Engine:
    return Engine()


def test_nothing_is_known_at_first(engine: Engine) -> None:
    learned = engine.history().learned()
    assert (learned.ways, learned.margin_bytes) == ([], 7)
    assert engine.history().freed_bytes(WHOLE) == {}
    assert not engine.history().is_known(WHOLE)


def test_the_least_of_the_parks_of_a_process_is_relied_on(engine: Engine) -> None:
    engine.park(90)
    engine.park(95)
    engine.park(80, kept=12)
    way = engine.way()
    assert (way.freed_bytes, way.residual_bytes, way.residual_first_bytes) == ({"d0": 80}, {"d0": 12}, {"d0": 10})
    assert way.parks == 3


def test_a_new_process_is_taken_for_what_the_last_one_was_when_it_was_new(engine: Engine) -> None:
    engine.park(90)
    engine.park(20, kept=80)
    engine.incarnation = "2"
    assert (engine.way().freed_bytes, engine.way().residual_bytes) == ({"d0": 90}, {"d0": 10})
    engine.park(85, kept=15)
    assert (engine.way().freed_bytes, engine.way().residual_first_bytes) == ({"d0": 85}, {"d0": 15})
    engine.incarnation = "3"
    assert engine.way().freed_bytes == {"d0": 85}


def test_ways_are_apart_and_gone_with_another_configuration(engine: Engine) -> None:
    engine.park(90)
    engine.park(20, modes=KV)
    assert (engine.way().freed_bytes, engine.way(KV).freed_bytes) == ({"d0": 90}, {"d0": 20})
    engine.key = "configured otherwise"
    assert engine.history().learned().ways == []
    engine.park(50)
    assert [way.modes for way in engine.history().learned().ways] == [WHOLE]


def test_seconds_are_the_middle_of_the_last_ones_and_may_be_unknown(engine: Engine) -> None:
    engine.history().parked(WHOLE, {"d0": 1}, {}, seconds=None, at=1.0)
    assert engine.way().park_seconds is None
    for seconds in (100.0, 1.0, 2.0, 3.0, 4.0, 5.0):
        engine.history().parked(WHOLE, {"d0": 1}, {}, seconds=seconds, at=1.0)
        engine.history().woken(WHOLE, seconds / 2)
    assert (engine.way().park_seconds, engine.way().wake_seconds) == (3.0, 1.5)


def test_much_less_than_was_learned_is_told_device_by_device(engine: Engine) -> None:
    """vllm-project/vllm#32714: 16 of 24 GB stay on each device after an upgrade."""
    history = engine.history()
    history.parked(WHOLE, {"d0": 100, "d1": 100}, {}, seconds=None, at=1.0)
    assert history.too_little(WHOLE, {"d0": 80, "d1": 100}) == {}
    assert history.too_little(WHOLE, {"d0": 100, "d1": 79}) == {"d1": {"learned_bytes": 100, "freed_bytes": 79}}
    assert history.too_little(WHOLE, {"d0": 100}) == {"d1": {"learned_bytes": 100, "freed_bytes": 0}}
    engine.incarnation = "2"
    engine.park(60)
    assert set(engine.history().too_little(WHOLE, {"d0": 60})) == {"d0", "d1"}, (
        "what was learned first stays the measure"
    )


def test_a_process_that_keeps_more_with_every_park_is_told_of_again_and_again(engine: Engine) -> None:
    """vllm-project/vllm#21336: 3.4 to 44.5 GiB more in every cycle."""
    footprint = {"d0": 1000}
    engine.park(900, kept=100)
    engine.park(900, kept=140)
    assert engine.history().growth(WHOLE, footprint) == {}, "an engine breathes"
    engine.park(900, kept=150)
    grown = engine.history().growth(WHOLE, footprint)
    assert grown == {"d0": {"first_bytes": 100, "now_bytes": 150, "parks": 3, "residual_bytes": [100, 140, 150]}}
    engine.park(900, kept=180)
    assert engine.history().growth(WHOLE, footprint) == {}, "told once"
    engine.park(900, kept=200)
    assert set(engine.history().growth(WHOLE, footprint)) == {"d0"}, "and again when it has grown as much again"
    engine.incarnation = "2"
    engine.park(900, kept=300)
    assert engine.history().growth(WHOLE, footprint) == {}, "another process begins anew"


def test_the_history_of_a_long_life_is_bounded_and_still_counts_from_its_first_park(engine: Engine) -> None:
    for number in range(3 * RESIDUALS_MAX):
        engine.park(900, kept=100 + number)
    [of] = engine.history().growth(WHOLE, {"d0": 1000}).values()
    assert (of["first_bytes"], len(of["residual_bytes"])) == (100, RESIDUALS_MAX)


def test_a_way_that_was_tried_in_vain_is_left_alone(engine: Engine) -> None:
    for _ in range(TRIALS_MAX):
        assert engine.history().try_begins(KV)
        assert not engine.history().is_known(KV), "an agent may have died in the middle: once more"
    assert not engine.history().try_begins(KV)
    assert engine.history().is_known(KV)
    assert engine.way(KV).trouble is not None
    engine.history().went_wrong(WHOLE, "wrong answer")
    assert engine.way().trouble == "wrong answer"


def test_ways_that_went_wrong_are_tried_anew_once_an_operator_says_so(engine: Engine) -> None:
    engine.park(900)
    engine.park(500, modes=KV)
    engine.history().went_wrong(KV, "wrong answer after the wake")
    engine.history().forgive()
    assert not engine.history().is_known(KV), "what it freed is forgotten too: it was never seen whole"
    assert engine.way().parks == 1
    assert engine.history().try_begins(KV)


def test_one_park_that_gave_too_little_says_nothing_about_the_whole_policy(engine: Engine) -> None:
    engine.fall_short(50)
    assert engine.history().learned().ways == []
    assert engine.history().residual_bytes(WHOLE) == {}
    assert not engine.history().is_known(WHOLE), "a trial may still show it"
    engine.park(90)
    engine.fall_short(50)
    engine.fall_short(60)
    assert (engine.way().freed_bytes, engine.way().residual_bytes) == ({"d0": 90}, {"d0": 10})
    engine.park(90)
    engine.fall_short(60)
    assert engine.way().freed_bytes == {"d0": 90}, "not twice in a row"


def test_the_same_too_little_twice_in_a_row_is_what_this_process_gives(engine: Engine) -> None:
    """An engine that keeps a context on each device: a job that may have any size is told of what is left."""
    engine.fall_short(90)
    engine.fall_short(90)
    assert (engine.way().freed_bytes, engine.way().residual_bytes) == ({"d0": 90}, {"d0": 10})
    engine.incarnation = "2"
    assert engine.history().residual_bytes(WHOLE) == {}, "another process is tried again"
    engine.fall_short(90)
    engine.fall_short(90)
    engine.park(95)
    assert engine.way().freed_bytes == {"d0": 95}, "it can give more"


def test_a_device_that_released_nothing_is_never_a_measure_of_the_whole_policy(engine: Engine) -> None:
    for _ in range(3):
        engine.fall_short(0, released=False)
    assert engine.history().residual_bytes(WHOLE) == {}
    assert engine.history().freed_bytes(WHOLE) == {}


def test_a_part_of_it_that_gave_too_little_is_believed_less_until_it_gives_again(engine: Engine) -> None:
    engine.park(20, modes=KV)
    engine.fall_short(0, KV, released=False)
    assert engine.way(KV).freed_bytes == {"d0": 0}
    assert engine.history().freed_bytes(WHOLE) == {}
    engine.park(20, modes=KV)
    assert engine.way(KV).freed_bytes == {"d0": 20}
    engine.fall_short(0, KV, released=False)
    engine.incarnation = "2"
    assert engine.way(KV).freed_bytes == {"d0": 20}


def test_samples_count_only_while_they_are_equal() -> None:
    samples = EqualSamples()
    for value, good in ((1, True), (1, True), (2, True), (2, False), (2, True), (2, True)):
        samples.take(value, is_good=good)
    assert (samples.taken, samples.still, samples.good) == (6, 4, 2)
