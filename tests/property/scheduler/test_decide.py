"""decide over random snapshots: the same answer in any order of rows, and never a byte or a device twice."""

from __future__ import annotations

import random
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import AttemptState, EngineState, GateState, WithoutJob
from lull.scheduler.actions import ExpectWork, OpenLoan, RecallLoan, SetReasons, StartAttempt, StopAttempt
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
from lull.scheduler.placement import queue_order

NOW = 1000.0
POLICIES = {
    (when, pressed): EnginePolicy.model_validate(
        {"when": when, "on_pressure": pressed, "pressure_free_bytes_min": 1 if pressed else None}
    )
    for when in ("always", "manual")
    for pressed in (False, True)
}
CAPACITY = 100


@st.composite
def snapshots(draw: st.DrawFn) -> Snapshot:
    rng = draw(st.randoms(use_true_random=False))
    nodes: list[Node] = []
    devices: list[Device] = []
    engines: list[Engine] = []
    loans: list[Loan] = []
    attempts: list[Attempt] = []
    for number in range(draw(st.integers(0, 3))):
        up = rng.random() < 0.85
        node = Node(NodeId(f"n{number}"), f"node{number}", up, not up)
        nodes.append(node)
        mine = [f"n{number}d{index}" for index in range(rng.randint(0, 4))]
        for index, name in enumerate(mine):
            devices.append(
                Device(
                    DeviceId(name),
                    node.id,
                    index,
                    CAPACITY,
                    rng.randint(0, CAPACITY),
                    quarantined=rng.random() < 0.1,
                    not_before=rng.choice([0.0, 0.0, 0.0, NOW + 5]),
                    margin_bytes=rng.choice([None, 0, 10]),
                )
            )
        engines += [
            _engine(rng, node, f"n{number}e{index}", rng.sample(mine, rng.randint(1, min(2, len(mine)))))
            for index in range(rng.randint(0, 3) if mine else 0)
        ]
        free = list(mine)
        for index in range(rng.randint(0, 2)):
            if free:
                loan, ran = _loan(
                    rng, node, f"n{number}l{index}", [free.pop() for _ in range(rng.randint(1, len(free)))]
                )
                loans.append(loan)
                attempts += ran
    jobs = [_job(rng, f"j{number}", loans) for number in range(draw(st.integers(0, 12)))]
    return Snapshot(tuple(nodes), tuple(devices), tuple(engines), tuple(jobs), tuple(attempts), tuple(loans))


def _engine(rng: random.Random, node: Node, name: str, device_ids: list[str]) -> Engine:
    return Engine(
        id=EngineId(name),
        node_id=node.id,
        name=name,
        device_ids=tuple(DeviceId(each) for each in device_ids),
        state=EngineState.RUNNING if rng.random() < 0.8 else rng.choice(list(EngineState)),
        gate=GateState.OPEN if rng.random() < 0.9 else GateState.UNKNOWN,
        verified=rng.random() < 0.9,
        policy=POLICIES["always" if rng.random() < 0.8 else "manual", rng.random() < 0.5],
        device_bytes={each: rng.randint(0, CAPACITY) for each in device_ids},
        residual_bytes={each: rng.randint(0, 5) for each in device_ids},
        idle_since=rng.choice([None, 10.0, 20.0]),
        not_before=rng.choice([0.0, 0.0, NOW + 5]),
        is_pressed=rng.random() < 0.5,
    )


def _loan(rng: random.Random, node: Node, name: str, device_ids: list[str]) -> tuple[Loan, list[Attempt]]:
    room = {DeviceId(each): rng.randint(10, CAPACITY) for each in device_ids}
    ran: list[Attempt] = []
    for number in range(rng.randint(0, 2)):
        stop_wanted = rng.random() < 0.3
        ran.append(
            Attempt(
                AttemptId(f"{name}a{number}"),
                JobId(f"{name}x{number}"),
                LoanId(name),
                node.id,
                tuple(room)[:1],
                rng.randint(1, min(room.values())) // 2 + 1,
                rng.choice([AttemptState.PLACED, AttemptState.RUNNING, AttemptState.UNKNOWN]),
                stop_wanted,
                stop_wanted and rng.random() < 0.5,
            )
        )
    state = rng.choice([LoanState.DRAINING, LoanState.LENT, LoanState.LENT, LoanState.WAKING, LoanState.FAULTED])
    loan = Loan(
        LoanId(name),
        node.id,
        tuple(room),
        (),
        state,
        0,
        room,
        rng.random() < 0.2,
        engine_lost=rng.random() < 0.1,
        without_job=WithoutJob(wake_on_request=rng.random() < 0.7) if rng.random() < 0.4 else None,
    )
    return loan, [] if loan.without_job and rng.random() < 0.7 else ran


def _job(rng: random.Random, name: str, loans: list[Loan]) -> Job:
    return Job(
        id=JobId(name),
        priority=rng.randint(-2, 2),
        created_at=float(rng.randint(1, 5)),
        gpus=rng.choice([1, 1, 1, 2, 3]),
        hbm_bytes=rng.choice([None, 1, 10, 40, 90, CAPACITY, 10 * CAPACITY]),
        attempt_no=rng.randint(0, 2),
        not_before=rng.choice([0.0, 0.0, 0.0, NOW + 1]),
        assigned_loan_id=rng.choice([None, *[loan.id for loan in loans]]) if rng.random() < 0.3 else None,
    )


def shuffled(snapshot: Snapshot, rng: random.Random) -> Snapshot:
    rows: dict[str, Any] = {}
    for name in ("nodes", "devices", "engines", "jobs", "attempts", "loans"):
        rows[name] = list(getattr(snapshot, name))
        rng.shuffle(rows[name])
    return Snapshot(**{name: tuple(value) for name, value in rows.items()})


@given(snapshots(), st.randoms(use_true_random=False))
@settings(max_examples=80, deadline=None)
def test_the_order_of_rows_does_not_matter(snapshot: Snapshot, rng: random.Random) -> None:
    first = decide(snapshot, NOW)
    assert decide(snapshot, NOW) == first
    assert decide(shuffled(snapshot, rng), NOW) == first


@given(snapshots())
@settings(max_examples=150, deadline=None)
def test_nothing_is_given_twice(snapshot: Snapshot) -> None:
    actions = decide(snapshot, NOW)
    devices = {device.id: device for device in snapshot.devices}
    nodes = {node.id: node for node in snapshot.nodes}
    engines = {engine.id: engine for engine in snapshot.engines}
    jobs = {job.id: job for job in snapshot.jobs}
    lent = {device for loan in snapshot.loans for device in loan.device_ids}
    placed: list[JobId] = []
    for action in actions:
        if isinstance(action, OpenLoan):
            assert not lent.intersection(action.device_ids), "a device is lent twice"
            lent.update(action.device_ids)
            _check_open_loan(action, nodes, devices, engines)
            if action.without_job is not None:
                assert action.places == ()
                continue
            used = dict.fromkeys(action.device_ids, 0)
            for place in action.places:
                placed.append(place.job_id)
                assert len(set(place.device_ids)) == jobs[place.job_id].gpus
                for device in place.device_ids:
                    used[device] += place.hbm_bytes
            assert all(used[device] <= action.room_bytes[device] for device in used), "a byte is lent twice"
            assert action.need_bytes <= max(used.values())
            assert action.need_bytes_by_device == {device: nbytes for device, nbytes in used.items() if nbytes}
            placed += action.later_job_ids
        elif isinstance(action, StartAttempt):
            placed.append(action.place.job_id)
    assert len(placed) == len(set(placed)), "a job is placed twice"
    assert all(jobs[job_id].not_before <= NOW for job_id in placed)
    _check_rooms(snapshot, [action for action in actions if isinstance(action, StartAttempt)])


@given(snapshots())
@settings(max_examples=150, deadline=None)
def test_only_a_sleep_in_which_nothing_runs_is_ended_for_a_job(snapshot: Snapshot) -> None:
    actions = decide(snapshot, NOW)
    loans = {loan.id: loan for loan in snapshot.loans}
    ended = [action.loan_id for action in actions if isinstance(action, RecallLoan)]
    assert len(ended) == len(set(ended))
    used = {attempt.loan_id for attempt in snapshot.attempts}
    used |= {action.loan_id for action in actions if isinstance(action, StartAttempt)}
    for loan_id in ended:
        loan = loans[loan_id]
        assert loan.without_job is not None
        assert loan.without_job.wake_on_request
        assert (loan.state, loan.recall_ordered) == (LoanState.LENT, False)
        assert loan_id not in used
        assert snapshot.jobs, "for whom?"


def _check_open_loan(action: OpenLoan, nodes: Any, devices: Any, engines: Any) -> None:
    assert nodes[action.node_id].up
    for device_id in action.device_ids:
        assert devices[device_id].node_id == action.node_id
        assert not devices[device_id].quarantined
        assert action.room_bytes[device_id] <= CAPACITY - (devices[device_id].margin_bytes or 0)
        assert devices[device_id].not_before <= NOW
    for engine in engines.values():
        if set(engine.device_ids) & set(action.device_ids):
            assert engine.id in action.engine_ids, "an engine on a lent device is not parked"
            assert set(engine.device_ids) <= set(action.device_ids), "a device of a parked engine stays outside"
    for engine_id in action.engine_ids:
        engine = engines[engine_id]
        assert (engine.state, engine.gate) == (EngineState.RUNNING, GateState.OPEN)
        assert engine.verified
        if action.without_job is None:
            assert engine.policy.when == "always"
        else:
            assert engine.policy.on_pressure
            assert engine.is_pressed
        assert engine.not_before <= NOW
    assert (action.restore_by_seconds is None) == (not action.engine_ids)


def _check_rooms(snapshot: Snapshot, starts: list[StartAttempt]) -> None:
    loans = {loan.id: loan for loan in snapshot.loans}
    left = {(loan.id, device): nbytes for loan in snapshot.loans for device, nbytes in loan.room_bytes.items()}
    for attempt in snapshot.attempts:
        for device in attempt.device_ids:
            left[attempt.loan_id, device] -= attempt.hbm_bytes
    for start in starts:
        loan = loans[start.loan_id]
        assert loan.state is LoanState.LENT
        assert not loan.recall_ordered
        assert not loan.engine_lost
        for device in start.place.device_ids:
            left[start.loan_id, device] -= start.place.hbm_bytes
            assert left[start.loan_id, device] >= 0, "the plan grew inside a loan"


@given(snapshots())
@settings(max_examples=80, deadline=None)
def test_every_job_is_placed_or_says_why_and_recalls_disturb_nobody(snapshot: Snapshot) -> None:
    actions = decide(snapshot, NOW)
    explained = {action.job_id: action.reasons for action in actions if isinstance(action, SetReasons)}
    placed: set[JobId] = set()
    for action in actions:
        if isinstance(action, OpenLoan):
            placed |= {place.job_id for place in action.places} | set(action.later_job_ids)
        elif isinstance(action, StartAttempt):
            placed.add(action.place.job_id)
    assert placed | set(explained) == {job.id for job in snapshot.jobs}
    assert not placed & set(explained)
    assert all(reasons and reasons[0].sentence for reasons in explained.values())
    told = {action.loan_id: action.more for action in actions if isinstance(action, ExpectWork)}
    assert all(loan.expects_more is not told[loan.id] for loan in snapshot.loans if loan.id in told)
    waiting = [job for job in snapshot.jobs if job.id not in placed and job.not_before <= NOW]
    first = min(waiting, key=queue_order, default=None)
    lost = {loan.id for loan in snapshot.loans if loan.engine_lost}
    if first is not None and first.assigned_loan_id is not None and first.assigned_loan_id not in lost:
        assert told.get(first.assigned_loan_id, True), "what the first in the queue waits for is kept for it"
    stops = [action.attempt_id for action in actions if isinstance(action, StopAttempt)]
    assert len(stops) == len(set(stops))
