"""Ends and starts that do not go as they should, and routers that are none."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.engines.ledger import Ledger
from lull.agents.engines.llama_server import LlamaServerAdapter
from lull.agents.engines.ollama import OllamaAdapter
from lull.agents.errors import EngineRefused, EngineTimedOut
from lull.agents.processes import boot_id
from lull.agents.protocol.policy import CanaryPolicy
from lull.agents.protocol.wire import EngineState
from tests.engines.rigs import KINDS, Rig
from tests.engines.spawned import spawned

PROCESS = next(kind for kind in KINDS if kind.kind == "process")


async def test_a_process_that_was_to_end_is_ended_by_the_next_agent(tmp_path: Path) -> None:
    """The agent died between its word and the signal."""
    rig = Rig(PROCESS, tmp_path)
    await rig.start()
    try:
        Ledger(tmp_path / "ledger.json", boot_id).write(ending=rig.incarnation)
        assert (await rig.adapter().observe()).state is EngineState.PARKED
        assert (rig.incarnation, await rig.held_mib()) == (None, 0)
        await rig.adapter().resume(rig.settings.policy, 20)
        assert (await rig.adapter().observe()).state is EngineState.RUNNING
        await rig.process.stop(5)  # not by us: it is gone, and not parked
        assert (await rig.adapter().observe()).state is EngineState.GONE
    finally:
        await rig.stop()


async def test_a_process_that_never_becomes_ready_or_ends_at_its_start(tmp_path: Path) -> None:
    rig = Rig(PROCESS, tmp_path)
    await rig.start()
    try:
        policy = rig.settings.policy
        nowhere = rig.settings.model_copy(update={"health_path": "/nowhere"})
        await rig.adapter().park(policy, 5)
        with pytest.raises(EngineTimedOut, match="/nowhere"):
            await rig.adapter(nowhere).resume(policy, 0.5)
        await rig.stop()
        (tmp_path / "faults.json").write_text('["ends_at_start"]')
        with pytest.raises(EngineRefused, match=r"engine\.log"):
            await rig.adapter().resume(policy, 20)
        assert (await rig.adapter().observe()).state is EngineState.GONE
    finally:
        await rig.stop()


async def test_a_llama_server_that_is_no_router_or_does_not_have_the_model(tmp_path: Path) -> None:
    with spawned(tmp_path, "llama_server.py") as engine:
        able = await LlamaServerAdapter(engine.url, "other").capabilities()
        assert "does not list 'other'" in (able.unsupported or "")
        engine.set_faults("no_router")
        able = await LlamaServerAdapter(engine.url, "small").capabilities()
        assert 'kind = "process"' in (able.unsupported or "")


async def test_an_ollama_model_that_cannot_be_loaded_stays_parked(tmp_path: Path) -> None:
    with spawned(tmp_path, "ollama_server.py", health="/api/version") as engine:
        one = OllamaAdapter(engine.url, "small")
        engine.set_faults("load_fails")
        with pytest.raises(EngineRefused, match="out of memory"):
            await one.answer(CanaryPolicy())
        assert (await one.observe()).state is EngineState.PARKED
        engine.set_faults()
        assert (await one.answer(CanaryPolicy())).text
        assert (await one.observe()).state is EngineState.RUNNING
