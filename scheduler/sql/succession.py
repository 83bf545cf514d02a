"""Who may register as a node that is known already: its own next life, and nobody beside it.

A data directory that was copied, or a virtual machine that was cloned, comes with the node's id, its journal and its
machine-id, while the original may live on. Told apart are, in this order:

1. Another machine-id: never the same node.
2. The same process of the agent, or the same boot and the same data directory: the lock of that directory proves that
   no other process is in it. Accepted at once.
3. Another boot, or another directory: the node after a reboot, or a copy. While the registered agent lives it is a
   copy. Accepted once the old lease is over.
4. And then only with a journal that holds the newest registration that was used. An older one is a copy from before
   (a restored snapshot): it does not know what the node has accepted and reported since, and its new reports would
   bear numbers that were used.

Whoever is refused is given no orders, since those are sent only above the fence that a registration is answered, and
nothing is concluded from what it holds.
"""

from __future__ import annotations

from sqlalchemy import RowMapping

from ...agents.protocol.wire import Register
from ..errors import DuplicateIdentity


def check_successor(old: RowMapping, register: Register, now: float, lease_seconds: float) -> None:
    """Raises DuplicateIdentity."""
    if old["machine_id"] != register.machine_id:
        raise DuplicateIdentity(
            register.node_id,
            "is registered from another machine (machine-id differs); give this agent a data directory of its own",
        )
    if _is_the_one(old, register):
        return
    other = "since another boot" if old["boot_id"] != register.boot_id else "in another data directory"
    silent_seconds = now - old["last_seen_at"]
    if old["silent_since"] is None and silent_seconds <= lease_seconds:
        raise DuplicateIdentity(
            register.node_id,
            f"an agent with this identity runs {other} and was heard {max(0.0, silent_seconds):.0f} s ago."
            f" If it is over, this one is taken {lease_seconds:.0f} s after its last word;"
            " a copy or a clone needs a data directory of its own",
            retry_after_seconds=max(1, round(lease_seconds - silent_seconds)),
        )
    if old["journal_id"] == register.journal_id and register.incarnation < old["confirmed_incarnation"]:
        raise DuplicateIdentity(
            register.node_id,
            f"this agent's journal is an older copy: it ends before registration {old['confirmed_incarnation']}, which"
            " the node has used. Give it a data directory of its own; or, if nothing of the node runs elsewhere, stop"
            " it, delete its journal.sqlite* and start it again: what is unknown then is for an operator to resolve",
        )


def _is_the_one(old: RowMapping, register: Register) -> bool:
    if register.start_id and register.start_id == old["start_id"]:
        return True
    same_home = "" in (old["home"], register.home) or old["home"] == register.home  # agents that do not tell
    return bool(old["boot_id"] == register.boot_id) and same_home
