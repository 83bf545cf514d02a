"""A full disk, a gateway that cannot start, an engine that does not end: none of them takes the rest with it."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents import daemon as daemon_module
from lull.agents.engine_process import EngineWillNotDie
from lull.agents.gates.base import GateUnreachable
from lull.agents.processes import is_same
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import GateState
from tests.agent_node import MIB, AgentNode, EngineUnderTest, agent_node
from tests.small_disk import small_disk

WAITS = "import sys; print('up', flush=True); open(sys.argv[1]).read()"


def alerts(node: AgentNode) -> list[str]:
    return [alert["code"] for alert in node.reports("alert")]


async def test_a_full_disk_brings_the_engine_back_and_lends_no_more(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with small_disk(tmp_path / "agent", 8 * MIB) as disk:
        async with agent_node(tmp_path) as node:
            before = (await node.ask()).json()["choices"]
            job = node.job([sys.executable, "-c", WAITS, str(pipe)])
            await node.open_loan(job)
            await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
            await node.crash()
            disk.fill()
            await node.start()
            pipe.write_text("")
            await node.until_closed()
            end = node.attempt_end(job.attempt_id)
            assert end is not None
            assert (end["end"], end["exit_code"]) == ("exited", 0)
            await node.ready()
            assert (await node.ask()).json()["choices"] == before
            assert node.daemon is not None
            assert node.daemon.node.disk_is_short()
            await node.until(lambda: "disk_short" in alerts(node), "the alert")
            assert not node.reports("device_observed")
            await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=2)
            assert node.states("loan-2")[-1] == "closed", "refused at once"
            reason = node.last_reason("loan-2")
            assert reason is not None
            assert "disk" in reason["sentence"]
            disk.clear()
            await node.until(lambda: "disk_well" in alerts(node), "room again")
            assert not node.daemon.node.disk_is_short()
            await node.open_loan(node.job(["true"]), loan_id="loan-3", epoch=3)
            await node.until_closed("loan-3")
            assert "lent" in node.states("loan-3")


@pytest.mark.parametrize("at", [LoanStep.SETTLED, LoanStep.SPAWN_INTENT])
async def test_no_job_is_started_that_only_memory_knows_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: LoanStep
) -> None:
    async with agent_node(tmp_path) as node:
        assert node.daemon is not None
        journal = node.daemon.journal
        write_step = journal.write_step
        monkeypatch.setattr(journal, "mend", lambda: False)

        def fills_up(loan_id: str, step: LoanStep, **given: Any) -> None:
            write_step(loan_id, step, **given)
            if step is at:
                journal._file._go_on_in_memory(OSError("no space"))

        monkeypatch.setattr(journal, "write_step", fills_up)
        job = node.job([sys.executable, "-c", f"open({str(tmp_path / 'ran')!r}, 'w')"])
        await node.open_loan(job)
        await node.until_closed()
        assert journal.in_memory
        assert not (tmp_path / "ran").exists()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["reason"]["code"]) == ("not_started", "DiskReserve")
        await node.ready()
        assert (await node.ask()).status_code == 200


async def test_a_port_in_use_is_said_once_and_the_agent_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    node = AgentNode(tmp_path, [EngineUnderTest()], [16 * MIB])
    try:
        with socket.socket() as taken:
            taken.bind(("127.0.0.1", node.gateway_port))
            taken.listen()
            await node.start()
            await node.until(lambda: "gateway_down" in alerts(node), "the alert")
            assert node.daemon is not None
            gateway = node.daemon.gateway
            assert gateway.is_down
            assert not await gateway.ensure()
            assert alerts(node).count("gateway_down") == 1
            (line,) = [line for line in capsys.readouterr().out.splitlines() if "the gateway is down" in line]
            assert f"127.0.0.1:{node.gateway_port}" in line
            assert "the port is in use" in line
        await node.ready()
        assert not gateway.is_down
        assert (await node.ask()).status_code == 200
    finally:
        await node.end_everything()


async def test_a_gateway_that_hangs_at_the_start_does_not_end_the_agent(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        assert node.daemon is not None
        await node.stop()
        control = tmp_path / "agent" / "gateway.sock"
        kept = control.rename(control.with_suffix(".kept"))
        with socket.socket(socket.AF_UNIX) as silent:  # takes connections and never answers
            silent.bind(str(control))
            silent.listen()
            await node.start()
            await node.until(lambda: "gateway_down" in alerts(node), "the alert")
            control.unlink()
        kept.rename(control)
        await node.ready()
        assert (await node.ask()).status_code == 200


async def stopped(node: AgentNode, seconds: float = 40) -> None:
    assert node.daemon is not None
    assert node._task is not None
    node.keeper()
    node.daemon.stop_everything()
    await asyncio.wait_for(node._task, seconds)


async def test_a_stop_does_not_wait_long_for_an_engine_that_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(daemon_module, "_FAULTED_STOP_SECONDS", 0.5)
    engines = [EngineUnderTest("alpha", faults=["die-on-resume"]), EngineUnderTest("beta", devices=[1])]
    async with agent_node(tmp_path, *engines, capacities=[16 * MIB, 16 * MIB]) as node:
        alpha, beta = node.keeper("alpha"), node.keeper("beta")
        assert alpha.process is not None

        def refuses(policy: object) -> None:
            raise OSError("no such program")

        alpha.process.start = refuses  # type: ignore[method-assign,assignment]
        ran = beta.process_identity
        await node.open_loan(node.job(["true"]), engines=["alpha"])
        await node.until(lambda: node.state() is LoanState.FAULTED, "the engine is lost")
        gate, journal = beta.gate, node.daemon.journal  # type: ignore[union-attr]
        assert journal.open_loans()
        await stopped(node)
        assert ran is not None
        assert not is_same(ran)
        with pytest.raises(GateUnreachable):
            await gate.observe(beta.engine_id)
        node._forget_daemon()
        await node.start()  # an agent without that trouble ends the loan
        await node.until_closed()
        await node.ready()


async def test_an_engine_that_does_not_end_keeps_no_other_from_its_end(tmp_path: Path) -> None:
    engines = [EngineUnderTest("alpha"), EngineUnderTest("beta", devices=[1])]
    async with agent_node(tmp_path, *engines, capacities=[16 * MIB, 16 * MIB]) as node:
        alpha, beta = node.keeper("alpha"), node.keeper("beta")
        ran = beta.process_identity
        gate = beta.gate
        assert alpha.process is not None
        assert alpha.gate_state is GateState.OPEN

        async def will_not_die(seconds: float) -> None:
            raise EngineWillNotDie("pid 1 does not end")

        alpha.process.stop = will_not_die  # type: ignore[method-assign,assignment]
        await stopped(node)
        assert ran is not None
        assert not is_same(ran)
        assert alpha.process_identity is not None
        with pytest.raises(GateUnreachable):
            await gate.observe(beta.engine_id)
        node._forget_daemon()
