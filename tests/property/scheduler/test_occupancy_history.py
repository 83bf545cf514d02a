"""What nodes say, late and over gaps, against what really was: intervals are disjoint and complete, exact wherever one
process of the agent watched, and claim nothing of the time after the last sign of life."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.protocol.wire import OccupancyKind
from lull.scheduler.usage import Span, lost_sight, told

LEASE = 10.0
KINDS = (OccupancyKind.SERVING, OccupancyKind.IDLE, OccupancyKind.JOB, OccupancyKind.PARKING)


@dataclass
class World:
    """One device, the agent processes that watch it one after the other, and a server that hears of it or does not."""

    rng: random.Random
    now: float = 0.0
    spans: list[Span] = field(default_factory=list)
    said: list[Span] = field(default_factory=list)  # everything that was ever said, in order
    sent: int = 0  # how much of it the server has
    lives: int = 0
    holds: OccupancyKind | None = None  # None: no process watches
    reports: int = 0
    registered: str = ""
    connected: bool = False
    last_seen_at: float = 0.0
    silent: bool = False
    losses: list[float] = field(default_factory=list)  # the last sign of life of each silence
    hears: list[float] = field(default_factory=list)
    heard_at: list[float] = field(default_factory=list)  # of each thing said

    @property
    def start_id(self) -> str:
        return f"life-{self.lives}"

    def say(self) -> None:
        assert self.holds is not None
        self.reports += 1
        self.said.append(Span(self.now, None, self.holds, start_id=self.start_id, report_no=self.reports))

    def forget(self) -> None:
        """A full disk, or too long a time without a server: an observation that was not sent is dropped."""
        if self.sent < len(self.said) - 1:
            del self.said[self.rng.randrange(self.sent, len(self.said) - 1)]

    def hear(self) -> None:
        """The server takes what it has not taken."""
        for span in self.said[self.sent :]:
            tail = told(self.spans[-2:], span, live=span.start_id == self.registered)
            self.spans = [*self.spans[:-2], *tail]
        self.heard_at += [self.now] * (len(self.said) - self.sent)
        self.hears.append(self.now)
        self.sent = len(self.said)
        self.last_seen_at, self.silent = self.now, False

    def lose(self) -> None:
        self.spans = [*self.spans[:-2], *lost_sight(self.spans[-2:], self.last_seen_at)]
        self.losses.append(self.last_seen_at)

    # ---- what may happen -------------------------------------------------------------------------------------

    def start(self) -> None:
        if self.holds is None:
            self.lives += 1
            self.reports, self.holds = 0, self.rng.choice(KINDS)
            self.say()
            self.connect()

    def die(self) -> None:
        if self.holds is not None:
            self.holds, self.connected = None, False

    def change(self) -> None:
        if self.holds is not None:
            self.holds = self.rng.choice([kind for kind in KINDS if kind is not self.holds])
            self.say()
            if self.connected:
                self.hear()

    def cut(self) -> None:
        self.connected = False

    def connect(self) -> None:
        """Registers, and tells everything anew."""
        if self.holds is None:
            return
        if not self.silent and self.lives > 1 and self.now - self.last_seen_at > LEASE:
            self.lose()
        self.connected, self.registered = True, self.start_id
        self.say()
        self.hear()

    def beat(self) -> None:
        if self.connected:
            self.hear()

    def doubt(self) -> None:
        if not self.connected and not self.silent and self.now - self.last_seen_at > LEASE:
            self.silent = True
            self.lose()


def lived(world: World) -> None:
    world.start()
    for _ in range(world.rng.randint(5, 60)):
        world.now += world.rng.choice([0.5, 1.0, 3.0, 12.0])
        world.beat()
        act = world.rng.choice(
            [world.start, world.die, world.change, world.change, world.cut, world.connect, world.forget]
        )
        act()
        world.doubt()
    world.now += 1.0
    if world.holds is None:
        world.start()
    world.connect()


@settings(max_examples=120, deadline=None)
@given(st.randoms(use_true_random=False))
def test_history_is_what_was(rng: random.Random) -> None:
    world = World(rng)
    lived(world)
    spans = [span for span in world.spans if span.ended_at is None or span.ended_at > span.started_at]
    for before, after in pairwise(spans):
        assert before.ended_at == after.started_at, "disjoint and complete"
    assert spans[0].started_at == world.said[0].started_at
    assert spans[-1].ended_at is None
    assert spans[-1].kind is world.holds, "whoever lives and listens is seen"
    for number, (before, after) in enumerate(pairwise(world.said), 1):
        middle = (before.started_at + after.started_at) / 2
        if before.started_at == after.started_at:
            continue
        shown = next(s for s in spans if s.started_at <= middle and (s.ended_at is None or middle < s.ended_at))
        if (before.start_id, before.report_no + 1) == (after.start_id, after.report_no):
            assert shown.kind is before.kind, "one process watched all the time"
            continue
        assert shown.kind in (before.kind, OccupancyKind.UNKNOWN)
        heard = world.heard_at[number]
        silences = [seen for seen in world.losses if seen < heard and not any(seen < at < heard for at in world.hears)]
        if any(middle > max(seen, before.started_at) for seen in silences):
            assert shown.kind is OccupancyKind.UNKNOWN, f"nobody saw the device at {middle}"
        if before.start_id == after.start_id and not silences:
            assert shown.kind is OccupancyKind.UNKNOWN, "what was said in between never came"


def test_a_gap_in_the_reports_of_one_process_stays_unknown() -> None:
    """The oldest observations are dropped while nobody listens for very long."""
    first = Span(10.0, None, OccupancyKind.IDLE, start_id="a", report_no=1)
    spans = lost_sight(told([], first, live=True), 20.0)
    later = Span(50.0, None, OccupancyKind.JOB, start_id="a", report_no=9)
    after = told(spans, later, live=True)
    assert [(span.started_at, span.ended_at, span.kind) for span in after] == [
        (10.0, 20.0, OccupancyKind.IDLE),
        (20.0, 50.0, OccupancyKind.UNKNOWN),
        (50.0, None, OccupancyKind.JOB),
    ]
    assert told(spans, replace(later, report_no=2), live=True)[0].ended_at == 50.0
    heard = told(told([], first, live=True), later, live=True)
    assert [(span.started_at, span.ended_at, span.kind) for span in heard[-2:]] == [
        (10.0, 50.0, OccupancyKind.UNKNOWN),
        (50.0, None, OccupancyKind.JOB),
    ], "also one that nobody called silent"


def test_the_last_word_of_a_process_that_died_unheard_says_nothing_of_what_came_after() -> None:
    first = Span(10.0, None, OccupancyKind.IDLE, start_id="a", report_no=1)
    spans = lost_sight(told([], first, live=True), 20.0)
    spans = told(spans[-2:], Span(30.0, None, OccupancyKind.JOB, start_id="a", report_no=2), live=False)
    spans = spans[:-2] + told(spans[-2:], Span(60.0, None, OccupancyKind.IDLE, start_id="b", report_no=1), live=True)
    assert [(span.started_at, span.ended_at, span.kind) for span in spans] == [
        (10.0, 30.0, OccupancyKind.IDLE),
        (30.0, 30.0, OccupancyKind.JOB),
        (30.0, 60.0, OccupancyKind.UNKNOWN),
        (60.0, None, OccupancyKind.IDLE),
    ]


def test_an_agent_that_does_not_say_which_process_it_is_leaves_the_gap() -> None:
    spans = lost_sight(told([], Span(1.0, None, OccupancyKind.IDLE), live=True), 5.0)
    spans = told(spans, Span(9.0, None, OccupancyKind.IDLE), live=True)
    assert [(span.ended_at, span.kind) for span in spans] == [
        (5.0, OccupancyKind.IDLE),
        (9.0, OccupancyKind.UNKNOWN),
        (None, OccupancyKind.IDLE),
    ]
