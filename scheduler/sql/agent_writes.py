"""A node's sign of life, and orders that are no decisions."""

from __future__ import annotations

from sqlalchemy import select, update

from ...agents.protocol.wire import Order
from ..errors import NotFound
from ..tables import nodes
from .changes import give_order
from .leadership import ruling_term
from .writer import Tx


def touch(tx: Tx, node_id: str, now: float) -> None:
    """Counts a sign of life. The leader watches the count change by its own clock; the time is for people."""
    row = tx.conn.execute(select(nodes.c.silent_since).where(nodes.c.id == node_id).with_for_update()).one_or_none()
    if row is None:
        raise NotFound("node", node_id)
    tx.conn.execute(
        update(nodes)
        .where(nodes.c.id == node_id)
        .values(heard_count=nodes.c.heard_count + 1, last_seen_at=now, silent_since=None)
    )
    if row.silent_since is not None:
        tx.event("node_back", "the node speaks again", now, node_id=node_id)
        tx.touch("nodes", "jobs", "decide")


def add_order(tx: Tx, node_id: str, order: Order, now: float) -> int:
    attempt_id = getattr(order, "attempt_id", None)
    return give_order(tx, node_id, order, ruling_term(tx), now, attempt_id=attempt_id)


def raise_incarnation(tx: Tx, node_id: str, incarnation: int) -> None:
    """A node that carries a higher number than this database was registered by a database that has since lost its
    last commits (failover, restored copy). The next registration has to be above it, or the node refuses it."""
    tx.conn.execute(
        update(nodes).where(nodes.c.id == node_id, nodes.c.incarnation < incarnation).values(incarnation=incarnation)
    )
