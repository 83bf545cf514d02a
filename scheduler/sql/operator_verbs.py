"""What an operator decides where nobody else can: the fate of an attempt, the end of a faulted loan, a restart.

Each is guarded by the present state, asked twice does nothing more, and leaves an event with who asked.
"""

from __future__ import annotations

from typing import Any, Final, Literal

from sqlalchemy import RowMapping, select

from ...agents.protocol.loans import LoanState
from ...agents.protocol.wire import (
    AttemptEnd,
    AttemptState,
    EngineState,
    GiveUpLoan,
    Reason,
    RestartEngine,
    StopAttempt,
)
from ..errors import Conflict, InvalidRequest, NotFound
from ..lifecycle import AttemptEvent, JobEvent
from ..tables import attempts, loan_devices, loans, nodes, orders
from . import registration
from .changes import (
    as_json,
    end_attempt,
    give_order,
    locked_attempt,
    locked_job,
    locked_loan,
    move_attempt,
    move_job,
    requeue_values,
)
from .leadership import ruling_term
from .reading import as_reason, engine
from .writer import Tx

Outcome = Literal["failed", "requeue"]
RESOLVED: Final = "Resolved"
GIVEN_UP: Final = "GivenUp"
_NOT_RESTARTED: Final = (EngineState.PARKING, EngineState.PARKED, EngineState.WAKING)


def resolve_attempt(tx: Tx, attempt_id: str, outcome: Outcome, principal: str, now: float, *, confirmed: bool) -> None:
    """Ends an attempt of unknown fate as lost. Its job fails, or is queued again: then it may run beside the lost
    attempt, which its node is told to stop as soon as it speaks, and that has to be ``confirmed``."""
    node = _locked_node_of(tx, attempts, "attempt", attempt_id)
    attempt = locked_attempt(tx, attempt_id)
    assert attempt is not None
    job = locked_job(tx, attempt["job_id"])
    assert job is not None
    if attempt["state"] == AttemptState.ENDED.value:
        before = as_reason(attempt["reason"])
        if before is not None and before.code == RESOLVED and before.data["outcome"] == outcome:
            return
        raise Conflict(f"the attempt has ended already: {attempt['end']}", state=attempt["state"])
    if attempt["state"] != AttemptState.UNKNOWN.value and node["silent_since"] is None:
        raise Conflict(
            f"the attempt is {attempt['state']} on a node that speaks: its fate is not unknown; cancel its job instead",
            state=attempt["state"],
        )
    if outcome == "requeue" and job["stop_wanted"]:
        raise Conflict("the job was to be cancelled: it is not queued again; resolve it as failed", state=job["state"])
    if outcome == "requeue" and not confirmed:
        raise InvalidRequest(
            "confirm",
            f"nobody knows whether attempt {attempt['attempt_no']} of job {job['id']} still runs on node {node['id']},"
            " and the job would be started a second time; make sure that it does not run, then send true",
        )
    sentence = "lost" if outcome == "failed" else "lost, and started anew"
    reason = Reason(code=RESOLVED, sentence=f"resolved by {principal} as {sentence}", data={"outcome": outcome})
    tx.event(
        "attempt_resolved",
        f"attempt {attempt['attempt_no']}, whose fate is unknown, was resolved as {sentence}",
        now,
        actor=principal,
        severity="warning",
        job_id=attempt["job_id"],
        attempt_id=attempt_id,
        loan_id=attempt["loan_id"],
        node_id=attempt["node_id"],
        from_state=attempt["state"],
        to_state=AttemptState.ENDED.value,
        data={"outcome": outcome},
    )
    if outcome == "failed":
        end_attempt(tx, attempt, AttemptEnd.LOST, now, reason=reason, actor=principal)
    else:
        _end_and_requeue(tx, attempt, job, reason, principal, now)
    stop = StopAttempt(attempt_id=attempt_id)
    give_order(tx, attempt["node_id"], stop, ruling_term(tx), now, attempt_id=attempt_id)
    in_use = node["confirmed_incarnation"] == node["incarnation"]
    if in_use and node["silent_since"] is None and node["newest_report"] <= node["acknowledged"]:
        registration.settle_loans(tx, node, now)  # one that waited for this attempt is over now


def _end_and_requeue(tx: Tx, attempt: RowMapping, job: RowMapping, reason: Reason, principal: str, now: float) -> None:
    values = {"end": AttemptEnd.LOST.value, "reason": as_json(reason), "missing_incarnation": None, "ended_at": now}
    sentence = f"attempt {attempt['attempt_no']} ended: {AttemptEnd.LOST}"
    move_attempt(tx, attempt, AttemptEvent.ENDED, now, sentence=sentence, actor=principal, values=values)
    move_job(
        tx,
        job,
        JobEvent.REQUEUED,
        now,
        sentence=f"queued again: {reason.sentence}",
        actor=principal,
        values=requeue_values(job, reason, now, ran=True),
        attempt=attempt,
    )


def give_up_loan(tx: Tx, loan_id: str, principal: str, now: float) -> None:
    """Orders the node to close a faulted loan as it is: the gates of its engines stay closed."""
    node = _locked_node_of(tx, loans, "loan", loan_id)
    loan = locked_loan(tx, loan_id)
    assert loan is not None
    before = as_reason(loan["reason"])
    if loan["state"] == LoanState.CLOSED.value and before is not None and before.code == GIVEN_UP:
        return
    if loan["state"] != LoanState.FAULTED.value:
        raise Conflict(f"the loan is {loan['state']}: only a faulted one can be given up", state=loan["state"])
    order = GiveUpLoan(loan_id=loan_id)
    if not _is_on_its_way(tx, node, order):
        give_order(tx, loan["node_id"], order, ruling_term(tx), now, loan_id=loan_id)
        sentence = "the loan is given up: its engines are left as they are, their gates stay closed"
        tx.event(
            "loan_give_up_ordered",
            sentence,
            now,
            actor=principal,
            severity="warning",
            loan_id=loan_id,
            node_id=loan["node_id"],
        )


def restart_engine(tx: Tx, id_or_name: str, principal: str, now: float) -> str:
    """Orders the agent to restart a supervised engine; returns its id."""
    found = engine(tx.conn, id_or_name)
    node = tx.conn.execute(select(nodes).where(nodes.c.id == found.node_id).with_for_update()).mappings().one()
    if not found.supervised:
        text = f"engine {found.name} is attached: whoever runs it restarts it"
        raise Conflict(text, state=found.state.value)
    lent = select(loan_devices.c.loan_id).where(loan_devices.c.open, loan_devices.c.device_id.in_(found.device_ids))
    loan_id = tx.conn.execute(lent.limit(1)).scalar_one_or_none()
    if loan_id is not None:
        raise Conflict(f"devices of engine {found.name} are lent (loan {loan_id})", state=found.state.value)
    if found.state in _NOT_RESTARTED:
        raise Conflict(f"engine {found.name} is {found.state}: it is being brought back", state=found.state.value)
    order = RestartEngine(engine_id=found.id)
    if not _is_on_its_way(tx, node, order):
        give_order(tx, found.node_id, order, ruling_term(tx), now)
        tx.event(
            "engine_restart_ordered",
            f"engine {found.name} is to be restarted",
            now,
            actor=principal,
            severity="warning",
            engine_id=found.id,
            node_id=found.node_id,
        )
    return found.id


def _locked_node_of(tx: Tx, table: Any, noun: str, key: str) -> RowMapping:
    """The node's row first, as whoever takes its reports does."""
    node_id = tx.conn.execute(select(table.c.node_id).where(table.c.id == key)).scalar_one_or_none()
    if node_id is None:
        raise NotFound(noun, key)
    return tx.conn.execute(select(nodes).where(nodes.c.id == node_id).with_for_update()).mappings().one()


def _is_on_its_way(tx: Tx, node: RowMapping, order: GiveUpLoan | RestartEngine) -> bool:
    """The node has this very order and has not answered it."""
    waiting = select(orders.c.body).where(
        orders.c.node_id == node["id"],
        orders.c.seq > node["fence_seq"],
        orders.c.kind == order.kind,
        orders.c.outcome.is_(None),
    )
    return order.model_dump(mode="json") in tx.conn.execute(waiting).scalars().all()
