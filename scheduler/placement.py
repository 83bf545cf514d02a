"""PURE: which devices can be lent, and which of them a job fits on.

Devices that share an engine are lent together: they form a group. A group's bytes are those that show once its
engines are parked: free + what the engines hold - what they keep while parked.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

from ..agents.protocol.wire import EngineState, GateState, Reason
from .model import Device, DeviceId, Engine, EngineId, Job, Loan, LoanId, Node, NodeId, Snapshot
from .ways import GroupWay, group_ways, whole_of

# A job that asks for the whole device gets what the device has. Drivers keep some of it for themselves;
# below this share of the capacity something else is using it.
WHOLE_DEVICE_SHARE_MIN: Final = 0.9
_NEVER: Final = float("inf")


@dataclass(frozen=True, slots=True)
class Blocker:
    """Why a group cannot be lent now. ``until``: when it will be looked at again, if that is known."""

    code: str
    sentence: str
    data: Mapping[str, Any] = field(default_factory=dict[str, Any])
    until: float | None = None


Cost: TypeAlias = tuple[int, bool, int, float, int, str, int, str]
QueuePlace: TypeAlias = tuple[int, float, str]


@dataclass(frozen=True, slots=True)
class Group:
    node: Node
    devices: tuple[Device, ...]
    engines: tuple[Engine, ...]
    room_bytes: Mapping[DeviceId, int]  # once the engines are parked, as their whole policies say
    whole_bytes: Mapping[DeviceId, int]  # of each device with nobody else on it, for jobs
    blocker: Blocker | None
    ways: tuple[GroupWay, ...] = ()  # to park its engines, cheapest first
    is_measured: bool = False  # it is known of one of them at least what it costs: that tells jobs apart

    @property
    def cost(self) -> Cost:
        return self.cost_of(None)

    def cost_of(self, way: GroupWay | None) -> Cost:
        """What lending it costs, best first: no engine to park, then idle engines, those that park and wake in less
        time, the longest idle, the smallest."""
        idle = [engine.idle_since for engine in self.engines]
        seconds = 0 if way is None or not self.engines else way.cost_class
        busy = None in idle
        since = max((at for at in idle if at is not None), default=0.0)
        moved = sum(sum(engine.device_bytes.values()) for engine in self.engines)
        first = self.devices[0]
        return (len(self.engines), busy, seconds, _NEVER if busy else since, moved, self.node.id, first.index, first.id)

    def way_for(self, job: Job) -> GroupWay | None:
        """The cheapest in which as many of its devices fit the job as there may be, or as it wants."""
        wanted = min(job.gpus, _count_fitting(job, self.room_bytes, self))
        return next((way for way in self.ways if _count_fitting(job, way.room_bytes, self) >= wanted), None)


@dataclass(frozen=True, slots=True)
class Choice:
    """Groups of one node to lend, the devices among them that the job gets, and its bytes on each."""

    groups: tuple[Group, ...]
    device_ids: tuple[DeviceId, ...]
    hbm_bytes: int
    costs: tuple[Cost, ...] = ()  # of the groups, for this job

    @property
    def engine_ids(self) -> tuple[EngineId, ...]:
        return tuple(sorted(engine.id for group in self.groups for engine in group.engines))

    @property
    def node_id(self) -> NodeId:
        return self.groups[0].node.id

    @property
    def room_bytes(self) -> dict[DeviceId, int]:
        return {device: nbytes for group in self.groups for device, nbytes in group.room_bytes.items()}


def largest_possible(nodes: Iterable[Sequence[int]], gpus: int) -> int:
    """The most bytes that each of ``gpus`` devices of one node can give; 0 if no node has so many."""
    return max((sorted(sizes, reverse=True)[gpus - 1] for sizes in nodes if len(sizes) >= gpus), default=0)


def queue_order(job: Job) -> QueuePlace:
    """Higher priority first, then who came first."""
    return (-job.priority, job.created_at, job.id)


def build_groups(snapshot: Snapshot, now: float) -> tuple[Group, ...]:
    """All devices, grouped, cheapest first; the order of the snapshot's rows does not matter."""
    nodes = {node.id: node for node in snapshot.nodes}
    lent = {device: loan for loan in snapshot.loans for device in loan.device_ids}
    devices = {device.id: device for device in snapshot.devices if device.node_id in nodes}
    groups = [
        _group(nodes[devices[members[0]].node_id], [devices[each] for each in members], engines, lent, now)
        for members, engines in _components(devices, snapshot.engines)
    ]
    return tuple(sorted(groups, key=lambda group: group.cost))


def _components(
    devices: Mapping[DeviceId, Device], engines: Iterable[Engine]
) -> list[tuple[list[DeviceId], list[Engine]]]:
    """Devices joined by the engines that lie on them. An engine of a node that has lost the device to another, say
    with its data directory, does not lie on it."""
    of_device: dict[DeviceId, list[Engine]] = {}
    for engine in sorted(engines, key=lambda each: each.id):
        for device_id in engine.device_ids:
            if device_id in devices and devices[device_id].node_id != engine.node_id:
                continue
            of_device.setdefault(device_id, []).append(engine)
    components: list[tuple[list[DeviceId], list[Engine]]] = []
    seen: set[DeviceId] = set()
    for start in sorted(devices):
        if start in seen:
            continue
        members: list[DeviceId] = []
        joined: dict[EngineId, Engine] = {}
        todo = [start]
        while todo:
            here = todo.pop()
            if here in seen or here not in devices:
                continue
            seen.add(here)
            members.append(here)
            for engine in of_device.get(here, ()):
                joined[engine.id] = engine
                todo.extend(each for each in engine.device_ids if engine in of_device.get(each, ()))
        components.append((sorted(members), [joined[key] for key in sorted(joined)]))
    return components


def _group(
    node: Node, devices: list[Device], engines: list[Engine], lent: Mapping[DeviceId, Loan], now: float
) -> Group:
    devices.sort(key=lambda device: (device.index, device.id))
    whole: dict[DeviceId, int] = {}
    for device in devices:
        kept = sum(engine.residual_bytes.get(device.id, 0) for engine in engines)
        whole[device.id] = max(0, device.capacity_bytes - kept - (device.margin_bytes or 0))
    ways = group_ways(devices, engines, whole)
    blocker = _device_blocker(node, devices, lent, now) or _engine_blocker(devices, engines, now)
    measured = bool(engines) and any(way.seconds < _NEVER for way in ways)
    return Group(node, tuple(devices), tuple(engines), whole_of(ways).room_bytes, whole, blocker, ways, measured)


def _device_blocker(node: Node, devices: list[Device], lent: Mapping[DeviceId, Loan], now: float) -> Blocker | None:
    if not node.up:
        sentence = f"node {node.name} is silent" if node.silent else f"node {node.name} has not finished registering"
        return Blocker("NodeUnreachable", sentence, {"node": node.name})
    for device in devices:
        if device.quarantined:
            return Blocker("DeviceQuarantined", f"device {device.id} is quarantined", {"device_id": device.id})
    for device in devices:
        if device.id in lent:
            loan = lent[device.id]
            return Blocker("LoanOpen", f"its devices are lent: the loan is {loan.state}", {"loan_id": loan.id})
    for device in devices:
        if device.not_before > now:
            return _left_alone(f"device {device.id}", device, {"device_id": device.id})
    return None


def _left_alone(who: str, row: Device | Engine, data: Mapping[str, Any]) -> Blocker:
    trouble = row.trouble or Reason(code="EngineNotReady", sentence="its last park failed")
    sentence = f"{who} is left alone for a while: {trouble.sentence}"
    return Blocker(trouble.code, sentence, {**data, **trouble.data}, row.not_before)


def _engine_blocker(devices: list[Device], engines: list[Engine], now: float) -> Blocker | None:
    here = {device.id for device in devices}
    for engine in engines:
        data = {"engine_id": engine.id, "engine": engine.name}
        if engine.policy.when != "always":
            sentence = f"engine {engine.name} is not lent: its policy says when = {engine.policy.when}, not always"
            return Blocker("EngineManual", sentence, data)
        if engine.refused is not None:
            return Blocker("PolicyRefused", f"engine {engine.name} is not lent: {engine.refused}", data)
        if engine.state is not EngineState.RUNNING or not engine.verified or engine.gate is not GateState.OPEN:
            doubt = "" if engine.verified else ", not verified yet"
            sentence = f"engine {engine.name} is {engine.state}, its gate {engine.gate}{doubt}"
            return Blocker("EngineNotReady", sentence, data)
        if engine.not_before > now:
            return _left_alone(f"engine {engine.name}", engine, data)
        if not here.issuperset(engine.device_ids):
            return Blocker("EngineNotReady", f"engine {engine.name} has devices that are not known yet", data)
    return None


def bytes_on(job: Job, room: Mapping[DeviceId, int], whole: Mapping[DeviceId, int], device: DeviceId) -> int | None:
    """The bytes that the job would take there, or None where it does not fit."""
    if job.hbm_bytes is not None:
        return job.hbm_bytes if room[device] >= job.hbm_bytes else None
    return room[device] if room[device] > 0 and room[device] >= whole[device] * WHOLE_DEVICE_SHARE_MIN else None


def choose(job: Job, groups: Iterable[Group]) -> Choice | None:
    """The cheapest devices of one node for the job. ``groups`` are in order of cost and may all be lent."""
    by_node: dict[NodeId, list[Group]] = {}
    by_job = False
    for group in groups:
        by_node.setdefault(group.node.id, []).append(group)
        by_job = by_job or group.is_measured
    choices = [choice for each in by_node.values() if (choice := _choose_on_node(job, each, by_job)) is not None]
    return min(choices, key=_choice_cost, default=None)


def _choice_cost(choice: Choice) -> tuple[Any, ...]:
    parked, busy, seconds, since, moved = zip(*(cost[:5] for cost in choice.costs), strict=True)
    return (sum(parked), any(busy), max(seconds), max(since), sum(moved), choice.node_id, choice.device_ids)


def _choose_on_node(job: Job, groups: Sequence[Group], by_job: bool) -> Choice | None:
    """``by_job``: what parks cost is known, here or on another node, and tells groups apart."""

    def cost(group: Group) -> Cost:
        return group.cost_of(group.way_for(job)) if by_job else group.cost

    groups = sorted(groups, key=cost) if by_job else groups
    fits = [(group, _fitting(job, group)) for group in groups]
    fits = [(group, devices) for group, devices in fits if devices]
    taken: list[tuple[Group, list[DeviceId]]] = []
    count = 0
    for group, devices in fits:
        if count >= job.gpus:
            break
        taken.append((group, devices))
        count += len(devices)
    if count < job.gpus:
        return None
    # What came first may be superfluous once a larger group had to be taken: drop the dearest that can go.
    for group, devices in sorted(taken, key=lambda pair: cost(pair[0]), reverse=True):
        if count - len(devices) >= job.gpus:
            taken = [pair for pair in taken if pair[0] is not group]
            count -= len(devices)
    chosen = [device for _, devices in taken for device in devices][: job.gpus]
    room = {device: nbytes for group, _ in taken for device, nbytes in group.room_bytes.items()}
    hbm_bytes = job.hbm_bytes if job.hbm_bytes is not None else min(room[device] for device in chosen)
    used = set(chosen)
    kept = tuple(group for group, devices in taken if used.intersection(devices))
    return Choice(kept, tuple(chosen), hbm_bytes, tuple(cost(group) for group in kept))


def _fitting(job: Job, group: Group) -> list[DeviceId]:
    """First those on which it fits under the plan that is the cheapest for it."""
    fits = [d.id for d in group.devices if bytes_on(job, group.room_bytes, group.whole_bytes, d.id) is not None]
    way = group.way_for(job) if len(group.ways) > 1 else None
    if way is None:
        return fits
    return sorted(fits, key=lambda device: bytes_on(job, way.room_bytes, group.whole_bytes, device) is None)


def _count_fitting(job: Job, room: Mapping[DeviceId, int], group: Group) -> int:
    return sum(1 for d in group.devices if bytes_on(job, room, group.whole_bytes, d.id) is not None)


@dataclass(slots=True)
class Room:
    """What is left on the devices of one loan while it is being filled."""

    loan_id: LoanId | None
    left_bytes: dict[DeviceId, int]
    whole_bytes: Mapping[DeviceId, int]

    def fit(self, job: Job) -> tuple[tuple[DeviceId, ...], int] | None:
        """Devices for the job beside what is there already, the emptiest first."""
        order = sorted(self.left_bytes, key=lambda device: (-self.left_bytes[device], device))
        chosen = [d for d in order if bytes_on(job, self.left_bytes, self.whole_bytes, d) is not None][: job.gpus]
        if len(chosen) < job.gpus:
            return None
        taken = job.hbm_bytes if job.hbm_bytes is not None else min(self.left_bytes[device] for device in chosen)
        return tuple(chosen), taken

    def take(self, device_ids: Iterable[DeviceId], hbm_bytes: int) -> None:
        for device in device_ids:
            self.left_bytes[device] -= hbm_bytes
