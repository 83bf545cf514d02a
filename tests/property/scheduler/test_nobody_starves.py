"""Small jobs are submitted without end, as many as there is room for: a large one of their priority runs too."""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.wire import AttemptState, EngineState, GateState
from lull.scheduler.actions import ExpectWork, OpenLoan, StartAttempt
from lull.scheduler.decide import PASSED_OVER_SECONDS_MAX, decide
from lull.scheduler.model import Attempt, AttemptId, DeviceId, Engine, Job, JobId, Loan, LoanId, Snapshot
from tests.scheduler_rows import NODE, device, engine, job

STEP_SECONDS = 20.0
RUNS_SECONDS_MAX = 60.0


@dataclass
class World:
    """Its devices are lent as soon as that is decided, and given back when nothing runs and nothing waits."""

    rng: random.Random
    devices: tuple[DeviceId, ...]
    engine: Engine | None
    now: float = 0.0
    queued: dict[JobId, Job] = field(default_factory=dict[JobId, Job])
    loans: dict[LoanId, Loan] = field(default_factory=dict[LoanId, Loan])
    attempts: dict[AttemptId, Attempt] = field(default_factory=dict[AttemptId, Attempt])
    ends_at: dict[AttemptId, float] = field(default_factory=dict[AttemptId, float])
    started: set[JobId] = field(default_factory=set[JobId])
    made: int = 0

    def snapshot(self) -> Snapshot:
        engines = [] if self.engine is None else [self.engine]
        if engines and any(loan.engine_ids for loan in self.loans.values()):
            engines = [replace(engines[0], state=EngineState.PARKED, gate=GateState.CLOSED)]
        free = {
            each: 40 if self.engine is not None and each in self.engine.device_ids and not self.loans else 100
            for each in self.devices
        }
        rows = [device(each, free[each]) for each in self.devices]
        jobs, attempts, loans = self.queued.values(), self.attempts.values(), self.loans.values()
        return Snapshot((NODE,), tuple(rows), tuple(engines), tuple(jobs), tuple(attempts), tuple(loans))

    def submit(self, name: str, hbm_bytes: int, gpus: int = 1) -> None:
        self.queued[JobId(name)] = job(name, hbm_bytes, gpus=gpus, created_at=self.now)

    def step(self) -> None:
        self.now += STEP_SECONDS
        for attempt_id in [each for each, at in self.ends_at.items() if at <= self.now]:
            del self.attempts[attempt_id], self.ends_at[attempt_id]
        busy = {attempt.loan_id for attempt in self.attempts.values()}
        self.loans = {key: loan for key, loan in self.loans.items() if loan.expects_more or key in busy}
        for action in decide(self.snapshot(), self.now):
            match action:
                case OpenLoan():
                    self.made += 1
                    loan_id = LoanId(f"l{self.made}")
                    places = action.places
                    self.loans[loan_id] = Loan(
                        loan_id,
                        NODE.id,
                        action.device_ids,
                        action.engine_ids,
                        LoanState.LENT,
                        action.need_bytes,
                        action.room_bytes,
                        expects_more=bool(action.later_job_ids),
                    )
                    for job_id in action.later_job_ids:
                        self.queued[job_id] = replace(self.queued[job_id], assigned_loan_id=loan_id)
                case StartAttempt():
                    loan_id, places = action.loan_id, (action.place,)
                case ExpectWork():
                    self.loans[action.loan_id] = replace(self.loans[action.loan_id], expects_more=action.more)
                    continue
                case _:
                    continue
            for place in places:
                self.made += 1
                attempt_id = AttemptId(f"a{self.made}")
                del self.queued[place.job_id]
                self.started.add(place.job_id)
                self.ends_at[attempt_id] = self.now + self.rng.uniform(STEP_SECONDS, RUNS_SECONDS_MAX)
                self.attempts[attempt_id] = Attempt(
                    attempt_id,
                    place.job_id,
                    loan_id,
                    NODE.id,
                    place.device_ids,
                    place.hbm_bytes,
                    AttemptState.RUNNING,
                )


@given(
    st.randoms(use_true_random=False),
    st.sampled_from([(1, 0), (1, 1), (2, 0), (2, 2)]),
    st.integers(51, 100),
    st.integers(1, 2),
)
@settings(max_examples=25, deadline=None)
def test_a_large_job_is_passed_over_for_no_longer_than_is_documented(
    rng: random.Random, size: tuple[int, int], hbm_bytes: int, gpus: int
) -> None:
    count, under_engine = size
    names = tuple(DeviceId(f"d{index}") for index in range(count))
    world = World(rng, names, engine("e", *names[:under_engine]) if under_engine else None)
    for number in range(3 * count):
        world.submit(f"s{number}", 30)
    world.step()
    world.submit("large", hbm_bytes, min(gpus, count))
    since = world.now
    while "large" not in world.started:
        while len(world.queued) < 3 * count + 1:
            world.made += 1
            world.submit(f"s{world.made}", rng.choice([10, 30, 40]))
        world.step()
        assert world.now - since <= PASSED_OVER_SECONDS_MAX + 2 * RUNS_SECONDS_MAX + 2 * STEP_SECONDS
    assert len(world.started) > 3, "the small ones ran meanwhile"
