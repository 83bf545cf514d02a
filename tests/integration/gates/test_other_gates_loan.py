"""Whole loans behind gates of the other kinds: an agent that dies in the middle, and a gate that opens meanwhile."""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from httpx import ConnectError

from lull.agents.engine_keeper import EngineKeeper
from lull.agents.processes import send_signal, wait_exited
from lull.agents.protocol.loans import LoanStep
from lull.agents.protocol.wire import GateState
from lull.vmm import HostDevice, HostDriver
from tests.agent_node import MIB, AgentNode
from tests.gates.kubernetes_server import NAMESPACE, TOKEN, FakePod, KubernetesServer
from tests.gates.nodes import node_of
from tests.gates.webhook_server import SECRET, WebhookServer
from tests.waiting import wait_until_async

WAITS_FOR_A_WORD = ["/bin/sh", "-c", 'echo up; read line < "$0"']


class Pod:
    """A pod of its own for the engine, as a daemon set's agent would meet it."""

    async def start(self, folder: Path) -> dict[str, Any]:
        self.server = KubernetesServer({"vllm": {"app": "vllm"}})
        self.pod = self.server.add(FakePod("vllm-0", "uid-1", {"app": "vllm"}, ["lull.dev/serving"]))
        await self.server.start()
        (folder / "api-token").write_text(TOKEN)
        section = {
            "api_url": self.server.url,
            "token_file": folder / "api-token",
            "namespace": NAMESPACE,
            "pod": "vllm-0",
            "services": ["vllm"],
            "condition": "lull.dev/serving",
            "drain_grace_seconds": 0.1,
            "propagation_seconds": 0.05,
        }
        return {"gate_kind": "kubernetes", "kubernetes": section}

    @property
    def is_open(self) -> bool:
        return self.pod.ready

    def open_by_itself(self) -> None:
        self.pod.conditions["lull.dev/serving"] = "True"
        self.server.changed(self.pod)
        self.server.follow()

    async def stop(self) -> None:
        await self.server.stop()
        assert self.server.odd == []


class Hook:
    async def start(self, folder: Path) -> dict[str, Any]:
        self.server = await WebhookServer().start()
        (folder / "secret").write_bytes(SECRET)
        section = {
            "url": f"http://127.0.0.1:{self.server.port}/",
            "secret_file": folder / "secret",
            "allow": ["127.0.0.0/8"],
            "call_seconds_max": 30,
        }
        return {"gate_kind": "webhook", "webhook": section}

    @property
    def is_open(self) -> bool:
        return self.server.state == "open"

    def open_by_itself(self) -> None:
        self.server.state = "open"

    async def stop(self) -> None:
        await self.server.stop()
        assert self.server.refused == []


@asynccontextmanager
async def node_behind(gate: Pod | Hook, root: Path) -> AsyncIterator[AgentNode]:
    settings = await gate.start(root)
    try:
        async with node_of(root, **settings, gate_poll_seconds=0.05) as node:
            await node.start()
            await node.ready()
            yield node
    finally:
        await gate.stop()


async def begin_job(node: AgentNode, pipe: Path) -> None:
    os.mkfifo(pipe)
    job = node.job([*WAITS_FOR_A_WORD, str(pipe)])
    await node.open_loan(job)
    await node.until(lambda: node.log_of(job.attempt_id) == b"up\n", "the job runs")


@pytest.mark.parametrize("gate", [Pod, pytest.param(Hook, marks=pytest.mark.long)])
async def test_the_engine_is_away_behind_a_closed_gate_whatever_dies(tmp_path: Path, gate: Any) -> None:
    other_side: Pod | Hook = gate()
    async with node_behind(other_side, tmp_path) as node:
        assert other_side.is_open
        await begin_job(node, tmp_path / "pipe")
        assert not other_side.is_open
        other_side.open_by_itself()
        await wait_until_async(lambda: not other_side.is_open, 10, "it is closed again")
        await node.crash()
        assert not other_side.is_open
        other_side.open_by_itself()
        await node.start()
        await wait_until_async(lambda: not other_side.is_open, 10, "the next agent closes it again")
        assert LoanStep.GATE_OPENING not in node.steps()
        (tmp_path / "pipe").write_text("go\n")
        await node.until_closed()
        assert other_side.is_open
        assert node.keeper().gate_state is GateState.OPEN
        assert node.steps().count(LoanStep.PARK_SENT) == 1


async def test_devices_are_looked_at_while_a_gate_takes_long(tmp_path: Path) -> None:
    hook = Hook()
    async with node_behind(hook, tmp_path) as node:
        hook.server.hangs.clear()
        asked = len(hook.server.hosts)
        await wait_until_async(lambda: len(hook.server.hosts) > asked, 10, "it is asked how it is")
        assert node.daemon is not None
        watch = node.daemon.watch
        driver = HostDriver(HostDevice.create(tmp_path / "device0", capacity_bytes=16 * MIB))
        handle = driver.create(driver.granularity())
        await wait_until_async(lambda: watch._foreign == set(node.device_ids), 10, "a stranger on the device is seen")
        driver.release(handle)
        await wait_until_async(lambda: not watch._foreign, 10, "it is gone")
        hook.server.hangs.set()


async def test_without_a_gate_a_loan_says_who_counted(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"gate_kind": "none", "none": {"drain_grace_seconds": 0.2}}
    async with node_of(tmp_path, **settings) as node:
        await node.start()
        await node.ready()
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert node.daemon is not None
        (drained,) = [row for row in node.daemon.journal.steps("loan-1") if row.step is LoanStep.IN_FLIGHT_ZERO]
        assert drained.data["counted_by"] == "grace"
        assert node.steps()[-1] is LoanStep.CLOSED
        assert LoanStep.SPAWNED in node.steps()
        assert [end["endpoint"] for end in node.reports("engine_changed")][-1] is None


async def test_a_dead_engine_that_nobody_else_counts_for_is_started_again(tmp_path: Path) -> None:
    """This engine has no such gauge at all: no word of it is to be had, before it is started or after it has ended."""
    gauge = {"in_flight_metrics": ["no:such_gauge"]}
    async with node_of(tmp_path, gate_kind="none", none=gauge) as node:
        await node.start()
        await node.ready()
        keeper = node.keeper()
        for wants_restart in (False, True):
            dead = keeper.incarnation
            process = keeper.process_identity
            assert process is not None
            send_signal(process, signal.SIGKILL)
            await wait_exited(process, 10)
            if wants_restart:
                keeper.want_restart()
            await node.until(partial(_is_another, keeper, {None, dead}), "it is started again")
            await node.ready()


async def test_an_engine_that_cannot_be_drained_serves_on_until_it_can_be_restarted(tmp_path: Path) -> None:
    hook = Hook()
    async with node_behind(hook, tmp_path) as node:
        hook.server.in_flight = None  # nobody counts
        keeper = node.keeper()
        first = keeper.incarnation
        keeper.want_restart()
        await node.until(lambda: keeper.reason is not None and "in_flight" in keeper.reason.sentence, "it is refused")
        await wait_until_async(lambda: hook.is_open, 10, "it serves on")
        assert keeper.incarnation == first
        hook.server.in_flight = 0
        await node.until(lambda: _is_another(keeper, {None, first}), "it is restarted")
        await node.ready()


def _is_another(keeper: EngineKeeper, gone: set[str | None]) -> bool:
    return keeper.incarnation not in gone


@pytest.mark.long
async def test_a_gateway_that_no_engine_needs_any_more_lets_nothing_past_the_gate_of_now(tmp_path: Path) -> None:
    """The file said `gateway` and says `none` now: the old gateway still led to the engine."""
    async with node_of(tmp_path) as node:
        await node.start()
        await node.ready()
        assert (await node.ask()).status_code == 200
        await node.stop()
        fields = node.settings.model_dump(exclude_unset=True)
        engines = [
            {**{key: value for key, value in engine.items() if key not in ("gate_kind",)}, "gate_kind": "none"}
            for engine in fields["engines"]
        ]
        first = node.settings
        grace = {"drain_grace_seconds": 0.1}
        node.settings = type(first).model_validate({**fields, "engines": engines, "none": grace})
        await node.start()
        await node.ready()
        with pytest.raises(ConnectError):
            await node.ask()
        await node.stop()
        node.settings = first
        await node.start()
        await node.ready()
        assert (await node.ask()).status_code == 200
