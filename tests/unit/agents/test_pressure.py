"""When an engine is said to be in the way of host memory: pure, and over any course of looks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lull.agents.pressure import SAMPLES, Patience, Seen

BOUND = 100
IDLE = 60.0


def look(at: float, available: int = 1, *, ready: bool = True, asleep: bool = False, ago: float | None = None) -> Seen:
    return Seen(at, available, ready, asleep, ago)


def after(*looks: Seen, patience: Patience | None = None) -> tuple[Patience, bool]:
    """The patience after the looks, and whether the last of them is pressing."""
    patience = patience or Patience()
    for seen in looks:
        patience = patience.after(seen, BOUND, IDLE)
    return patience, patience.is_pressed(looks[-1], IDLE)


def test_three_samples_below_the_bound_and_idle_for_long_enough() -> None:
    early = [look(0.0), look(30.0), look(59.0)]
    assert not after(*early)[1], "not idle for long enough"
    assert after(*early, look(60.0))[1]
    assert not after(look(0.0, 500), look(61.0), look(62.0))[1], "two samples"
    assert after(look(0.0, 500), look(61.0), look(62.0), look(63.0))[1]
    assert not after(look(0.0), look(61.0), look(62.0, BOUND), look(63.0), look(64.0))[1], "not in a row"


def test_a_request_starts_the_wait_anew() -> None:
    looks = [look(at) for at in (0.0, 100.0, 101.0, 102.0)]
    assert after(*looks)[1]
    assert not after(*looks, look(103.0, ago=0.5))[1]
    assert after(*looks, look(103.0, ago=0.5), look(170.0, ago=67.5))[1]


def test_one_that_was_away_has_to_be_idle_anew() -> None:
    looks = [look(at) for at in (0.0, 100.0, 101.0, 102.0)]
    assert not after(*looks, look(103.0, ready=False))[1]
    back = [*looks, look(103.0, ready=False), look(104.0), look(105.0)]
    assert not after(*back)[1]
    assert after(*back, look(164.0))[1]


def test_a_sleep_that_did_not_last_doubles_what_is_asked_and_a_long_one_forgives() -> None:
    awake = [look(float(at)) for at in (0, 70, 71, 72)]
    slept = [look(73.0, ready=False, asleep=True), look(80.0, ready=False), look(81.0, ago=1.0)]
    patience, _ = after(*awake, *slept)
    assert patience.short_sleeps == 1
    assert not after(look(82.0), look(83.0), look(150.0, ago=70.0), patience=patience)[1]
    assert after(look(82.0), look(83.0), look(202.0, ago=122.0), patience=patience)[1]
    patience, _ = after(look(210.0, ready=False, asleep=True), look(400.0), patience=patience)
    assert patience.short_sleeps == 0


def test_a_loan_that_is_over_before_the_next_look_counts_as_one_that_was_seen() -> None:
    patience, pressed = after(*(look(float(at)) for at in (0, 70, 71, 72)))
    assert pressed
    patience, pressed = after(look(74.0), patience=patience.taken(73.0, asleep=True))
    assert (patience.short_sleeps, patience.ready_since, pressed) == (1, 74.0, False)
    patience, pressed = after(look(300.0), patience=patience)
    assert pressed
    patience, pressed = after(look(302.0), patience=patience.taken(301.0, asleep=False))
    assert (patience.short_sleeps, pressed) == (1, False), "a loan for a job is no sleep"


def test_what_is_asked_is_bounded() -> None:
    assert Patience(short_sleeps=1000).idle_seconds_needed(IDLE) == 32 * IDLE


LOOKS = st.lists(
    st.builds(
        Seen,
        st.floats(0.1, 100.0),  # since the look before
        st.sampled_from([1, BOUND - 1, BOUND, 5 * BOUND]),
        st.booleans(),
        st.booleans(),
        st.one_of(st.none(), st.floats(0.0, 500.0)),
    ),
    min_size=1,
    max_size=40,
)


@given(LOOKS)
def test_it_never_presses_before_its_time(steps: list[Seen]) -> None:
    at, patience = 0.0, Patience()
    seen: list[Seen] = []
    for step in steps:
        at += step.at
        asleep = step.asleep and not step.ready  # a loan has it then
        now = Seen(at, step.available_bytes, step.ready, asleep, step.last_request_seconds_ago)
        seen.append(now)
        patience = patience.after(now, BOUND, IDLE)
        if patience.is_pressed(now, IDLE):
            assert all(one.available_bytes < BOUND for one in seen[-SAMPLES:])
            assert len(seen) >= SAMPLES
            assert now.last_request_seconds_ago is None or now.last_request_seconds_ago >= IDLE
            away = [one.at for one in seen if not one.ready]
            assert at - max(away, default=0.0) >= IDLE
