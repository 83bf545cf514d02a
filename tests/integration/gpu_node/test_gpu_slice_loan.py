"""A whole loan on a MIG slice whose weights belong to the device's memory service."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.agents.settings import MEMORY_SERVICE_FLAGS
from tests.agent_node import MIB, EngineUnderTest
from tests.fake_nvml.library import gpu_uuid
from tests.gpu_node import GpuMachine, gpu_machine

SLICE = gpu_uuid(2, is_slice=True)
SEES = "import os; from lull.vmm.cuda_driver import CudaDriver; print(CudaDriver.devices(), os.environ['LULL_DEVICES'])"


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[GpuMachine]:
    engine = EngineUnderTest(weights_bytes=8 * MIB, kv_bytes=2 * MIB, extra=[MEMORY_SERVICE_FLAGS])
    with gpu_machine(tmp_path, engine, uuids=[SLICE], devices=3, slices=2) as found:
        yield found


@pytest.mark.long
async def test_a_slice_is_lent_while_its_engine_s_weights_are_parked_in_the_memory_service(machine: GpuMachine) -> None:
    async with machine.node() as node:
        before = await node.ask()
        job = node.gpu_job([sys.executable, "-c", SEES], hbm_bytes=14 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0), (end, node.last_reason())
        assert node.log_of(job.attempt_id) == f"['{SLICE}'] {SLICE}\n".encode()
        assert (await node.ask()).json()["choices"] == before.json()["choices"]
        assert node.daemon is not None
        (seen,) = node.daemon.node.observed(await node.daemon.node.look())
        assert seen.device_kind == "mig"
