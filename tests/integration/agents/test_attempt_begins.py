"""Between the intent to start a job and its start: whatever fails there, the job runs once, after a proof, or never."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.agents import attempts, loan_work
from lull.agents.loan import Loan
from lull.agents.protocol.loans import LoanEvent, LoanState, LoanStep
from lull.agents.protocol.wire import LOAN_OVER, AttemptSpec, StartAttempt, StopAttempt
from lull.vmm import HostDevice, HostDriver, Pool
from tests.agent_node import MIB, AgentNode, agent_node


def at_intent(node: AgentNode, act: Callable[[], object]) -> list[LoanStep]:
    """Calls ``act`` once, right after the intent is written. What is returned is filled then."""
    assert node.daemon is not None
    journal = node.daemon.journal
    write_step = journal.write_step
    seen: list[LoanStep] = []

    def acts(loan_id: str, step: LoanStep, **given: object) -> None:
        write_step(loan_id, step, **given)  # type: ignore[arg-type]
        if step is LoanStep.SPAWN_INTENT and not seen:
            seen.append(step)
            act()

    journal.write_step = acts  # type: ignore[method-assign,assignment]
    return seen


def dies() -> None:
    raise asyncio.CancelledError  # nothing more is done by whoever took the step


def marks(tmp_path: Path) -> list[str]:
    return [sys.executable, "-c", f"open({str(tmp_path / 'runs')!r}, 'a').write('ran\\n')"]


async def dead_before_go(node: AgentNode, job: AttemptSpec) -> None:
    died = at_intent(node, dies)
    await node.open_loan(job)
    await node.until(lambda: died, "the intent")


async def test_memory_that_is_gone_by_the_next_agent_is_asked_for_anew(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(marks(tmp_path), hbm_bytes=8 * MIB)
        await dead_before_go(node, job)
        await node.crash()
        pool = Pool(HostDriver(HostDevice.open(tmp_path / "device0")))
        block = pool.allocate(14 * MIB, "stranger")
        await node.start()
        end = await node.until(lambda: node.attempt_end(job.attempt_id), "the end")
        pool.free(block)
        assert not (tmp_path / "runs").exists()
        assert (end["end"], end["reason"]["code"]) in [
            ("not_started", "HBMNotFreed"),
            ("not_started", "ForeignProcess"),
        ]
        await node.until_closed()


async def test_a_job_that_was_cancelled_before_go_is_not_started_by_the_next_agent(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(marks(tmp_path))
        await dead_before_go(node, job)
        await node.order(StopAttempt(attempt_id=job.attempt_id))
        await node.crash()
        await node.start()
        end = await node.until(lambda: node.attempt_end(job.attempt_id), "the end")
        assert not (tmp_path / "runs").exists()
        assert (end["end"], end["started_at"]) == ("cancelled", None)
        await node.until_closed()


async def test_a_go_that_found_no_runner_is_said_again(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job(marks(tmp_path))
        control = tmp_path / "agent" / "attempts" / job.attempt_id / "control.sock"
        away = control.with_suffix(".away")
        acted = at_intent(node, lambda: control.rename(away))
        await node.open_loan(job)
        await node.until(lambda: acted, "the intent")
        away.rename(control)
        await node.until_closed(seconds=30)
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert (tmp_path / "runs").read_text() == "ran\n"
        assert LoanStep.SPAWNED in node.steps()


async def test_a_job_whose_runner_answers_late_is_told_as_running(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with agent_node(tmp_path) as node:
        job = node.job([*marks(tmp_path)[:2], f"{marks(tmp_path)[2]}; open({str(pipe)!r}).read()"])
        identity = tmp_path / "agent" / "attempts" / job.attempt_id / "identity.json"
        gone_silent: list[str] = []

        def stop_runner() -> None:
            monkeypatch.setattr(attempts, "_ANSWER_SECONDS_MAX", 0.1)
            os.kill(json.loads(identity.read_text())["pid"], signal.SIGSTOP)

        class Silent(attempts.RunnerSilent):
            def __init__(self, text: str) -> None:
                super().__init__(text)
                gone_silent.append(text)

        monkeypatch.setattr(attempts, "RunnerSilent", Silent)
        at_intent(node, stop_runner)
        await node.open_loan(job)
        await node.until(lambda: gone_silent, "no answer to go")
        monkeypatch.setattr(attempts, "_ANSWER_SECONDS_MAX", 10.0)
        os.kill(json.loads(identity.read_text())["pid"], signal.SIGCONT)
        await node.until(lambda: LoanStep.SPAWNED in node.steps(), "the job is told as running", 30)
        states = [one["state"] for one in node.reports("attempt_changed") if one["attempt_id"] == job.attempt_id]
        assert states == ["running"]
        pipe.write_text("")
        await node.until_closed()
        assert (tmp_path / "runs").read_text() == "ran\n"


async def test_an_idle_loan_ends_however_often_it_is_looked_at(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loan_work, "_LOOK_SECONDS_MAX", 0.1)
    async with agent_node(tmp_path, loan_idle_seconds_max=0.5) as node:
        assert node.daemon is not None
        node.daemon.node.connected = asyncio.Event()
        node.daemon.node.connected.set()
        await node.open_loan(node.job(["true"]), expects_more=True)
        await node.until_closed(seconds=30)


async def test_an_attempt_that_comes_just_as_the_work_ends_is_told_that_the_loan_is_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    until_over = loan_work._until_over
    late: list[AttemptSpec] = []

    async with agent_node(tmp_path) as node:

        async def just_over(loan: Loan) -> LoanEvent:
            event = await until_over(loan)
            assert loan.state is LoanState.LENT
            late.append(node.job(marks(tmp_path)))
            await node.order(StartAttempt(loan_id=loan.loan_id, attempt=late[0]))
            return event

        monkeypatch.setattr(loan_work, "_until_over", just_over)
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        end = node.attempt_end(late[0].attempt_id)
        assert end is not None
        assert (end["end"], end["reason"]["code"]) == ("not_started", LOAN_OVER)
        assert not (tmp_path / "runs").exists()
