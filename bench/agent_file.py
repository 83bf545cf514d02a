"""The agent.toml of a box: one writer for the demo, the benchmarks and the tests."""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One reference engine on a device of its own, with its key file and its witness in ``directory``."""

    name: str
    port: int
    directory: Path
    lull: Sequence[str]  # how the command line is called
    weights_bytes: int
    kv_cache_bytes: int
    capacity_bytes: int
    policy: Mapping[str, Any]
    flags: Sequence[str] = ()  # more for `lull engine serve`
    more: Mapping[str, Any] = field(default_factory=dict[str, Any])  # other keys of [[engines]]

    @property
    def device_path(self) -> Path:
        return self.directory / f"device-{self.name}"

    @property
    def key_path(self) -> Path:
        return self.directory / f"{self.name}.key"

    @property
    def witness_path(self) -> Path:
        return self.directory / f"{self.name}.witness"

    def settings(self, index: int) -> dict[str, Any]:
        command = [
            *(*self.lull, "engine", "serve", "--name", self.name, "--port", str(self.port)),
            *("--device", str(self.device_path)),
            *("--weights", str(self.weights_bytes), "--kv-cache", str(self.kv_cache_bytes)),
            *("--control-key-file", str(self.key_path), "--witness", str(self.witness_path)),
            *self.flags,
            "{restore_mode_flags}",
        ]
        return {
            "name": self.name,
            "models": [self.name],
            "url": f"http://127.0.0.1:{self.port}",
            "device_indexes": [index],
            **({} if "kind" in self.more else {"control_key_file": str(self.key_path)}),  # of another kind, it has none
            "command": command,
            **self.more,
            "policy": dict(self.policy),
        }


def write_agent_toml(path: Path, settings: Mapping[str, Any], engines: Sequence[EngineEntry] = ()) -> None:
    """``settings`` beside what the engines bring: devices and [[engines]]. Key files are made. Raises OSError."""
    for engine in engines:
        with os.fdopen(os.open(engine.key_path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    values = {
        **settings,
        "devices": [
            *settings.get("devices", []),
            *({"path": str(engine.device_path), "capacity_bytes": engine.capacity_bytes} for engine in engines),
        ],
        "engines": [engine.settings(index) for index, engine in enumerate(engines, len(settings.get("devices", [])))],
    }
    path.write_text("".join(f"{line}\n" for line in _lines(values)))


def _lines(values: Mapping[str, Any]) -> list[str]:
    """Plain keys first: what follows a table's head belongs to the table."""
    tables: list[str] = []
    plain: list[str] = []
    for key, value in values.items():
        if isinstance(value, Mapping):
            tables += [f"[{key}]", *_pairs(cast("Mapping[str, Any]", value))]
        elif isinstance(value, list) and value and isinstance(value[0], Mapping):
            for entry in cast("list[Mapping[str, Any]]", value):
                tables += [f"[[{key}]]", *_pairs(entry)]
        else:
            plain += _pairs({key: value})
    return plain + tables


def _pairs(table: Mapping[str, Any]) -> list[str]:
    return [f"{key} = {in_toml(value)}" for key, value in table.items()]


def in_toml(value: Any) -> str:
    """A value as TOML spells it on one line; JSON does for strings, numbers and booleans."""
    if isinstance(value, Mapping):
        inner = cast("Mapping[str, Any]", value)
        return "{" + ", ".join(_pairs(inner)) + "}"
    if isinstance(value, list | tuple):
        items = cast("Sequence[Any]", value)
        return "[" + ", ".join(in_toml(one) for one in items) + "]"
    return json.dumps(str(value) if isinstance(value, Path) else value)
