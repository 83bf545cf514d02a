"""A node under test whose engines are stand-ins of this directory, driven by the real agent over their real wires."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lull.agents.processes import find_by_environ
from tests.agent_node import AgentNode, EngineUnderTest
from tests.engines.spawned import MIB, ROOT, stand_in_command


@dataclass
class StandInUnderTest(EngineUnderTest):
    """``settings``: fields of agent.toml's [[engines]] beside those that every stand-in has."""

    kind: str = "sglang"
    script: str = "sglang_server.py"
    flags: list[str] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)


class StandInNode(AgentNode):
    def _engine(self, engine: EngineUnderTest) -> dict[str, Any]:
        assert isinstance(engine, StandInUnderTest)
        root = self.engine_root(engine.name)
        root.mkdir(exist_ok=True)
        self.set_faults(*engine.faults, name=engine.name)
        device = self.root / f"device{engine.devices[0]}"
        flags = ["--model", engine.name, *engine.flags]
        if len(engine.devices) > 1:
            flags += ["--second-device", str(self.root / f"device{engine.devices[1]}")]
        self.commands[engine.name] = stand_in_command(engine.script, root, device, engine.port, *flags)
        supervised = {
            "command": self.commands[engine.name],
            "env": {"PYTHONPATH": str(ROOT)},
            "health_seconds_max": 60,
            "stop_seconds_max": 5,
        }
        return {
            "name": engine.name,
            "kind": engine.kind,
            "models": [engine.name],
            "url": f"http://127.0.0.1:{engine.port}",
            "device_indexes": engine.devices,
            **({} if engine.attached else supervised),
            "policy": {"when": "always", "settle_samples": 2, "settle_seconds_max": 2, **engine.policy},
            **engine.settings,
        }

    def engine_root(self, name: str = "alpha") -> Path:
        return self.root / f"{name}.engine"

    def set_faults(self, *names: str, name: str = "alpha") -> None:
        """Read by the stand-in at its next request."""
        (self.engine_root(name) / "faults.json").write_text(json.dumps(names))

    def start_owned(self, name: str = "alpha") -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        self.owned[name] = subprocess.Popen(
            self.commands[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, env=environment
        )

    def calls(self, name: str = "alpha") -> list[str]:
        """``METHOD /path`` of every request that reached the engine, in order."""
        path = self.engine_root(name) / "calls"
        lines = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        return [f"{line['method']} {line['path']}" for line in lines]


@asynccontextmanager
async def stand_in_node(
    root: Path, engine: StandInUnderTest, *, capacity_mib: int = 16, **settings: Any
) -> AsyncIterator[StandInNode]:
    """A started node whose engine is verified and routed. Every device of it has ``capacity_mib``."""
    node = StandInNode(root, [engine], [capacity_mib * MIB] * len(engine.devices), **settings)
    try:
        await node.start()
        if engine.attached:
            node.start_owned(engine.name)
        await node.ready()
        yield node
    finally:
        await node.end_everything()
        assert not [pid for it in (node._engine_ids or {}).values() for pid in find_by_environ("LULL_ENGINE", it)]
