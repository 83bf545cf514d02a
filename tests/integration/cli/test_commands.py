"""The commands of users, against a real server and a real agent."""

from __future__ import annotations

import json
import shlex
import shutil
import subprocess
from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.up_box import LULL, UpBox, opened
from tests.waiting import wait_until

MIB8 = ("--hbm", "8MiB")


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Generator[UpBox]:
    with opened(tmp_path_factory.mktemp("box")) as box:
        yield box


def submitted(box: UpBox, script: str, *options: str) -> str:
    ended = box.run("submit", "-q", *MIB8, *options, "--", "/bin/sh", "-c", script)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_job_is_submitted_runs_and_is_shown(box: UpBox) -> None:
    job = submitted(box, "echo out; echo err >&2", "--name", "first", "--project", "p")
    assert box.run("wait", job).returncode == 0
    shown = json.loads(box.run("show", job, "-o", "json").stdout)
    assert (shown["state"], shown["name"], shown["exit_code"]) == ("succeeded", "first", 0)
    assert shown["created_at"].endswith("Z")
    assert f"job:       {job}" in box.run("show", job).stdout
    assert box.run("logs", job).stdout == "out\n"
    assert box.run("logs", "--stderr", job).stdout == "err\n"
    assert job in box.run("ps").stdout
    assert job in box.run("job", "list", "-o", "name").stdout.split()
    assert yaml.safe_load(box.run("-o", "yaml", "show", job).stdout)["id"] == job
    late = box.run("cancel", job)
    assert (late.returncode, "job_ended" in late.stderr) == (5, True)


@pytest.mark.parametrize(("script", "code"), [("exit 0", 0), ("exit 7", 7), ("kill -9 $$", 137), ("kill -15 $$", 143)])
def test_waiting_ends_with_the_jobs_own_code(box: UpBox, script: str, code: int) -> None:
    assert box.run_process("submit", "--wait", *MIB8, "--", "/bin/sh", "-c", script).returncode == code


def test_following_prints_both_streams_and_ends_with_the_jobs_own_code(box: UpBox) -> None:
    ended = box.run("submit", "--follow", *MIB8, "--", "/bin/sh", "-c", "echo out; echo err >&2; exit 5")
    assert ended.returncode == 5
    assert ended.stdout == "out\n"
    assert ended.stderr.splitlines()[0] == "err"


def test_words_behind_the_first_belong_to_the_command(box: UpBox) -> None:
    ended = box.run("submit", "--follow", *MIB8, "/bin/echo", "-n", "--gpus", "--", "x")
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "--gpus -- x"


def test_a_running_job_is_cancelled(box: UpBox) -> None:
    job = submitted(box, "echo up; exec sleep 600")
    wait_until(lambda: box.run("logs", job).stdout == "up\n", 60, "the job's first word")
    assert box.run("wait", job, "--timeout", "0.2s").returncode == 124
    assert box.run("cancel", job).returncode == 0
    assert box.run("wait", job).returncode == 130
    assert box.run("cancel", job).returncode == 0  # it is what was asked for


def test_a_time_limit_ends_a_job(box: UpBox) -> None:
    job = submitted(box, "exec sleep 600", "--time", "1s")
    assert box.run("wait", job).returncode in (124, 143)
    assert json.loads(box.run("-o", "json", "show", job).stdout)["state"] == "timed_out"


def test_escapes_in_a_log_do_not_reach_the_terminal(box: UpBox) -> None:
    job = submitted(box, r"printf '\033[31mred\033[0m\033]0;title\007\n'")
    assert box.run("wait", job).returncode == 0
    assert box.run("logs", job).stdout == "red\n"
    assert box.run("logs", "--raw", job).returncode == 2


def test_a_job_may_come_from_a_file_and_options_win(box: UpBox, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("argv: [/bin/sh, -c, 'echo $WHO']\nhbm: 8MiB\nname: from file\nenv: {WHO: file}\n")
    ended = box.run("submit", "-f", str(path), "--env", "WHO=option", "--follow")
    assert (ended.returncode, ended.stdout) == (0, "option\n"), ended.stderr


def test_an_idempotency_key_gives_the_same_job(box: UpBox) -> None:
    key = ("--idempotency-key", "once")
    assert submitted(box, "true", *key) == submitted(box, "true", *key)
    other = box.run("submit", *key, *MIB8, "--", "/bin/false")
    assert (other.returncode, "idempotency_mismatch" in other.stderr) == (1, True)


def test_a_job_that_can_never_run_says_what_is_possible(box: UpBox) -> None:
    argv = ("submit", "--hbm", "1GiB", "--", "true")
    refused = box.run(*argv)
    assert refused.returncode == 1
    assert "largest possible is 64 MiB (67108864 bytes)" in refused.stderr
    assert box.run(*argv, "--wait").returncode == 1  # behind the command it is the command's own word
    assert box.run("submit", "--wait", *argv[1:]).returncode == 6


def test_a_waiting_job_says_why(box: UpBox) -> None:
    holder = submitted(box, "exec sleep 600")
    job = box.run("submit", "-q", "--hbm", "64MiB", "--", "true").stdout.strip()
    told = wait_until(lambda: "waits:" in (said := box.run("job", "explain", job).stdout) and said, 30, "a reason")
    assert "[" in str(told)
    assert box.run("cancel", holder, job).returncode == 0
    assert box.run("wait", holder).returncode == 130


def test_a_job_is_held_released_and_retried(box: UpBox) -> None:
    holder = submitted(box, "exec sleep 600")
    job = box.run("submit", "-q", "--hbm", "64MiB", "--", "true").stdout.strip()
    assert box.run("job", "hold", job).stdout == f"job {job}: held\n"
    assert "held by operator" in box.run("job", "explain", job).stdout
    assert json.loads(box.run("job", "release", job, "-o", "json").stdout)["state"] == "queued"
    early = box.run("job", "retry", job)
    assert (early.returncode, "has ended" in early.stderr) == (5, True)
    assert box.run("cancel", holder, job).returncode == 0
    again = box.run("job", "retry", "-q", job).stdout.strip()
    assert again != job
    assert box.run("wait", again).returncode == 0
    assert box.run("wait", holder).returncode == 130


def test_what_is_known_is_not_for_an_operator_to_decide(box: UpBox) -> None:
    job = submitted(box, "true")
    assert box.run("wait", job).returncode == 0
    for words in (("failed",), ("requeue",), ("requeue", "--yes")):
        refused = box.run("job", "resolve", job, "--as", *words)
        assert (refused.returncode, "ended already" in refused.stderr) == (5, True)
        assert "nobody knows" not in refused.stderr
    loan = json.loads(box.run("show", job, "-o", "json").stdout)["loan_id"]
    wait_until(
        lambda: json.loads(box.run("loan", "show", loan, "-o", "json").stdout)["state"] == "closed", 30, "closed"
    )
    given_up = box.run("loan", "give-up", loan)
    assert (given_up.returncode, "only a faulted one" in given_up.stderr) == (5, True)


@pytest.mark.parametrize(
    ("words", "code", "told"),
    [
        ("show nonesuch", 4, "nonesuch"),
        ("engine show nonesuch", 4, "nonesuch"),
        ("engine restart nonesuch", 4, "nonesuch"),
        ("job resolve nonesuch --as failed", 4, "nonesuch"),
        ("--token-file /nonexistent show x", 3, "/nonexistent"),
        ("--server http://127.0.0.1:1 ps", 3, "no token"),
        ("submit --hbm 40G -- true", 2, "ambiguous"),
        ("submit --env X -- true", 2, "NAME=VALUE"),
        ("submit", 2, "no command"),
        ("submit --wait --detach -- true", 2, "--detach"),
        ("submit --gpus 0 -- true", 2, "gpus"),
        ("-o nonsense ps", 2, "nonsense"),
        ("usage --since yesterday", 2, "--since"),
        ("frobnicate", 2, "frobnicate"),
    ],
)
def test_what_is_wrong_is_named_and_has_its_code(box: UpBox, words: str, code: int, told: str) -> None:
    ended = box.run(*shlex.split(words))
    assert ended.returncode == code, ended.stderr
    assert told in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_server_that_is_not_there_is_one_line(box: UpBox) -> None:
    token = str(box.paths.token_file)
    ended = box.run("--server", "http://127.0.0.1:1", "--token-file", token, "ps")
    assert ended.returncode == 1
    assert ended.stderr.count("\n") == 1
    assert "lull up" in ended.stderr


def test_a_foreign_token_is_refused(box: UpBox, tmp_path: Path) -> None:
    token = tmp_path / "token"
    token.write_text("lull_" + "x" * 43)
    token.chmod(0o600)
    ended = box.run("ps", LULL_TOKEN_FILE=str(token))
    assert (ended.returncode, "unauthenticated" in ended.stderr) == (3, True)


def test_lulls_own_codes_can_be_moved_away(box: UpBox) -> None:
    argv = ("submit", "--wait", "--hbm", "1GiB", "--", "true")
    assert box.run(*argv, LULL_EXIT_ERROR="99").returncode == 99


def test_nodes_loans_usage_and_events_are_listed(box: UpBox) -> None:
    job = submitted(box, "true")
    assert box.run("wait", job).returncode == 0
    (node,) = json.loads(box.run("node", "list", "-o", "json").stdout)
    assert node["name"] == "box"
    assert "64MiB" in box.run("node", "show", "box").stdout
    assert json.loads(box.run("engine", "list", "-o", "json").stdout) == []
    loan = box.run("loan", "list", "-o", "name").stdout.split()[0]
    assert "spawned" in box.run("loan", "show", loan).stdout
    usage = json.loads(box.run("usage", "-o", "json", "--since", "1h").stdout)
    assert {interval["device_id"] for interval in usage["items"]} == {node["devices"][0]["id"]}
    assert "job" in box.run("usage").stdout
    events = [json.loads(line) for line in box.run("events", "-o", "jsonl").stdout.splitlines()]
    assert [event["seq"] for event in events] == sorted({event["seq"] for event in events})
    assert any(event["job_id"] == job for event in events)
    last = events[-2]["seq"]
    assert box.run("events", "--since", str(last), "-o", "name").stdout.split()[0] == str(events[-1]["seq"])
    assert "the loan is" in box.run("events").stdout


def test_a_stop_in_a_copied_directory_leaves_the_original_agent_alone(box: UpBox, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("agent.json", "home.json"):
        shutil.copy(box.paths.agent_dir / name, copy)
    told = box.run(*box.agent_words(copy), "--stop")
    assert (told.returncode, "is a copy" in told.stderr) == (1, True), told.stderr
    assert box.run("wait", submitted(box, "true")).returncode == 0, "the original still takes jobs"


@pytest.mark.long
def test_an_agent_in_a_copied_directory_is_refused_and_takes_no_job(box: UpBox, tmp_path: Path) -> None:
    """First by itself, since its original runs here; then, as a clone elsewhere would be, by the server."""
    copy = tmp_path / "copy"
    shutil.copytree(box.paths.agent_dir, copy, ignore=shutil.ignore_patterns("*.sock", "attempts"))
    argv = box.agent_words(copy)
    at_home = box.run_process(*argv)
    assert (at_home.returncode, "is a copy" in at_home.stderr) == (1, True), at_home.stderr
    (copy / "home.json").unlink()
    with (tmp_path / "log").open("wb") as log:
        second = subprocess.Popen((*LULL, *argv), env=box.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        told = wait_until(
            lambda: [e for e in _events(box, "alert") if e["data"].get("code") == "duplicate_identity"], 30, "refused"
        )
        assert "another data directory" in told[0]["sentence"]
        job = submitted(box, "true")
        assert box.run("wait", job).returncode == 0
        assert len(json.loads(box.run("show", job, "-o", "json").stdout)["attempts"]) == 1
        assert second.poll() is None
        assert not list((copy / "attempts").glob("*")), "it has run nothing"
    finally:
        second.terminate()
        second.wait(30)
    assert "duplicate_identity" in (tmp_path / "log").read_text()


def _events(box: UpBox, type_: str) -> list[dict[str, Any]]:
    return [
        event
        for line in box.run("events", "-o", "jsonl").stdout.splitlines()
        if (event := json.loads(line))["type"] == type_
    ]
