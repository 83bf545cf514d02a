"""How an agent is told to keep a memory service, and how an engine is told where it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.agents.engine_process import render_command
from lull.agents.memory_service import service_socket
from lull.agents.node import Owners
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.settings import MEMORY_SERVICE_FLAGS, RESTORE_MODE_FLAGS, AgentSettings

COMMAND = ["serve", MEMORY_SERVICE_FLAGS, RESTORE_MODE_FLAGS]


def settings(tmp_path: Path, **device: Any) -> AgentSettings:
    engine = {
        "name": "alpha",
        "models": ["alpha"],
        "url": "http://127.0.0.1:9001",
        "device_indexes": [0],
        "control_key_file": tmp_path / "key",
        "command": COMMAND,
    }
    values = {
        "server_url": "http://127.0.0.1:1",
        "token_file": tmp_path / "token",
        "data_dir": tmp_path,
        "devices": [{"path": tmp_path / "device", "capacity_bytes": 1 << 20, **device}],
        "engines": [engine],
    }
    return AgentSettings.model_validate(values)


def test_an_engine_that_wants_a_service_needs_one_on_its_device(tmp_path: Path) -> None:
    assert settings(tmp_path, memory_service=True).devices[0].memory_service
    with pytest.raises(ValueError, match=r"needs memory_service = true in the \[\[devices\]\]"):
        settings(tmp_path)


def test_the_engine_is_told_the_socket(tmp_path: Path) -> None:
    policy = EnginePolicy(restore_modes={"model_weights": "CPU"})  # type: ignore[dict-item]
    modes = ["--restore-mode", "model_weights=CPU"]
    assert render_command(COMMAND, policy, Path("/s")) == ["serve", "--memory-service", "/s", *modes]
    assert render_command(COMMAND, policy, None) == ["serve", *modes]


def test_a_socket_is_the_device_s_and_short(tmp_path: Path) -> None:
    first = service_socket(tmp_path, "HOST-1")
    assert first == service_socket(tmp_path, "HOST-1")
    assert first != service_socket(tmp_path, "HOST-2")
    assert len(str(first.relative_to(tmp_path))) <= 20


def test_a_service_is_neither_foreign_nor_an_engine() -> None:
    owners = Owners(engines={"e": lambda: {1}}, attempts={"a": lambda: {2}}, services={"d": lambda: {3}})
    assert owners.of([1, 2, 3, 4]) == {1: ("engine", "e"), 2: ("job", "a"), 3: ("service", None), 4: ("foreign", None)}
