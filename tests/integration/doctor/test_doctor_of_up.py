"""`lull doctor` with the very file that `lull up` is given, which leaves three keys to it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from lull.agents.doctor.checks import CHECKS
from lull.agents.processes import identity
from lull.cli.context import Target, write_context
from lull.cli.up_files import UpPaths, UpRecord, write_record
from tests.agent_node import free_port
from tests.cli_here import run_here

Told = dict[str, list[dict[str, str]]]
NEED = {"agent", "data_dir", "filesystem", "flush", "disk_room", "quarantine", "server", "token", "clock", "versions"}
NEED |= {"gateway", "gateway_port"}


def file_for_up(root: Path) -> Path:
    config = root / "agent.toml"
    config.write_text(
        f"""\
host_reserve_bytes = 0
[gateway]
listen = "127.0.0.1:{free_port()}"
[[devices]]
path = "device"
capacity_bytes = "16MiB"
[[engines]]
name = "small"
kind = "process"
models = ["small"]
url = "http://127.0.0.1:{free_port()}"
device_indexes = [0]
command = ["true"]
"""
    )
    return config


def doctor(config: Path, environ: Mapping[str, str]) -> Told:
    told = run_here(["doctor", "--config", str(config), "--json"], environ)
    assert told.stderr == ""
    found: Told = {}
    for one in json.loads(told.stdout)["checks"]:
        found.setdefault(one["check"], []).append(one)
    return found


def environment(root: Path) -> dict[str, str]:
    return {"HOME": str(root), "XDG_DATA_HOME": str(root / "data"), "LULL_CONFIG": str(root / "contexts.toml")}


def up_ran(config: Path, paths: UpPaths, url: str) -> None:
    paths.make()
    paths.server_dir.mkdir()
    paths.token_file.write_text("lull_test")
    paths.token_file.chmod(0o600)
    argv = ["lull", "agent", "--config", str(config), "--server", url, "--token-file", str(paths.token_file)]
    argv += ["--data-dir", str(paths.agent_dir)]
    me = identity(1)
    assert me is not None
    write_record(paths, UpRecord(server_url=url, mark=str(paths.data_dir), agent_argv=argv, up=me))


def test_what_up_filled_in_is_found_in_its_directory_or_by_its_context(tmp_path: Path) -> None:
    config, url = file_for_up(tmp_path), f"http://127.0.0.1:{free_port()}"
    elsewhere = UpPaths(tmp_path / "elsewhere")
    up_ran(config, elsewhere, url)
    write_context(tmp_path / "contexts.toml", "local", Target(url, elsewhere.token_file))
    for _ in range(2):
        found = doctor(config, environment(tmp_path))
        assert [one["status"] for one in found["config"]] == ["ok", "ok"]
        assert str(tmp_path) in found["config"][1]["seen"]
        assert found["key_files"][0]["status"] == "ok"
        assert url in found["server"][0]["seen"]
        assert found.keys() == {check.name for check in CHECKS}
        assert "agent" in found["data_dir"][0]["seen"]
        assert not [one for told in found.values() for one in told if "cannot be read" in one["seen"]]
        # Then where `lull up` keeps its things unless it is told otherwise.
        (tmp_path / "contexts.toml").unlink()
        if not (tmp_path / "data").exists():
            up_ran(config, UpPaths(tmp_path / "data" / "lull"), url)
            (tmp_path / "contexts.toml").write_text("")


def test_without_an_up_all_is_looked_at_that_can_be(tmp_path: Path) -> None:
    config = file_for_up(tmp_path)
    found = doctor(config, environment(tmp_path))
    assert [one["status"] for one in found["config"]] == ["ok", "warning"]
    assert "data_dir, server_url, token_file: left to `lull up`" in found["config"][1]["seen"]
    left_out = {check for check, told in found.items() if any("left to `lull up`" in one["seen"] for one in told)}
    assert left_out == NEED | {"config"}
    assert found["host_devices"][0]["status"] == "ok"
    assert found["engines"][0]["subject"] == "small"
    # Another file's `lull up` says nothing about this one.
    up_ran(tmp_path / "another.toml", UpPaths(tmp_path / "data" / "lull"), "http://127.0.0.1:1")
    assert doctor(config, environment(tmp_path))["config"][1]["status"] == "warning"
    # A file with an error of its own tells that alone.
    config.write_text(config.read_text() + "colour = 1\n")
    broken = doctor(config, environment(tmp_path))["config"]
    assert [("colour" in one["seen"], "server_url" in one["seen"]) for one in broken] == [(True, False)]
