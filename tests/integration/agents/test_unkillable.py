"""A job that SIGKILL does not end: its devices are nobody else's, the engine included, until it is gone."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import EngineState, StopAttempt
from tests.agent_node import MIB, agent_node
from tests.tracing import held_at_its_end

HOLDS = """
import os, time
from lull.vmm import HostDevice, HostDriver, Pool
(device,) = HostDevice.from_environment()
block = Pool(HostDriver(device)).allocate(int(os.environ["LULL_HBM_BYTES"]), "job")
print("up", flush=True)
time.sleep(60)
"""


async def test_nothing_is_woken_on_a_job_that_cannot_be_killed(tmp_path: Path) -> None:
    async with agent_node(tmp_path, unkillable_seconds_max=0.5) as node:
        (device_id,) = node.device_ids
        first = node.keeper().incarnation
        job = node.job([sys.executable, "-c", HOLDS], hbm_bytes=4 * MIB, kill_grace_seconds=0.1)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job holds its memory")
        started = node.root / "agent" / "attempts" / job.attempt_id / "started.json"
        pid = json.loads(started.read_text())["pid"]
        with held_at_its_end(pid) as tracer:
            if tracer is None:
                pytest.skip("this machine forbids tracing")
            await node.order(StopAttempt(attempt_id=job.attempt_id))
            await node.until(lambda: node.state() is LoanState.FAULTED, "the loan is faulted")
            end = node.attempt_end(job.attempt_id)
            assert end is not None
            assert (end["end"], end["cleanup"]["code"], end["cleanup"]["data"]) == (
                "cancelled",
                "unkillable",
                {"pids": [pid]},
            )
            assert "unkillable" in [alert["code"] for alert in node.reports("alert")]
            for other in ("loan-2", "loan-3"):  # a new agent knows as well
                await node.until(lambda: device_id in node.daemon.node.quarantined, "the device is quarantined")  # type: ignore[union-attr]
                assert (await node.keeper().adapter.observe()).state is EngineState.PARKED
                assert node.state() is LoanState.FAULTED
                facts = (await node.daemon.node.look())[device_id]  # type: ignore[union-attr]
                assert facts.bytes_of([pid]) >= 4 * MIB, "its memory is still there"
                await node.open_loan(node.job(["true"]), loan_id=other, epoch=2)
                assert node.states(other) == ["closed"], "refused at once"
                await node.crash()
                await node.start()
            assert LoanStep.RESUME_SENT not in node.steps()
            tracer.let_go()
            await node.until_closed()
            assert node.daemon is not None
            assert node.daemon.node.quarantined == {}
        await node.ready()
        assert node.keeper().incarnation == first
        assert (await node.ask()).status_code == 200
