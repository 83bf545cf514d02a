"""A node whose engine is behind a real HAProxy, the node's gateway its backup server; or behind another gate."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests import kept_nodes
from tests.agent_node import MIB, AgentNode, EngineUnderTest, free_port
from tests.gates.haproxies import Haproxy


@asynccontextmanager
async def node_of(root: Path, engine: EngineUnderTest | None = None, **settings: Any) -> AsyncIterator[AgentNode]:
    """Not started yet; its ports are known."""
    # A busy machine takes its time to look at all processes.
    wanted = [engine or EngineUnderTest(policy={"settle_seconds_max": 30})]
    node = await kept_nodes.take(root, wanted, [16 * MIB], settings)
    kept = False
    try:
        yield node
        kept = await kept_nodes.keep(node)
    finally:
        if not kept:
            await node.end_everything()


@asynccontextmanager
async def haproxy_node(
    root: Path, sockets: Path, engine: EngineUnderTest | None = None, *, line: dict[str, Any] | None = None, **more: Any
) -> AsyncIterator[tuple[AgentNode, Haproxy]]:
    """Started, its engine verified and open in HAProxy. ``line``: of HAProxy's file; ``more``: of the gate's."""
    port = free_port()
    section = {
        "sockets": [str(sockets / f"haproxy-{port}.sock")],
        "backend": "llm",
        "old_worker_seconds_max": 0,
        **more,
    }
    settings: dict[str, Any] = {"gate_kind": "haproxy", "haproxy": section, "gate_poll_seconds": 0.05}
    async with node_of(root, engine, **settings) as node:
        haproxy = Haproxy(sockets, port, node.engines[0].port, backup_port=node.gateway_port, **(line or {})).start()
        try:
            await node.start()
            await node.ready()
            yield node, haproxy
        finally:
            haproxy.stop()
