"""Whole loans behind a real HAProxy whose backup server is the node's gateway."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path
from typing import Any

import pytest

from lull.agents.gates.haproxy_socket import ServerState, server_states
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import GateState
from lull.vmm.reference_engine.witness import read_witness
from tests.agent_node import AgentNode
from tests.gates.haproxies import Haproxy
from tests.gates.nodes import haproxy_node
from tests.waiting import wait_until_async

WAITS_FOR_A_WORD = ["/bin/sh", "-c", 'echo up; read line < "$0"']
CLIENTS = 4


def server(haproxy: Haproxy) -> ServerState:
    (alpha, _lull) = server_states(haproxy.ask("show servers state llm"))
    return alpha


def alerts(node: AgentNode) -> list[str]:
    return [alert["code"] for alert in node.reports("alert")]


async def begin_job(node: AgentNode, pipe: Path, loan_id: str = "loan-1", epoch: int = 1) -> str:
    """A loan with a job that runs until somebody writes into the pipe."""
    if not pipe.exists():
        os.mkfifo(pipe)
    job = node.job([*WAITS_FOR_A_WORD, str(pipe)])
    await node.open_loan(job, loan_id=loan_id, epoch=epoch)
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
    return job.attempt_id


async def test_no_request_is_lost_and_none_reaches_the_parked_engine(tmp_path: Path, sockets: Path) -> None:
    async with haproxy_node(tmp_path, sockets) as (node, haproxy):
        stop = asyncio.Event()
        statuses: list[int] = []

        async def client() -> None:
            while not stop.is_set():
                statuses.append((await node.ask(port=haproxy.port)).status_code)

        clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
        await wait_until_async(lambda: len(statuses) >= CLIENTS, 20, "requests are answered")
        await begin_job(node, tmp_path / "pipe")
        keeper = node.keeper()
        assert server(haproxy).is_in_maintenance
        seen = await keeper.gate.observe(keeper.engine_id)
        assert seen.state is GateState.CLOSED

        async def all_held() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).held == CLIENTS

        await wait_until_async(all_held, 20, "every client waits at the gateway")
        answered = len(statuses)
        (tmp_path / "pipe").write_text("go\n")
        await node.until_closed()
        assert server(haproxy).is_open
        await wait_until_async(lambda: len(statuses) >= answered + 2 * CLIENTS, 20, "they are answered")
        stop.set()
        await asyncio.gather(*clients)
        assert set(statuses) == {200}
        counts = read_witness(node.witness_path("alpha"))
        assert counts.while_not_running == 0
        assert node.steps().count(LoanStep.PARK_SENT) == 1


async def test_a_haproxy_that_forgets_is_told_again_at_once(tmp_path: Path, sockets: Path) -> None:
    async with haproxy_node(tmp_path, sockets) as (node, haproxy):
        await begin_job(node, tmp_path / "pipe")
        haproxy.restart()
        await wait_until_async(lambda: server(haproxy).is_closed, 10, "the server is closed again")
        assert "gate_opened_by_itself" in alerts(node)
        assert node.state() is LoanState.LENT
        (tmp_path / "pipe").write_text("go\n")
        await node.until_closed()
        assert server(haproxy).is_open
        assert (await node.ask(port=haproxy.port)).status_code == 200


@pytest.mark.long
async def test_the_next_agent_keeps_closed_what_the_last_one_closed(tmp_path: Path, sockets: Path) -> None:
    async with haproxy_node(tmp_path, sockets) as (node, haproxy):
        await begin_job(node, tmp_path / "pipe")
        await node.crash()
        assert server(haproxy).is_closed  # losing the agent opens nothing
        haproxy.restart()
        await node.start()
        await wait_until_async(lambda: server(haproxy).is_closed, 10, "the server is closed again")
        (tmp_path / "pipe").write_text("go\n")
        await node.until_closed()
        assert server(haproxy).is_open
        assert (await node.ask(port=haproxy.port)).status_code == 200
        await node.crash()
        assert server(haproxy).is_open  # and closes nothing
        await node.start()
        await node.ready()


@pytest.mark.long
@pytest.mark.parametrize(
    "after",
    [
        LoanStep.GATE_CLOSING,
        LoanStep.GATE_CLOSED,
        LoanStep.IN_FLIGHT_ZERO,
        LoanStep.PARK_SENT,
        LoanStep.SETTLED,
        LoanStep.RESUME_SENT,
        LoanStep.VERIFIED,
        LoanStep.GATE_OPENING,
        LoanStep.GATE_OPENED,
    ],
)
@pytest.mark.parametrize("restarts", [False, True])
async def test_an_agent_that_dies_right_after_a_step(
    tmp_path: Path, sockets: Path, after: LoanStep, restarts: bool
) -> None:
    """Its HAProxy stays as it was, or is restarted while there is no agent: the end is the same."""
    async with haproxy_node(tmp_path, sockets) as (node, haproxy):
        assert node.daemon is not None
        journal = node.daemon.journal
        write_step = journal.write_step
        died: list[LoanStep] = []

        def dies_after(loan_id: str, step: LoanStep, **given: Any) -> None:
            write_step(loan_id, step, **given)
            if step is after and not died:
                died.append(step)
                raise asyncio.CancelledError  # nothing more is done by whoever took the step

        journal.write_step = dies_after  # type: ignore[method-assign,assignment]
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: died, f"the step {after}")
        await node.crash()
        if restarts:
            haproxy.restart()
        await node.start()
        await node.until_closed()
        await node.ready()
        assert server(haproxy).is_open
        assert (await node.ask(port=haproxy.port)).status_code == 200
        assert node.steps().count(LoanStep.PARK_SENT) <= 1
        assert read_witness(node.witness_path("alpha")).while_not_running == 0


@pytest.mark.long
async def test_without_its_haproxy_an_engine_is_not_lent_and_opens_when_that_is_back(
    tmp_path: Path, sockets: Path
) -> None:
    async with haproxy_node(tmp_path, sockets) as (node, haproxy):
        first = node.keeper().incarnation
        haproxy.stop()
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert LoanStep.PARK_SENT not in node.steps()
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "GateUnreachable"
        haproxy.start()
        await begin_job(node, tmp_path / "pipe", "loan-2", 2)
        haproxy.stop()
        await wait_until_async(lambda: "gate_unreachable" in alerts(node), 10, "the operator is told")
        (tmp_path / "pipe").write_text("go\n")
        await node.until(lambda: LoanStep.GATE_OPENING in node.steps("loan-2"), "the engine is right again")
        await wait_until_async(lambda: "gate_not_opened" in alerts(node), 10, "the operator is told")
        assert node.state("loan-2") is not LoanState.CLOSED
        haproxy.start()
        await node.until_closed("loan-2")
        assert server(haproxy).is_open
        assert node.keeper().incarnation == first
        assert (await node.ask(port=haproxy.port)).status_code == 200


@pytest.mark.long
async def test_a_haproxy_whose_own_checks_say_no_is_not_taken_for_open(tmp_path: Path, sockets: Path) -> None:
    """The operator's check asks for what the engine never answers with 200: its word stands against the canary's."""
    line: dict[str, Any] = {"server": "check inter 50ms fall 1 rise 1", "backend": "option httpchk GET /nothing"}
    async with haproxy_node(tmp_path, sockets, call_seconds_max=0.5) as (node, haproxy):
        haproxy.stop()
        other = Haproxy(sockets, haproxy.port, node.engines[0].port, backup_port=node.gateway_port, **line).start()
        try:
            keeper = node.keeper()

            async def unknown() -> bool:
                return (await keeper.gate.observe(keeper.engine_id)).state is GateState.UNKNOWN

            await wait_until_async(unknown, 10, "the gate is not known to be open")
            assert (await node.ask(port=other.port)).status_code == 200  # by way of the gateway
        finally:
            other.stop()
        haproxy = Haproxy(sockets, haproxy.port, node.engines[0].port, backup_port=node.gateway_port).start()
        try:
            await node.ready()
        finally:
            haproxy.stop()
