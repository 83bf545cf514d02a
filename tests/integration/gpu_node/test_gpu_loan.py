"""Whole loans on a GPU: drain, park, settle judged by NVML, a job that allocates there, wake, canary.

One engine serves all tests of this file; each has an agent of its own.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.processes import environ_value
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import EngineState, GateState, StopAttempt
from tests.agent_node import MIB, EngineUnderTest
from tests.fake_nvml.library import GPU_IS_LOST, gpu_uuid
from tests.gpu_node import GPU_BYTES, GpuMachine, GpuNode, gpu_machine

GPU = gpu_uuid(0)
# Takes what it was promised on the only GPU that it sees, writes a pattern, reads it back, and says where.
FILL = """
import ctypes, os
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm import Pool
(uuid,) = CudaDriver.devices()
assert uuid == os.environ["CUDA_VISIBLE_DEVICES"] == os.environ["LULL_DEVICES"], uuid
assert os.environ["LULL_HOST_DEVICE"] == ""
driver = CudaDriver(uuid)
pool = Pool(driver)
n = int(os.environ["LULL_HBM_BYTES"])
block = pool.allocate(n, "job")
driver.set(block.address, 0x5a, n)
back = ctypes.create_string_buffer(n)
driver.copy(ctypes.addressof(back), block.address, n)
assert back.raw == b"\\x5a" * n
print(n, uuid)
"""
WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]
HOLDS = """
import sys
from lull.vmm.cuda_driver import CudaDriver
driver = CudaDriver(CudaDriver.devices()[0])
driver.create(int(sys.argv[1]))
print("holds", flush=True)
sys.stdin.read()
"""
STATES = ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying", "closed"]


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuMachine]:
    engine = EngineUnderTest(weights_bytes=8 * MIB, kv_bytes=2 * MIB, policy={"settle_seconds_max": 20})
    with gpu_machine(tmp_path_factory.mktemp("gpu"), engine, devices=2) as found:
        yield found


@contextmanager
def stranger(nbytes: int) -> Iterator[int]:
    """The pid of a process that is nobody's and holds memory of the GPU."""
    words = [sys.executable, "-c", HOLDS, str(nbytes)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"holds\n"
            yield process.pid
        finally:
            process.kill()


def alerts(node: GpuNode) -> list[str]:
    return [one["code"] for one in node.reports("alert")]


def set_policy(node: GpuNode, **changes: Any) -> None:
    node.keeper().policy = node.keeper().policy.model_copy(update=changes)


async def running(node: GpuNode, **fields: Any) -> Any:
    """A job that runs in a loan and holds nothing."""
    job = node.gpu_job(WAITS, **fields)
    await node.open_loan(job)
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
    return job


async def test_a_job_runs_in_the_gpu_memory_of_an_engine_that_comes_back(machine: GpuMachine) -> None:
    async with machine.node() as node:
        before = await node.ask()
        assert before.status_code == 200
        process = node.keeper().process_identity
        assert process is not None
        assert environ_value(process.pid, "CUDA_VISIBLE_DEVICES") == GPU  # of two
        held = node.keeper().device_bytes[GPU]
        assert held >= 10 * MIB
        node.nvml.begin("process", 0, 1, MIB, "G")  # a display draws there as well, and is no reason not to lend
        # More than is free beside the engine.
        job = node.gpu_job([sys.executable, "-c", FILL], hbm_bytes=12 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0), node.log_of(job.attempt_id)
        assert node.log_of(job.attempt_id) == f"{12 * MIB} {GPU}\n".encode()
        assert node.states() == STATES
        after = await node.ask()
        assert after.json()["choices"] == before.json()["choices"]
        assert node.keeper().device_bytes == {GPU: held}
        assert [line for line in node.witness() if line["state"] != "running"] == []


async def test_a_stranger_on_the_gpu_keeps_it_from_being_lent_and_from_being_given_back_too_early(
    machine: GpuMachine,
) -> None:
    async with machine.node() as node:
        with stranger(MIB) as pid:
            await node.open_loan(node.gpu_job(WAITS))
            await node.until_closed()
            reason = node.last_reason()
            assert reason is not None
            assert reason["code"] == "ForeignProcess"
            assert f"process {pid} (python" in reason["sentence"]
            assert LoanStep.PARK_SENT not in node.steps()
        job = node.gpu_job(WAITS)
        await node.open_loan(job, loan_id="loan-2", epoch=2)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        with stranger(8 * MIB):
            await node.order(StopAttempt(attempt_id=job.attempt_id))
            await node.until(lambda: node.state("loan-2") is LoanState.WAKING, "the engine is to be woken")
            looks = 0
            while looks < 3:  # S5: nothing is resumed into memory that is not free
                await node.daemon.node.look()  # type: ignore[union-attr]
                looks += 1
                assert LoanStep.RESUME_SENT not in node.steps("loan-2")
                assert node.keeper().gate_state is GateState.CLOSED
        await node.until_closed("loan-2")
        assert (await node.ask()).status_code == 200


async def test_memory_that_is_freed_late_is_waited_for(machine: GpuMachine) -> None:
    async with machine.node() as node:
        node.nvml.begin("keep", 0)
        job = node.gpu_job([sys.executable, "-c", FILL], hbm_bytes=12 * MIB)
        await node.daemon.node.look()  # type: ignore[union-attr]
        await node.open_loan(job)
        await node.until(lambda: LoanStep.PARKED_SEEN in node.steps(), "the engine says parked")
        await node.daemon.node.look()  # type: ignore[union-attr]
        assert node.state() is LoanState.SETTLING
        assert not node.attempt_end(job.attempt_id)
        node.nvml.end("keep", 0)
        await node.until_closed()
        assert node.states() == STATES


async def test_memory_that_is_not_freed_starts_no_job(machine: GpuMachine) -> None:
    async with machine.node() as node:
        set_policy(node, settle_seconds_max=1.0)
        node.nvml.begin("keep", 0)
        await node.daemon.node.look()  # type: ignore[union-attr]
        job = node.gpu_job(WAITS, hbm_bytes=12 * MIB)
        await node.open_loan(job)
        await node.until(lambda: "waking" in node.states(), "the loan is given up")
        node.nvml.end("keep", 0)
        await node.until_closed()
        reason = node.last_reason()
        end = node.attempt_end(job.attempt_id)
        assert reason is not None
        assert end is not None
        assert (reason["code"], end["end"], node.log_of(job.attempt_id)) == ("HBMNotFreed", "not_started", b"")
        assert "park_ineffective" in alerts(node)
        assert (await node.ask()).status_code == 200


async def test_a_gpu_that_is_lost_under_a_job_is_lent_to_nobody_until_it_is_back(machine: GpuMachine) -> None:
    async with machine.node() as node:
        before = await node.ask()
        job = await running(node)
        node.nvml.begin("error", "*", 0, GPU_IS_LOST)
        await node.until(lambda: node.state() is LoanState.FAULTED, "the loan cannot give the GPU back")
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["reason"]["code"]) == ("preempted", "gpu_lost")
        assert "device_lost" in alerts(node)
        # The next agent knows the GPU by its record, and takes the loan up.
        await node.crash()
        await node.start()
        await node.until(lambda: GPU in node.daemon.node.quarantined, "the GPU is quarantined")  # type: ignore[union-attr]
        (seen,) = node.daemon.node.observed(await node.daemon.node.look())  # type: ignore[union-attr]
        assert (seen.free_bytes, seen.quarantined.code if seen.quarantined else "") == (0, "DeviceLost")
        assert seen.capacity_bytes == GPU_BYTES
        other = node.gpu_job(WAITS)
        await node.open_loan(other, loan_id="loan-2", epoch=2)
        assert node.attempt_end(other.attempt_id)["end"] == "not_started"  # type: ignore[index]
        node.nvml.end_all()
        await node.until_closed()
        assert GPU not in node.daemon.node.quarantined  # type: ignore[union-attr]
        assert "device_back" in alerts(node)
        await node.ready()
        assert (await node.ask()).json()["choices"] == before.json()["choices"]


async def test_a_job_that_dies_of_its_lost_gpu_is_told_from_one_that_fails(machine: GpuMachine, tmp_path: Path) -> None:
    dies = f"""
import os, sys, time
print("up", flush=True)
while not os.path.exists({str(tmp_path / "dies")!r}):
    time.sleep(0.01)
sys.exit(3)
"""
    async with machine.node(engine_poll_seconds=30.0) as node:  # nobody looks meanwhile
        job = node.gpu_job([sys.executable, "-c", dies])
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        node.nvml.begin("error", "*", 0, GPU_IS_LOST)
        (tmp_path / "dies").touch()
        end = await node.until(lambda: node.attempt_end(job.attempt_id), "the job's end")
        assert (end["end"], end["exit_code"], end["reason"]["code"]) == ("exited", 3, "gpu_lost")
        node.nvml.end_all()
        await node.until_closed()
        await node.ready()


async def test_an_engine_on_a_lost_gpu_serves_nobody_until_it_answered_right_again(machine: GpuMachine) -> None:
    async with machine.node() as node:
        keeper = node.keeper()
        process = keeper.process_identity
        node.nvml.begin("hide", 0)
        await node.until(lambda: keeper.gate_state is GateState.CLOSED, "its gate is closed")
        await node.until(lambda: keeper.state is EngineState.FAILED, "it counts as failed")
        assert not keeper.verified_now()
        assert keeper.reason is not None
        assert (keeper.reason.code, "see dmesg for Xid" in keeper.reason.sentence) == ("DeviceLost", True)
        canaries = len(node.witness())
        node.nvml.end_all()
        await node.ready()
        assert keeper.process_identity == process  # it was right, so it was not started anew
        assert len(node.witness()) > canaries
        assert (await node.ask()).status_code == 200


async def test_a_driver_that_hangs_hangs_nobody_else(machine: GpuMachine) -> None:
    async with machine.node(probe_seconds_max=0.3) as node:
        node.nvml.begin("hang", "*", "*")
        await node.until(lambda: GPU in node.daemon.node.quarantined, "the GPU counts as unreadable")  # type: ignore[union-attr]
        # It may well serve, and nobody says otherwise; only lending needs to know.
        assert (await node.ask()).status_code == 200
        await node.open_loan(node.gpu_job(WAITS))
        reason = node.daemon.node.quarantined[GPU]  # type: ignore[union-attr]
        assert (reason.code, "did not answer" in reason.sentence) == ("DeviceUnreadable", True)
        assert node.state() is None
        node.nvml.end_all()
        await node.until(lambda: GPU not in node.daemon.node.quarantined, "the GPU is back")  # type: ignore[union-attr]
        await node.ready()
