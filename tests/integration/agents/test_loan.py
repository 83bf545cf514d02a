"""One loan on real memory: a real engine parks, a real job runs in its place, the same engine wakes."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from lull.agents.processes import find_by_environ
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import (
    AttemptEnd,
    EngineState,
    ExpectWork,
    GateState,
    RecallLoan,
    SetRestoreBy,
    StartAttempt,
    StopAttempt,
)
from tests.agent_node import MIB, EngineUnderTest, agent_node

STEPS = [
    LoanStep.ACCEPTED,
    LoanStep.PREFLIGHTED,
    LoanStep.GATE_CLOSING,
    LoanStep.GATE_CLOSED,
    LoanStep.IN_FLIGHT_ZERO,
    LoanStep.PARK_SENT,
    LoanStep.PARKED_SEEN,
    LoanStep.SETTLED,
    LoanStep.SPAWN_INTENT,
    LoanStep.SPAWNED,
    LoanStep.EXIT_RECORDED,
    LoanStep.ROOM_PROVED,
    LoanStep.RESUME_SENT,
    LoanStep.RUNNING_SEEN,
    LoanStep.VERIFIED,
    LoanStep.GATE_OPENING,
    LoanStep.GATE_OPENED,
    LoanStep.CLOSED,
]
STATES = ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying", "closed"]

# Takes what it was promised, writes a pattern, reads it back, and tells how much it held.
FILL = """
import ctypes, os
from lull.vmm import HostDevice, HostDriver, Pool
(device,) = HostDevice.from_environment()
pool = Pool(HostDriver(device))
n = int(os.environ["LULL_HBM_BYTES"])
block = pool.allocate(n, "job")
ctypes.memset(block.address, 0x5a, n)
assert ctypes.string_at(block.address, n) == b"\\x5a" * n
print(n)
"""
IGNORES_TERM = (
    "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
)
WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


@pytest.mark.parametrize("mode", ["CPU", "PINNED"])
async def test_a_job_runs_in_the_engine_s_memory_and_the_engine_comes_back(tmp_path: Path, mode: str) -> None:
    policy = {"restore_modes": {"model_weights": mode, "kv_cache": "NONE"}}
    async with agent_node(tmp_path, EngineUnderTest(policy=policy), capacities=[8 * MIB]) as node:
        before = await node.ask()
        assert before.status_code == 200
        # More than is free beside the engine.
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=4 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        assert node.states() == STATES
        assert node.steps() == STEPS
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0), node.log_of(job.attempt_id)
        assert node.log_of(job.attempt_id) == b"4194304\n"
        after = await node.ask()
        assert after.json()["choices"] == before.json()["choices"]
        assert [line for line in node.witness() if line["state"] != "running"] == []


async def test_requests_are_held_over_a_loan_and_none_fails(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        held = [asyncio.create_task(node.ask()) for _ in range(3)]
        route = node.keeper()

        async def waiting() -> bool:
            return (await route.gate.observe(route.engine_id)).held == 3

        await node.until(waiting, "three requests held")
        await node.order(StopAttempt(attempt_id=job.attempt_id))
        assert [reply.status_code for reply in await asyncio.gather(*held)] == [200, 200, 200]
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.CANCELLED
        assert all(line["state"] == "running" for line in node.witness())


async def test_refused_requests_are_503_with_retry_after(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"gate": "refuse"})) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        reply = await node.ask()
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) > 0
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.PREEMPTED
        assert (await node.ask()).status_code == 200


async def test_an_engine_that_keeps_its_memory_is_resumed_and_no_job_starts(tmp_path: Path) -> None:
    engine = EngineUnderTest(faults=["keep-memory"], policy={"settle_seconds_max": 0.3})
    async with agent_node(tmp_path, engine, capacities=[8 * MIB]) as node:
        job = node.job([sys.executable, "-c", "print('never')"], hbm_bytes=4 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        assert node.states() == ["draining", "parking", "settling", "waking", "verifying", "closed"]
        assert LoanStep.SPAWN_INTENT not in node.steps()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["reason"]["code"]) == ("not_started", "HBMNotFreed")
        assert [alert["code"] for alert in node.reports("alert")] == ["park_ineffective"]
        reason = node.last_reason()
        assert reason is not None
        (short,) = reason["data"]["devices"].values()
        assert short["free_bytes"] < short["need_bytes"] == 4 * MIB
        assert (await node.ask()).status_code == 200
        assert node.log_of(job.attempt_id) == b""


@pytest.mark.parametrize("fault", ["lose-weights", "overwrite-block", "wrong-after-wake"])
async def test_garbage_after_a_wake_never_gets_traffic(tmp_path: Path, fault: str) -> None:
    async with agent_node(tmp_path, EngineUnderTest(faults=[fault])) as node:
        before = (await node.ask()).json()["choices"]
        first = node.keeper().incarnation
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: LoanStep.GATE_CLOSED in node.steps(), "the gate is closed")
        held = asyncio.create_task(node.ask())
        await node.until_closed()
        assert node.states()[-3:] == ["verifying", "faulted", "closed"]
        assert "wake_corrupt" in [alert["code"] for alert in node.reports("alert")]
        assert node.keeper().incarnation != first, "it was restarted"
        assert (await held).json()["choices"] == before
        # A client's request is never answered by the process that woke wrong.
        woken = [line for line in node.witness() if line["kind"] == "request"]
        assert {line["pid"] for line in woken[1:]} == {int(node.keeper().incarnation.split(":")[1])}  # type: ignore[union-attr]


async def test_restart_never_leaves_a_wrong_engine_closed(tmp_path: Path) -> None:
    engine = EngineUnderTest(faults=["lose-weights"], policy={"restart": "never", "hold_seconds_max": 0.2})
    async with agent_node(tmp_path, engine) as node:
        first = node.keeper().incarnation
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.states()[-1:] == ["faulted"], "faulted")
        await node.until(
            lambda: "engine_not_ready" in [alert["code"] for alert in node.reports("alert")],
            "the alert that it stays so",
        )
        assert node.keeper().incarnation == first
        assert (await node.ask()).status_code == 503
        assert node.states()[-1] == "faulted"


async def test_an_engine_that_dies_parked_is_brought_back_and_the_job_not_started(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(faults=["die-parked"])) as node:
        before = (await node.ask()).json()["choices"]
        job = node.job(["true"])
        await node.open_loan(job)
        await node.until_closed()
        assert "faulted" in node.states()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.NOT_STARTED
        assert (await node.ask()).json()["choices"] == before


@pytest.mark.parametrize("restart", ["after_loan", "now"])
async def test_an_engine_killed_while_the_job_runs_comes_back_by_policy(tmp_path: Path, restart: str) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"restart": restart})) as node:
        before = (await node.ask()).json()["choices"]
        job = node.job(
            [sys.executable, "-c", "import sys; print('up', flush=True); sys.stdin.read(); import time; time.sleep(60)"]
        )
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        process = node.keeper().process_identity
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        await node.until(lambda: "engine_lost" in [alert["code"] for alert in node.reports("alert")], "engine lost")
        if restart == "after_loan":
            assert node.attempt_end(job.attempt_id) is None, "the job goes on"
            assert node.states()[-1] == "lent"
            assert node.keeper().process_identity is None, "its start is held back while its devices are lent"
            await node.order(StopAttempt(attempt_id=job.attempt_id))
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == ("cancelled" if restart == "after_loan" else "preempted")
        assert node.states()[-3:] == ["recalling", "faulted", "closed"]
        assert (await node.ask()).json()["choices"] == before


async def test_an_engine_that_dies_on_resume_is_restarted(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(faults=["die-on-resume"])) as node:
        before = (await node.ask()).json()["choices"]
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert node.states()[-3:] == ["waking", "faulted", "closed"]
        assert node.steps().count(LoanStep.RESUME_SENT) == 1
        assert (await node.ask()).json()["choices"] == before


async def test_a_wake_that_hangs_is_restarted_after_its_deadline(tmp_path: Path) -> None:
    engine = EngineUnderTest(faults=["hang-wake"], policy={"resume_seconds_max": 0.5})
    async with agent_node(tmp_path, engine) as node:
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert node.states()[-3:] == ["waking", "faulted", "closed"]
        assert node.steps().count(LoanStep.RESUME_SENT) == 1, "a call without an answer is never repeated"
        assert (await node.ask()).status_code == 200


async def test_a_park_that_hangs_is_asked_once_and_ends_in_a_restart(tmp_path: Path) -> None:
    engine = EngineUnderTest(faults=["hang-park"], policy={"park_call_seconds_max": 0.5})
    async with agent_node(tmp_path, engine) as node:
        job = node.job(["true"])
        await node.open_loan(job)
        await node.until_closed()
        assert node.states() == ["draining", "parking", "faulted", "closed"]
        assert node.steps().count(LoanStep.PARK_SENT) == 1
        assert "park_deadline" in [alert["code"] for alert in node.reports("alert")]
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.NOT_STARTED
        assert (await node.ask()).status_code == 200


async def test_a_refused_park_changes_nothing(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(faults=["refuse-park"])) as node:
        first = node.keeper().incarnation
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert node.states() == ["draining", "parking", "closed"]
        assert node.keeper().incarnation == first
        assert (await node.ask()).status_code == 200


@pytest.mark.parametrize("choice", ["abort_loan", "abort_requests"])
async def test_a_drain_deadline(tmp_path: Path, choice: str) -> None:
    engine = EngineUnderTest(
        extra=["--token-delay", "0.4"],
        policy={"drain_seconds_max": 0.3, "on_drain_deadline": choice, "canary": {"tokens": 1}},
    )
    async with agent_node(tmp_path, engine) as node:
        slow = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def in_flight() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).in_flight == 1

        await node.until(in_flight, "the request is in flight")
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        reply = await slow
        if choice == "abort_loan":
            assert node.states() == ["draining", "closed"]
            assert reply.status_code == 200
            assert LoanStep.PARK_SENT not in node.steps()
        else:
            assert node.states() == STATES
            assert reply.status_code == 503
        assert keeper.gate_state is GateState.OPEN


async def test_a_recall_while_draining_releases_nothing(tmp_path: Path) -> None:
    engine = EngineUnderTest(extra=["--token-delay", "0.4"], policy={"canary": {"tokens": 1}})
    async with agent_node(tmp_path, engine) as node:
        slow = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def in_flight() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).in_flight == 1

        await node.until(in_flight, "the request is in flight")
        job = node.job(["true"])
        await node.open_loan(job)
        await node.until(lambda: LoanStep.GATE_CLOSED in node.steps(), "the gate is closed")
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.until_closed()
        assert node.states() == ["draining", "closed"]
        assert LoanStep.PARK_SENT not in node.steps()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.NOT_STARTED
        assert (await slow).status_code == 200
        assert (await node.ask()).status_code == 200


async def test_restore_by_ends_the_job_as_preempted(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        await node.order(SetRestoreBy(loan_id="loan-1", restore_by_seconds=0.3))
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.PREEMPTED


@pytest.mark.parametrize(
    ("argv", "fields", "expected"),
    [
        ([sys.executable, "-c", "raise SystemExit(7)"], {}, {"end": "exited", "exit_code": 7}),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"], {}, {"end": "signalled", "signal": 9}),
        (WAITS, {"time_limit_seconds": 0.2}, {"end": "timed_out"}),
        (
            [sys.executable, "-c", IGNORES_TERM],
            {"time_limit_seconds": 1.0, "kill_grace_seconds": 0.2},
            {"end": "timed_out"},
        ),
        (["/no/such/command"], {}, {"end": "spawn_failed"}),
    ],
)
async def test_however_a_job_ends_the_engine_comes_back(
    tmp_path: Path, argv: list[str], fields: dict[str, object], expected: dict[str, object]
) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(argv, **fields)
        await node.open_loan(job)
        await node.until_closed()
        assert node.states()[-1] == "closed"
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert {key: end[key] for key in expected} == expected
        assert (await node.ask()).status_code == 200


async def test_a_child_that_a_job_leaves_behind_is_swept_before_the_engine_wakes(tmp_path: Path) -> None:
    leak = "import subprocess; subprocess.Popen(['sleep', '60'], start_new_session=True)"
    async with agent_node(tmp_path) as node:
        job = node.job([sys.executable, "-c", leak])
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert end["cleanup"]["code"] == "stragglers_killed"
        assert find_by_environ("LULL_ATTEMPT", job.attempt_id) == []


async def test_several_jobs_run_under_one_park(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        beside = [node.job(WAITS, hbm_bytes=2 * MIB), node.job(WAITS, hbm_bytes=2 * MIB)]
        await node.open_loan(*beside)
        await node.until(lambda: {node.log_of(job.attempt_id) for job in beside} == {b"up\n"}, "both run at once")
        later = node.job([sys.executable, "-c", "print('later')"])
        await node.order(StartAttempt(loan_id="loan-1", attempt=later))
        await node.until(lambda: node.attempt_end(later.attempt_id), "a third one ran in the same loan")
        for job in beside:
            await node.order(StopAttempt(attempt_id=job.attempt_id))
        await node.until_closed()
        assert node.steps().count(LoanStep.PARK_SENT) == 1
        assert node.steps().count(LoanStep.SPAWNED) == 3


async def test_a_loan_is_kept_after_its_last_job_only_while_more_is_expected(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        assert node.daemon is not None
        # Of its own: the agent clears the other one whenever it fails to reach the server.
        node.daemon.node.connected = asyncio.Event()
        node.daemon.node.connected.set()
        node.daemon.node.settings = node.settings.model_copy(update={"loan_idle_seconds_max": 60.0})
        first, second = node.job(["true"]), node.job(WAITS)
        await node.open_loan(first, expects_more=True)
        await node.until(lambda: node.attempt_end(first.attempt_id), "the first job ran")
        await node.order(StartAttempt(loan_id="loan-1", attempt=second))
        await node.until(lambda: node.log_of(second.attempt_id) == b"up\n", "another one runs in the same loan")
        await node.order(ExpectWork(loan_id="loan-1", more=False))
        assert node.states() == ["draining", "parking", "settling", "lent"], "what runs is not disturbed"
        await node.order(StopAttempt(attempt_id=second.attempt_id))
        await node.until_closed()
        await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=2)
        await node.until_closed("loan-2")


async def test_an_attempt_for_a_loan_that_is_over_is_proved_not_started(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        late = node.job(["true"])
        await node.order(StartAttempt(loan_id="loan-1", attempt=late))
        end = node.attempt_end(late.attempt_id)
        assert end is not None
        assert end["end"] == AttemptEnd.NOT_STARTED


async def test_a_device_without_an_engine_is_lent_by_the_same_steps_less_the_engine_s(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(devices=[0]), capacities=[8 * MIB, 4 * MIB, 2 * MIB]) as node:
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=4 * MIB, device_ids=node.device_ids[1:2])
        await node.open_loan(job, engines=[], device_ids=node.device_ids[1:2])
        await node.until_closed()
        assert node.states() == ["settling", "lent", "recalling", "closed"]
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert node.keeper().state is EngineState.RUNNING


async def test_devices_of_one_loan_have_to_show_what_is_needed_of_each(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(devices=[0]), capacities=[8 * MIB, 4 * MIB, 2 * MIB]) as node:
        _, large, small = node.device_ids
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=4 * MIB, device_ids=[large])
        needs = {large: 4 * MIB}
        await node.open_loan(job, engines=[], device_ids=[large, small], need_bytes_by_device=needs)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0), "the small device is not asked for what it never had"


async def test_a_loan_of_two_engines_parks_and_wakes_both(tmp_path: Path) -> None:
    engines = [EngineUnderTest("alpha", devices=[0]), EngineUnderTest("beta", devices=[1])]
    async with agent_node(tmp_path, *engines, capacities=[8 * MIB, 8 * MIB]) as node:
        job = node.job(["true"], device_ids=node.device_ids, hbm_bytes=8 * MIB)
        await node.open_loan(job, engines=["alpha", "beta"])
        await node.until_closed()
        assert node.states() == STATES
        assert node.steps().count(LoanStep.PARK_SENT) == 2
        assert node.steps().count(LoanStep.GATE_OPENED) == 2
        assert [(await node.ask(name)).status_code for name in ("alpha", "beta")] == [200, 200]
