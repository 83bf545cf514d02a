"""`lull up`: what dies is started again, what must live lives, and a stop leaves nothing."""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import subprocess
from collections.abc import Generator
from pathlib import Path

import pytest

from lull.agents.processes import is_same
from lull.bench.box import free_ports
from tests.doc_examples import example
from tests.up_box import LULL, UpBox, opened
from tests.waiting import wait_until

pytestmark = pytest.mark.acceptance


@pytest.fixture(scope="module")
def shared_box(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpBox]:
    """For tests that end with it running and no job in it."""
    with opened(tmp_path_factory.mktemp("box") / "box") as box:
        yield box


@pytest.fixture
def box(shared_box: UpBox) -> UpBox:
    wait_until(shared_box.ready, 60, "a server with one node")
    return shared_box


def running_job(box: UpBox) -> str:
    ended = box.run("submit", "-q", "--hbm", "8MiB", "--", "/bin/sh", "-c", "echo up; exec sleep 600")
    job = ended.stdout.strip()
    wait_until(lambda: box.run("logs", job).stdout == "up\n", 60, "the job's first word")
    return job


def job_pid(box: UpBox) -> int:
    """The process of the one job that runs."""
    for path in box.paths.agent_dir.rglob("started.json"):
        if not path.with_name("exit.json").exists():
            return int(json.loads(path.read_text())["pid"])
    raise AssertionError("no job has started")


@pytest.mark.parametrize("name", ["server", "agent"])
def test_who_is_killed_comes_back_and_the_job_goes_on(box: UpBox, name: str) -> None:
    job = running_job(box)
    pid = job_pid(box)
    killed = box.record().children[name]
    os.kill(killed.pid, signal.SIGKILL)
    wait_until(lambda: box.record().children[name] != killed and box.ready(), 90, f"a new {name}")
    wait_until(lambda: box.job(job).state == "running", 60, "the job's state")
    assert job_pid(box) == pid
    assert Path(f"/proc/{pid}").exists()
    assert box.run("cancel", job).returncode == 0
    assert box.run("wait", job).returncode == 130


def test_sigterm_ends_server_and_agent_and_nothing_else(box: UpBox) -> None:
    job = running_job(box)
    pid, record = job_pid(box), box.record()
    assert box.up is not None
    box.up.terminate()
    assert box.up.wait(60) == 0
    assert not any(is_same(process) for process in record.children.values())
    assert Path(f"/proc/{pid}").exists()
    assert box.processes()  # the gateway
    box.start()
    wait_until(lambda: box.job(job).state == "running", 60, "the job's state")
    assert job_pid(box) == pid
    assert box.run("cancel", job).returncode == 0
    assert box.run("wait", job).returncode == 130


def test_a_stop_ends_everything_and_loses_no_job(box: UpBox) -> None:
    job = running_job(box)
    pid = job_pid(box)
    ended = box.stop()
    assert ended.returncode == 0, ended.stderr
    assert box.up is not None
    assert box.up.wait(30) == 0
    assert box.processes() == []
    assert not Path(f"/proc/{pid}").exists()
    assert "nothing runs" in box.stop().stderr
    box.start()
    wait_until(lambda: (seen := box.job(job)).attempt_no == 2 and seen.state == "running", 90, "a second attempt")
    assert box.run("cancel", job).returncode == 0
    assert box.run("wait", job).returncode == 130


def test_one_data_directory_is_for_one(box: UpBox) -> None:
    ended = box.run_process("up", "--config", str(box.config), "--data-dir", str(box.directory), "--port", "1")
    assert ended.returncode == 1
    assert box.url in ended.stderr
    assert box.up is not None
    assert str(box.up.pid) in ended.stderr


def test_a_killed_up_leaves_orphans_that_the_next_one_ends(box: UpBox) -> None:
    orphans = box.record().children
    assert box.up is not None
    box.up.kill()
    box.up.wait(30)
    assert all(is_same(process) for process in orphans.values())
    box.start()
    wait_until(lambda: not any(map(is_same, orphans.values())), 60, "the end of the orphans")
    wait_until(lambda: box.ready() and len(box.record().children) == 2, 90, "two children of the new one")


def test_a_port_that_is_in_use_is_one_clear_line(box: UpBox, tmp_path: Path) -> None:
    other = UpBox(tmp_path / "other")
    argv = ("--config", str(other.config), "--data-dir", str(other.directory), "--port", str(box.port))
    ended = other.run_process("up", *argv)
    assert ended.returncode == 1
    assert str(box.port) in ended.stderr
    assert "Traceback" not in ended.stderr
    assert other.processes() == []
    assert not other.paths.record.exists()
    assert "nothing runs" in other.stop().stderr


def test_a_gateway_s_port_in_use_is_one_clear_line_and_the_rest_runs(tmp_path: Path) -> None:
    with opened(tmp_path / "box", start=False) as box, socket.socket() as taken:
        taken.bind(("127.0.0.1", box.gateway_port))
        taken.listen()
        box.start()
        (line,) = [line for line in (box.directory / "up.log").read_text().splitlines() if "gateway.listen" in line]
        assert f"127.0.0.1:{box.gateway_port}" in line
        assert "in use" in line
        assert box.run("submit", "--wait", "--hbm", "1MiB", "--", "true").returncode == 0
        wait_until(lambda: "gateway_down" in box.run("events", "-o", "jsonl").stdout, 60, "the alert")


def test_the_file_that_the_page_shows_starts_as_it_stands(tmp_path: Path) -> None:
    """In a folder and on ports of the test's own, with less to hold; and its engine is lent."""
    with opened(tmp_path / "box", start=False) as box:
        text = example("configuration.md", "toml")
        own = {
            "/var/lib/lull": tmp_path / "lib",
            "8070": box.gateway_port,
            "9001": free_ports(1)[0],
            '"1GiB"': '"8MiB"',
        }
        for shown, ours in own.items():
            assert shown in text
            text = text.replace(shown, str(ours))
        box.config.write_text(text)
        (tmp_path / "lib").mkdir()
        key = tmp_path / "lib/alpha.key"
        key.write_text(f"{secrets.token_hex(32)}\n")
        key.chmod(0o600)
        box.start()
        waited = box.run("submit", "--wait", "--hbm", "1GiB", "--", "true")
        assert waited.returncode == 0, box.run("engine", "list").stdout


@pytest.mark.parametrize(
    ("right", "wrong", "told"),
    [
        ("capacity_bytes = 67108864", "capacity_bytes = ", "agent.toml:5: "),
        ("node_name", "colour = 1\nnode_name", "agent.toml:1: colour"),
        ("capacity_bytes = 67108864", "capacity_bytes = 'much'", "agent.toml:5: devices.0.capacity_bytes"),
    ],
)
def test_settings_that_cannot_be_are_refused_before_anything_starts(
    tmp_path: Path, right: str, wrong: str, told: str
) -> None:
    box = UpBox(tmp_path / "box")
    text = box.config.read_text()
    assert right in text
    box.config.write_text(text.replace(right, wrong))
    ended = box.run_process(
        "up", "--config", str(box.config), "--data-dir", str(box.directory), "--port", str(box.port)
    )
    assert ended.returncode == 2, ended.stderr
    assert str(box.config) in ended.stderr
    assert told in ended.stderr
    assert box.processes() == []


def test_without_settings_a_machine_lends_a_quarter_of_its_memory(tmp_path: Path) -> None:
    box = UpBox(tmp_path / "plain")
    box.config.unlink()
    argv = [*LULL, "up", "--data-dir", str(box.directory), "--port", str(box.port)]
    with subprocess.Popen(argv, env=box.environ, stderr=subprocess.DEVNULL) as up:
        try:
            wait_until(box.ready, 90, "a server with one node")
            ended = box.run("submit", "--wait", "--hbm", "1MiB", "--", "true")
            assert ended.returncode == 0, ended.stderr
        finally:
            box.stop()
            up.kill()
    assert box.processes() == []
