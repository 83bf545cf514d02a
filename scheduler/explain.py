"""PURE: why a job waits, as data. Codes are stable, sentences are for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from ..agents.protocol.loans import LoanState
from ..agents.protocol.sizes import in_words
from .model import Job, JobReason, LoanId, NodeId, Snapshot
from .placement import Blocker, Group, bytes_on

QUEUED_BEHIND: Final = "QueuedBehind"
_NODES_SHOWN_MAX: Final = 50

# Which of several nodes' reasons is the job's: what goes away by itself first.
_ORDER: Final = (
    "LoanOpen",
    "HBMNotFreed",
    "WaitingForDrain",
    "EngineNotReady",
    "ForeignProcess",
    "EngineManual",
    "PolicyRefused",
    "NodeUnreachable",
    "DeviceQuarantined",
    "Unsatisfiable",
)


def queued_behind(ahead: int, since: float, next_check: float | None = None) -> JobReason:
    if ahead == 0:
        sentence = "it is first in the queue and about to be looked at"
    else:
        sentence = f"{ahead} {'job is' if ahead == 1 else 'jobs are'} ahead in the queue"
    return JobReason(QUEUED_BEHIND, sentence, since, next_check, {"n": ahead})


def waiting_for_loan(
    state: LoanState, loan_id: str, since: float, next_check: float | None = None
) -> tuple[JobReason, ...]:
    """Why a job that has its devices does not run yet."""
    data = {"loan_id": loan_id, "loan_state": state.value}
    if state is LoanState.DRAINING:
        return (JobReason("WaitingForDrain", "the engine finishes its requests", since, next_check, data),)
    if state in (LoanState.PARKING, LoanState.SETTLING):
        sentence = "the engine is being parked" if state is LoanState.PARKING else "its memory is being proved free"
        return (JobReason("WaitingForPark", sentence, since, next_check, data),)
    return ()


def waiting_in_loan(job: Job, loan_id: LoanId, now: float) -> JobReason:
    sentence = "it runs under an open loan as soon as there is room in it"
    return JobReason("LoanOpen", sentence, now, None, {"loan_id": loan_id})


def waiting_for_wake(loan_id: LoanId, now: float) -> JobReason:
    sentence = "an engine that sleeps without a job is woken, so that its devices can be lent together with others"
    return JobReason("LoanOpen", sentence, now, None, {"loan_id": loan_id})


def backed_off(job: Job, now: float) -> JobReason:
    trouble = job.trouble
    if trouble is None:
        return JobReason("NotStarted", "its last attempt did not start", now, job.not_before)
    return JobReason(trouble.code, trouble.sentence, now, job.not_before, trouble.data)


def explain(job: Job, snapshot: Snapshot, groups: Sequence[Group], now: float) -> JobReason:
    """Why none of the nodes can take the job now: for each node its first failing predicate."""
    if not snapshot.nodes:
        return JobReason("NoNode", "no node has registered yet", now)
    per_node: dict[NodeId, Blocker] = {}
    for node in sorted(snapshot.nodes, key=lambda each: (each.name, each.id)):
        per_node[node.id] = _blocker_of_node(job, [group for group in groups if group.node.id == node.id])
    names = {node.id: node.name for node in snapshot.nodes}
    code, blocker = min(((each.code, each) for each in per_node.values()), key=lambda pair: _rank(pair[0]))
    shown = list(per_node.items())[:_NODES_SHOWN_MAX]
    nodes = {names[node_id]: {"code": each.code, "sentence": each.sentence} for node_id, each in shown}
    data: dict[str, Any] = {**blocker.data, "nodes": nodes}
    return JobReason(code, blocker.sentence, now, blocker.until, data)


def _rank(code: str) -> int:
    """Any other code is of a trouble after which an engine or a device is left alone for a while."""
    return _ORDER.index(code if code in _ORDER else "EngineNotReady")


def _blocker_of_node(job: Job, groups: Sequence[Group]) -> Blocker:
    count = sum(len(group.devices) for group in groups)
    if count < job.gpus:
        return Blocker("Unsatisfiable", f"the node has {count} of {job.gpus} devices", {"gpus": count})
    large = [group for group in groups if _could_hold(job, group)]
    if sum(_could_hold(job, group) for group in groups) < job.gpus:
        largest = max((nbytes for group in groups for nbytes in group.whole_bytes.values()), default=0)
        data = {"need_bytes": job.hbm_bytes, "largest_bytes": largest}
        sentence = f"the node's devices are too small: the largest gives {in_words(largest)}"
        return Blocker("Unsatisfiable", sentence, data)
    blocked = [group.blocker for group in large if group.blocker is not None]
    if blocked:
        return min(blocked, key=lambda each: _rank(each.code))
    return _taken_by_others(job, large)


def _could_hold(job: Job, group: Group) -> int:
    need = job.hbm_bytes
    return sum(1 for nbytes in group.whole_bytes.values() if nbytes > 0 and (need is None or nbytes >= need))


def _taken_by_others(job: Job, groups: Iterable[Group]) -> Blocker:
    """The groups may be lent, and yet the bytes are not there: somebody holds them."""
    for group in groups:
        for device in group.devices:
            if bytes_on(job, group.room_bytes, group.whole_bytes, device.id) is None:
                have = group.room_bytes[device.id]
                need = job.hbm_bytes if job.hbm_bytes is not None else group.whole_bytes[device.id]
                data: Mapping[str, Any] = {
                    "device_id": device.id,
                    "have_bytes": have,
                    "need_bytes": need,
                    "foreign_bytes": device.foreign_bytes,
                }
                if device.foreign_bytes > 0:
                    return Blocker(
                        "ForeignProcess", f"others hold {in_words(device.foreign_bytes)} of the device", data
                    )
                return Blocker("HBMNotFreed", f"the device would have {in_words(have)} of {in_words(need)}", data)
    return Blocker("LoanOpen", "the devices have just been given to jobs ahead of this one", {})
