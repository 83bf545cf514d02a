"""`lull demo` and `lull bench loan` as users run them, small: every number, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from lull.agents.processes import find_by_environ
from tests.waiting import wait_until

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(400)]

MIB = 1 << 20
LULL = (sys.executable, "-P", "-m", "lull.cli")
SMALL = ("--engine-weights", "32MiB", "--timeout", "200s")
MARK = "LULL_DEMO_TEST"


def environ(tmp_path: Path) -> dict[str, str]:
    """A temporary directory of its own, and a mark by which every process of the demo is found."""
    (tmp_path / "t").mkdir(exist_ok=True)
    return {**os.environ, "TMPDIR": str(tmp_path / "t"), MARK: str(tmp_path), "COLUMNS": "200"}


@pytest.fixture
def short_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Unix sockets have short names."""
    return tmp_path_factory.mktemp("d")


def run(path: Path, *words: str) -> subprocess.CompletedProcess[str]:
    argv = [*LULL, *words]
    return subprocess.run(argv, env=environ(path), cwd=path, capture_output=True, text=True, timeout=300, check=False)


def left_behind(path: Path) -> list[str]:
    names = [str(found) for found in (path / "t").iterdir()]
    return names + [f"process {pid}" for pid in find_by_environ(MARK, str(path))]


def roles(document: dict[str, Any]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for process in document["processes"]:
        found.setdefault(process["role"], []).append(process["pid"])
    return found


def test_the_demo_tells_the_whole_story_and_leaves_nothing(short_path: Path) -> None:
    ended = run(short_path, "demo", "--json", *SMALL)
    assert ended.returncode == 0, ended.stderr + ended.stdout
    document = json.loads(ended.stdout)
    assert document["failures"] == []
    assert document["engine_answer_equal"]
    assert document["addresses_unchanged"]
    engine_bytes = document["engine_device_bytes_before"]
    assert engine_bytes >= 32 * MIB
    assert document["engine_device_bytes_parked"] == 0
    assert document["engine_device_bytes_after"] == engine_bytes
    assert document["free_bytes_before"] == document["device_capacity_bytes"] - engine_bytes
    assert document["free_bytes_parked"] == document["device_capacity_bytes"]
    assert document["free_bytes_after"] == document["free_bytes_before"]
    assert document["job_allocated_bytes"] > document["free_bytes_before"]
    assert document["backup_bytes"] >= 30 * MIB
    assert document["requests_sent"] == document["requests_answered"] > 10
    assert document["requests_failed"] == 0
    assert document["job_exit_code"] == 0
    assert document["overhead_seconds"] > 0
    assert {"draining", "parking", "settling", "lent", "recalling", "waking", "verifying"} <= set(
        document["phase_seconds"]
    )
    found = roles(document)
    assert {"server", "agent", "gateway", "engine", "runner", "job", "load"} <= set(found)
    assert len(found["engine"]) == 2
    assert len({pid for pids in found.values() for pid in pids}) == len(document["processes"])
    assert left_behind(short_path) == []


def interrupted(path: Path, number: signal.Signals, moment: str) -> tuple[int, str]:
    """The exit code of a demo that gets a signal once it has said `moment`."""
    argv = [*LULL, "demo", *SMALL]
    with subprocess.Popen(
        argv, env=environ(path), cwd=path, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as demo:
        assert demo.stderr is not None
        said: list[str] = []
        for line in demo.stderr:
            said.append(line)
            if moment in line:
                demo.send_signal(number)
                break
        said += demo.stderr.readlines()
        return demo.wait(60), "".join(said)


@pytest.mark.parametrize(
    ("number", "moment"),
    [(signal.SIGINT, "spawned"), (signal.SIGTERM, "park_sent"), (signal.SIGINT, "starting, gate closed")],
)
def test_an_interrupted_demo_leaves_nothing(short_path: Path, number: signal.Signals, moment: str) -> None:
    code, said = interrupted(short_path, number, moment)
    assert moment in said, said
    assert code == 130, said
    wait_until(lambda: left_behind(short_path) == [], 10, "an empty place")


def test_a_demo_that_cannot_end_in_time_says_where_it_was_and_leaves_nothing(short_path: Path) -> None:
    ended = run(short_path, "demo", "--json", "--engine-weights", "32MiB", "--timeout", "1s")
    assert ended.returncode == 1
    assert "last seen" in ended.stderr
    assert ended.stdout == ""
    assert left_behind(short_path) == []


def test_what_cannot_be_is_refused_before_anything_starts(short_path: Path) -> None:
    for words, told in ((("--engine-weights", "1MiB"), "between"), (("--timeout", "soon"), "duration")):
        ended = run(short_path, "demo", *words)
        assert (ended.returncode, told in ended.stderr) == (2, True)


def test_a_kept_box_goes_on_and_is_ended_by_a_stop(short_path: Path) -> None:
    ended = run(short_path, "demo", "--keep", *SMALL)
    assert ended.returncode == 0, ended.stderr
    (directory,) = (short_path / "t").iterdir()
    try:
        listed = subprocess.run(
            [*LULL, "engine", "list", "-o", "json"],
            env={**environ(short_path), "LULL_CONFIG": str(directory / "cli.toml")},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert {(engine["name"], engine["gate"]) for engine in json.loads(listed.stdout)} == {
            ("alpha", "open"),
            ("beta", "open"),
        }
        assert str(directory) in ended.stderr
    finally:
        stopped = run(short_path, "up", "--stop", "--data-dir", str(directory))
    assert stopped.returncode == 0, stopped.stderr
    assert find_by_environ(MARK, str(short_path)) == []


def test_the_loan_benchmark_tells_every_part(short_path: Path) -> None:
    ended = run(short_path, "bench", "loan", "--json", "--loans", "2", "--weights", "32MiB")
    assert ended.returncode == 0, ended.stderr
    document = json.loads(ended.stdout)
    assert document["loans"] == 2
    own = [part["p50"] for part in document["parts_seconds"] if part["counted_as"] == "lull"]
    assert document["own_seconds"]["p50"] > 0
    assert document["own_seconds"]["max"] >= document["own_seconds"]["p50"] >= document["own_seconds"]["min"]
    assert len(own) >= 10
    assert {"copy", "settle", "job", "canary", "drain", "lull"} == {
        part["counted_as"] for part in document["parts_seconds"]
    }
    assert left_behind(short_path) == []
