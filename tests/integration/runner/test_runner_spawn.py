"""What a job starts with, and what is said when it cannot start."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest

from lull.agents.attempts import BadRecord, BadSpec
from lull.agents.protocol.wire import AttemptEnd
from tests.attempt_runs import PYTHON, Attempts, output


@pytest.mark.parametrize(
    ("argv", "workdir", "text"),
    [
        (["no-such-command"], None, "command not found: 'no-such-command' is in no directory of PATH="),
        (["./no-such-file"], None, "command './no-such-file' does not exist"),
        (["./plain"], None, "command './plain' is not an executable file"),
        (["./"], None, "command './' is not an executable file"),
        (["./bad-interpreter"], None, "or the interpreter in its first line does not"),
        (["./no-program"], None, "a script needs a #! line"),
        (["true"], "/no/such/directory", "workdir '/no/such/directory': No such file or directory"),
        (["true"], "plain", "Not a directory"),
        (["true", "x" * 200_000], None, "command 'true': Argument list too long"),
    ],
)
async def test_why_a_command_did_not_start(
    attempts: Attempts, tmp_path: Path, argv: list[str], workdir: str | None, text: str
) -> None:
    (tmp_path / "plain").write_text("#!/bin/sh\n")
    (tmp_path / "bad-interpreter").write_text("#!/no/such/shell\n")
    (tmp_path / "no-program").write_bytes(b"\0not a program")
    for name in ("bad-interpreter", "no-program"):
        (tmp_path / name).chmod(0o700)
    where = str(tmp_path) if workdir is None else str(tmp_path / workdir)
    process = await attempts.launch(argv, workdir=where)
    assert await process.go() is None
    outcome = await process.wait_ended()
    assert outcome.end == AttemptEnd.SPAWN_FAILED
    assert (outcome.exit_code, outcome.signal, outcome.started_at) == (None, None, None)
    assert outcome.reason is not None
    assert text in outcome.reason.sentence
    assert outcome.reason.code == "spawn_failed"
    assert process.directory.started() is None


async def test_what_a_job_sees(attempts: Attempts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AGENT_SECRET", "hunter2")
    code = """
import json, os, signal, sys
ignored = [n for n in range(1, 65) if n not in (9, 19, 32, 33) and signal.getsignal(n) == signal.SIG_IGN]
mask = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, [])))
umask = os.umask(0)
print(json.dumps({"env": dict(os.environ), "cwd": os.getcwd(), "stdin": sys.stdin.read(), "fds": sorted(
    int(n) for n in os.listdir("/proc/self/fd")), "leader": os.getsid(0) == os.getpid() == os.getpgid(0),
    "ignored": ignored, "mask": mask, "umask": umask, "oom": open("/proc/self/oom_score_adj").read().strip()}))
"""
    env = {"PATH": os.environ["PATH"], "GREETING": "grüße \udc80", "LULL_ATTEMPT": "forged"}
    mine = os.umask(0o027)
    try:
        process = await attempts.run([*PYTHON, code], env=env, workdir=str(tmp_path))
    finally:
        os.umask(mine)
    assert (await process.wait_ended()).exit_code == 0, output(process.directory, "stderr")
    seen = json.loads(output(process.directory))
    assert seen["env"].pop("LULL_ATTEMPT") == process.directory.path.name
    assert seen["env"].pop("LC_CTYPE", "C.UTF-8") == "C.UTF-8"  # Python's own
    assert seen["env"] == {"PATH": os.environ["PATH"], "GREETING": "grüße \udc80"}
    assert seen["cwd"] == str(tmp_path)
    assert seen["stdin"] == ""
    assert seen["fds"][:3] == [0, 1, 2]
    assert len(seen["fds"]) == 4, "standard streams, and the one that lists them"
    assert seen["leader"]
    assert seen["ignored"] == [13, 25], "Python's own at its start; nothing else"
    assert seen["mask"] == []
    assert seen["umask"] == 0o027
    assert seen["oom"] == "500"


async def test_without_workdir_a_job_starts_at_home(attempts: Attempts, tmp_path: Path) -> None:
    process = await attempts.run(["pwd"], env={"PATH": os.environ["PATH"], "HOME": str(tmp_path)})
    await process.wait_ended()
    assert output(process.directory) == f"{tmp_path}\n".encode()


async def test_a_broken_pipe_is_a_signal_to_the_job(attempts: Attempts) -> None:
    process = await attempts.run(["sh", "-c", "yes | head -n 1; echo ${PIPESTATUS:-done}"])
    assert (await process.wait_ended()).exit_code == 0
    assert output(process.directory) == b"y\ndone\n"
    assert output(process.directory, "stderr") == b"", "yes died by SIGPIPE instead of complaining"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"argv": []}, "argv"),
        ({"argv": ["a\0b"]}, r"argv\[0\]"),
        ({"env": {"A=B": "c"}}, "env: 'A=B'"),
        ({"env": {"A": "\0"}}, r"env\['A'\]"),
        ({"workdir": "relative"}, "workdir"),
        ({"kill_grace_seconds": -1.0}, "kill_grace_seconds"),
        ({"log_tail_bytes": -1}, "log_tail_bytes"),
    ],
)
async def test_a_bad_spec_is_refused_by_field(attempts: Attempts, fields: dict[str, object], text: str) -> None:
    directory, spec = attempts.make(["true"])
    spec = replace(spec, **fields)  # type: ignore[arg-type]
    with pytest.raises(BadSpec, match=text):
        directory.write_spec(spec)
    assert not directory.path.exists()


async def test_a_record_that_is_no_record(attempts: Attempts) -> None:
    directory, spec = attempts.make(["true"])
    directory.write_spec(spec)
    path = directory.path / "exit.json"
    for content in ("{torn", "[]"):
        path.write_text(content)
        with pytest.raises(BadRecord, match=r"exit\.json"):
            directory.exit_record()
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BadRecord, match="regular file"):
        directory.exit_record()
    path.unlink()
    path.symlink_to("spec.json")
    with pytest.raises(BadRecord, match=r"exit\.json"):
        directory.exit_record()
    assert directory.settle().end == AttemptEnd.NOT_STARTED, "what nobody can have left counts for nothing"
    assert not path.is_symlink()


async def test_a_spec_of_a_newer_agent_is_read(attempts: Attempts) -> None:
    directory, spec = attempts.make(["true"])
    directory.write_spec(spec)
    directory.write("spec.json", {**(directory.read("spec.json") or {}), "of_tomorrow": 1})
    assert directory.spec() == spec
