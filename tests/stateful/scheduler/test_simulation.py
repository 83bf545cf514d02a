"""A seeded world around decide: nodes that obey, dawdle, refuse and fall silent. Everything that is promised is
checked after every step; in the end all faults stop and every job has to have run exactly once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field, replace

import pytest

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptState, EngineState, GateState
from lull.scheduler.actions import ExpectWork, OpenLoan, Place, SetReasons, StartAttempt, StopAttempt
from lull.scheduler.decide import decide
from lull.scheduler.model import (
    Attempt,
    AttemptId,
    Device,
    DeviceId,
    Engine,
    EngineId,
    Job,
    JobId,
    Loan,
    LoanId,
    Node,
    NodeId,
    Snapshot,
)

SEEDS = 60
STEPS = 120
CAPACITY = 100
ENGINE_BYTES = 70
_FORWARD = {
    LoanState.DRAINING: LoanState.PARKING,
    LoanState.PARKING: LoanState.SETTLING,
    LoanState.SETTLING: LoanState.LENT,
    LoanState.RECALLING: LoanState.WAKING,
    LoanState.WAKING: LoanState.VERIFYING,
    LoanState.VERIFYING: LoanState.CLOSED,
}


@dataclass
class World:
    rng: random.Random
    now: float = 0.0
    nodes: dict[NodeId, Node] = field(default_factory=dict)
    devices: dict[DeviceId, Device] = field(default_factory=dict)
    engines: dict[EngineId, Engine] = field(default_factory=dict)
    queued: dict[JobId, Job] = field(default_factory=dict)
    attempts: dict[AttemptId, Attempt] = field(default_factory=dict)
    loans: dict[LoanId, Loan] = field(default_factory=dict)
    placed_jobs: dict[AttemptId, Job] = field(default_factory=dict)
    runs: dict[JobId, int] = field(default_factory=dict)  # how often a job ran to its end
    recalled: set[LoanId] = field(default_factory=set)
    made: int = 0
    parks: int = 0

    def snapshot(self) -> Snapshot:
        groups = (self.nodes, self.devices, self.engines, self.queued, self.attempts, self.loans)
        rows = [list(group.values()) for group in groups]
        for each in rows:
            self.rng.shuffle(each)
        return Snapshot(*(tuple(each) for each in rows))  # type: ignore[arg-type]

    def name(self, prefix: str) -> str:
        self.made += 1
        return f"{prefix}{self.made}"

    # ---- what decide asks for --------------------------------------------------------------------------------

    def decide(self) -> None:
        for action in decide(self.snapshot(), self.now):
            match action:
                case OpenLoan():
                    self.open(action)
                case StartAttempt():
                    assert self.loans[action.loan_id].state is LoanState.LENT
                    self.place(action.place, action.loan_id, action.node_id)
                case ExpectWork():
                    assert self.loans[action.loan_id].expects_more is not action.more
                    self.loans[action.loan_id] = replace(self.loans[action.loan_id], expects_more=action.more)
                case StopAttempt():
                    attempt = self.attempts[action.attempt_id]
                    assert not attempt.stop_ordered
                    self.attempts[attempt.id] = replace(attempt, stop_ordered=True)
                case SetReasons():
                    self.queued[action.job_id] = replace(self.queued[action.job_id], reasons=action.reasons)
                case _:
                    raise AssertionError(action)

    def open(self, action: OpenLoan) -> None:
        lent = {device for loan in self.loans.values() for device in loan.device_ids}
        assert not lent & set(action.device_ids)
        assert self.nodes[action.node_id].up
        self.parks += len(action.engine_ids)
        loan_id = LoanId(self.name("loan"))
        state = LoanState.DRAINING if action.engine_ids else LoanState.SETTLING
        self.loans[loan_id] = Loan(
            loan_id,
            action.node_id,
            action.device_ids,
            action.engine_ids,
            state,
            action.need_bytes,
            action.room_bytes,
            expects_more=bool(action.later_job_ids),
        )
        for place in action.places:
            self.place(place, loan_id, action.node_id)
        for job_id in action.later_job_ids:
            self.queued[job_id] = replace(self.queued[job_id], assigned_loan_id=loan_id)

    def place(self, place: Place, loan_id: LoanId, node_id: NodeId) -> None:
        job = self.queued.pop(place.job_id)
        assert job.attempt_no == place.attempt_no
        attempt_id = AttemptId(self.name("attempt"))
        self.placed_jobs[attempt_id] = replace(job, attempt_no=job.attempt_no + 1, assigned_loan_id=None, reasons=())
        self.attempts[attempt_id] = Attempt(
            attempt_id, job.id, loan_id, node_id, place.device_ids, place.hbm_bytes, AttemptState.PLACED
        )

    # ---- what the nodes do -----------------------------------------------------------------------------------

    def step(self, *, faults: bool) -> None:
        self.now += self.rng.random() * 3
        if faults and self.rng.random() < 0.05:
            node = self.rng.choice(list(self.nodes.values()))
            self.nodes[node.id] = replace(node, up=not node.up, silent=node.up)
        for loan in list(self.loans.values()):
            if self.rng.random() < 0.6:
                self.advance(loan, faults=faults)

    def advance(self, loan: Loan, *, faults: bool) -> None:
        """A node goes on whether or not the scheduler hears of it."""
        mine = [attempt for attempt in self.attempts.values() if attempt.loan_id == loan.id]
        if loan.state is LoanState.LENT:
            for attempt in mine:
                self.run(attempt)
            if not mine and not loan.expects_more:
                self.move(loan, LoanState.RECALLING)
        elif loan.state is LoanState.SETTLING and faults and self.rng.random() < 0.2:
            for attempt in mine:
                self.send_back(attempt)
            for engine_id in loan.engine_ids:
                self.engines[engine_id] = replace(self.engines[engine_id], not_before=self.now + 5)
            self.move(loan, LoanState.WAKING)
        elif not loan.expects_more and not mine and loan.state in (LoanState.DRAINING, LoanState.SETTLING):
            self.move(loan, LoanState.CLOSED if loan.state is LoanState.DRAINING else LoanState.WAKING)
        else:
            self.move(loan, _FORWARD[loan.state])

    def run(self, attempt: Attempt) -> None:
        if attempt.state is AttemptState.PLACED:
            self.attempts[attempt.id] = replace(attempt, state=AttemptState.RUNNING)
            self.check_bytes(attempt.loan_id)
        elif self.rng.random() < 0.5:
            del self.attempts[attempt.id]
            job = self.placed_jobs.pop(attempt.id)
            self.runs[job.id] = self.runs.get(job.id, 0) + 1

    def send_back(self, attempt: Attempt) -> None:
        del self.attempts[attempt.id]
        job = self.placed_jobs.pop(attempt.id)
        self.queued[job.id] = replace(job, not_before=self.now + 5)

    def move(self, loan: Loan, state: LoanState) -> None:
        awake = state is LoanState.CLOSED
        for engine_id in loan.engine_ids:
            engine = self.engines[engine_id]
            self.engines[engine_id] = replace(
                engine,
                state=EngineState.RUNNING if awake else EngineState.PARKED,
                gate=GateState.OPEN if awake else GateState.CLOSED,
            )
        if awake:
            del self.loans[loan.id]
            assert not [each for each in self.attempts.values() if each.loan_id == loan.id]
        else:
            self.loans[loan.id] = replace(loan, state=state)

    # ---- what must hold --------------------------------------------------------------------------------------

    def check_bytes(self, loan_id: LoanId) -> None:
        used: dict[DeviceId, int] = {}
        for attempt in self.attempts.values():
            if attempt.loan_id == loan_id:
                for device in attempt.device_ids:
                    used[device] = used.get(device, 0) + attempt.hbm_bytes
        assert all(nbytes <= CAPACITY for nbytes in used.values()), "a device is overfull"

    def check(self) -> None:
        live = [attempt.job_id for attempt in self.attempts.values()]
        assert len(live) == len(set(live)), "two attempts of one job live"
        assert not set(live) & set(self.queued), "a job waits and runs"
        lent = [device for loan in self.loans.values() for device in loan.device_ids]
        assert len(lent) == len(set(lent)), "a device is lent twice"
        for engine in self.engines.values():
            covered = any(engine.id in loan.engine_ids for loan in self.loans.values())
            assert covered or engine.state is EngineState.RUNNING, "an engine is parked without a loan"


def build(rng: random.Random) -> World:
    world = World(rng)
    for number in range(rng.randint(1, 3)):
        node = NodeId(f"n{number}")
        world.nodes[node] = Node(node, node, up=True, silent=False)
        names = [DeviceId(f"{node}d{index}") for index in range(rng.randint(1, 4))]
        for index, name in enumerate(names):
            world.devices[name] = Device(name, node, index, CAPACITY, CAPACITY)
        left = list(names)
        while left and rng.random() < 0.7:
            on = tuple(left.pop() for _ in range(min(len(left), rng.randint(1, 2))))
            engine = EngineId(f"{node}e{len(left)}")
            for name in on:
                world.devices[name] = replace(world.devices[name], free_bytes=CAPACITY - ENGINE_BYTES)
            world.engines[engine] = Engine(
                engine,
                node,
                engine,
                on,
                EngineState.RUNNING,
                GateState.OPEN,
                verified=True,
                policy=EnginePolicy(when="always"),
                device_bytes=dict.fromkeys(on, ENGINE_BYTES),
                residual_bytes={},
            )
    return world


def submit(world: World) -> None:
    sizes = {node: sum(each.node_id == node for each in world.devices.values()) for node in world.nodes}
    job = JobId(world.name("job"))
    gpus = world.rng.randint(1, min(2, max(sizes.values())))
    hbm = world.rng.choice([None, 20, 50, 100])
    world.queued[job] = Job(job, world.rng.randint(-1, 1), world.now, gpus, hbm)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_every_job_runs_exactly_once(seed: int) -> None:
    world = build(random.Random(seed))
    submitted = 0
    for _ in range(STEPS):
        if submitted < 25 and world.rng.random() < 0.4:
            submit(world)
            submitted += 1
        world.decide()
        world.check()
        world.step(faults=True)
        world.check()
    world.nodes = {node: replace(row, up=True, silent=False) for node, row in world.nodes.items()}
    for _ in range(400):
        if not world.queued and not world.attempts and not world.loans:
            break
        world.decide()
        world.check()
        world.step(faults=False)
    waiting = {job.id: [reason.code for reason in job.reasons] for job in world.queued.values()}
    assert not waiting, f"seed {seed}: still waiting {waiting}, loans {list(world.loans.values())}"
    assert not world.loans, f"seed {seed}: a loan never ended: {list(world.loans.values())}"
    assert len(world.runs) == submitted
    assert set(world.runs.values()) <= {1}, f"seed {seed}: {world.runs}"
