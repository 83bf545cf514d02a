"""`lull demo --engine vllm` where no vLLM is, and what it would start where one is."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest
import typer

from lull.agents.protocol.config_file import load_toml
from lull.agents.settings import AgentSettings, EngineSettings
from lull.bench.box import DIRECTORY_BYTES_MAX, Box, _write_agent_toml
from lull.bench.vllm_engine import NoVllm, VllmInstall, find_vllm
from lull.cli.demo import DemoEngine, demo
from lull.cli.demo_story import plan_engines, plan_vllm

MIB = 1 << 20


def test_without_a_vllm_it_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LULL_VLLM_PYTHON", str(tmp_path / "none"))
    with pytest.raises(typer.Exit) as caught:
        demo(engine=DemoEngine.VLLM)
    assert caught.value.exit_code == 2
    said = capsys.readouterr().err
    assert f"demo --engine vllm: no vLLM was found in {tmp_path / 'none'}" in said
    assert "make test-vllm" in said
    assert "requirements/vllm.txt" in said


def test_it_is_looked_for_here_and_where_make_puts_it(tmp_path: Path) -> None:
    with pytest.raises(NoVllm) as caught:
        find_vllm({"XDG_CACHE_HOME": str(tmp_path)})
    assert sys.executable in str(caught.value)
    assert str(tmp_path / "lull" / "vllm" / "bin" / "python") in str(caught.value)


def test_an_interpreter_with_both_is_taken(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexit 0\n")
    python.chmod(0o755)
    assert find_vllm({"LULL_VLLM_PYTHON": str(python)}).python == str(python)


def test_the_vllm_is_lent_and_the_engine_beside_it_is_not() -> None:
    first, other = plan_vllm(VllmInstall("/usr/bin/python3"), 64 * MIB)
    usual, _ = plan_engines(64 * MIB)
    assert (first.lends, other.lends) == (True, False)
    assert first.capacity_bytes == usual.capacity_bytes
    assert other.vllm is None


def test_its_keys_make_an_engine_of_agent_toml(tmp_path: Path) -> None:
    install = VllmInstall("/v/bin/python")
    keys = install.engine_keys("alpha", 8001, tmp_path / "model", tmp_path / "device", 32 * MIB, tmp_path / "tmp")
    values = {"name": "alpha", "models": ["alpha"], "url": "http://127.0.0.1:8001", "device_indexes": [0], **keys}
    settings = EngineSettings.model_validate(values)
    assert settings.env["LULL_HOST_DEVICE"] == str(tmp_path / "device")
    assert settings.command is not None
    assert "--enable-sleep-mode" not in settings.command
    assert settings.command[settings.command.index("--worker-cls") + 1] == "lull.vmm.vllm.cpu_worker.LullCpuWorker"


def test_what_vllm_leaves_behind_goes_with_the_box(tmp_path: Path) -> None:
    """Its sockets and its rendezvous file stay where TMPDIR says when it is killed."""
    plan = plan_vllm(VllmInstall(shutil.which("true") or "true"), 64 * MIB)
    box = Box(tmp_path, tuple(plan), 1, 2, {"alpha": 3, "beta": 4}, {})
    _write_agent_toml(box)
    alpha, beta = load_toml(tmp_path / "agent.toml", AgentSettings).engines
    assert alpha.env["TMPDIR"] == str(tmp_path / "tmp")
    assert (tmp_path / "tmp").is_dir()
    assert "TMPDIR" not in beta.env
    longest = "d" * DIRECTORY_BYTES_MAX + f"/tmp/{uuid.uuid4()}"
    assert len(longest) <= 107, "a Unix socket has to fit"


def test_a_model_that_cannot_be_written_ends_the_demo_with_a_sentence(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\n[ "$2" = -c ] && exit 0\necho no space left >&2\nexit 1\n')
    python.chmod(0o755)
    argv = [sys.executable, "-P", "-m", "lull.cli", "demo", "--engine", "vllm"]
    environment = {**os.environ, "LULL_VLLM_PYTHON": str(python), "TMPDIR": str(tmp_path)}
    done = subprocess.run(argv, env=environment, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == f"lull: demo: {python} could not write a model: no space left\n"
    assert list(tmp_path.iterdir()) == [python]


def test_a_model_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho no space left >&2\nexit 1\n")
    python.chmod(0o755)
    with pytest.raises(NoVllm, match="could not write a model: no space left"):
        VllmInstall(str(python)).write_model(tmp_path / "model", MIB)
