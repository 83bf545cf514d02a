"""Trial parks that do not go as they should: an agent that dies, a wrong answer, strangers on the device."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.plans import Plan, way_in
from lull.agents.protocol.wire import EngineState, GateState, Reason
from lull.vmm import HostDevice, HostDriver, Pool
from lull.vmm.tags import RestoreMode
from tests.engines.engine_loans import answer_of
from tests.engines.spawned import MIB, ROOT
from tests.engines.stand_in_node import StandInNode, StandInUnderTest
from tests.gates.webhook_server import SECRET, WebhookServer

KV = {"kv_cache": RestoreMode.NONE}
WHOLE = {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
KV_RELEASE = "POST /release_kv_cache_memory"
NO_REASON = Reason(code="None", sentence="")
WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


@asynccontextmanager
async def node_of(
    root: Path,
    *faults: str,
    trial: bool = True,
    settings: dict[str, Any] | None = None,
    policy: dict[str, Any] | None = None,
) -> AsyncIterator[StandInNode]:
    """Made, not started: a vLLM with 4 MiB of weights and 2 MiB of KV cache."""
    engine = StandInUnderTest(
        kind="vllm",
        script="vllm_server.py",
        flags=["--enable-sleep-mode", "--version", "0.33.0"],
        faults=list(faults),
        settings={
            "trial_park": trial,
            "env": {"VLLM_SERVER_DEV_MODE": "1", "PYTHONPATH": str(ROOT)},
            **(settings or {}),
        },
        policy={"restore_modes": {tag: str(mode) for tag, mode in WHOLE.items()}, **(policy or {})},
    )
    node = StandInNode(root, [engine], [16 * MIB])
    try:
        yield node
    finally:
        await node.end_everything()


def alerts(node: StandInNode, code: str) -> list[str]:
    return [alert["sentence"] for alert in node.reports("alert") if alert["code"] == code]


async def test_an_agent_that_dies_in_the_middle_leaves_an_engine_that_is_woken_and_tried_again(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        await node.start()
        await node.until(lambda: KV_RELEASE in node.calls(), "the KV cache is parked for a trial")
        process = node.keeper().incarnation
        assert node.keeper().gate_state is not GateState.OPEN
        await node.crash()
        held = asyncio.create_task(node.ask())
        await node.start()
        await node.ready()
        assert (await held).status_code == 200, "it waited at the gate, which was not open before"
        assert node.keeper().incarnation == process
        learned = node.keeper().changed().learned
        assert learned is not None
        (device,) = node.device_ids
        for modes, freed in ((KV, 2 * MIB), (WHOLE, 6 * MIB)):
            way = way_in(learned, modes)
            assert way is not None
            assert way.freed_bytes == {device: freed}
            assert way.trouble is None

        # A loan by such a plan, and the agent dies again: the plan is in the journal with the loan.
        answer = await answer_of(node)
        job = node.job(WAITS, hbm_bytes=12 * MIB)
        await node.open_loan(job, plans={"alpha": Plan(modes=KV, whole=False, freed_bytes={device: 2 * MIB})})
        await node.until(lambda: LoanStep.SPAWNED in node.steps(), "the job runs")
        await node.crash()
        await node.start()
        await node.until(lambda: node.steps().count(LoanStep.SPAWNED) == 2, "the job is adopted")
        keeper = node.keeper()
        assert keeper.bytes_on(await keeper.node.look()) == {device: 4 * MIB}, "the weights are on the device"
        assert node.loan().policy_of(keeper).restore_modes == KV
        node.loan().recall("test")
        await node.until_closed()
        assert "faulted" not in node.states()
        assert node.keeper().incarnation == process
        await node.ready()
        assert await answer_of(node) == answer


@pytest.mark.long
async def test_an_engine_that_wakes_wrong_is_started_anew_and_that_way_is_left_alone_until_an_operator_says_so(
    tmp_path: Path,
) -> None:
    async with node_of(tmp_path, "garbage") as node:
        await node.start()
        await node.ready()
        report = node.keeper().changed()
        assert (report.state, report.gate) == (EngineState.RUNNING, GateState.OPEN)
        assert report.learned is not None
        for modes in (KV, WHOLE):
            way = way_in(report.learned, modes)
            assert way is not None
            assert "answers text" in (way.trouble or "")
        assert len(alerts(node, "trial_failed")) == 2
        assert node.calls().count(KV_RELEASE) == 1

        node.set_faults()
        first = node.keeper().incarnation
        node.keeper().want_restart()
        await node.until(lambda: node.keeper().incarnation not in (first, None), "the operator's restart")
        await node.ready()
        ways = node.keeper().parks.learned().ways
        assert [(way.trouble, way.parks) for way in ways] == [(None, 1), (None, 1)]


async def test_a_trial_in_which_nothing_became_free_teaches_nothing_and_is_tried_again(tmp_path: Path) -> None:
    async with node_of(tmp_path, "frees_nothing", policy={"settle_seconds_max": 0.5}) as node:
        await node.start()
        await node.ready()
        report = node.keeper().changed()
        assert report.learned is not None
        assert way_in(report.learned, WHOLE) is None
        assert report.residual_bytes == {}, "its next park may free all of it"
        told = alerts(node, "trial_failed")
        assert ["showed nothing" in sentence for sentence in told] == [True, True], "once for each way"

        node.set_faults()
        first = node.keeper().incarnation
        node.keeper().want_restart()
        await node.until(lambda: node.keeper().incarnation not in (first, None), "another process")
        await node.ready()
        (device,) = node.device_ids
        assert node.keeper().parks.freed_bytes(WHOLE) == {device: 6 * MIB}


async def test_a_key_that_is_gone_says_nothing_about_the_way_that_is_tried(tmp_path: Path) -> None:
    key = tmp_path / "api.key"
    key.write_text("any")
    slow = {"settle_samples": 8, "settle_seconds_max": 20}  # 2 s in which the key goes
    async with node_of(tmp_path, settings={"api_key_file": key}, policy=slow) as node:
        await node.start()
        await node.until(lambda: KV_RELEASE in node.calls(), "the KV cache is parked for a trial")
        first = node.keeper().incarnation
        key.unlink()
        said = "could not be asked the canary"
        await node.until(lambda: said in (node.keeper().reason or NO_REASON).sentence, "no key to ask with")
        assert node.keeper().gate_state is GateState.CLOSED
        key.write_text("any")
        await node.ready()
        assert node.keeper().incarnation == first
        assert [way.trouble for way in node.keeper().parks.learned().ways] == [None, None]
        assert alerts(node, "trial_failed") == []


async def test_nothing_is_tried_while_a_request_is_in_flight(tmp_path: Path) -> None:
    server = await WebhookServer().start()
    (tmp_path / "secret").write_bytes(SECRET)
    gate = {
        "gate_kind": "webhook",
        "webhook": {
            "url": f"http://127.0.0.1:{server.port}/",
            "secret_file": tmp_path / "secret",
            "allow": ["127.0.0.0/8"],
        },
    }
    server.in_flight = 3
    try:
        async with node_of(tmp_path, settings=gate, policy={"drain_seconds_max": 1}) as node:
            await node.start()
            await node.ready()
            assert KV_RELEASE not in node.calls()
            (sentence,) = alerts(node, "trial_not_now")
            assert "3 requests did not end within 1 s" in sentence
            server.in_flight = 0
            node.keeper().want_restart()
            await node.until(lambda: node.calls().count(KV_RELEASE) == 1, "it is tried")
            await node.ready()
    finally:
        await server.stop()


async def test_nothing_is_tried_beside_strangers_or_where_nobody_asked_for_it(tmp_path: Path) -> None:
    async with node_of(tmp_path) as node:
        device = HostDevice.create(tmp_path / "device0", capacity_bytes=16 * MIB)
        pool = Pool(HostDriver(device))
        block = pool.allocate(2 * MIB, "stranger")
        await node.start()
        await node.ready()
        assert KV_RELEASE not in node.calls()
        [sentence] = alerts(node, "trial_not_now")
        assert "which are not ours" in sentence
        pool.free(block)
        assert node.keeper().changed().learned == node.keeper().parks.learned()
        assert node.keeper().parks.learned().ways == []
    (tmp_path / "more").mkdir()
    async with node_of(tmp_path / "more", trial=False) as node:
        await node.start()
        await node.ready()
        assert KV_RELEASE not in node.calls()
        assert alerts(node, "trial_not_now") == []
