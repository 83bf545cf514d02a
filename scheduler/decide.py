"""PURE: what to do now. The same snapshot gives the same actions, in whatever order its rows come.

A job is served, in the order of the queue, by the first of: the loan whose set it joined; a device without an
engine; room left in an open loan; the cheapest engine to park, unless it has a loan to wait for. The node is told
whether a job waits for a loan, ahead of the end of the last attempt there, so that it need not ask then.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Final

from ..agents.protocol.loans import LoanState
from . import parking
from .actions import Action, ExpectWork, OpenLoan, Place, RecallLoan, SetReasons, StartAttempt, StopAttempt
from .explain import QUEUED_BEHIND, backed_off, explain, queued_behind, waiting_for_wake, waiting_in_loan
from .model import DeviceId, Job, JobId, JobReason, Loan, LoanId, Node, NodeId, Snapshot
from .placement import Choice, Group, QueuePlace, Room, build_groups, choose, queue_order
from .ways import GroupWay, cheapest_way, whole_of

LATER_JOBS_MAX: Final = 32  # that wait for one loan; more of them are worth parking another engine
# A job that waits may be passed over by others of its priority for so long since it was submitted, and no longer.
PASSED_OVER_SECONDS_MAX: Final = 600.0
REASONS_MAX: Final = 200  # written in one decision; the next one goes on

_BEFORE_THE_END: Final = (LoanState.DRAINING, LoanState.PARKING, LoanState.SETTLING, LoanState.LENT)


@dataclass(slots=True)
class _Work:
    """What is still free while the queue is gone through."""

    snapshot: Snapshot
    now: float
    nodes: dict[NodeId, Node]
    groups: list[Group]  # that may be lent and are not given away yet
    all_groups: tuple[Group, ...]
    loans: dict[LoanId, Loan]  # that are lent to jobs, or will be
    rooms: dict[LoanId, Room]  # of those whose nodes take more
    asleep: set[LoanId]  # loans without a job that may be ended for one
    awaited: set[LoanId] = field(default_factory=set[LoanId])  # by jobs
    actions: list[Action] = field(default_factory=list[Action])
    done: set[JobId] = field(default_factory=set[JobId])  # placed, or waiting for a loan of this decision
    # What a job waits for, and the place in the queue behind which nobody may go on with it. By loan, and by device.
    loan_floors: dict[LoanId, QueuePlace] = field(default_factory=dict[LoanId, QueuePlace])
    device_floors: dict[DeviceId, QueuePlace] = field(default_factory=dict[DeviceId, QueuePlace])
    hopeless: dict[tuple[int, int | None], JobReason] = field(default_factory=dict[tuple[int, int | None], JobReason])


def decide(snapshot: Snapshot, now: float) -> tuple[Action, ...]:
    work = _prepare(snapshot, now)
    for attempt in sorted(snapshot.attempts, key=lambda each: each.id):
        node = work.nodes.get(attempt.node_id)
        if attempt.stop_wanted and not attempt.stop_ordered and node is not None and node.up:
            work.actions.append(StopAttempt(attempt.id, attempt.node_id))
    queue = sorted(snapshot.jobs, key=queue_order)
    reasons: list[tuple[Job, tuple[JobReason, ...]]] = []
    waiting: dict[tuple[int, int | None], Job] = {}  # of each shape, the first in the queue
    ahead = 0
    for position, job in enumerate(queue):
        if job.id in work.done:
            continue
        if job.not_before > now:
            reasons.append((job, (backed_off(job, now),)))
            continue
        reason = _serve(work, job, queue[position + 1 :])
        if reason is None:
            continue
        reasons.append((job, (reason, queued_behind(ahead, now)) if ahead else (reason,)))
        waiting.setdefault((job.gpus, job.hbm_bytes), job)
        ahead += 1
    for loan_id in sorted(work.loans):
        loan, more = work.loans[loan_id], _is_awaited(work, loan_id, waiting)
        if loan.expects_more is not more and loan.without_job is None:
            work.actions.append(ExpectWork(loan_id, loan.node_id, more))
    given = {device for action in work.actions if isinstance(action, OpenLoan) for device in action.device_ids}
    work.actions += parking.under_pressure(work.all_groups, given, now)
    changed = [SetReasons(job.id, new) for job, given in reasons if (new := _renewed(job, given)) is not None]
    return (*work.actions, *changed[:REASONS_MAX])


def _prepare(snapshot: Snapshot, now: float) -> _Work:
    nodes = {node.id: node for node in snapshot.nodes}
    groups = build_groups(snapshot, now)
    whole = {device: nbytes for group in groups for device, nbytes in group.whole_bytes.items()}
    engines = {engine.id: engine for engine in snapshot.engines}
    devices = {device.id: device for device in snapshot.devices}
    busy = {attempt.loan_id for attempt in snapshot.attempts}
    loans: dict[LoanId, Loan] = {}
    rooms: dict[LoanId, Room] = {}
    for loan in sorted(snapshot.loans, key=lambda each: each.id):
        node = nodes.get(loan.node_id)
        if loan.recall_ordered or loan.state not in _BEFORE_THE_END or node is None or not node.up:
            continue
        if not parking.takes_jobs(loan, engines):
            continue
        loans[loan.id] = loan
        if loan.takes_no_more:  # it ends by itself; a sleep may go on, and is ended then for the next job
            continue
        # A loan that has lost its engine ends with the jobs that it has.
        left = {} if loan.engine_lost else dict(loan.room_bytes)
        if loan.without_job is not None:  # opened before it was known what its engines keep while they are parked
            left = {device: min(nbytes, whole.get(device, nbytes)) for device, nbytes in left.items()}
            if loan.state is LoanState.LENT and loan.id not in busy:
                asleep = [engines[each] for each in loan.engine_ids if each in engines]
                left = parking.at_most_free(left, devices, asleep)
        rooms[loan.id] = Room(loan.id, left, {device: whole.get(device, nbytes) for device, nbytes in left.items()})
    for attempt in snapshot.attempts:
        if attempt.loan_id in rooms:
            room = rooms[attempt.loan_id]
            room.take([device for device in attempt.device_ids if device in room.left_bytes], attempt.hbm_bytes)
    free = [group for group in groups if group.blocker is None]
    return _Work(
        snapshot,
        now,
        nodes,
        free,
        groups,
        loans,
        rooms,
        parking.may_make_way(snapshot, loans.values()),
    )


def _serve(work: _Work, job: Job, rest: list[Job]) -> JobReason | None:
    """Places the job (None) or says why it waits."""
    own = job.assigned_loan_id
    if own is not None and (own not in work.rooms or work.loans[own].engine_lost or _kept_from(work, job, own)):
        own = None
    if own is not None and _start_in(work, job, own):
        return None
    shape = (job.gpus, job.hbm_bytes)
    if shape in work.hopeless:
        reason = replace(work.hopeless[shape], since=work.now)
        return reason if own is None else _wait_in(work, job, own)
    groups = [group for group in work.groups if not _is_kept_from(work, job, group)]
    bare = choose(job, (group for group in groups if not group.engines))
    if bare is not None:
        _open(work, job, bare, rest)
        return None
    for loan_id in sorted(work.rooms):
        if _kept_from(work, job, loan_id):
            continue
        if _start_in(work, job, loan_id):
            return None
        if own is None and work.rooms[loan_id].fit(job) is not None:
            _reserve(work, job, loan_id)
            return _wait_in(work, job, loan_id)
    # What its loan is for: that no other engine is parked for it.
    if own is not None:
        work.loan_floors.setdefault(own, _floor(work, job))
        return _wait_in(work, job, own)
    choice = choose(job, groups)
    if choice is not None:
        _open(work, job, choice, rest)
        return None
    woken = _wake_for(work, job, groups)
    if woken is not None:
        return woken
    reason = explain(job, work.snapshot, work.all_groups, work.now)
    work.hopeless[shape] = reason
    _keep_for(work, job)
    return reason


def _wake_for(work: _Work, job: Job, groups: list[Group]) -> JobReason | None:
    """Ends loans in which engines only sleep, where the job needs more devices than one of them has: what it waits for
    can be lent together once they are closed. None: that would not help."""
    sleeping = [
        group
        for group in work.all_groups
        if group.blocker is not None
        and group.blocker.code == "LoanOpen"
        and group.blocker.data["loan_id"] in work.asleep
        and not _kept_from(work, job, group.blocker.data["loan_id"])
        and not _is_kept_from(work, job, group)
    ]
    choice = choose(job, sorted([*groups, *sleeping], key=lambda group: group.cost)) if sleeping else None
    if choice is None:
        return None
    chosen = {device.id for group in choice.groups for device in group.devices}
    ended = [loan for loan in work.loans.values() if loan.id in work.asleep and chosen.intersection(loan.device_ids)]
    for loan in ended:
        work.actions.append(RecallLoan(loan.id, loan.node_id, parking.NEEDED))
        work.asleep.discard(loan.id)
        del work.loans[loan.id]
        work.rooms.pop(loan.id, None)
    for device_id in chosen:
        work.device_floors.setdefault(device_id, _floor(work, job))
    work.groups = [group for group in work.groups if group not in choice.groups]
    return waiting_for_wake(ended[0].id, work.now)


def _keep_for(work: _Work, job: Job) -> None:
    """Others would overtake the job without end if they could go on taking what it waits for: the devices that it would
    get if no loan were open are kept from those behind its floor, and the loans there end."""
    free = {group.devices[0].id for group in work.groups}  # no device is in two
    lent = {device: room for loan in work.snapshot.loans for device, room in loan.room_bytes.items()}
    # Under a plan that leaves tags where they are there would be more, with the whole policies parked.
    narrow = {device for loan in work.snapshot.loans if loan.is_narrow for device in loan.room_bytes}
    groups = [
        replace(
            group,
            room_bytes={
                device.id: group.whole_bytes[device.id] - device.foreign_bytes
                if device.id in narrow
                else lent.get(device.id, group.room_bytes[device.id])
                for device in group.devices
            },
        )
        for group in work.all_groups
        if (group.devices[0].id in free if group.blocker is None else group.blocker.code == "LoanOpen")
    ]
    choice = choose(job, groups)
    if choice is None:
        return
    chosen = {device.id for group in choice.groups for device in group.devices}
    floor = _floor(work, job)
    for device_id in chosen:
        work.device_floors.setdefault(device_id, floor)
    for loan in work.loans.values():
        if chosen.intersection(loan.device_ids):
            work.loan_floors.setdefault(loan.id, floor)


def _is_overdue(work: _Work, job: Job) -> bool:
    return work.now - job.created_at >= PASSED_OVER_SECONDS_MAX


def _floor(work: _Work, job: Job) -> QueuePlace:
    """Behind all of its priority; once the job has waited for too long, its own place."""
    return queue_order(job) if _is_overdue(work, job) else (-job.priority, math.inf, "")


def _kept_from(work: _Work, job: Job, loan_id: LoanId) -> bool:
    return loan_id in work.loan_floors and queue_order(job) > work.loan_floors[loan_id]


def _is_kept_from(work: _Work, job: Job, group: Group) -> bool:
    floors = work.device_floors
    return any(device.id in floors and queue_order(job) > floors[device.id] for device in group.devices)


def _wait_in(work: _Work, job: Job, loan_id: LoanId) -> JobReason:
    work.awaited.add(loan_id)
    return waiting_in_loan(job, loan_id, work.now)


def _is_awaited(work: _Work, loan_id: LoanId, waiting: dict[tuple[int, int | None], Job]) -> bool:
    """A job waits for room in it, or could start there once those that run have ended."""
    loan = work.loans[loan_id]
    if loan_id in work.awaited or loan.engine_lost or loan.takes_no_more:
        return loan_id in work.awaited
    empty = Room(loan_id, dict(loan.room_bytes), work.rooms[loan_id].whole_bytes)
    return any(not _kept_from(work, job, loan_id) and empty.fit(job) is not None for job in waiting.values())


def _start_in(work: _Work, job: Job, loan_id: LoanId) -> bool:
    """Starts the job in an open loan whose memory is proved free and has room for it."""
    loan, room = work.loans[loan_id], work.rooms[loan_id]
    fit = room.fit(job)
    if loan.state is not LoanState.LENT or fit is None:
        return False
    device_ids, hbm_bytes = fit
    room.take(device_ids, hbm_bytes)
    work.asleep.discard(loan_id)
    place = Place(job.id, job.attempt_no, device_ids, hbm_bytes)
    work.actions.append(StartAttempt(loan_id, loan.node_id, place))
    return True


def _reserve(work: _Work, job: Job, loan_id: LoanId) -> None:
    room = work.rooms[loan_id]
    fit = room.fit(job)
    if fit is not None:
        room.take(*fit)
        work.asleep.discard(loan_id)


def _open(work: _Work, job: Job, choice: Choice, rest: list[Job]) -> None:
    """Opens a loan for the job and for all behind it that fit under the same park; of each engine it releases what
    the cheapest plan does that is enough for this set."""
    work.groups = [group for group in work.groups if group not in choice.groups]
    whole = {device: nbytes for group in choice.groups for device, nbytes in group.whole_bytes.items()}
    planned = choice.room_bytes
    room = Room(None, dict(planned), whole)
    room.take(choice.device_ids, choice.hbm_bytes)
    places = [Place(job.id, job.attempt_no, choice.device_ids, choice.hbm_bytes)]
    later: list[JobId] = []
    need: dict[DeviceId, int] = {}  # of the later ones
    bare = [group for group in work.groups if not group.engines]
    empty, passed_over = Room(None, dict(planned), whole), False
    for other in rest:
        if other.not_before > work.now or other.id in work.done or other.assigned_loan_id in work.rooms:
            continue
        alone = empty.fit(other)
        if alone is None or choose(other, bare) is not None:
            continue
        fit = None if passed_over else room.fit(other)
        # Who is filled in behind one that has waited for too long would make it wait for longer.
        passed_over = passed_over or (fit is None and _is_overdue(work, other))
        if fit is not None:
            room.take(*fit)
            places.append(Place(other.id, other.attempt_no, *fit))
        elif choice.engine_ids and len(later) < LATER_JOBS_MAX:
            later.append(other.id)
            need.update((device, max(need.get(device, 0), alone[1])) for device in alone[0])
        else:
            continue
        work.done.add(other.id)
    used = {device: planned[device] - left for device, left in room.left_bytes.items()}
    ways = [_way(group, {d: max(used[d], need.get(d, 0)) for d in group.room_bytes}) for group in choice.groups]
    planned = {device: nbytes for way in ways for device, nbytes in way.room_bytes.items()}
    engines = [engine for group in choice.groups for engine in group.engines]
    work.actions.append(
        OpenLoan(
            node_id=choice.node_id,
            device_ids=tuple(sorted(planned)),
            engine_ids=choice.engine_ids,
            # For people, and for agents that know one number only: what every device can show.
            need_bytes=min(max(used.values()), min(planned.values())),
            need_bytes_by_device={device: nbytes for device, nbytes in used.items() if nbytes},
            room_bytes=planned,
            restore_by_seconds=min((engine.policy.park_seconds_max for engine in engines), default=None),
            places=tuple(places),
            later_job_ids=tuple(later),
            plans={engine_id: plan for way in ways for engine_id, plan in way.known_plans.items()},
        )
    )
    work.done.add(job.id)


def _way(group: Group, need_bytes: dict[DeviceId, int]) -> GroupWay:
    return cheapest_way(group.ways, need_bytes) or whole_of(group.ways)


def _renewed(job: Job, given: tuple[JobReason, ...]) -> tuple[JobReason, ...] | None:
    """The reasons to write, or None if people would read the same. Each keeps the time since which it holds."""
    since = {reason.code: reason.since for reason in job.reasons}
    new = tuple(replace(reason, since=since.get(reason.code, reason.since)) for reason in given)
    return None if [_gist(reason) for reason in new] == [_gist(reason) for reason in job.reasons] else new


def _gist(reason: JobReason) -> tuple[object, ...]:
    # The place in the queue is filled in by whoever reads it: it changes too often to be written.
    if reason.code == QUEUED_BEHIND:
        return (reason.code,)
    return (reason.code, reason.sentence, reason.data)
