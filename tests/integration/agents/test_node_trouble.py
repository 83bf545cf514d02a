"""Trouble of the node itself (disk, configuration, /proc, driver) ends no agent, and no parked engine waits for it."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

import pytest

from lull.agents.attempts import AttemptDir, RunnerSpec
from lull.agents.engines.base import Observation
from lull.agents.errors import ConfigError, DeviceAbsent
from lull.agents.node import Device
from lull.agents.node_probe import NodeProbe
from lull.agents.probe_nvml import UNREADABLE
from lull.agents.protocol.loans import LoanState
from lull.agents.protocol.wire import AttemptEnd, RecallLoan, StartAttempt
from tests.agent_node import MIB, AgentNode, agent_node
from tests.small_disk import small_disk

WAITS = "import sys; print('up', flush=True); open(sys.argv[1]).read()"
SLEEPS = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(100)"]


async def lent(node: AgentNode, argv: list[str], **fields: object) -> str:
    """A loan in which the job ran so far that it has written."""
    job = node.job(argv)
    await node.open_loan(job, expects_more=True, need_bytes=4 * MIB, **fields)  # type: ignore[arg-type]
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
    return job.attempt_id


@pytest.mark.parametrize("reserve", [True, False], ids=["with the reserve", "without it"])
async def test_a_runner_killed_on_a_full_disk(tmp_path: Path, exits: list[int], reserve: bool) -> None:
    with small_disk(tmp_path / "agent", 8 * MIB) as disk:
        async with agent_node(tmp_path) as node:
            attempt_id = await lent(node, SLEEPS)
            assert node.daemon is not None
            disk.fill()
            if not reserve:
                (tmp_path / "agent" / "disk.reserve").unlink()
                disk.fill()
            identity = tmp_path / "agent" / "attempts" / attempt_id / "identity.json"
            os.kill(json.loads(identity.read_text())["pid"], signal.SIGKILL)
            end = await node.until(lambda: node.attempt_end(attempt_id) or exits, "the end")
            assert not exits
            assert end["end"] == AttemptEnd.RUNNER_LOST
            await node.until_closed()
            await node.ready()
            assert (await node.ask()).status_code == 200
            disk.clear()


async def test_a_runner_killed_while_no_agent_lives_and_the_disk_is_full(tmp_path: Path, exits: list[int]) -> None:
    with small_disk(tmp_path / "agent", 8 * MIB) as disk:
        async with agent_node(tmp_path) as node:
            attempt_id = await lent(node, SLEEPS)
            identity = tmp_path / "agent" / "attempts" / attempt_id / "identity.json"
            await node.crash()
            disk.fill()
            (tmp_path / "agent" / "disk.reserve").unlink()
            disk.fill()
            os.kill(json.loads(identity.read_text())["pid"], signal.SIGKILL)
            await node.start()
            await node.until_closed()
            assert not exits
            end = node.attempt_end(attempt_id)
            assert end is not None
            assert end["end"] == AttemptEnd.RUNNER_LOST
            await node.ready()
            disk.clear()


async def test_no_further_attempt_is_taken_while_the_disk_is_full(tmp_path: Path, exits: list[int]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with small_disk(tmp_path / "agent", 8 * MIB) as disk:
        async with agent_node(tmp_path) as node:
            await lent(node, [sys.executable, "-c", WAITS, str(pipe)])
            disk.fill()
            second = node.job(["true"])
            await node.order(StartAttempt(loan_id="loan-1", attempt=second))
            end = node.attempt_end(second.attempt_id)
            assert end is not None, "answered at once"
            assert (end["end"], end["reason"]["code"]) == ("not_started", "DiskReserve")
            disk.clear()
            pipe.write_text("")
            await node.until_closed()
            assert not exits


async def test_an_attempt_without_room_for_its_directory_is_queued_again(tmp_path: Path, exits: list[int]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with small_disk(tmp_path / "agent", 16 * MIB, files_max=400) as disk:
        async with agent_node(tmp_path) as node:
            await lent(node, [sys.executable, "-c", WAITS, str(pipe)])
            disk.take_all_names()
            second = node.job(["true"])
            await node.order(StartAttempt(loan_id="loan-1", attempt=second))
            end = await node.until(lambda: node.attempt_end(second.attempt_id) or exits, "the end")
            assert not exits
            assert (end["end"], end["reason"]["code"]) == ("not_started", "DiskReserve")
            disk.give_names_back()
            pipe.write_text("")
            await node.until_closed()


def test_an_attempt_that_has_no_lock_and_no_room_for_one_never_began(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", files_max=100) as disk:
        directory = AttemptDir(disk.path / "attempt")
        directory.write_spec(RunnerSpec("attempt", "job", ["true"], {}))
        disk.take_all_names()
        assert directory.settle().end == AttemptEnd.NOT_STARTED
        disk.give_names_back()


async def test_a_device_that_was_taken_out_of_the_file_under_a_loan(tmp_path: Path, exits: list[int]) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with agent_node(tmp_path, capacities=[16 * MIB, 16 * MIB]) as node:
        device_ids = node.device_ids[1:]
        job = node.job([sys.executable, "-c", WAITS, str(pipe)], device_ids=device_ids)
        await node.open_loan(job, engines=[], device_ids=device_ids)
        await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")
        await node.crash()
        whole = node.settings
        node.settings = whole.model_copy(update={"devices": whole.devices[:1]})
        await node.start()
        assert node._task is not None
        with pytest.raises(ConfigError, match=f"{device_ids[0]}.*loan-1.*put them back until the loan is closed"):
            await node._task
        node._forget_daemon()
        node.settings = whole
        await node.start()
        pipe.write_text("")
        await node.until_closed()
        end = node.attempt_end(job.attempt_id)
        assert end is not None
        assert (end["end"], end["exit_code"]) == ("exited", 0)
        assert not exits


async def test_host_memory_that_cannot_be_read_refuses_the_loan(tmp_path: Path, exits: list[int]) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text(Path("/proc/meminfo").read_text())
    async with agent_node(tmp_path, meminfo_file=meminfo) as node:
        away = meminfo.rename(tmp_path / "away")
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.state() is LoanState.CLOSED or exits, "the loan is refused")
        assert not exits
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "HostRAMForBackup"
        await node.ready()
        away.rename(meminfo)
        await node.open_loan(node.job(["true"]), loan_id="loan-2", epoch=2)
        await node.until_closed("loan-2")
        assert "lent" in node.states("loan-2")


async def test_an_engine_that_cannot_be_looked_at_ends_a_drain_and_not_the_agent(
    tmp_path: Path, exits: list[int]
) -> None:
    async with agent_node(tmp_path) as node:
        adapter = node.keeper().adapter
        observe = adapter.observe

        async def unreadable() -> Observation:
            if node.state() is LoanState.DRAINING:
                raise DeviceAbsent("NVML: driver/library version mismatch")
            return await observe()

        adapter.observe = unreadable  # type: ignore[method-assign]
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.state() is LoanState.CLOSED or exits, "the loan is refused")
        assert not exits
        reason = node.last_reason()
        assert reason is not None
        assert reason["code"] == "EngineNotReady"
        await node.ready()


async def test_an_engine_that_cannot_be_looked_at_while_it_parks_is_looked_at_again(
    tmp_path: Path, exits: list[int]
) -> None:
    async with agent_node(tmp_path) as node:
        adapter = node.keeper().adapter
        observe = adapter.observe
        looks: list[LoanState] = []

        async def unreadable() -> Observation:
            if node.state() is LoanState.PARKING and len(looks) < 3:
                looks.append(LoanState.PARKING)
                raise DeviceAbsent("NVML: driver/library version mismatch")
            return await observe()

        adapter.observe = unreadable  # type: ignore[method-assign]
        await node.open_loan(node.job(["true"]))
        await node.until(lambda: node.state() is LoanState.CLOSED or exits, "the loan is over")
        assert not exits
        assert len(looks) == 3
        assert "lent" in node.states()
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.ready()


def test_a_host_device_that_cannot_be_looked_at_is_absent(tmp_path: Path) -> None:
    def fails() -> int:
        raise OSError(24, "Too many open files")

    device = Device("HOST-1", 0, "host_unified", 16 * MIB, str(tmp_path), unified=True)
    facts = NodeProbe([device], 1.0, fails).look()
    assert "HOST-1" not in facts
    assert facts.absent["HOST-1"].code == UNREADABLE
    assert "Too many open files" in facts.absent["HOST-1"].sentence


async def test_what_is_written_down_already_needs_no_room(tmp_path: Path) -> None:
    """An engine that was released before its park is brought back by an agent that can write nothing more."""
    with small_disk(tmp_path / "agent", 8 * MIB) as disk:
        async with agent_node(tmp_path) as node:
            keeper = node.keeper()
            async with keeper.hand:
                disk.fill()
                (tmp_path / "agent" / "disk.reserve").unlink()
                disk.fill()
                with pytest.raises(OSError, match="No space left"):
                    keeper.released()  # the file says that it is verified: nothing may be parked
                disk.clear()
                keeper.released()
                disk.fill()
                keeper.released()
                disk.clear()
            await node.ready()


@pytest.mark.parametrize("damage", [b"{", None], ids=["damaged", "gone"])
async def test_a_node_whose_file_is_lost_is_the_same_node_and_brings_back_what_it_lent(
    tmp_path: Path, exits: list[int], damage: bytes | None
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    async with agent_node(tmp_path) as node:
        before = (await node.ask()).json()["choices"]
        known = (tmp_path / "agent" / "node.json").read_bytes()
        await lent(node, [sys.executable, "-c", WAITS, str(pipe)])
        await node.crash()
        if damage is None:
            (tmp_path / "agent" / "node.json").unlink()
        else:
            (tmp_path / "agent" / "node.json").write_bytes(damage)
        await node.start()
        assert json.loads((tmp_path / "agent" / "node.json").read_bytes()) == json.loads(known)
        pipe.write_text("on")
        await node.order(RecallLoan(loan_id="loan-1", reason="test"))
        await node.until(lambda: node.state() is LoanState.CLOSED or exits, "the engine comes back")
        assert not exits
        await node.ready()
        assert (await node.ask()).json()["choices"] == before
