"""How much output of ended attempts stays: what ended first goes first, what runs is left alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from lull.agents.job_logs import read_log
from lull.agents.log_retention import Ended, drop_oldest
from lull.agents.settings import AgentSettings

KIB = 1024
FULL = 64 * KIB


def attempt(root: Path, name: str, *, ended_at: float | None = None) -> Path:
    """One that wrote 64 KiB."""
    stream = root / name / "logs" / "stdout"
    stream.mkdir(parents=True)
    (stream / f"{0:020d}").write_bytes(b"x" * FULL)
    if ended_at is not None:
        end(root / name, ended_at)
    return root / name


def end(directory: Path, at: float) -> None:
    (directory / "exit.json").write_text(json.dumps({"log_bytes": {"stdout": FULL, "stderr": 0}}))
    os.utime(directory / "exit.json", (at, at))


def kept(root: Path) -> set[str]:
    return {path.name for path in root.iterdir() if (path / "logs").exists()}


def test_what_ended_first_goes_first_and_what_runs_stays(tmp_path: Path) -> None:
    seen: dict[str, Ended] = {}
    attempt(tmp_path, "a", ended_at=300.0)  # the oldest id, and the last to end
    attempt(tmp_path, "b", ended_at=100.0)
    attempt(tmp_path, "c", ended_at=200.0)
    runs = attempt(tmp_path, "d")
    drop_oldest(tmp_path, 4 * FULL, seen)
    assert kept(tmp_path) == {"a", "b", "c", "d"}
    drop_oldest(tmp_path, 3 * FULL, seen)
    assert kept(tmp_path) == {"a", "c", "d"}
    drop_oldest(tmp_path, 0, seen)
    assert kept(tmp_path) == {"d"}
    end(runs, 50.0)
    drop_oldest(tmp_path, FULL, seen)
    assert kept(tmp_path) == {"d"}, "it fits"
    drop_oldest(tmp_path, FULL - 1, seen)
    assert kept(tmp_path) == set()
    assert {path.name for path in tmp_path.iterdir()} == {"a", "b", "c", "d"}, "their records stay"


def test_output_that_is_gone_has_expired_and_none_at_all_has_not(tmp_path: Path) -> None:
    directory = attempt(tmp_path, "a", ended_at=1.0)
    assert read_log(directory, "stdout", 0).data == b"x" * FULL
    drop_oldest(tmp_path, 0, {})
    with pytest.raises(FileNotFoundError):
        read_log(directory, "stdout", 0)
    silent = tmp_path / "b"
    silent.mkdir()
    (silent / "exit.json").write_text("{}")
    assert read_log(silent, "stdout", 0).ended


def test_nothing_that_a_job_has_linked_is_removed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    (theirs / "file").write_bytes(b"x" * FULL)
    directory = attempt(tmp_path / "attempts", "a", ended_at=1.0)
    (directory / "logs" / "stderr").symlink_to(theirs)
    drop_oldest(tmp_path / "attempts", 0, {})
    assert (theirs / "file").exists()
    assert kept(tmp_path / "attempts") == set()
    odd = tmp_path / "attempts" / "b"
    odd.mkdir()
    (odd / "logs").symlink_to(theirs)
    end(odd, 1.0)
    drop_oldest(tmp_path / "attempts", 0, {})
    assert (theirs / "file").exists()


def test_one_that_was_removed_is_forgotten_and_no_directory_is_no_fault(tmp_path: Path) -> None:
    seen = {"gone": Ended(1.0, FULL)}
    drop_oldest(tmp_path / "none yet", 0, seen)
    assert seen == {}


def test_the_defaults_are_those_of_the_design() -> None:
    fields = {"server_url": "http://127.0.0.1:1", "token_file": "/t", "data_dir": "/d"}
    settings = AgentSettings.model_validate(fields)
    assert settings.log_head_bytes + settings.log_tail_bytes == 256 << 20
    assert (settings.logs_keep_seconds, settings.logs_bytes_max) == (14 * 24 * 3600, 20 << 30)
    assert AgentSettings.model_validate({**fields, "logs_keep_seconds": 365 * 24 * 3600}).logs_keep_seconds
