"""Checkpoints of a real process through the stand-in of the driver, and all that goes wrong with them."""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from lull.agents.engines.checkpoint_driver import CheckpointBusy, CheckpointDriver, CheckpointMissing, ProcessState
from lull.agents.engines.cuda_checkpoint import CudaCheckpointAdapter
from lull.agents.engines.ledger import Ledger
from lull.agents.errors import AgentError, EngineRefused, EngineTimedOut
from lull.agents.processes import identity
from lull.agents.protocol.policy import CanaryPolicy, EnginePolicy
from lull.agents.protocol.wire import EngineState
from tests.agent_node import free_port
from tests.engines.no_descriptors import no_descriptors
from tests.engines.rigs import KINDS, Rig
from tests.waiting import wait_until_async

KIND = next(kind for kind in KINDS if kind.kind == "cuda-checkpoint")
CANARY = CanaryPolicy(deadline_seconds=10)
POLICY = EnginePolicy()


class CheckpointRig(Rig):
    """One engine, and its adapter; `again` is the next agent's."""

    def __init__(self, root: Path, *flags: str, **options: Any) -> None:
        super().__init__(replace(KIND, flags=flags), root)
        self.settings = self.settings.model_copy(
            update={"cuda_checkpoint": self.settings.cuda_checkpoint.model_copy(update=options)}
        )
        self.made: list[CudaCheckpointAdapter] = []
        self.one = self.again()
        self.outsider = CheckpointDriver([])

    def again(self) -> CudaCheckpointAdapter:
        made = self.adapter()
        assert isinstance(made, CudaCheckpointAdapter)
        self.made.append(made)
        self.one = made
        return made

    @property
    def ledger(self) -> Ledger:
        return Ledger(self.root / "ledger.json", lambda: self.incarnation)

    def faults(self, *lines: str) -> None:
        draft = self.cuda / "draft"
        draft.write_text("".join(f"{line}\n" for line in lines))
        draft.replace(self.cuda / "checkpoint_faults")

    @property
    def pid(self) -> int:
        assert self.process.process is not None
        return self.process.process.pid

    async def state(self) -> EngineState:
        return (await self.one.observe()).state

    async def driver_state(self, pid: int | None = None) -> ProcessState:
        return ProcessState((await self.outsider.call("state", pid or self.pid, 10)).value or 0)

    async def call(self, *verbs: str, pid: int | None = None) -> None:
        """As somebody else's tool would."""
        for verb in verbs:
            assert (await self.outsider.call(verb, pid or self.pid, 10)).is_success

    async def end(self) -> None:
        self.outsider.close()
        for adapter in self.made:
            await adapter.aclose()
        self.faults()
        await self.stop()


NewRig = Callable[..., Awaitable[CheckpointRig]]


@pytest_asyncio.fixture
async def new_rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[NewRig]:
    made: list[CheckpointRig] = []

    async def make(*flags: str, **options: Any) -> CheckpointRig:
        rig = CheckpointRig(tmp_path, *flags, **options)
        for name, value in rig.cuda_environment().items():
            monkeypatch.setenv(name, value)
        made.append(rig)
        await rig.start()
        return rig

    yield make
    for rig in made:
        await rig.end()


async def test_what_goes_wrong_with_a_lock_changes_nothing(new_rig: NewRig) -> None:
    rig = await new_rig(lock_seconds_max=0.2)
    golden, full = await rig.one.answer(CANARY), await rig.held_mib()
    rig.faults("busy *")
    with pytest.raises(EngineRefused, match="NOT_READY"):
        await rig.one.park(POLICY, 10)
    assert await rig.driver_state() is ProcessState.RUNNING
    assert (await rig.state(), await rig.held_mib()) == (EngineState.RUNNING, full)
    rig.faults()

    await rig.call("lock")
    seen = await rig.one.observe()
    assert (seen.state, "somebody else has locked" in seen.detail) == (EngineState.UNREACHABLE, True)
    assert seen.is_held
    with pytest.raises(AgentError):
        await rig.one.park(POLICY, 10)
    assert await rig.driver_state() is ProcessState.LOCKED  # it is theirs
    await rig.call("unlock")
    assert await rig.state() is EngineState.RUNNING
    assert await rig.one.answer(CANARY) == golden

    with pytest.raises(EngineRefused, match="nothing is checkpointed"):
        await rig.one.resume(POLICY, 10)


async def test_a_question_that_is_under_way_is_no_transition(new_rig: NewRig) -> None:
    """An agent that starts looks at once for its first report and for its keeper."""
    rig = await new_rig()
    one = rig.again()
    for parks in (False, True):
        if parks:
            await one.park(POLICY, 10)
        seen = [observed.state for observed in await asyncio.gather(one.observe(), one.observe(), one.observe())]
        assert seen == [EngineState.PARKED if parks else EngineState.RUNNING] * 3


@pytest.mark.long
async def test_a_lock_that_hangs_is_given_up(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one rank's does while the others wait for it in NCCL."""
    monkeypatch.setattr("lull.agents.engines.cuda_checkpoint._LOCK_GRACE_SECONDS", 0.2)
    monkeypatch.setattr("lull.agents.engines.checkpoint_driver._START_SECONDS", 3.0)
    rig = await new_rig("--more-ranks", "1", processes_max=2, lock_seconds_max=0.2)
    pids = sorted(rig.pids())
    rig.faults(f"lock_hangs {pids[1]}")
    with pytest.raises(EngineRefused, match="nothing was released"):
        await rig.one.park(POLICY, 10)
    assert [await rig.driver_state(pid) for pid in pids] == [ProcessState.RUNNING] * 2
    rig.faults()
    await rig.one.park(POLICY, 10)
    assert (await rig.state(), await rig.held_mib()) == (EngineState.PARKED, 0)
    await rig.again().resume(POLICY, 10)
    assert (await rig.state(), await rig.held_mib()) == (EngineState.RUNNING, 8)


@pytest.mark.long
async def test_more_processes_than_allowed_are_refused(new_rig: NewRig) -> None:
    rig = await new_rig("--more-ranks", "1")
    able = await rig.one.capabilities()
    assert "NCCL" in (able.unsupported or "")
    with pytest.raises(EngineRefused, match="processes_max"):
        await rig.one.park(POLICY, 10)
    assert await rig.state() is EngineState.RUNNING
    options = rig.settings.cuda_checkpoint.model_copy(update={"processes_max": 2})
    rig.settings = rig.settings.model_copy(update={"cuda_checkpoint": options})
    able = await rig.again().capabilities()
    assert (able.unsupported, "cuda-checkpoint#27" in (able.fragile or "")) == (None, True)


@pytest.mark.long
async def test_the_process_that_listens_is_meant_where_the_file_says_so(new_rig: NewRig) -> None:
    rig = await new_rig()
    settings = rig.settings.cuda_checkpoint.model_copy(update={"pids_from": "port"})
    rig.settings = rig.settings.model_copy(update={"cuda_checkpoint": settings})
    elsewhere = rig.adapter(rig.settings.model_copy(update={"url": f"http://127.0.0.1:{free_port()}"}))
    able = await elsewhere.capabilities()
    assert "none of its processes has a CUDA context" in (able.unsupported or "")
    await elsewhere.aclose()
    able = await rig.again().capabilities()
    assert (able.unsupported, able.fragile) == (None, None)
    assert "13.0" in able.engine


async def test_a_restore_without_room_loses_the_engine_and_is_not_tried_again(new_rig: NewRig, tmp_path: Path) -> None:
    rig = await new_rig()
    await rig.one.park(POLICY, 10)
    rig.faults("restore_fails *")
    with pytest.raises(EngineRefused, match="cuda-checkpoint#44"):
        await rig.one.resume(POLICY, 10)
    rig.faults()
    seen = await rig.again().observe()
    assert (seen.state, "#44" in seen.detail) == (EngineState.FAILED, True)
    await rig.stop()
    await rig.start()
    assert await rig.state() is EngineState.RUNNING


async def test_a_restore_that_an_earlier_agent_s_call_has_done_is_done(new_rig: NewRig, tmp_path: Path) -> None:
    """Both wait for a device on which another engine is restored; the first one's agent is gone."""
    rig = await new_rig()
    golden = await rig.one.answer(CANARY)
    await rig.one.park(POLICY, 10)
    (lock,) = rig.one._driver._lock_paths
    with open(lock, "rb") as another:
        fcntl.flock(another, fcntl.LOCK_EX)
        gone = asyncio.create_task(rig.one.resume(POLICY, 30))
        await wait_until_async(lambda: rig.ledger.read().get("state") == "restoring", 10, "its call is next")
        heir = rig.again()
        assert await rig.state() is EngineState.PARKED
        resumed = asyncio.create_task(heir.resume(POLICY, 30))
        await wait_until_async(lambda: heir._driver.is_changing, 20, "the next agent's call waits too")
    await asyncio.gather(gone, resumed)
    assert await rig.state() is EngineState.RUNNING
    assert await rig.one.answer(CANARY) == golden


async def test_a_checkpoint_that_fails_or_frees_nothing(new_rig: NewRig) -> None:
    rig = await new_rig()
    full = await rig.held_mib()
    rig.faults("keeps_memory *")
    await rig.one.park(POLICY, 10)
    assert (await rig.state(), await rig.held_mib()) == (EngineState.PARKED, full)  # the bytes tell
    rig.faults()
    await rig.one.resume(POLICY, 10)
    assert await rig.state() is EngineState.RUNNING
    rig.faults("checkpoint_fails *")
    with pytest.raises(EngineTimedOut, match="only a restart helps"):
        await rig.one.park(POLICY, 10)
    rig.faults()
    rig.again()
    assert await rig.state() is EngineState.FAILED


@pytest.mark.long
async def test_a_driver_that_hangs_holds_nobody(new_rig: NewRig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lull.agents.engines.checkpoint_driver._START_SECONDS", 3.0)
    rig = await new_rig()
    await rig.one.park(POLICY, 10)
    rig.faults("restore_hangs *")
    async with asyncio.timeout(20):
        with pytest.raises(EngineTimedOut):
            await rig.one.resume(POLICY, 0.2)
        assert await rig.state() is EngineState.WAKING
        with pytest.raises(AgentError):
            await rig.again().resume(POLICY, 0.2)  # the first one is still at work
        rig.faults()
        await wait_until_async(lambda: _is_running(rig), 10, "what was restored is unlocked")
    await rig.one.park(POLICY, 10)

    monkeypatch.setattr("lull.agents.engines.cuda_checkpoint._STATUS_SECONDS", 0.2)
    rig.faults("state_hangs *")
    async with asyncio.timeout(20):
        seen = await rig.one.observe()
    assert (seen.state, "did not answer" in seen.detail) == (EngineState.UNREACHABLE, True)
    assert seen.is_our_fault
    rig.faults()
    assert await rig.state() is EngineState.PARKED


async def _is_running(rig: CheckpointRig) -> bool:
    return await rig.state() is EngineState.RUNNING


async def test_an_agent_that_died_between_two_calls_is_taken_over(new_rig: NewRig) -> None:
    rig = await new_rig("--more-ranks", "1", processes_max=2)
    golden, pids = await rig.one.answer(CANARY), sorted(rig.pids())
    processes = [known.model_dump() for pid in pids if (known := identity(pid)) is not None]

    # After one lock, and after both.
    for locked in (pids[:1], pids):
        rig.ledger.write(state="parking", processes=processes)
        for pid in locked:
            await rig.call("lock", pid=pid)
        rig.again()
        assert await rig.state() is EngineState.RUNNING
        assert [await rig.driver_state(pid) for pid in pids] == [ProcessState.RUNNING] * 2
        assert rig.ledger.read()["state"] is None

    # Between the two checkpoints: parked, and its bytes tell that it is not enough.
    rig.ledger.write(state="parking", processes=processes)
    await rig.call("lock", pid=pids[0])
    await rig.call("lock", "checkpoint", pid=pids[1])
    seen = await rig.again().observe()
    assert (seen.state, "are not checkpointed" in seen.detail) == (EngineState.PARKED, True)
    assert await rig.held_mib() > 0
    await rig.one.resume(POLICY, 10)
    assert await rig.state() is EngineState.RUNNING

    # Between the restore and the unlock.
    await rig.one.park(POLICY, 10)
    rig.ledger.write(state="restoring")
    for pid in pids:
        await rig.call("restore", pid=pid)
    rig.again()
    assert await rig.state() is EngineState.RUNNING
    assert await rig.one.answer(CANARY) == golden


@pytest.mark.long
async def test_a_process_that_ends_while_it_is_checkpointed(new_rig: NewRig) -> None:
    rig = await new_rig("--more-ranks", "1", processes_max=2)
    await rig.one.park(POLICY, 10)
    assert await rig.one.healthy()
    (rank,) = rig.pids() - {rig.pid}
    os.kill(rank, signal.SIGKILL)
    await wait_until_async(lambda: _is_failed(rig), 10, "its end is seen")
    with pytest.raises(AgentError):
        await rig.one.resume(POLICY, 10)


async def _is_failed(rig: CheckpointRig) -> bool:
    return await rig.state() is EngineState.FAILED


@pytest.mark.long
async def test_calls_that_change_something_take_turns(new_rig: NewRig, tmp_path: Path) -> None:
    rig = await new_rig()
    await rig.call("lock")
    rig.faults("checkpoint_hangs *")
    locks = [tmp_path / "device.lock"]
    first, second = CheckpointDriver(locks), CheckpointDriver(locks)
    try:
        busy = asyncio.create_task(first.call("checkpoint", rig.pid, 20))
        await wait_until_async(lambda: _is_checkpointing(rig), 10, "the checkpoint has begun")
        with pytest.raises(CheckpointBusy):
            await second.call("unlock", rig.pid, 10)
        rig.faults()
        assert (await busy).is_success
        assert (await second.call("restore", rig.pid, 10, wait_seconds=5)).is_success
    finally:
        first.close()
        second.close()


async def _is_checkpointing(rig: CheckpointRig) -> bool:
    return await rig.driver_state() is ProcessState.CHECKPOINTING


async def test_a_machine_without_a_driver_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LD_LIBRARY_PATH", raising=False)
    monkeypatch.delenv("FAKE_CUDA_STATE", raising=False)
    rig = CheckpointRig(tmp_path)
    try:
        able = await rig.one.capabilities()
        assert "checkpoint calls cannot be made here" in (able.unsupported or "")
        driver = CheckpointDriver([])
        with pytest.raises(CheckpointMissing):
            await driver.call("state", 1, 10)
        driver.close()
    finally:
        await rig.end()


async def test_a_process_for_calls_that_cannot_be_had_is_told() -> None:
    driver = CheckpointDriver([])
    with no_descriptors(), pytest.raises(CheckpointMissing, match="no process for checkpoint calls"):
        await driver.call("version", 0, 10)
    driver.close()


def test_the_states_are_the_drivers() -> None:
    facts = json.loads((Path(__file__).parents[2] / "engines" / "replies" / "cuda_checkpoint.json").read_text())
    assert {state.name: int(state) for state in ProcessState} == {
        name: fact["value"] for name, fact in facts["states"].items()
    }
