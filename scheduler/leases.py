"""PURE: which nodes have been silent for too long, by one leader's own monotonic clock.

A node's sign of life is a count that rises in its row; the leader notes when it saw the count rise. No other
machine's clock matters. A leader that is new gives every node it finds a long grace: that the scheduler was away
says nothing about the nodes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from .model import Node, NodeId


@dataclass(slots=True)
class _Lease:
    heard_count: int
    deadline: float


class LeaseBook:
    """``now`` is monotonic seconds throughout."""

    def __init__(self, lease_seconds: float, grace_seconds: float) -> None:
        self._lease_seconds = lease_seconds
        self._grace_seconds = grace_seconds
        self._leases: dict[NodeId, _Lease] | None = None

    def forget(self) -> None:
        """Leadership was lost: the next ``overdue`` is that of a new leader."""
        self._leases = None

    def overdue(self, nodes: Iterable[Node], now: float) -> list[Node]:
        """The nodes that are to be called silent and are not yet."""
        new_leader = self._leases is None
        before = self._leases or {}
        self._leases = {}
        late: list[Node] = []
        for node in nodes:
            lease = before.get(node.id)
            if lease is None:
                lease = _Lease(node.heard_count, now + (self._grace_seconds if new_leader else self._lease_seconds))
            elif node.heard_count != lease.heard_count:
                lease = _Lease(node.heard_count, now + self._lease_seconds)
            self._leases[node.id] = lease
            if now >= lease.deadline and not node.silent:
                late.append(node)
        return late
