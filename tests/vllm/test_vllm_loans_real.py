"""Whole loans of a real vLLM: it is parked, its bytes are proved, a job runs in them, it wakes and answers alike."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.protocol.loans import LoanState, LoanStep
from lull.vmm.host_device import HostDevice
from tests.agent_node import AgentNode, EngineUnderTest
from tests.engines.real_vllm import CAPACITY_MIB, ENVIRONMENT, KV_MIB, NAME, START_SECONDS_MAX, vllm_command
from tests.engines.spawned import MIB, Spawned
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(2400)]

LOST = {"model_weights": "NONE", "kv_cache": "NONE"}
JOB_MIB = CAPACITY_MIB - 8  # far more than is free beside the engine
JOB = """
import os, sys, time
from lull.vmm import HostDevice, HostDriver, Pool
[device] = HostDevice.from_environment()
pool = Pool(HostDriver(device))
pool.allocate(%d << 20, "job")
print("the job has", pool.device_bytes() >> 20, "MiB", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.02)
"""


class VllmNode(AgentNode):
    """``server``: one that runs already and is attached; else the agent starts its own."""

    def __init__(self, root: Path, engine: EngineUnderTest, model: Path, server: Spawned | None, **fields: Any) -> None:
        self.model, self.server, self.fields = model, server, fields
        super().__init__(root, [engine], [CAPACITY_MIB * MIB])

    def _engine(self, engine: EngineUnderTest) -> dict[str, Any]:
        if self.server is not None:
            (self.root / "device0").symlink_to(self.server.device.path)
        port = engine.port if self.server is None else self.server.port
        supervised = {
            "command": vllm_command(self.model, port),
            "env": {**ENVIRONMENT, "LULL_HOST_DEVICE": str(self.root / "device0")},
            "health_seconds_max": START_SECONDS_MAX,
        }
        return {
            "name": NAME,
            "kind": "vllm",
            "models": [NAME],
            "url": f"http://127.0.0.1:{port}",
            "device_indexes": [0],
            **(supervised if self.server is None else {}),
            "policy": {"when": "always", "settle_samples": 2, "canary": {"deadline_seconds": 60}, **engine.policy},
            **self.fields,
        }

    def device(self) -> HostDevice:
        return HostDevice.open(self.root / "device0")

    async def until_serving(self) -> None:
        keeper = self.keeper(NAME)
        await wait_until_async(lambda: keeper.verified, START_SECONDS_MAX, "vLLM is verified")
        await self.ready(NAME)


@asynccontextmanager
async def vllm_node(
    root: Path, model: Path, server: Spawned | None, policy: dict[str, Any] | None = None, **fields: Any
) -> AsyncIterator[VllmNode]:
    engine = EngineUnderTest(NAME, policy=policy or {}, attached=server is not None)
    node = VllmNode(root, engine, model, server, **fields)
    try:
        await node.start()
        await node.until_serving()
        yield node
    finally:
        await node.end_everything()


async def lend(node: VllmNode, go: Path) -> None:
    """Opens a loan and waits until its job has the memory that the engine gave."""
    job = node.job([sys.executable, "-c", JOB % JOB_MIB, str(go)], hbm_bytes=JOB_MIB * MIB)
    await node.open_loan(job)
    await node.until(lambda: b"the job has" in node.log_of(job.attempt_id), "the job has its memory", 120)
    assert node.state() is LoanState.LENT


async def ask(node: VllmNode, **more: Any) -> httpx.Response:
    body = {"model": NAME, "prompt": "Lull lends", "max_tokens": 16, "temperature": 0, **more}
    async with httpx.AsyncClient(timeout=300, trust_env=False) as client:
        return await client.post(f"http://127.0.0.1:{node.gateway_port}/v1/completions", json=body)


def text_of(reply: httpx.Response) -> str:
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


@pytest.mark.parametrize("level", [1, 2])
async def test_a_job_runs_in_the_memory_of_a_parked_vllm(
    tmp_path: Path, model: Path, vllm: Spawned, level: int
) -> None:
    policy = {"restore_modes": LOST} if level == 2 else {}
    more = {"vllm": {"reload": "reload_weights"}} if level == 2 else {}
    go = tmp_path / "go"
    async with vllm_node(tmp_path, model, vllm, policy, **more) as node:
        answer = text_of(await ask(node))
        in_flight = asyncio.create_task(ask(node, max_tokens=300, ignore_eos=True))
        await lend(node, go)
        drained = await asyncio.wait_for(in_flight, 60)
        assert drained.json()["usage"]["completion_tokens"] == 300, "drained, not cut off"
        assert vllm.held_mib() == 0
        assert node.device().free_bytes() <= (CAPACITY_MIB - JOB_MIB) * MIB
        if level == 2:  # the agent dies while the job runs, and another one goes on
            await node.crash()
            await node.start()
            await node.until(lambda: node.daemon is not None and "loan-1" in node.daemon.loans, "the loan goes on")
        held = asyncio.create_task(ask(node))
        go.touch()
        await node.until_closed("loan-1")
        await node.until_serving()
        assert text_of(await asyncio.wait_for(held, 60)) == answer, "held at the gate, then answered"
        assert text_of(await ask(node)) == answer
        assert vllm.held_mib() > KV_MIB
        assert "faulted" not in node.states()
        steps = node.steps()
        assert [steps.count(step) for step in (LoanStep.PARK_SENT, LoanStep.RESUME_SENT, LoanStep.VERIFIED)] == [
            1,
            1,
            1,
        ]


async def test_kv_cache_alone_makes_room_for_a_smaller_job(tmp_path: Path, model: Path, vllm: Spawned) -> None:
    async with vllm_node(tmp_path, model, vllm, {"restore_modes": {"kv_cache": "NONE"}}) as node:
        answer, whole_mib = text_of(await ask(node)), vllm.held_mib()
        await node.open_loan(node.job(["true"], hbm_bytes=(KV_MIB + 4) * MIB))
        await node.until_closed("loan-1")
        await node.until_serving()
        assert LoanStep.SPAWNED in node.steps(), node.last_reason()
        assert text_of(await ask(node)) == answer
        assert vllm.held_mib() == whole_mib


async def test_the_agent_starts_one_and_starts_it_again_when_it_dies_parked(tmp_path: Path, model: Path) -> None:
    go = tmp_path / "go"
    async with vllm_node(tmp_path, model, None) as node:
        answer, process = text_of(await ask(node)), node.keeper(NAME).process
        await lend(node, go)
        assert process is not None
        assert process.process is not None
        first = process.process.pid
        await process.stop(5)
        go.touch()
        await node.until(lambda: "faulted" in node.states(), "its death is seen", 120)
        await node.until_closed("loan-1", START_SECONDS_MAX)
        await node.until_serving()
        assert process.process.pid != first
        assert text_of(await ask(node)) == answer
