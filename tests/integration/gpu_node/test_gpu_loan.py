"""Whole loans on a GPU: drain, park, settle judged by NVML, a job that allocates there, wake, canary."""

from __future__ import annotations

import sys
from pathlib import Path

from lull.vmm.cuda_driver import CudaDriver
from tests.agent_node import MIB, EngineUnderTest
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_nvml.library import gpu_uuid
from tests.gpu_node import GPU_GRANULES, gpu_node

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
STATES = ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying", "closed"]


async def test_a_job_runs_in_the_gpu_memory_of_an_engine_that_comes_back(
    new_fake_cuda: NewFakeCuda, tmp_path: Path
) -> None:
    new_fake_cuda(granules=GPU_GRANULES, devices=2, strict=True)
    CudaDriver.devices()
    async with gpu_node(tmp_path, EngineUnderTest(weights_bytes=8 * MIB, kv_bytes=2 * MIB)) as node:
        before = await node.ask()
        assert before.status_code == 200
        held = node.keeper().device_bytes[gpu_uuid(0)]
        assert held >= 10 * MIB
        # More than is free beside the engine.
        job = node.gpu_job([sys.executable, "-c", FILL], hbm_bytes=12 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0), node.log_of(job.attempt_id)
        assert node.log_of(job.attempt_id) == f"{12 * MIB} {gpu_uuid(0)}\n".encode()
        assert node.states() == STATES
        after = await node.ask()
        assert after.json()["choices"] == before.json()["choices"]
        assert node.keeper().device_bytes == {gpu_uuid(0): held}
        assert [line for line in node.witness() if line["state"] != "running"] == []
