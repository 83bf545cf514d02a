"""Engine policies: seeded by the agent's TOML, changed over REST, locked by the TOML if it says so."""

from __future__ import annotations

from sqlalchemy import update

from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import SetPolicy
from ..errors import PolicyLocked, VersionConflict
from ..model import PolicyRow
from ..tables import engines
from .changes import give_order
from .leadership import ruling_term
from .reading import engine, policy_of
from .writer import Tx


def put(
    tx: Tx,
    id_or_name: str,
    policy: EnginePolicy,
    expected_version: int | None,
    principal: str,
    now: float,
) -> PolicyRow:
    found = engine(tx.conn, id_or_name)
    if found.policy_locked:
        raise PolicyLocked(found.id)
    # First: a request whose answer was lost is sent again, against a version that is over by its own doing.
    # One that its agent refused is offered to it again: what stood against it may be gone.
    anew = found.policy_refused is not None and expected_version in (None, found.policy_version)
    if policy == found.policy and not anew:
        return policy_of(found)
    if expected_version is not None and expected_version != found.policy_version:
        raise VersionConflict(expected_version, found.policy_version)
    version = found.policy_version + 1
    written = tx.conn.execute(
        update(engines)
        .where(engines.c.id == found.id, engines.c.policy_version == found.policy_version)
        # What held the engine back may be just what was mended: the next loan finds out.
        .values(policy=policy.model_dump(mode="json"), policy_version=version, not_before=0.0, trouble=None)
    )
    if written.rowcount != 1:
        raise VersionConflict(found.policy_version, version)
    give_order(tx, found.node_id, SetPolicy(engine_id=found.id, version=version, policy=policy), ruling_term(tx), now)
    tx.event(
        "policy_changed",
        f"the policy is at version {version}",
        now,
        actor=principal,
        engine_id=found.id,
        node_id=found.node_id,
        data={"version": version, "policy": policy.model_dump(mode="json")},
    )
    tx.touch("engines", "decide")
    return PolicyRow(found.id, version, policy, locked=False, version_in_force=found.policy_version_in_force)


def refused(tx: Tx, order: SetPolicy, sentence: str) -> None:
    """The agent goes on with the policy that it has: whoever looks at the engine is told why."""
    why = {"version": order.version, "sentence": sentence}
    tx.conn.execute(update(engines).where(engines.c.id == order.engine_id).values(policy_refused=why))
    tx.touch("engines")
