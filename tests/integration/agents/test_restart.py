"""The agent dies, the gateway dies, engines die with no loan about: everything is found again and goes on."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from lull.agents.daemon import Daemon
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineChanged, EngineState, GateState, RestartEngine, SetPolicy, StopAttempt
from tests.agent_node import EngineUnderTest, agent_node
from tests.waiting import wait_until

TELLS = """
import sys
print('up', flush=True)
open(sys.argv[1]).read()
print('down', flush=True)
raise SystemExit(3)
"""


async def test_a_killed_agent_s_job_goes_on_and_is_adopted(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        engine = node.keeper().incarnation
        job = node.job([sys.executable, "-c", TELLS, str(pipe)])
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        await node.crash()
        # With no agent in sight the job ends.
        pipe.write_text("")
        wait_until(
            lambda: (tmp_path / "agent" / "attempts" / job.attempt_id / "exit.json").exists(), 20, "the exit record"
        )
        await node.start()
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 3)
        assert node.log_of(job.attempt_id) == b"up\ndown\n"
        assert node.steps().count(LoanStep.SPAWN_INTENT) == 1
        assert node.steps().count(LoanStep.PARK_SENT) == 1
        assert node.keeper().incarnation == engine
        assert (await node.ask()).json()["choices"] == before


@pytest.mark.parametrize(
    "after",
    [
        LoanStep.GATE_CLOSING,
        LoanStep.GATE_CLOSED,
        LoanStep.IN_FLIGHT_ZERO,
        LoanStep.PARK_SENT,
        LoanStep.PARKED_SEEN,
        LoanStep.SETTLED,
        LoanStep.SPAWN_INTENT,
        LoanStep.SPAWNED,
        LoanStep.EXIT_RECORDED,
        LoanStep.ROOM_PROVED,
        LoanStep.RESUME_SENT,
        LoanStep.RUNNING_SEEN,
        LoanStep.VERIFIED,
        LoanStep.GATE_OPENING,
        LoanStep.GATE_OPENED,
    ],
)
async def test_an_agent_that_dies_right_after_a_step(tmp_path: Path, after: LoanStep) -> None:
    """Every step of one loan: the next agent brings the engine back, and no attempt is started twice."""
    runs = tmp_path / "runs"
    script = f"open({str(runs)!r}, 'a').write('ran\\n')"
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        assert node.daemon is not None
        journal = node.daemon.journal
        write_step = journal.write_step
        died: list[LoanStep] = []

        def dies_after(loan_id: str, step: LoanStep, **given: object) -> None:
            write_step(loan_id, step, **given)  # type: ignore[arg-type]
            if step is after and not died:
                died.append(step)
                raise asyncio.CancelledError  # nothing more is done by whoever took the step

        journal.write_step = dies_after  # type: ignore[method-assign,assignment]
        job = node.job([sys.executable, "-c", script])
        await node.open_loan(job)
        await node.until(lambda: died, f"the step {after}")
        await node.crash()
        await node.start()
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        ran = runs.read_text().count("ran") if runs.exists() else 0
        assert ran == (1 if end["end"] == "exited" else 0), end
        if after is LoanStep.PARK_SENT:  # and before the call
            reason = node.last_reason()
            assert reason is not None
            assert "did not park: the agent that asked it ended before its answer came" in reason["sentence"]
        await node.ready()
        assert (await node.ask()).json()["choices"] == before
        assert all(line["state"] == "running" for line in node.witness())


async def test_an_idle_engine_is_adopted_with_its_gate_as_it_was(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        first = node.keeper().incarnation
        await node.stop()
        assert (await node.ask()).status_code == 200, "traffic goes on without an agent"
        await node.start()
        await node.ready()
        assert node.keeper().incarnation == first


async def test_an_engine_that_lives_is_never_told_as_gone_by_a_new_agent(tmp_path: Path) -> None:
    """Neither by its registration nor by a report, idle or in the middle of a loan that nobody else touches."""
    async with agent_node(tmp_path) as node:
        await node.stop()
        new = Daemon(node.settings)
        try:
            new.keepers[(await _told(new)).engine_id].report()
            told = await _told(new)
            assert (told.state, told.gate, told.verified) == (EngineState.RUNNING, GateState.OPEN, True)
            assert told.device_bytes[new.keepers[told.engine_id].device_ids[0]] > 0
            await new.keepers[told.engine_id].adapter.park(EnginePolicy(), 20)
        finally:
            await _let_go(new)
        new = Daemon(node.settings)
        try:
            before = len(_reported(new))
            for keeper in new.keepers.values():
                keeper.report()
            assert len(_reported(new)) == before, "nobody has looked yet"
            told = await _told(new)
            assert (told.state, told.verified) == (EngineState.PARKED, False)
        finally:
            await _let_go(new)
        await node.start()
        await node.ready()
        assert "gone" not in [one["state"] for one in node.reports("engine_changed")]


async def _told(daemon: Daemon) -> EngineChanged:
    for keeper in daemon.keepers.values():
        if keeper.process is not None:
            keeper.process.adopt()
    [declared] = (await daemon._make_register()).engines
    return declared.engine


def _reported(daemon: Daemon) -> list[object]:
    return [one for one in daemon.journal.unsent(100_000) if one["report"]["kind"] == "engine_changed"]


async def _let_go(daemon: Daemon) -> None:
    """As when its process ends: nothing was started in it."""
    await daemon.upstream.aclose()
    daemon.node.spares.close()
    daemon.journal.close()
    daemon._lock.release()


async def test_an_engine_that_dies_is_restarted_behind_a_closed_gate(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        keeper = node.keeper()
        first = keeper.incarnation
        assert keeper.process_identity is not None
        os.kill(keeper.process_identity.pid, signal.SIGKILL)
        await node.until(lambda: keeper.incarnation not in (first, None), "a new process")
        await node.ready()
        assert (await node.ask()).json()["choices"] == before


async def test_a_gateway_that_dies_comes_back_closed_and_is_opened_for_the_same_process(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        info = await node.daemon.gateway_gate.info()  # type: ignore[union-attr]
        os.kill(info.pid, signal.SIGKILL)

        async def open_again() -> bool:
            try:
                found = await node.daemon.gateway_gate.info()  # type: ignore[union-attr]
                return found.pid != info.pid and (await keeper.gate.observe(keeper.engine_id)).state is GateState.OPEN
            except Exception:
                return False

        await node.until(open_again, "a new gateway with the gate open")
        assert (await node.ask()).status_code == 200


async def test_an_engine_found_parked_without_a_loan_is_resumed(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        await keeper.adapter.park(keeper.policy, 10)
        await node.until(
            lambda: "engine_not_running" in [alert["code"] for alert in node.reports("alert")], "the alert"
        )
        await node.ready()
        assert (await keeper.adapter.observe()).state is EngineState.RUNNING
        assert (await node.ask()).status_code == 200


async def test_other_restore_modes_restart_the_engine_when_it_is_free(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        wanted = EnginePolicy.model_validate(
            {**keeper.policy.model_dump(), "restore_modes": {"model_weights": "PINNED", "kv_cache": "CPU"}}
        )
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=wanted))
        await node.until(lambda: keeper.incarnation not in (first, None), "a new process")
        await node.ready()
        assert keeper.modes_in_effect() == {"model_weights": "PINNED", "kv_cache": "CPU"}
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=1, policy=EnginePolicy()))
        assert [a["outcome"] for a in node.reports("order_answer")] == ["accepted", "refused"]
        assert keeper.policy == wanted


async def test_an_operator_s_restart_goes_through_the_gate(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        first = keeper.incarnation
        await node.order(RestartEngine(engine_id=keeper.engine_id))
        await node.until(lambda: keeper.incarnation not in (first, None), "a new process")
        await node.ready()
        assert (await node.ask()).status_code == 200


async def test_an_agent_that_stops_breaks_off_a_draining_loan(tmp_path: Path) -> None:
    engine = EngineUnderTest(extra=["--token-delay", "0.4"], policy={"canary": {"tokens": 1}})
    async with agent_node(tmp_path, engine) as node:
        slow = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def in_flight() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).in_flight == 1

        await node.until(in_flight, "the request is in flight")
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: LoanStep.GATE_CLOSED in node.steps(), "the gate is closed")
        gate = keeper.gate
        await node.stop()
        assert (await gate.observe(keeper.engine_id)).state is GateState.OPEN
        assert (await slow).status_code == 200
        await node.start()
        assert node.state() is LoanState.CLOSED


async def test_an_order_acts_once(tmp_path: Path) -> None:
    from lull.agents.protocol.wire import OrderEnvelope

    async with agent_node(tmp_path) as node:
        job = node.job(["true"])
        await node.open_loan(job)
        await node.until_closed()
        assert node.daemon is not None
        seen = len(node.reports("order_answer"))
        await node.daemon.orders.take(OrderEnvelope(seq=1, term=1, order=StopAttempt(attempt_id=job.attempt_id)))
        assert len(node.reports("order_answer")) == seen, "an order that was answered before has no effect"
        await node.daemon.orders.take(OrderEnvelope(seq=9, term=0, order=StopAttempt(attempt_id=job.attempt_id)))
        assert node.reports("order_answer")[-1]["outcome"] == "stale"
        await node.daemon.orders.take(OrderEnvelope.model_validate({"seq": 10, "term": 1, "order": {"kind": "dance"}}))
        assert node.reports("order_answer")[-1]["outcome"] == "unsupported"
        await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=0)
        assert node.reports("loan_changed")[-1]["state"] == "closed"
        assert "epoch 0" in node.reports("loan_changed")[-1]["reason"]["sentence"]
