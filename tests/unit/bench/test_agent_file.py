"""What is written for a box is what an agent reads."""

from __future__ import annotations

import tomllib
from pathlib import Path

from lull.agents.protocol.config_file import load_toml
from lull.agents.settings import AgentSettings
from lull.bench.agent_file import EngineEntry, in_toml, write_agent_toml

MIB = 1 << 20


def test_an_agent_reads_what_was_written(tmp_path: Path) -> None:
    entry = EngineEntry(
        name="alpha",
        port=9001,
        directory=tmp_path / 'a "quoted" place',
        lull=("python", "-m", "lull.cli"),
        weights_bytes=4 * MIB,
        kv_cache_bytes=2 * MIB,
        capacity_bytes=16 * MIB,
        policy={"when": "always", "restore_modes": {"model_weights": "PINNED", "kv_cache": "NONE"}},
        flags=("--fault", "keep-memory"),
        more={"stop_seconds_max": 5},
    )
    entry.directory.mkdir()
    settings = {
        "gateway": {"listen": "127.0.0.1:8070"},
        "server_url": "http://127.0.0.1:7070",
        "token_file": tmp_path / "token",
        "data_dir": tmp_path / "agent",
        "devices": [{"path": "device", "capacity_bytes": MIB}],
    }
    write_agent_toml(tmp_path / "agent.toml", settings, [entry])
    read = load_toml(tmp_path / "agent.toml", AgentSettings)
    assert [device.path for device in read.devices] == [tmp_path / "device", entry.device_path]
    (engine,) = read.engines
    assert engine.device_indexes == [1]
    assert engine.control_key_file == entry.key_path
    assert entry.key_path.stat().st_mode & 0o777 == 0o600
    assert engine.policy.restore_modes["model_weights"] == "PINNED"
    assert engine.stop_seconds_max == 5
    assert engine.command is not None
    assert engine.command[-3:] == ["--fault", "keep-memory", "{restore_mode_flags}"]


def test_values_survive_the_spelling() -> None:
    value = {"a": [1, 2.5, True, "x\ny", {"b": ["é", "\\"]}], "c": {}, "d": []}
    assert tomllib.loads(f"v = {in_toml(value)}")["v"] == value
