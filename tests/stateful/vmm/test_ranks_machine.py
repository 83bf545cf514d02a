"""The agreement of ranks: every order of events, with up to so many faults, for two and three ranks; more at random."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from lull.vmm.ranks_protocol import (
    TIMED_OUT,
    Done,
    Event,
    Failed,
    IllegalRankStep,
    Kind,
    Leader,
    Message,
    Phase,
    Rank,
    Send,
    Step,
    Trouble,
    Undone,
    Verb,
)
from tests.ranks_world import World


def explore(first: World) -> tuple[int, set[str]]:
    """Visits every state that can be reached. The number of states, and how operations ended in them."""
    seen = {first}
    pending = [first]
    endings: set[str] = set()
    while pending:
        world = pending.pop()
        world.check()
        moves = list(world.moves())
        if not any(name.startswith("go ") for name, _ in moves):
            world.check_quiet()
            endings.add(type(world.result).__name__)
        for _, following in moves:
            if following not in seen:
                seen.add(following)
                pending.append(following)
    return len(seen), endings


@pytest.mark.parametrize(("ranks", "faults", "operations"), [(2, 1, 2), (3, 1, 1)])
def test_every_order_of_events(ranks: int, faults: int, operations: int) -> None:
    states, endings = explore(World.new(ranks, faults=faults, operations=operations))
    assert states > 500
    assert endings >= {"Done", "Undone", "Failed"}


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("ranks", "faults", "operations"), [(2, 2, 2), (2, 3, 1), (3, 2, 1)])
def test_every_order_of_events_with_more_faults(ranks: int, faults: int, operations: int) -> None:
    explore(World.new(ranks, faults=faults, operations=operations))


def test_without_faults_it_succeeds() -> None:
    states, endings = explore(World.new(3, faults=0))
    assert (states > 50, endings) == (True, {"Done", "NoneType"})


def test_a_prepare_that_is_lost_is_undone_and_comes_too_late() -> None:
    rank, _ = Rank().hear(Message(Kind.ABORT, 7))
    assert rank.hear(Message(Kind.PREPARE, 7, Verb.RELEASE))[1] == Step(Phase.IDLE)
    leader, _ = Leader(frozenset({0, 1})).start(Verb.RELEASE, None)
    assert leader.hear(1, Message(Kind.READY, 0)) == (leader, ())  # of an operation before
    leader, _ = leader.hear(0, Message(Kind.READY, 1))
    leader, outputs = leader.expire()
    assert outputs == (Send(0, Message(Kind.ABORT, 1)), Send(1, Message(Kind.ABORT, 1)))
    assert Rank().hear(Message(Kind.ABORT, 1))[1].answer is Kind.ABORTED
    leader, _ = leader.hear(1, Message(Kind.ABORTED, 1))
    leader, outputs = leader.hear(0, Message(Kind.ABORTED, 1))
    assert outputs == (Undone(Trouble(1, TIMED_OUT, "rank 1 did not get ready in time")),)


def test_an_ending_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(IllegalRankStep, match="idle cannot end with did_commit"):
        Rank().end(Event.DID_COMMIT)


class RanksMachine(RuleBasedStateMachine):
    @initialize(ranks=st.integers(1, 5), faults=st.integers(0, 6))
    def begin(self, ranks: int, faults: int) -> None:
        self.world = World.new(ranks, faults=faults, operations=4)

    @rule(data=st.data())
    def move(self, data: st.DataObject) -> None:
        moves = list(self.world.moves())
        if moves:
            self.world = data.draw(st.sampled_from(moves))[1]

    @invariant()
    def holds(self) -> None:
        if hasattr(self, "world"):
            self.world.check()
            if self.world.quiet():
                self.world.check_quiet()

    def teardown(self) -> None:
        if hasattr(self, "world"):
            steps = 0
            while going := [world for name, world in self.world.moves() if name.startswith("go ")]:
                self.world = going[0]
                steps += 1
                assert steps < 1000, "it never ends"
            self.world.check_quiet()
            assert isinstance(self.world.result, Done | Undone | Failed | None)


TestRanksMachine = RanksMachine.TestCase
TestRanksMachine.settings = settings(
    max_examples=25, stateful_step_count=50, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
