"""An agent with a memory service: the weights outlive engine, agent and loan, and a loan really frees the device."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.processes import identity, send_signal, wait_exited
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import EngineState, StopAttempt
from lull.agents.settings import MEMORY_SERVICE_FLAGS
from lull.vmm.service.client import read_events, read_state
from tests.agent_node import MIB, AgentNode, EngineUnderTest, agent_node
from tests.integration.agents.test_loan import FILL, STATES, WAITS


def socket_of(node: AgentNode) -> Path:
    assert node.daemon is not None
    return node.daemon.memory_services[0].socket


def pool_of(node: AgentNode) -> dict[str, Any]:
    (pool,) = read_state(socket_of(node))["pools"]
    return pool


def engine_log(node: AgentNode) -> str:
    return (node.root / "agent" / "engines" / "alpha" / "engine.log").read_text()


async def test_weights_in_the_service_are_lent_and_outlive_an_engine_that_is_killed_while_parked(
    tmp_path: Path,
) -> None:
    async with agent_node(tmp_path, EngineUnderTest(extra=[MEMORY_SERVICE_FLAGS]), capacities=[8 * MIB]) as node:
        keeper = node.keeper()
        before = await node.ask()
        assert before.status_code == 200
        facts = (await node.daemon.node.look())[node.device_ids[0]]  # type: ignore[union-attr]
        assert facts.used_bytes == 6 * MIB, "weights once, though service and engine both hold them"
        assert keeper.footprint == {node.device_ids[0]: 6 * MIB}

        # Lent and woken: what the job takes is more than is free beside the weights.
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=6 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        assert node.states() == STATES
        assert node.log_of(job.attempt_id) == b"6291456\n"
        assert (await node.ask()).json()["choices"] == before.json()["choices"]

        # Killed while parked: the next engine finds the weights in the service and loads nothing.
        waiting = node.job(WAITS, hbm_bytes=6 * MIB)
        await node.open_loan(waiting, loan_id="loan-2", epoch=2)
        await node.until(lambda: node.log_of(waiting.attempt_id) == b"up\n", "the job runs")
        assert pool_of(node)["state"] == "parked"
        process = keeper.process_identity
        assert process is not None
        send_signal(process, signal.SIGKILL)
        await node.until(lambda: keeper.state is EngineState.GONE, "the engine's death seen")
        await node.order(StopAttempt(attempt_id=waiting.attempt_id))
        await node.until_closed("loan-2")
        assert (await node.ask()).json()["choices"] == before.json()["choices"]
        assert '"weights": "loaded"' in engine_log(node).splitlines()[0]
        assert '"weights": "attached"' in engine_log(node).splitlines()[-1]

        # The next agent takes the service over; what is stopped ends.
        pid = read_state(socket_of(node))["pid"]
        await node.stop()
        await node.start()
        await node.ready()
        assert read_state(socket_of(node))["pid"] == pid
        assert node.daemon is not None
        service = identity(pid)
        assert service is not None
        node.daemon.stop_everything()
        await node.until(lambda: not os.path.exists(f"/proc/{process.pid}"), "the engine gone")
        assert await wait_exited(service, 30)


@pytest.mark.long
async def test_a_service_that_dies_is_started_again_and_gets_the_weights_from_the_engine(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(extra=[MEMORY_SERVICE_FLAGS]), capacities=[8 * MIB]) as node:
        before = await node.ask()
        pid = int(read_state(socket_of(node))["pid"])
        killed = identity(pid)
        assert killed is not None
        send_signal(killed, signal.SIGKILL)
        assert node.daemon is not None
        service = node.daemon.memory_services[0]
        await node.until(lambda: service.restarts == 1 and service.pids(), "another service")
        assert (await node.ask()).json()["choices"] == before.json()["choices"]
        assert [one["code"] for one in node.reports("alert")] == ["memory_service_restarted"]
        job = node.job([sys.executable, "-c", FILL], hbm_bytes=6 * MIB)
        await node.open_loan(job)
        await node.until_closed()
        assert LoanStep.SPAWNED in node.steps()
        assert (await node.ask()).json()["choices"] == before.json()["choices"]
        kinds = [event["kind"] for event in read_events(socket_of(node))]
        assert kinds[:3] == ["writer_connected", "committed", "user_parked"]

        # Killed while it runs: the weights are on the device still, and room is asked for what is not.
        keeper = node.keeper()
        process = keeper.process_identity
        assert process is not None
        send_signal(process, signal.SIGKILL)
        await node.until(lambda: keeper.process_identity not in (None, process) and keeper.verified, "another engine")
        assert (await node.ask()).json()["choices"] == before.json()["choices"]
        assert '"weights": "attached"' in engine_log(node).splitlines()[-1]
