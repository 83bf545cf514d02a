"""The agent's log on a disk that is full."""

from __future__ import annotations

import io
from pathlib import Path

import structlog

from lull.agents.main import LossyStream
from tests.small_disk import small_disk


def test_a_full_disk_behind_the_log_costs_lines_and_nothing_else(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        raw = (disk.path / "agent.log").open("ab", buffering=0)
        with io.TextIOWrapper(raw, write_through=True) as stream:
            log = structlog.PrintLogger(LossyStream(stream))  # type: ignore[arg-type]
            log.info("before")
            disk.fill()
            for _ in range(2000):
                log.info("x" * 100)
            disk.clear()
            log.info("after")
        lines = (disk.path / "agent.log").read_text().splitlines()
        assert lines[0] == "before"
        assert lines[-1].endswith("after")
