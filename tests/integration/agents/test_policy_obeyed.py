"""Each policy field has a test that fails when the field is ignored. Those that are not here are named at the end."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import RecallLoan
from tests.agent_node import MIB, AgentNode, EngineUnderTest, agent_node

WAITS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(60)"]


def stamps(node: AgentNode, step: LoanStep) -> list[float]:
    assert node.daemon is not None
    return [row.boottime for row in node.daemon.journal.steps("loan-1") if row.step is step]


async def lend(node: AgentNode, *argv: str) -> None:
    await node.open_loan(node.job(list(argv) or ["true"]))


async def test_settle_samples_and_their_bound(tmp_path: Path) -> None:
    policy = {"settle_samples": 20, "settle_seconds_max": 60}
    async with agent_node(tmp_path, EngineUnderTest(policy=policy)) as node:
        await lend(node)
        await node.until_closed()
        (parked,), (settled,) = stamps(node, LoanStep.PARKED_SEEN), stamps(node, LoanStep.SETTLED)
        assert settled - parked >= 19 * node.settings.settle_poll_seconds


async def test_settle_seconds_max_is_when_it_gives_up(tmp_path: Path) -> None:
    policy = {"settle_samples": 100, "settle_seconds_max": 0.2}
    async with agent_node(tmp_path, EngineUnderTest(policy=policy)) as node:
        await lend(node)
        await node.until_closed()
        assert node.states() == ["draining", "parking", "settling", "waking", "verifying", "closed"]
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "HBMNotFreed"


async def test_hold_requests_max_bounds_who_may_wait(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"hold_requests_max": 1})) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        keeper = node.keeper()
        first = asyncio.create_task(node.ask())

        async def one_waits() -> bool:
            return (await keeper.gate.observe(keeper.engine_id)).held == 1

        await node.until(one_waits, "one request is held")
        assert (await node.ask()).status_code == 503
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        assert (await first).status_code == 200
        await node.until_closed()


async def test_canary_off_asks_nothing(tmp_path: Path) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"canary": "off"})) as node:
        await lend(node)
        await node.until_closed()
        assert [line for line in node.witness() if line["kind"] == "canary"] == []


@pytest.mark.parametrize(
    ("canary", "states"),
    [
        # A wrong answer of one token passes unseen by a canary that looks past nothing: the field matters.
        ({"tokens": 1, "logprob_tolerance": 10.0}, ["verifying", "closed"]),
        ({"tokens": 1}, ["verifying", "closed"]),
    ],
)
async def test_a_right_engine_passes_every_canary(tmp_path: Path, canary: dict[str, Any], states: list[str]) -> None:
    async with agent_node(tmp_path, EngineUnderTest(policy={"canary": canary})) as node:
        await lend(node)
        await node.until_closed()
        assert node.states()[-2:] == states


async def test_canary_deadline_and_prompt(tmp_path: Path) -> None:
    """A canary that cannot be answered in time fails closed: after the drain, before anything is released."""
    engine = EngineUnderTest(extra=["--token-delay", "0.1"], policy={"canary": {"tokens": 2, "prompt": "one"}})
    async with agent_node(tmp_path, engine) as node:
        keeper = node.keeper()
        strict = EnginePolicy.model_validate(
            {**keeper.policy.model_dump(), "canary": {"tokens": 2, "prompt": "one", "deadline_seconds": 0.05}}
        )
        keeper.policy = strict
        await lend(node)
        await node.until_closed()
        assert node.states() == ["draining", "closed"]
        reason = node.last_reason()
        assert reason is not None
        assert (reason["code"], "0.05 s" in reason["sentence"]) == ("GoldenWrong", True)


async def test_a_new_canary_gets_its_golden_answer_before_the_next_loan(tmp_path: Path) -> None:
    from lull.agents.protocol.wire import SetPolicy

    async with agent_node(tmp_path) as node:
        keeper = node.keeper()
        other = EnginePolicy.model_validate({**keeper.policy.model_dump(), "canary": {"tokens": 3, "prompt": "other"}})
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=other))
        await node.until(keeper.has_golden, "the new golden answer")
        await lend(node)
        await node.until_closed()
        assert node.states()[-1] == "closed"
        assert LoanStep.GATE_OPENED in node.steps()


async def test_the_snapshot_rules_a_loan_whatever_is_set_meanwhile(tmp_path: Path) -> None:
    from lull.agents.protocol.wire import SetPolicy

    async with agent_node(tmp_path) as node:
        job = node.job(WAITS)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        keeper = node.keeper()
        other = EnginePolicy.model_validate({**keeper.policy.model_dump(), "canary": {"tokens": 3, "prompt": "other"}})
        await node.order(SetPolicy(engine_id=keeper.engine_id, version=2, policy=other))
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.until_closed()
        assert node.states()[-2:] == ["verifying", "closed"]


@pytest.mark.parametrize(
    ("fields", "script", "says"),
    [
        ({"env": {"FLAVOUR": "mint"}}, "import os; print(os.environ['FLAVOUR'])", b"mint\n"),
        ({"workdir": "/usr"}, "import os; print(os.getcwd())", b"/usr\n"),
        ({}, "import os; print(os.environ['LULL_JOB_ID'], os.environ['LULL_HBM_BYTES'])", b"job-1 2097152\n"),
        ({}, "import os; print(oct(os.stat(os.environ['LULL_CHECKPOINT_DIR']).st_mode & 0o777))", b"0o700\n"),
        ({}, "import os; print(0 < float(os.environ['LULL_RESTORE_BY_SECONDS']) <= 600)", b"True\n"),
    ],
)
async def test_what_a_job_sees(tmp_path: Path, fields: dict[str, Any], script: str, says: bytes) -> None:
    async with agent_node(tmp_path) as node:
        job = node.job([sys.executable, "-c", script], **fields)
        await node.open_loan(job)
        await node.until_closed()
        assert node.log_of(job.attempt_id) == says


async def test_a_foreign_process_on_the_device_refuses_the_loan(tmp_path: Path) -> None:
    from lull.vmm import HostDevice, HostDriver, Pool

    async with agent_node(tmp_path) as node:
        pool = Pool(HostDriver(HostDevice.open(tmp_path / "device0")))
        block = pool.allocate(2 * MIB, "mine")
        job = node.job(["true"])
        await node.open_loan(job)
        await node.until_closed()
        assert node.states() == ["draining", "closed"]
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "ForeignProcess"
        pool.free(block)
        await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=2)
        await node.until_closed("loan-2")
        assert LoanStep.SPAWNED in node.steps("loan-2")


async def test_host_memory_for_the_backup_is_asked_for_before_anything_is_released(tmp_path: Path) -> None:
    async with agent_node(tmp_path) as node:
        assert node.daemon is not None
        node.daemon.node.host_ram._available = lambda: 1 * MIB
        await lend(node)
        await node.until_closed()
        assert node.states() == ["draining", "closed"]
        reason = node.last_reason()
        assert reason is not None
        assert (reason["code"], reason["data"]["have_bytes"]) == ("HostRAMForBackup", MIB)
        assert (await node.ask()).status_code == 200


async def test_a_journal_that_cannot_be_read_guesses_nothing(tmp_path: Path) -> None:
    """The job of a forgotten loan goes on; its memory is not taken from it; the engine comes back after it."""
    from lull.agents.processes import find_by_environ, identity, send_signal

    async with agent_node(tmp_path) as node:
        job = node.job([sys.executable, "-c", HOLDS], hbm_bytes=10 * MIB)
        await node.open_loan(job)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        engine_id, first = node.keeper().engine_id, node.keeper().incarnation
        await node.crash()
        for suffix in ("", "-wal"):
            path = tmp_path / "agent" / f"journal.sqlite{suffix}"
            if path.exists():
                path.write_bytes(b"x" * 8192)
        await node.start()
        assert node.daemon is not None
        assert [alert["code"] for alert in node.reports("alert")][:1] == ["journal_corrupt"]
        assert set(node.daemon.node.quarantined) == set(node.device_ids)
        keeper = node.keeper()
        await node.until(lambda: keeper.gate_state.value == "closed", "the gate is closed")
        assert (keeper.engine_id, keeper.incarnation) == (engine_id, first)
        await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=9)
        assert node.states("loan-2") == ["closed"], "refused at once"
        reason = node.last_reason("loan-2")
        assert reason is not None
        assert "quarantine.json" in reason["sentence"]
        for pid in find_by_environ("LULL_ATTEMPT", job.attempt_id):
            process = identity(pid)
            assert process is None or send_signal(process, 9)
        await node.ready()
        assert (await node.ask()).status_code == 200
        assert keeper.incarnation == first, "resumed, behind the room that the job left"
        await node.stop()
        await node.start()
        await node.ready()
        assert set(node.daemon.node.quarantined) == set(node.device_ids), "a restart alone lifts nothing"
        (tmp_path / "agent" / "quarantine.json").write_text("garbage")
        await node.stop()
        await node.start()
        assert set(node.daemon.node.quarantined) == set(node.device_ids), "a file that cannot be read lends nothing"
        (tmp_path / "agent" / "quarantine.json").unlink()
        await node.stop()
        await node.start()
        assert node.daemon.node.quarantined == {}
        await node.ready()


HOLDS = """
import os, time
from lull.vmm import HostDevice, HostDriver, Pool
(device,) = HostDevice.from_environment()
pool = Pool(HostDriver(device))
block = pool.allocate(int(os.environ["LULL_HBM_BYTES"]), "job")
print("up", flush=True)
time.sleep(60)
"""
