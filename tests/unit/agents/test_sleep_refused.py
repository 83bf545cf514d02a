"""What a node refuses when it is told to put an engine to sleep: with an agent that was made and not started."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lull.agents.daemon import Daemon
from lull.agents.pressure import PressureWatch
from lull.agents.protocol.wire import OpenLoan, OrderEnvelope, WithoutJob
from lull.agents.settings import AgentSettings
from tests.waiting import wait_until_async


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    engine = {"name": "a", "kind": "vllm", "models": ["m"], "url": "http://127.0.0.1:1", "device_indexes": [0]}
    settings = AgentSettings.model_validate(
        {
            "server_url": "http://127.0.0.1:1",
            "token_file": tmp_path / "token",
            "data_dir": tmp_path / "agent",
            "devices": [{"path": tmp_path / "device", "capacity_bytes": 1 << 20}],
            "engines": [{**engine, "gate_kind": "none", "none": {}}],
        }
    )
    daemon = Daemon(settings)
    yield daemon
    daemon.journal.close()
    daemon._lock.release()


async def told(daemon: Daemon, engine_ids: list[str], without_job: WithoutJob) -> str:
    """Why it does not, or nothing."""
    order = OpenLoan(
        loan_id="loan",
        epoch=1,
        device_ids=list(daemon.node.devices),
        engine_ids=engine_ids,
        need_bytes=0,
        restore_by_seconds=60.0,
        policies={key: daemon.keepers[key].policy for key in engine_ids},
        attempts=[],
        without_job=without_job,
    )
    await daemon.orders.take(OrderEnvelope(seq=1, term=1, order=order))
    for task in asyncio.all_tasks() - {asyncio.current_task()}:
        task.cancel()  # the loan, if there is one, before it has begun
    reports: list[dict[str, Any]] = [one["report"] for one in daemon.journal.unsent()]
    [changed] = [one for one in reports if one["kind"] == "loan_changed"]
    return changed["reason"]["sentence"] if changed["reason"] else ""


async def test_no_request_could_wake_an_engine_whose_gate_sees_none(daemon: Daemon) -> None:
    said = await told(daemon, list(daemon.keepers), WithoutJob())
    assert said == "the gate of engine a does not see requests, so none could wake it"


async def test_its_time_or_an_operator_can(daemon: Daemon) -> None:
    assert await told(daemon, list(daemon.keepers), WithoutJob(wake_on_request=False)) == ""


async def test_a_policy_that_its_gate_cannot_obey_is_refused(daemon: Daemon) -> None:
    [keeper] = daemon.keepers.values()
    before = keeper.policy
    said = keeper.set_policy(1, before.model_copy(update={"on_drain_deadline": "abort_requests"}))
    assert said is not None
    assert "gate_kind 'none' cannot abort requests" in said
    assert (keeper.policy_version, keeper.policy) == (0, before)
    assert keeper.set_policy(1, before.model_copy(update={"drain_seconds_max": 1.0})) is None


async def test_nor_is_it_put_to_sleep_under_pressure(daemon: Daemon) -> None:
    [keeper] = daemon.keepers.values()
    wanted = keeper.policy.model_copy(update={"on_pressure": True, "pressure_free_bytes_min": 1})
    said = keeper.set_policy(1, wanted)
    assert said is not None
    assert "on_pressure: the gate of this engine does not see requests" in said
    keeper.policy = wanted  # as its agent's file may have it
    watch = asyncio.create_task(PressureWatch(daemon.node, daemon.keepers, daemon.loan_on).run())
    told = await wait_until_async(
        lambda: [one["report"] for one in daemon.journal.unsent() if one["report"]["kind"] == "alert"], 20, "the alert"
    )
    watch.cancel()
    assert [one["code"] for one in told] == ["pressure_not_watched"]
    assert keeper.pressure is None


async def test_there_is_somebody_who_sleeps(daemon: Daemon) -> None:
    assert "names none" in await told(daemon, [], WithoutJob())
