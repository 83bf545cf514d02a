"""A loan on unified memory: what is free is what the host can still give, whoever takes it meanwhile."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import sys
from pathlib import Path

from lull.agents.probe_nvml import host_bytes
from lull.agents.protocol.capabilities import loses_weights
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import PolicyInForce, Registered
from lull.vmm.tags import RestoreMode
from tests.agent_node import MIB
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node

TAKES = """
import os
from lull.vmm import HostDevice, HostDriver
(device,) = HostDevice.from_environment()
assert device.kind == "unified"
HostDriver(device).create(int(os.environ["LULL_HBM_BYTES"]))
print("took", os.environ["CUDA_VISIBLE_DEVICES"] == "")
"""


class Host:
    """What the machine says of its memory, which changes all the time."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "meminfo"
        self.available_bytes = 1 << 40
        self.ended = asyncio.Event()
        self._writes = itertools.count()
        self.write()

    def write(self) -> None:
        draft = self.path.with_suffix(".new")
        draft.write_text(f"MemAvailable: {self.available_bytes // 1024 + next(self._writes)} kB\n")
        draft.replace(self.path)

    async def live(self) -> None:
        while not self.ended.is_set():
            self.write()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.005):
                    await self.ended.wait()


async def test_an_engine_that_loads_its_weights_again_is_lent_on_unified_memory(tmp_path: Path) -> None:
    host = Host(tmp_path)
    engine = StandInUnderTest(kind="llama-server", script="llama_server.py")
    device = {"path": tmp_path / "device0", "capacity_bytes": 16 * MIB, "memory": "unified"}
    async with stand_in_node(tmp_path, engine, devices=[device], meminfo_file=host.path) as node:
        assert node.daemon is not None
        assert loses_weights(node.keeper().policy)
        (opened,) = node.daemon.node.devices.values()
        assert (opened.kind, opened.reserve_bytes) == ("host_unified", int(host_bytes() * 0.10))
        # A backup would free nothing, and whoever sets such a policy is told so.
        wanted = EnginePolicy(restore_modes={"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE})
        assert "on unified memory" in (node.keeper().set_policy(1, wanted) or "")
        offered = PolicyInForce(engine_id=node.keeper().engine_id, version=2, policy=wanted)
        answer = Registered(incarnation=0, term=0, lease_seconds=30, orders_after=0, acknowledged=0, policies=[offered])
        await node.daemon._on_registered(answer)
        told = node.reports("engine_changed")[-1]
        assert (told["policy_version"], told["policy_refused"]["version"]) == (0, 2)
        assert "on unified memory" in told["policy_refused"]["sentence"]
        assert node.keeper().set_policy(3, node.keeper().policy) is None
        assert node.reports("engine_changed")[-1]["policy_refused"] is None
        living = asyncio.create_task(host.live())
        # The host has hardly more than the job needs; that it changes with every look is no reason to wait.
        host.available_bytes = opened.reserve_bytes + 15 * MIB
        job = node.job([sys.executable, "-c", TAKES], hbm_bytes=14 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"], node.log_of(job.attempt_id)) == ("exited", 0, b"took True\n")
        # The host runs short: nothing is free there, however little the device holds.
        host.available_bytes = opened.reserve_bytes + MIB
        await node.open_loan(node.job([sys.executable, "-c", TAKES], hbm_bytes=14 * MIB), loan_id="loan-2", epoch=2)
        await node.until(lambda: (node.last_reason("loan-2") or {}).get("code") == "HBMNotFreed", "it is not free")
        host.available_bytes = 1 << 40
        await node.until_closed("loan-2")
        host.ended.set()
        await living
