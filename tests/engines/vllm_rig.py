"""A vLLM stand-in and the adapter that drives it, as the agent would make both."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines.ledger import Ledger
from lull.agents.engines.vllm import VllmAdapter
from lull.agents.engines.vllm_metal import VllmMetalAdapter
from lull.agents.protocol.policy import CanaryPolicy, EnginePolicy
from lull.agents.settings import EngineSettings
from lull.vmm.tags import RestoreMode
from tests.engines.spawned import Spawned, spawned

DEV_MODE = {"VLLM_SERVER_DEV_MODE": "1"}
RELOAD = {"reload": "reload_weights"}
KEPT = EnginePolicy()
LOST = EnginePolicy(restore_modes={"model_weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE})
KV_ONLY = EnginePolicy(restore_modes={"kv_cache": RestoreMode.NONE})
CANARY = CanaryPolicy(deadline_seconds=5)
CALL_SECONDS = 5.0


@contextmanager
def vllm(root: Path, version: str, *flags: str, dev_mode: bool = True, sleep_mode: bool = True) -> Iterator[Spawned]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_SERVER_DEV_MODE", "1" if dev_mode else "0")
        more = ("--enable-sleep-mode", *flags) if sleep_mode else flags
        with spawned(root, "vllm_server.py", "--version", version, *more) as engine:
            yield engine


def settings_of(engine: Spawned, **fields: Any) -> EngineSettings:
    values = {"name": "small", "kind": "vllm", "models": ["small"], "url": engine.url, "device_indexes": [0]}
    return EngineSettings.model_validate({**values, **fields})


def adapter_of(engine: Spawned, **fields: Any) -> VllmAdapter:
    """A new one every time, as after a restart of the agent: all it knows is in the ledger and on the command line."""
    settings = settings_of(engine, **fields)
    ledger = Ledger(engine.root / "ledger.json", lambda: engine.incarnation)
    kind = VllmMetalAdapter if settings.kind == "vllm-metal" else VllmAdapter
    return kind(settings, ledger, engine)
