"""An agent keeps no more output of its attempts than its settings say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lull.agents import log_retention
from tests.agent_node import agent_node

KIB = 1024


async def test_the_output_that_ended_first_is_dropped_beyond_the_node_s_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_retention, "_AT_MOST_EVERY_SECONDS", 0.05)
    bounds: dict[str, Any] = {"log_head_bytes": 64 * KIB, "log_tail_bytes": 64 * KIB, "logs_bytes_max": 100 * KIB}
    async with agent_node(tmp_path, **bounds) as node:
        attempts = node.root / "agent" / "attempts"
        jobs = [node.job(["head", "-c", "90000", "/dev/zero"]) for _ in range(2)]
        for number, job in enumerate(jobs, 1):
            await node.open_loan(job, loan_id=f"loan-{number}", epoch=number)
            await node.until_closed(f"loan-{number}")
        spec = json.loads((attempts / jobs[0].attempt_id / "spec.json").read_text())
        assert (spec["log_head_bytes"], spec["log_tail_bytes"]) == (32 * KIB, 32 * KIB), "half for either stream"
        await node.until(lambda: not (attempts / jobs[0].attempt_id / "logs").exists(), "the first one's is dropped")
        assert (attempts / jobs[1].attempt_id / "logs" / "stdout").exists()
        assert (attempts / jobs[0].attempt_id / "exit.json").exists()
