"""What an operator wants of an engine's sleep: put it to sleep without a job, wake it, end any loan early.

The first two are answered by an operation, whose state is its loan's. The key's row commits with it: a repeated
request finds both or neither. Asked again without a key while the same is under way, nothing more is done.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Final

from sqlalchemy import RowMapping, exc, insert, select

from ...agents.protocol.loans import LoanState
from ...agents.protocol.parking import RESUMED
from ...agents.protocol.wire import AttemptState, WithoutJob
from ..errors import Conflict, NotFound, PolicyNotHonoured
from ..model import EngineRow
from ..parking import obstacle, sleep
from ..placement import Group, build_groups
from ..requests import ParkRequest
from ..tables import attempts, loan_devices, loans, nodes, operations
from . import job_writes, snapshots
from .decisions import TooLate, open_loan, recall_loan
from .leadership import ruling_term
from .reading import engine
from .writer import Tx

PARK: Final = "park"
RESUME: Final = "resume"
RECALLED: Final = "RecalledByOperator"
_BEFORE_THE_END: Final = (LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING, LoanState.LENT)


def park(tx: Tx, id_or_name: str, request: ParkRequest, principal: str, key: str | None, now: float) -> str:
    """Opens a loan without a job for the engine; returns the operation's id. Raises NotFound, Conflict with the way
    out, PolicyNotHonoured, IdempotencyMismatch."""
    found = engine(tx.conn, id_or_name)
    digest = _digest(PARK, found.id, request.model_dump_json())
    seen = None if key is None else job_writes.replayed(tx, principal, key, digest, now)
    if seen is not None:
        return seen
    node = _locked_node(tx, found)
    wish = WithoutJob(until_seconds=request.for_seconds, wake_on_request=request.wake_on_request)
    loan = _open_loan_of(tx, found)
    operation_id = None if loan is None else _same_wish(tx, loan, found, wish)
    if operation_id is None:
        _check_node(node, found)
        if wish.wake_on_request and found.tells_requests is False:
            raise Conflict(
                f"the gate of engine {found.name} does not see requests while it is closed, so none could wake it;"
                " park it with --no-wake-on-request (wake_on_request: false)",
                state=found.state.value,
            )
        group = _group_of(tx, found)
        _check_group(group, found)
        term = ruling_term(tx)
        try:
            loan_id = open_loan(tx, sleep(group, wish), term, now, actor=principal)
        except (TooLate, exc.IntegrityError):
            raise Conflict(
                f"engine {found.name} or its devices changed at the same moment; look again", state=found.state.value
            ) from None
        operation_id = _write(tx, PARK, found, loan_id, principal, now)
        tx.event(
            "engine_park_ordered",
            f"engine {found.name} is to be parked without a job{_terms(wish)}",
            now,
            actor=principal,
            engine_id=found.id,
            loan_id=loan_id,
            node_id=found.node_id,
            data={"operation_id": operation_id, **request.model_dump(mode="json")},
        )
    if key is not None:
        job_writes.remember(tx, principal, key, digest, operation_id, now)
    return operation_id


def resume(tx: Tx, id_or_name: str, principal: str, key: str | None, now: float) -> str:
    """Ends the loan without a job in which the engine sleeps; returns the operation's id. Raises NotFound, Conflict
    with the way out, IdempotencyMismatch."""
    found = engine(tx.conn, id_or_name)
    digest = _digest(RESUME, found.id)
    seen = None if key is None else job_writes.replayed(tx, principal, key, digest, now)
    if seen is not None:
        return seen
    node = _locked_node(tx, found)
    loan = _open_loan_of(tx, found)
    if loan is None:
        raise Conflict(f"engine {found.name} is {found.state}: it is not parked", state=found.state.value)
    _check_resumable(tx, loan, found)
    operation_id = _newest(tx, RESUME, loan["id"])
    if operation_id is None:
        operation_id = _write(tx, RESUME, found, loan["id"], principal, now)
        tx.event(
            "engine_resume_ordered",
            f"engine {found.name} is to be resumed",
            now,
            actor=principal,
            engine_id=found.id,
            loan_id=loan["id"],
            node_id=found.node_id,
            data={"operation_id": operation_id},
        )
        if LoanState(loan["state"]) in _BEFORE_THE_END and not loan["recall_ordered"]:
            _check_node(node, found)
            recall_loan(tx, found.node_id, loan["id"], RESUMED, ruling_term(tx), now)
    if key is not None:
        job_writes.remember(tx, principal, key, digest, operation_id, now)
    return operation_id


def recall(tx: Tx, loan_id: str, principal: str, now: float) -> None:
    """Orders the node to end the loan, with a job in it or without: jobs are preempted and queued again. Raises
    NotFound, Conflict for a loan that ends already by itself."""
    row = tx.conn.execute(select(loans.c.node_id).where(loans.c.id == loan_id)).one_or_none()
    if row is None:
        raise NotFound("loan", loan_id)
    node = tx.conn.execute(select(nodes).where(nodes.c.id == row.node_id).with_for_update()).mappings().one()
    loan = tx.conn.execute(select(loans).where(loans.c.id == loan_id).with_for_update()).mappings().one()
    state = LoanState(loan["state"])
    if loan["recall_ordered"] or state in (LoanState.RECALLING, LoanState.WAKING, LoanState.VERIFYING):
        return
    if state not in _BEFORE_THE_END:
        raise Conflict(f"the loan is {state}: there is nothing to recall", state=state.value)
    if node["silent_since"] is not None:
        raise Conflict(f"node {node['name']} is silent: its loan cannot be recalled now", state=state.value)
    recall_loan(tx, node["id"], loan_id, RECALLED, ruling_term(tx), now)
    tx.event(
        "loan_recall_ordered", "the loan is recalled", now, actor=principal, loan_id=loan_id, node_id=loan["node_id"]
    )


# ---- what stands against it ------------------------------------------------------------------------------------


def _check_node(node: RowMapping, found: EngineRow) -> None:
    if node["silent_since"] is not None:
        text = f"node {node['name']} of engine {found.name} is silent: it takes no orders; try again when it speaks"
        raise Conflict(text, state=found.state.value)
    if node["confirmed_incarnation"] != node["incarnation"]:
        raise Conflict(f"node {node['name']} has not finished registering; try again", state=found.state.value)


def _group_of(tx: Tx, found: EngineRow) -> Group:
    groups = build_groups(snapshots.load_node(tx.conn, found.node_id), 0.0)
    mine = [group for group in groups if any(each.id == found.id for each in group.engines)]
    if not mine:
        text = f"engine {found.name} is not in its agent's configuration any more, or its devices are not known"
        raise Conflict(text, state=found.state.value)
    return mine[0]


def _check_group(group: Group, found: EngineRow) -> None:
    blocker = obstacle(group, wanted_by_name=True)
    if blocker is None:
        return
    if blocker.code == "PolicyRefused":
        raise PolicyNotHonoured(f"{blocker.sentence}; set one that it can honour: lull engine policy set {found.name}")
    ways_out = {
        "SharedDevices": "give it devices of its own",
        "EngineNotReady": f"wait until it is verified and its gate is open, see: lull engine show {found.name}",
        "LoanOpen": "wait for the loan's end, or end it: lull loan recall " + str(blocker.data.get("loan_id", "")),
    }
    way_out = ways_out.get(blocker.code)
    text = blocker.sentence if way_out is None else f"{blocker.sentence}; {way_out}"
    raise Conflict(text, state=found.state.value)


def _same_wish(tx: Tx, loan: RowMapping, found: EngineRow, wish: WithoutJob) -> str | None:
    """The operation that has just this under way. Raises Conflict for any other open loan."""
    sleeps, state = snapshots.without_job_of(loan["without_job"]), LoanState(loan["state"])
    loan_id = loan["id"]
    if sleeps is None:
        text = f"engine {found.name} is in loan {loan_id}, which is for jobs; wait for its end, or end it"
        raise Conflict(f"{text}: lull loan recall {loan_id} (its jobs are queued again)", state=state.value)
    if loan["recall_ordered"] or state not in _BEFORE_THE_END:
        raise Conflict(f"engine {found.name} is being woken (loan {loan_id} is {state}); try again", state=state.value)
    under_way = _newest(tx, PARK, loan_id)
    if sleeps == wish and under_way is not None:
        return under_way
    text = f"engine {found.name} is parked already (loan {loan_id}, by {sleeps.wanted_by}{_terms(sleeps)})"
    raise Conflict(f"{text}; resume it first to park it otherwise: lull engine resume {found.name}", state=state.value)


def _check_resumable(tx: Tx, loan: RowMapping, found: EngineRow) -> None:
    live = select(attempts.c.job_id).where(
        attempts.c.loan_id == loan["id"], attempts.c.state != AttemptState.ENDED.value
    )
    jobs: Sequence[str] = tx.conn.execute(live.order_by(attempts.c.id)).scalars().all()
    if jobs or loan["without_job"] is None:
        whose = f"job {jobs[0]} holds" if jobs else "a loan for jobs holds"
        raise Conflict(
            f"{whose} the devices of engine {found.name}; wait for its end, cancel it, or recall the loan, which queues"
            f" the job again: lull loan recall {loan['id']}",
            state=loan["state"],
        )


# ---- rows ------------------------------------------------------------------------------------------------------


def _locked_node(tx: Tx, found: EngineRow) -> RowMapping:
    """The node's row first, as whoever takes its reports does."""
    return tx.conn.execute(select(nodes).where(nodes.c.id == found.node_id).with_for_update()).mappings().one()


def _open_loan_of(tx: Tx, found: EngineRow) -> RowMapping | None:
    held = select(loan_devices.c.loan_id).where(loan_devices.c.open, loan_devices.c.device_id.in_(found.device_ids))
    loan_id = tx.conn.execute(held.limit(1)).scalar_one_or_none()
    if loan_id is None:
        return None
    return tx.conn.execute(select(loans).where(loans.c.id == loan_id).with_for_update()).mappings().one()


def _newest(tx: Tx, kind: str, loan_id: str) -> str | None:
    mine = select(operations.c.id).where(operations.c.loan_id == loan_id, operations.c.kind == kind)
    return tx.conn.execute(mine.order_by(operations.c.id.desc()).limit(1)).scalar_one_or_none()


def _write(tx: Tx, kind: str, found: EngineRow, loan_id: str, principal: str, now: float) -> str:
    operation_id = job_writes.new_id()
    tx.conn.execute(
        insert(operations).values(
            id=operation_id, kind=kind, engine_id=found.id, loan_id=loan_id, requested_by=principal, created_at=now
        )
    )
    return operation_id


def _digest(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _terms(wish: WithoutJob) -> str:
    most = "" if wish.until_seconds is None else f" for at most {wish.until_seconds:g} s"
    return most + ("" if wish.wake_on_request else ", whatever requests come")
