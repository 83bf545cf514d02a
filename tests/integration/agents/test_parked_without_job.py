"""An engine sleeps without a job, on real memory, with no scheduler in sight: what wakes it, what it answers then."""

from __future__ import annotations

import asyncio
import os
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.journal import boottime
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.wire import AttemptSpec, OpenLoan, RecallLoan, SetRestoreBy, StartAttempt, WithoutJob
from tests.agent_node import AgentNode, EngineUnderTest, agent_node

STATES = ["draining", "parking", "settling", "lent", "recalling", "waking", "verifying", "closed"]


def sleeper(**policy: Any) -> EngineUnderTest:
    """On a machine that is busy with other tests a look at all processes may take its time."""
    return EngineUnderTest(policy={"settle_seconds_max": 30, **policy})


async def park(
    node: AgentNode, *, loan_id: str = "loan-1", epoch: int = 1, engines: list[str] | None = None, **terms: Any
) -> None:
    """As the scheduler orders it."""
    without_job = WithoutJob(**terms)
    keepers = [node.keeper(name) for name in engines or [engine.name for engine in node.engines]]
    order = OpenLoan(
        loan_id=loan_id,
        epoch=epoch,
        device_ids=sorted({device for keeper in keepers for device in keeper.device_ids}),
        engine_ids=[keeper.engine_id for keeper in keepers],
        need_bytes=0,
        restore_by_seconds=min(600.0, without_job.until_seconds or 600.0),
        policies={keeper.engine_id: keeper.policy for keeper in keepers},
        attempts=[],
        expects_more=False,
        without_job=without_job,
    )
    await node.order(order)


async def asleep(node: AgentNode, loan_id: str = "loan-1") -> None:
    await node.until(lambda: node.state(loan_id) is LoanState.LENT, "the engine sleeps")


async def test_a_request_wakes_the_engine_and_is_answered(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        assert sum((await node.keeper().held_bytes()).values()) == 0
        # Longer than a loan is kept that no job comes to.
        await node.until(lambda: _seconds_since(node, LoanStep.SETTLED) > 0.5, "half a second of sleep")
        assert node.state() is LoanState.LENT
        reply = await node.ask()
        assert (reply.status_code, reply.json()["choices"]) == (200, before)
        await node.until_closed()
        assert node.states() == STATES
        assert node.daemon is not None
        assert [one["reason"] for one in node.reports("loan_changed")][4]["code"] == "Request"
        [answered] = await node.until(lambda: node.reports("request_answered"), "the first byte is told")
        slept = _at(node, LoanStep.GATE_OPENED) - _at(node, LoanStep.SETTLED)
        assert 0 < answered["seconds"] < slept + 5
        assert (answered["loan_id"], answered["engine_id"]) == ("loan-1", node.keeper().engine_id)
        assert all(line["state"] == "running" for line in node.witness())


def _at(node: AgentNode, step: LoanStep) -> float:
    assert node.daemon is not None
    return next(row.boottime for row in node.daemon.journal.steps("loan-1") if row.step is step)


def _seconds_since(node: AgentNode, step: LoanStep) -> float:
    return boottime() - _at(node, step)


async def test_its_time_goes_on_while_no_agent_lives(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node, until_seconds=500.0)
        await asleep(node)
        assert node.daemon is not None
        accepted = _at(node, LoanStep.ACCEPTED)
        assert node.daemon.loans["loan-1"].restore_by_boottime == pytest.approx(accepted + 500.0, abs=1.0)
        await node.order(SetRestoreBy(loan_id="loan-1", restore_by_seconds=3.0))
        due = node.daemon.loans["loan-1"].restore_by_boottime
        assert due is not None
        await node.crash()
        await node.start()
        await node.until_closed()
        assert node.states() == STATES
        woken = _at(node, LoanStep.ROOM_PROVED)
        assert due <= woken < accepted + 500, "the rest of the time, not all of it anew"
        assert [one["reason"] and one["reason"]["code"] for one in node.reports("loan_changed")][4] == "ForOver"
        assert node.steps().count(LoanStep.PARK_SENT) == 1
        assert (await node.ask()).json()["choices"] == before


async def test_an_operator_ends_it(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        await node.order(RecallLoan(loan_id="loan-1", reason="Resumed"))
        await node.until_closed()
        assert node.states() == STATES
        assert (await node.ask()).json()["choices"] == before
        assert node.reports("request_answered") == [], "nobody waited"


async def test_resumed_and_asked_at_once_it_wakes_once(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        resume = node.order(RecallLoan(loan_id="loan-1", reason="Resumed"))
        replies = await asyncio.gather(node.ask(), resume, node.ask())
        assert [one.json()["choices"] for one in (replies[0], replies[2])] == [before, before]
        await node.until_closed()
        assert node.steps().count(LoanStep.RESUME_SENT) == 1
        assert node.states() == STATES


@pytest.mark.long
async def test_a_request_that_comes_while_it_drains_ends_it_before_anything_is_released(tmp_path: Path) -> None:
    engine = EngineUnderTest(extra=["--token-delay", "0.3"], policy={"canary": {"tokens": 1}, "settle_seconds_max": 30})
    async with agent_node(tmp_path, engine) as node:
        slow = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def in_flight() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).in_flight == 1

        await node.until(in_flight, "a request is in flight")
        await park(node)
        await node.until(lambda: LoanStep.GATE_CLOSED in node.steps(), "the gate is closed")
        late = asyncio.create_task(node.ask())
        await node.until_closed()
        assert (await slow).json()["choices"] == (await late).json()["choices"]
        assert node.states() == ["draining", "closed"]
        assert LoanStep.PARK_SENT not in node.steps()


@pytest.mark.long
async def test_where_no_request_may_wake_it_requests_wait_as_in_any_loan(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node, wake_on_request=False)
        await asleep(node)
        held = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def waiting() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).held == 1

        await node.until(waiting, "the request waits")
        # As long as it takes to be noticed where it counts, and longer.
        await node.until(lambda: _seconds_since(node, LoanStep.SETTLED) > 1.0, "a second")
        assert node.state() is LoanState.LENT
        await node.order(RecallLoan(loan_id="loan-1", reason="Resumed"))
        assert (await held).json()["choices"] == before
        await node.until_closed()


async def test_a_gate_that_refuses_is_opened_by_the_first_that_it_refused(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper(gate="refuse")) as node:
        await park(node)
        await asleep(node)
        assert (await node.ask()).status_code == 503
        await node.until_closed()
        assert node.states() == STATES
        assert (await node.ask()).status_code == 200


async def test_one_that_finds_no_room_to_wait_wakes_the_engine_too(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper(hold_requests_max=0)) as node:
        await park(node)
        await asleep(node)
        assert (await node.ask()).status_code == 503
        await node.until_closed()
        assert node.states() == STATES
        assert (await node.ask()).status_code == 200


async def test_one_that_was_refused_while_no_agent_lived_wakes_the_engine(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper(gate="refuse")) as node:
        await park(node)
        await asleep(node)
        await node.crash()
        assert (await node.ask()).status_code == 503
        await node.start()
        await node.until_closed()
        assert node.states() == STATES
        assert [one["reason"] and one["reason"]["code"] for one in node.reports("loan_changed")][4] == "Request"


async def test_one_that_is_refused_wakes_every_engine_that_serves_its_model(tmp_path: Path) -> None:
    both = [
        EngineUnderTest(
            name=name,
            devices=[index],
            extra=["--name", "m"],
            policy={"settle_seconds_max": 30, "gate": "refuse"},
            more={"models": ["m"]},
        )
        for index, name in enumerate(("alpha", "beta"))
    ]
    async with agent_node(tmp_path, *both, capacities=[16 << 20, 16 << 20]) as node:
        for number, engine in enumerate(both, 1):
            await park(node, loan_id=f"loan-{number}", epoch=number, engines=[engine.name])
            await asleep(node, f"loan-{number}")
        assert (await node.ask("m")).status_code == 503
        for number in (1, 2):
            await node.until_closed(f"loan-{number}")
            assert node.states(f"loan-{number}") == STATES
        assert (await node.ask("m")).status_code == 200


async def runs_until_told(node: AgentNode, pipe: Path) -> AttemptSpec:
    """A job in the sleep, which ends once something is written to ``pipe``."""
    os.mkfifo(pipe)
    job = node.job([sys.executable, "-c", f"print('up', flush=True); print(open({str(pipe)!r}).read())"])
    await node.order(StartAttempt(loan_id="loan-1", attempt=job))
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
    return job


async def test_a_job_runs_in_the_sleep_and_a_request_waits_for_its_end(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        pipe = tmp_path / "pipe"
        job = await runs_until_told(node, pipe)
        held = asyncio.create_task(node.ask())
        keeper = node.keeper()

        async def waiting() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).held == 1

        await node.until(waiting, "the request waits")
        assert node.state() is LoanState.LENT
        pipe.write_text("down")
        assert (await held).json()["choices"] == before
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert [one["reason"] and one["reason"]["code"] for one in node.reports("loan_changed")][4] == "Request"


async def test_jobs_that_come_one_after_the_other_do_not_keep_a_request_waiting(tmp_path: Path) -> None:
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        await park(node)
        await asleep(node)
        pipe = tmp_path / "pipe"
        first = await runs_until_told(node, pipe)
        held = asyncio.create_task(node.ask())

        async def takes_another() -> bool:
            job = node.job(["true"], hbm_bytes=1 << 20)
            await node.order(StartAttempt(loan_id="loan-1", attempt=job))
            end = await node.until(lambda: node.attempt_end(job.attempt_id), "it has ended")
            assert end["end"] == "exited" or (end["end"], end["reason"]["code"]) == ("not_started", "LoanOver")
            return bool(end["end"] == "exited")

        # The first of them may come before the request does.
        assert not all([await takes_another() for _ in range(3)]), "it goes on taking jobs"
        assert node.state() is LoanState.LENT, "the one that runs is left alone"
        pipe.write_text("down")
        assert (await held).json()["choices"] == before
        await node.until_closed()
        end = node.attempt_end(first.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)


async def test_an_engine_that_keeps_its_memory_is_woken_again(tmp_path: Path) -> None:
    engine = EngineUnderTest(faults=["keep-memory"], policy={"settle_seconds_max": 0.3})
    async with agent_node(tmp_path, engine) as node:
        await park(node)
        await node.until_closed()
        assert node.states() == ["draining", "parking", "settling", "waking", "verifying", "closed"]
        reason = node.last_reason()
        assert reason is not None
        assert (reason["code"], "nothing became free" in reason["sentence"]) == ("HBMNotFreed", True)
        assert (await node.ask()).status_code == 200


RELEASING = [
    LoanStep.GATE_CLOSING,
    LoanStep.GATE_CLOSED,
    LoanStep.IN_FLIGHT_ZERO,
    LoanStep.PARK_SENT,
    LoanStep.PARKED_SEEN,
    LoanStep.SETTLED,
]
WAKING = [
    LoanStep.ROOM_PROVED,
    LoanStep.RESUME_SENT,
    LoanStep.RUNNING_SEEN,
    LoanStep.VERIFIED,
    LoanStep.GATE_OPENING,
    LoanStep.GATE_OPENED,
    LoanStep.CLOSED,
]


def ask_in_a_thread(node: AgentNode) -> Future[httpx.Response]:
    """A client that lives on when the agent, which is in this process, dies."""
    url = f"http://127.0.0.1:{node.gateway_port}/v1/completions"
    body = {"model": "alpha", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    pool = ThreadPoolExecutor(1)
    asked = pool.submit(httpx.post, url, json=body, timeout=60, trust_env=False)
    pool.shutdown(wait=False)
    return asked


@pytest.mark.long
@pytest.mark.parametrize("after", [*RELEASING, *WAKING])
async def test_an_agent_that_dies_right_after_a_step_answers_who_waits(tmp_path: Path, after: LoanStep) -> None:
    """The request comes while the engine is away, or just before; it is answered by whichever agent there is then."""
    async with agent_node(tmp_path, sleeper()) as node:
        before = (await node.ask()).json()["choices"]
        assert node.daemon is not None
        write, died = node.daemon.journal.write_step, list[LoanStep]()

        def dies_after(loan_id: str, step: LoanStep, **given: Any) -> None:
            write(loan_id, step, **given)
            if step is after and not died:
                died.append(step)
                raise asyncio.CancelledError  # nothing more is done by whoever took the step

        node.daemon.journal.write_step = dies_after  # type: ignore[method-assign]
        await park(node)
        asked: Future[httpx.Response] | None = None
        if after in WAKING:
            await asleep(node)
            asked = ask_in_a_thread(node)
        await node.until(lambda: died, f"the step {after}")
        await node.crash()
        await node.start()
        answer = await asyncio.wrap_future(asked or ask_in_a_thread(node))
        assert answer.json()["choices"] == before
        await node.until_closed()
        if asked is not None:
            await node.until(lambda: node.reports("request_answered"), "the first byte is told, by the next agent")
        assert node.steps().count(LoanStep.PARK_SENT) <= 1
        assert all(line["state"] == "running" for line in node.witness())


async def test_an_idle_engine_is_told_of_while_host_memory_is_short(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"

    def available(kib: int) -> None:
        """As the kernel writes it; changed in one step, since the agent reads it at any time."""
        draft = tmp_path / "meminfo.new"
        draft.write_text(f"MemTotal:       99999999 kB\nMemFree:        1 kB\nMemAvailable:   {kib} kB\n")
        draft.replace(meminfo)

    available(400 << 10)
    engine = sleeper(on_pressure=True, pressure_free_bytes_min="200MiB", idle_seconds_min=0.5)
    async with agent_node(tmp_path, engine, meminfo_file=meminfo, engine_poll_seconds=0.05) as node:
        before = (await node.ask()).json()["choices"]
        assert node.keeper().pressure is None
        available(100 << 10)
        await node.until(lambda: node.keeper().pressure is not None, "the pressure is told")
        told = node.reports("engine_changed")[-1]["pressure"]
        assert told == {"available_bytes": 100 << 20, "bound_bytes": 200 << 20, "idle_seconds_min": 0.5}
        # The scheduler's answer. The next request ends the sleep; the engine has to be idle anew, and for longer.
        await park(node, wanted_by="pressure")
        idle_at_once = node.keeper().policy
        assert node.keeper().set_policy(1, idle_at_once.model_copy(update={"idle_seconds_min": 600})) is None
        await asleep(node)
        assert (await node.ask()).json()["choices"] == before
        await node.until_closed()
        # However slow this machine is, that sleep was shorter than ten minutes.
        await node.until(lambda: node.keeper().data.get("short_sleeps") == 1, "a short sleep is counted")
        assert node.keeper().set_policy(2, idle_at_once) is None
        await node.until(lambda: node.keeper().pressure is not None, "it is idle anew")
        told = node.reports("engine_changed")[-1]["pressure"]
        assert told["idle_seconds_min"] == 1.0
        available(400 << 10)
        await node.until(lambda: node.keeper().pressure is None, "there is room again")


@pytest.mark.parametrize("sleeps", [False, True], ids=["drained", "asleep"])
async def test_pressure_that_was_answered_is_not_told_again_before_the_engine_was_idle_anew(
    tmp_path: Path, sleeps: bool
) -> None:
    """Also where the loan is over before host memory is looked at again: then too it counts as a short sleep."""
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(f"MemTotal: 99999999 kB\nMemAvailable: {100 << 10} kB\n")
    engine = sleeper(on_pressure=True, pressure_free_bytes_min="200MiB", idle_seconds_min=0.5)
    async with agent_node(tmp_path, engine, meminfo_file=meminfo, engine_poll_seconds=1.0) as node:
        keeper = node.keeper()
        await node.until(lambda: keeper.pressure is not None, "the pressure is told")
        told = len(node.reports("engine_changed"))
        await park(node, wanted_by="pressure")
        assert keeper.pressure is None, "at once, not at the next look"
        if sleeps:
            await asleep(node)
            await node.ask()
        else:
            await node.order(RecallLoan(loan_id="loan-1", reason="Request"))
        assert keeper.set_policy(1, keeper.policy.model_copy(update={"idle_seconds_min": 600})) is None
        await node.until_closed()
        assert [one["pressure"] for one in node.reports("engine_changed")[told:] if one["pressure"]] == []
        await node.until(lambda: keeper.data.get("short_sleeps") == 1, "the sleep is counted")
