"""Engines that serve and that the agent cannot ask, and engines that somebody else has stopped: none is touched."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from lull.agents.protocol.loans import LoanStep
from tests.engines.engine_loans import alerts, held_and_served_again
from tests.engines.stand_in_node import StandInUnderTest, stand_in_node

KEPT = ["--enable-memory-saver", "--enable-weights-cpu-backup"]


@pytest.mark.parametrize("content", [b"", b"\xff\xfekey"], ids=["empty", "no text"])
async def test_a_key_file_that_holds_no_key_for_a_while_costs_neither_engine_nor_agent(
    tmp_path: Path, content: bytes
) -> None:
    key = tmp_path / "api.key"
    key.write_text("user\n")
    async with stand_in_node(tmp_path, StandInUnderTest(flags=KEPT, settings={"api_key_file": str(key)})) as node:
        first = node.keeper().incarnation
        key.write_bytes(content)
        await node.until(lambda: "engine_not_observable" in alerts(node), "the alert")
        assert (await node.ask()).status_code == 200
        key.write_text("user\n")
        await node.open_loan(node.job(["true"]))
        await node.until_closed()
        assert LoanStep.SPAWNED in node.steps()
        assert node.keeper().incarnation == first
        assert "engine_not_running" not in alerts(node)


async def test_an_sglang_that_somebody_else_has_paused_is_left_alone(tmp_path: Path) -> None:
    engine = StandInUnderTest(flags=KEPT)

    async def post(path: str) -> None:
        async with httpx.AsyncClient(trust_env=False) as client:
            reply = await client.post(f"http://127.0.0.1:{engine.port}{path}", json={"mode": "abort"})
            assert reply.status_code == 200

    async with stand_in_node(tmp_path, engine) as node:
        await held_and_served_again(node, lambda: post("/pause_generation"), lambda: post("/continue_generation"))
