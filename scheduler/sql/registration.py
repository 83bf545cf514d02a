"""A node registers with all that it holds, and both sides are brought to one picture.

What the node holds is adopted, or named to be recalled. What it does not hold is the delicate half: an attempt that
is open here and not listed there may be started again only if it is PROVED not to have started. The proof has
these parts, and each is needed:

1. Same journal. The node writes each acceptance of an order to its journal, flushed, before it acts on it, and lists
   from that journal every attempt that lives and every one whose end was not acknowledged. An attempt that
   is not listed was never accepted, or its end was acknowledged, that is: is in this database.
2. It is still `placed` here and the node never spoke of it, nor answered its order `accepted`. Otherwise the node
   once had it; that it is missing now means that a journal or this database lost something. Nothing follows then.
3. No report is known to be missing (``doubt``).
4. No old order can still start it. A registration ends all orders given so far: their seqs are at or below the
   fence, are never sent again, and the node refuses orders of a lower incarnation.
5. The registration is IN USE. A request that was delayed on its way (the node gave up on it, registered again and has
   been given orders since) describes a past in which the attempt was rightly not listed. So nothing is
   concluded at registration; it is noted, and concluded when the node first uses that very registration:
   its incarnation, or a seq at or above its fence, which only its answer told. A later registration overwrites
   the note.

Everything else stays `unknown`, with an alert. A reboot (another boot id, same conditions 4 and 5) proves that whatever
ran is over: `node_rebooted`.
"""

from __future__ import annotations

from typing import Any, Final

from sqlalchemy import RowMapping, insert, select, update

from ...agents.protocol.loans import LoanState
from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import (
    ORDER,
    PROTOCOL_VERSION,
    AttemptEnd,
    AttemptState,
    EngineDeclared,
    PolicyInForce,
    Reason,
    Register,
    Registered,
)
from ..errors import InvalidRequest, NotFound, StaleIncarnation
from ..tables import attempts, devices, engines, loans, nodes, orders
from . import adoption, history, inventory
from .changes import end_attempt, give_order, lose_sight, set_loan_state
from .leadership import ruling_term
from .succession import check_successor
from .writer import Tx

_HELD_MAX: Final = 10_000
_BY_OPERATORS: Final = ("give_up_loan", "restart_engine", "recall_loan")
_MARK_MAX: Final = 2**60  # what a database's integer holds, and room to count on


def register(tx: Tx, register: Register, now: float, lease_seconds: float) -> Registered:
    if register.protocol_version > PROTOCOL_VERSION + 1:
        raise InvalidRequest(
            "protocol_version", f"{register.protocol_version} is too new for this server; update the server first"
        )
    if len(register.loans) + len(register.attempts) > _HELD_MAX:
        raise InvalidRequest("loans", f"a node may hold {_HELD_MAX} loans and attempts")
    if (
        max(register.incarnation, register.orders_after, register.newest_report, *register.epochs.values(), 0)
        > _MARK_MAX
    ):
        raise InvalidRequest("incarnation", f"the marks that a node has persisted are at most {_MARK_MAX}")
    node = _write_node(tx, register, now, lease_seconds)
    _write_inventory(tx, register, now)
    adoption.raise_epochs(tx, register.epochs)
    recall = adoption.adopt_loans(tx, register, now)
    stop = adoption.adopt_attempts(tx, register, now)
    _note_missing(tx, register, node["incarnation"])
    tx.event(
        "node_registered",
        f"node {register.name} registered, version {register.version}",
        now,
        actor="agent",
        node_id=register.node_id,
        data={"incarnation": node["incarnation"], "loans": len(register.loans), "attempts": len(register.attempts)},
    )
    tx.touch("nodes", "engines", "decide")
    return Registered(
        incarnation=node["incarnation"],
        term=ruling_term(tx),
        lease_seconds=lease_seconds,
        orders_after=node["fence_seq"],
        acknowledged=node["acknowledged"],
        recall_loans=recall,
        stop_attempts=stop,
        policies=_policies(tx, register.node_id),
    )


def _write_node(tx: Tx, register: Register, now: float, lease_seconds: float) -> RowMapping:
    """A new incarnation, and a fence above every order given so far; both above what the node has persisted, which
    a database that is new, older or restored does not know."""
    here = nodes.c.id == register.node_id
    old = tx.conn.execute(select(nodes).where(here).with_for_update()).mappings().one_or_none()
    values: dict[str, Any] = {
        "name": register.name,
        "version": register.version,
        "protocol_version": register.protocol_version,
        "boot_id": register.boot_id,
        "machine_id": register.machine_id,
        "journal_id": register.journal_id,
        "start_id": register.start_id,
        "home": register.home,
        "newest_report": register.newest_report,
        "last_seen_at": now,
        "silent_since": None,
        "registered_at": now,
    }
    if old is None:
        values |= {"confirmed_incarnation": 0, "acknowledged": 0, "heard_count": 1}
        values |= {"incarnation": register.incarnation + 1}
        values |= dict.fromkeys(("order_seq", "fence_seq"), register.orders_after + 1)
        tx.conn.execute(insert(nodes).values(id=register.node_id, **values))
    else:
        check_successor(old, register, now, lease_seconds)
        if old["silent_since"] is None and now - old["last_seen_at"] > lease_seconds:
            # Nobody was there to call it silent: the server was away too.
            history.node_lost_sight(tx, register.node_id, old["last_seen_at"])
        values |= {
            "incarnation": max(old["incarnation"], register.incarnation) + 1,
            **dict.fromkeys(("order_seq", "fence_seq"), max(old["order_seq"], register.orders_after) + 1),
            "heard_count": old["heard_count"] + 1,
        }
        if register.start_id != old["start_id"] and register.reports_at_start is not None:
            # Above it the numbers are new ones, whatever bore them before the node lost power.
            values["acknowledged"] = min(old["acknowledged"], max(0, register.reports_at_start))
        if old["journal_id"] != register.journal_id:
            values |= {"acknowledged": 0, "journal_before_id": old["journal_before_id"] or old["journal_id"]}
        if old["boot_id"] != register.boot_id:
            values["boot_before_id"] = old["boot_before_id"] or old["boot_id"]
        tx.conn.execute(update(nodes).where(here).values(**values))
        # Orders are over: what they asked for and is still wanted is ordered anew.
        live = (attempts.c.node_id == register.node_id) & (attempts.c.state != AttemptState.ENDED.value)
        tx.conn.execute(update(attempts).where(live).values(stop_ordered=False))
        open_ = (loans.c.node_id == register.node_id) & (loans.c.state != LoanState.CLOSED.value)
        tx.conn.execute(update(loans).where(open_).values(recall_ordered=False, expects_more=None))
        _give_again(tx, register, old["fence_seq"], now)
    return tx.conn.execute(select(nodes).where(here)).mappings().one()


def _give_again(tx: Tx, register: Register, fence_seq: int, now: float) -> None:
    """What an operator asked for and the node had not taken: nobody would ask for it a second time."""
    missed = select(orders).where(
        orders.c.node_id == register.node_id,
        orders.c.seq > max(fence_seq, register.orders_after),
        orders.c.kind.in_(_BY_OPERATORS),
        orders.c.outcome.is_(None),
    )
    for row in tx.conn.execute(missed.order_by(orders.c.seq)).mappings().all():
        order = ORDER.validate_python(row["body"])
        give_order(tx, register.node_id, order, ruling_term(tx), now, loan_id=row["loan_id"])


def _write_inventory(tx: Tx, register: Register, now: float) -> None:
    node_id = register.node_id
    for table in (devices, engines):
        tx.conn.execute(update(table).where(table.c.node_id == node_id).values(present=False))
    for device in register.devices:
        inventory.device_observed(tx, node_id, device, now)
    for declared in register.engines:
        _declare_engine(tx, node_id, declared, now)
    gone = select(devices.c.id).where(devices.c.node_id == node_id, ~devices.c.present)
    history.node_lost_sight(tx, node_id, now, tx.conn.execute(gone).scalars().all())


def _declare_engine(tx: Tx, node_id: str, declared: EngineDeclared, now: float) -> None:
    """The TOML seeds the row in SQL, once; a locked TOML rules it at each registration. A version is above the one
    that the engine has in force, or the agent would refuse it: this database may be new or have lost a change."""
    engine_id = declared.engine.engine_id
    row = tx.conn.execute(select(engines).where(engines.c.id == engine_id).with_for_update()).mappings().one_or_none()
    if row is None:
        inventory.add_engine(tx, node_id, declared.engine, declared.policy, locked=declared.policy_locked, now=now)
        return
    inventory.engine_changed(tx, node_id, declared.engine, now)
    in_force = declared.engine.policy_version
    version = row["policy_version"] if row["policy_version"] >= in_force else in_force + 1
    values: dict[str, Any] = {"policy_locked": declared.policy_locked, "policy_version": version}
    policy = declared.policy.model_dump(mode="json")
    if declared.policy_locked and row["policy"] != policy:
        values |= {"policy": policy, "policy_version": version + 1}
        tx.event("policy_changed", "the agent's file rules", now, actor="agent", engine_id=engine_id, node_id=node_id)
    tx.conn.execute(update(engines).where(engines.c.id == engine_id).values(**values))


def _policies(tx: Tx, node_id: str) -> list[PolicyInForce]:
    statement = select(engines).where(engines.c.node_id == node_id, engines.c.present).order_by(engines.c.id)
    return [
        PolicyInForce(
            engine_id=row["id"], version=row["policy_version"], policy=EnginePolicy.model_validate(row["policy"])
        )
        for row in tx.conn.execute(statement).mappings()
    ]


# ---- what the node does not hold -------------------------------------------------------------------------------


def _note_missing(tx: Tx, register: Register, incarnation: int) -> None:
    held = {report.attempt_id for report in register.attempts}
    for loan in register.loans:
        held.update(loan.attempt_ids)
    listed = {"attempts": held, "loans": {loan.loan_id for loan in register.loans}}
    for table in (attempts, loans):
        over = AttemptState.ENDED.value if table is attempts else LoanState.CLOSED.value
        live = select(table.c.id).where(table.c.node_id == register.node_id, table.c.state != over)
        for row_id in tx.conn.execute(live.order_by(table.c.id)).scalars().all():
            note = None if row_id in listed[table.name] else incarnation
            tx.conn.execute(update(table).where(table.c.id == row_id).values(missing_incarnation=note))


def confirm(tx: Tx, node_id: str, seq: int, now: float) -> None:
    """The node asks for orders after ``seq``."""
    node = tx.conn.execute(select(nodes).where(nodes.c.id == node_id).with_for_update()).mappings().one_or_none()
    if node is None:
        raise NotFound("node", node_id)
    if seq < node["fence_seq"]:
        raise StaleIncarnation(node_id, f"orders after {seq} are over", int(node["incarnation"]))
    put_in_use(tx, node, now)


def put_in_use(tx: Tx, node: RowMapping, now: float) -> None:
    """The node uses its newest registration: what that did not list is settled now, once."""
    incarnation = node["incarnation"]
    if node["confirmed_incarnation"] == incarnation:
        return
    rebooted, forgot = node["boot_before_id"] is not None, node["journal_before_id"] is not None
    for attempt in _missing(tx, attempts, node["id"], incarnation):
        _settle_attempt(tx, attempt, now, rebooted=rebooted, forgot=forgot)
    if node["newest_report"] <= node["acknowledged"]:
        settle_loans(tx, node, now)
    tx.conn.execute(
        update(nodes)
        .where(nodes.c.id == node["id"])
        .values(confirmed_incarnation=incarnation, journal_before_id=None, boot_before_id=None)
    )
    if forgot:
        tx.event(
            "alert",
            "the node has lost its data directory: its journal is a new one",
            now,
            severity="critical",
            node_id=node["id"],
            data={"code": "journal_lost", "before": node["journal_before_id"], "now": node["journal_id"]},
        )
    tx.touch("nodes", "decide")


def _missing(tx: Tx, table: Any, node_id: str, incarnation: int) -> list[RowMapping]:
    over = AttemptState.ENDED.value if table is attempts else LoanState.CLOSED.value
    statement = select(table).where(
        table.c.node_id == node_id, table.c.state != over, table.c.missing_incarnation == incarnation
    )
    return list(tx.conn.execute(statement.order_by(table.c.id).with_for_update()).mappings().all())


def _settle_attempt(tx: Tx, attempt: RowMapping, now: float, *, rebooted: bool, forgot: bool) -> None:
    untouched = attempt["state"] == AttemptState.PLACED.value and not attempt["reported"]
    if untouched and not (forgot or attempt["doubt"] or _was_accepted(tx, attempt)):
        reason = Reason(code="NotStarted", sentence="its node registered anew and never took the order to start it")
        end_attempt(tx, attempt, AttemptEnd.NOT_STARTED, now, reason=reason, actor="scheduler")
    elif rebooted:
        reason = Reason(code="NodeRebooted", sentence="the node was started anew and does not hold this attempt")
        end_attempt(tx, attempt, AttemptEnd.NODE_REBOOTED, now, reason=reason, actor="scheduler")
    elif forgot:
        lose_sight(tx, attempt, now, "the node lost its data directory: nobody can say whether this attempt runs")
    else:
        lose_sight(tx, attempt, now, "the node once held this attempt and does not any more, without having said why")


def _was_accepted(tx: Tx, attempt: RowMapping) -> bool:
    """Whether the node answered that it took an order that carries this attempt."""
    carries = (orders.c.attempt_id == attempt["id"]) | (
        (orders.c.loan_id == attempt["loan_id"]) & (orders.c.kind == "open_loan")
    )
    statement = select(orders.c.seq, orders.c.kind, orders.c.attempt_id, orders.c.body).where(
        orders.c.node_id == attempt["node_id"], carries, orders.c.outcome == "accepted"
    )
    for order in tx.conn.execute(statement).mappings():
        if order["kind"] == "start_attempt":
            return True
        if order["kind"] == "open_loan" and any(
            spec["attempt_id"] == attempt["id"] for spec in order["body"].get("attempts", ())
        ):
            return True
    return False


def settle_loans(tx: Tx, node: RowMapping, now: float) -> None:
    """Once the reports are in that waited at the node: a loan that ended while nobody listened is not listed, and
    they say how it ended."""
    for loan in _missing(tx, loans, node["id"], node["incarnation"]):
        _settle_loan(tx, loan, now, forgot=node["journal_before_id"] is not None)


def _settle_loan(tx: Tx, loan: RowMapping, now: float, *, forgot: bool) -> None:
    """The node is through with it or never began it. While an attempt of it is unknown, its devices stay lent."""
    live = select(attempts.c.id).where(attempts.c.loan_id == loan["id"], attempts.c.state != AttemptState.ENDED.value)
    if tx.conn.execute(live.limit(1)).one_or_none() is not None:
        return
    reason = Reason(
        code="LoanNotHeld",
        sentence="the node lost its data directory" if forgot else "the node does not hold this loan",
    )
    set_loan_state(tx, loan, LoanState.CLOSED, now, reason=reason, actor="scheduler")
