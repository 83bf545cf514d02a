"""Nodes that a test left in order, for the next test that wants the same one: an engine takes seconds to start.

What is kept is what an agent that stops leaves alive: engines and gateway. The next test's agent is a new one, with a
new journal; it adopts them as it would after a restart, and has to take its own golden answers. An engine that was told
to go wrong, or that is not verified and routed when its test ends, is not kept.
"""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lull.agents.engine_keeper import EngineKeeper
from lull.agents.protocol.wire import EngineState, GateState

if TYPE_CHECKING:
    from tests.agent_node import AgentNode, EngineUnderTest

_KEPT_MAX: Final = 2  # each engine has torch in its memory
# In the agent's directory: who it is, and what the processes that live on have there.
_STAYS: Final = frozenset({"node.json", "engines", "gateway", "gateway.sock", "gateway.sock.lock"})
_OF_A_NODE: Final = frozenset({"agent", "token"})
_OF_AN_ENGINE: Final = frozenset({".key", ".witness"})
_kept: dict[str, AgentNode] = {}


async def take(
    root: Path, engines: list[EngineUnderTest], capacities: list[int], settings: dict[str, Any]
) -> AgentNode:
    """A kept node that is like the one wanted, its files linked into ``root``; else one that is not started yet."""
    from tests.agent_node import AgentNode

    # A directory that is there already is something special to its test, a small disk for example.
    own = (root / "agent").exists() or any(
        engine.faults or engine.extra or engine.attached or engine.more for engine in engines
    )
    found = None if own else _kept.pop(_key(engines, capacities), None)
    if found is None:
        node = AgentNode(root, engines, capacities, **settings)
        node.may_be_kept = not own
        return node
    for engine, running in zip(engines, found.engines, strict=True):
        engine.port = running.port
    for file in found.root.iterdir():
        # What the test before wrote there is not this one's.
        if file.name in _OF_A_NODE or file.suffix in _OF_AN_ENGINE or file.name.startswith("device"):
            (root / file.name).symlink_to(file)
    node = AgentNode(found.root, engines, capacities, gateway_port=found.gateway_port, **settings)
    node._children, node._engine_ids = found._children, found._engine_ids
    node.may_be_kept = True
    return node


async def keep(node: AgentNode) -> bool:
    """Stops the agent and keeps the rest; False, with nothing done, if that rest is not in order."""
    if not node.may_be_kept or not await set_down(node):
        return False
    _kept[_key(node.engines, node.capacities)] = node
    while len(_kept) > _KEPT_MAX:
        await _kept.pop(next(iter(_kept))).end_everything()
    return True


async def set_down(node: AgentNode) -> bool:
    """Stops the agent and forgets what it wrote, so that a new one finds engines and gateway alone; False, with nothing
    done, if these are not in order."""
    if node.daemon is None or node.daemon.loans:
        return False
    if not all(_in_order(keeper) for keeper in node.daemon.keepers.values()):
        return False
    node.keeper(node.engines[0].name)  # remembers the ids by which engines are found
    await node.stop()
    data_dir = node.root / "agent"
    for path in data_dir.iterdir():
        if path.name not in _STAYS:
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for engine in node.engines:
        facts = data_dir / "engines" / engine.name / "facts.json"
        value: dict[str, Any] = json.loads(facts.read_bytes())
        for of_that_test in ("golden", "short_sleeps"):
            value.pop(of_that_test, None)
        facts.write_text(json.dumps(value))
        node.witness_path(engine.name).write_bytes(b"")
    return True


def end_all() -> None:
    """At the end of a session."""

    async def end() -> list[BaseException | None]:
        return await asyncio.gather(*(node.end_everything() for node in _kept.values()), return_exceptions=True)

    ended = asyncio.run(end())
    _kept.clear()
    assert not any(ended), ended


def _in_order(keeper: EngineKeeper) -> bool:
    right = keeper.verified_now() and keeper.state is EngineState.RUNNING and keeper.gate_state is GateState.OPEN
    knows = keeper.footprint == keeper.device_bytes and keeper.data.get("condemned") is None
    wanted = {tag: str(mode) for tag, mode in keeper.settings.policy.restore_modes.items()}
    return right and knows and keeper.modes_in_effect() == wanted and not keeper.restart_wanted


def _key(engines: list[EngineUnderTest], capacities: list[int]) -> str:
    modes = [engine.policy.get("restore_modes") for engine in engines]
    sizes = [(engine.name, engine.weights_bytes, engine.kv_bytes, engine.devices) for engine in engines]
    return json.dumps([sizes, modes, capacities])
