"""Whole loans of a CUDA program on a GPU: the real agent, NVML's word for the bytes, the driver's checkpoints."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import pytest_asyncio

from lull.agents.engines.checkpoint_driver import CheckpointDriver
from lull.agents.engines.cuda_checkpoint import CudaCheckpointAdapter
from lull.agents.protocol.loans import LoanStep
from tests.engines.engine_loans import alerts, answer_of, breaks, held_and_served_again, lend, refused, serves_again
from tests.engines.spawned import MIB
from tests.engines.stand_in_node import StandInNode, StandInUnderTest
from tests.fake_nvml.library import gpu_uuid
from tests.gpu_node import GPU_BYTES, gpu_machine

# Faults of the driver; all others are the engine's own.
OF_THE_DRIVER = (
    "busy",
    "lock_hangs",
    "checkpoint_fails",
    "restore_fails",
    "keeps_memory",
    "restore_hangs",
    "state_hangs",
)


class CheckpointNode(StandInNode):
    def set_faults(self, *names: str, name: str = "alpha") -> None:
        file = Path(os.environ["FAKE_CUDA_STATE"]) / "checkpoint_faults"
        draft = file.with_suffix(".draft")
        draft.write_text("".join(f"{fault} *\n" for fault in names if fault in OF_THE_DRIVER))
        draft.replace(file)
        super().set_faults(*(fault for fault in names if fault not in OF_THE_DRIVER), name=name)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with gpu_machine(tmp_path_factory.mktemp("gpus")):
        yield


@pytest_asyncio.fixture
async def node(tmp_path: Path, machine: None) -> AsyncIterator[CheckpointNode]:
    """Its engine is verified and routed. 16 MiB, of which the engine has 6."""
    engine = StandInUnderTest(
        kind="cuda-checkpoint",
        script="cuda_server.py",
        settings={"cuda_checkpoint": {"lock_seconds_max": 0.5}},
        policy={"park_call_seconds_max": 10, "resume_seconds_max": 5},
    )
    one = CheckpointNode(tmp_path, [engine], [GPU_BYTES], devices=[{"kind": "nvidia", "uuid": gpu_uuid(0)}])
    try:
        await one.start()
        await one.ready()
        yield one
    finally:
        one.set_faults()
        await one.end_everything()


async def test_lends_a_gpu_and_brings_the_same_process_back(node: CheckpointNode) -> None:
    """Also when it is not parked at first, and when the agent dies while a job has its memory."""
    answer, first = await answer_of(node), node.keeper().incarnation
    (device_id,) = node.keeper().device_ids
    assert node.keeper().device_bytes == {device_id: 6 * MIB}

    loan_id = await lend(node, 1)
    await serves_again(node, loan_id, answer)
    assert LoanStep.SPAWNED in node.steps(loan_id)
    assert "faulted" not in node.states(loan_id)
    assert node.keeper().device_bytes == {device_id: 6 * MIB}

    assert await refused(node, 2, "keeps_memory", "HBMNotFreed", answer)
    loan_id = await lend(node, 3, "busy")
    await serves_again(node, loan_id, answer)
    assert LoanStep.SPAWNED not in node.steps(loan_id)

    node.set_faults()
    job = node.job(["sh", "-c", "echo up; exec sleep 60"], hbm_bytes=13 * MIB)
    await node.open_loan(job, loan_id="loan-4", epoch=4)
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
    await node.crash()
    await node.start()
    assert isinstance(node.keeper().adapter, CudaCheckpointAdapter)
    assert node.daemon is not None
    await node.until(lambda: "loan-4" in node.daemon.loans, "the loan is taken over")  # type: ignore[union-attr]
    node.daemon.loans["loan-4"].recall("Asked")
    await serves_again(node, "loan-4", answer)
    assert node.keeper().incarnation == first


async def test_what_somebody_else_has_locked_is_left_alone(node: CheckpointNode) -> None:
    incarnation = node.keeper().incarnation
    assert incarnation is not None
    pid, outsider = int(incarnation.split(":")[1]), CheckpointDriver([])
    try:
        await held_and_served_again(
            node, lambda: outsider.call("lock", pid, 10), lambda: outsider.call("unlock", pid, 10)
        )
    finally:
        outsider.close()


async def test_an_engine_whose_driver_does_not_tell_its_state_serves_on(
    node: CheckpointNode, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lull.agents.engines.cuda_checkpoint._STATUS_SECONDS", 0.5)
    monkeypatch.setattr("lull.agents.engines.checkpoint_driver._START_SECONDS", 3.0)
    first, answer = node.keeper().incarnation, await answer_of(node)
    node.set_faults("state_hangs")
    await node.until(lambda: "engine_not_observable" in alerts(node), "the alert")
    assert await answer_of(node) == answer
    node.set_faults()
    await serves_again(node, await lend(node, 1), answer)
    assert LoanStep.SPAWNED in node.steps("loan-1")
    assert node.keeper().incarnation == first
    assert "engine_not_running" not in alerts(node)


@pytest.mark.long
async def test_a_restore_that_fails_costs_the_process_and_no_request(node: CheckpointNode) -> None:
    await breaks(node, 1, "restore_fails", "EngineLost", await answer_of(node), at_once=False)


@pytest.mark.long
async def test_a_restore_that_hangs_costs_the_process_and_no_request(node: CheckpointNode) -> None:
    await breaks(node, 1, "restore_hangs", "EngineLost", await answer_of(node), at_once=False, crash=True)
