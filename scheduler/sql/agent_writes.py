"""Orders that are no decisions, incarnations of a database that is gone, and agents that were refused."""

from __future__ import annotations

from sqlalchemy import update

from ...agents.protocol.wire import Order, Register
from ..tables import nodes
from .changes import give_order
from .leadership import ruling_term
from .writer import Tx


def add_order(tx: Tx, node_id: str, order: Order, now: float) -> int:
    attempt_id = getattr(order, "attempt_id", None)
    return give_order(tx, node_id, order, ruling_term(tx), now, attempt_id=attempt_id)


def raise_incarnation(tx: Tx, node_id: str, incarnation: int) -> None:
    """A node that carries a higher number than this database was registered by a database that has since lost its
    last commits (failover, restored copy). The next registration has to be above it, or the node refuses it."""
    tx.conn.execute(
        update(nodes).where(nodes.c.id == node_id, nodes.c.incarnation < incarnation).values(incarnation=incarnation)
    )


def note_duplicate(tx: Tx, register: Register, sentence: str, now: float) -> None:
    tx.event(
        "alert",
        sentence,
        now,
        severity="critical",
        node_id=register.node_id,
        data={"code": "duplicate_identity", "name": register.name, "boot_id": register.boot_id, "home": register.home},
    )
