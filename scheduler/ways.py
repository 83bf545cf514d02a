"""PURE: how the engines of a group of devices may be parked together, and what each way leaves free.

The way of all whole policies is always among them. The others leave tags where they are: see ``protocol.plans``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from ..agents.protocol.plans import UNKNOWN_SECONDS, Plan, Sharer, Way, combinations, frees_together, ways_of
from .model import Device, DeviceId, Engine, EngineId

# After such a trouble the engine is parked whole: what was predicted of a part of it did not come true.
_DISTRUST: Final = ("PlanNotHeld", "HBMNotFreed")
_UNKNOWN_CLASS: Final = 1 << 10


@dataclass(frozen=True, slots=True)
class GroupWay:
    """``plans``: of every engine. ``room_bytes``: what each device has once they are parked so."""

    plans: Mapping[EngineId, Plan] = field(default_factory=dict[EngineId, Plan])
    room_bytes: Mapping[DeviceId, int] = field(default_factory=dict[DeviceId, int])
    seconds: float = UNKNOWN_SECONDS  # predicted for parks and wakes together

    @property
    def is_whole(self) -> bool:
        return all(plan.whole for plan in self.plans.values())

    @property
    def known_plans(self) -> dict[EngineId, Plan]:
        return {engine_id: plan for engine_id, plan in self.plans.items() if plan.known}

    @property
    def cost_class(self) -> int:
        """Powers of two of a second: measured times are not exact enough to choose by more."""
        if math.isinf(self.seconds):
            return _UNKNOWN_CLASS
        return 0 if self.seconds <= 1 else math.ceil(math.log2(self.seconds))

    def covers(self, need_bytes: Mapping[DeviceId, int]) -> bool:
        return all(self.room_bytes.get(device, 0) >= need for device, need in need_bytes.items())


def group_ways(
    devices: Sequence[Device], engines: Sequence[Engine], whole_bytes: Mapping[DeviceId, int]
) -> tuple[GroupWay, ...]:
    """Cheapest first. ``whole_bytes``: of each device with nobody else on it, for jobs."""
    of_engines = [_of_engine(engine) for engine in engines]
    margin = max((engine.learned.margin_bytes for engine in engines if engine.learned is not None), default=0)
    return tuple(_group_way(devices, engines, each, whole_bytes, margin) for each in combinations(of_engines))


def _of_engine(engine: Engine) -> tuple[Way, ...]:
    ways = ways_of(engine.capabilities, engine.policy, engine.learned, engine.device_bytes, engine.residual_bytes)
    if engine.trouble is not None and engine.trouble.code in _DISTRUST:
        return tuple(way for way in ways if way.plan.whole)
    return ways


def _group_way(
    devices: Sequence[Device],
    engines: Sequence[Engine],
    ways: Sequence[Way],
    whole_bytes: Mapping[DeviceId, int],
    margin_bytes: int,
) -> GroupWay:
    # An agent that tells no margin with its devices has told it with what it learned.
    untold = margin_bytes if any(way.plan.known for way in ways) else 0
    sharers = [_sharer(engine, way.plan) for engine, way in zip(engines, ways, strict=True)]
    room = {
        # Two observations of different moments must not add up to more than there is.
        device.id: max(0, _free_at_most(device, frees_together(sharers, device.id), whole_bytes[device.id], untold))
        for device in devices
    }
    plans = {engine.id: way.plan for engine, way in zip(engines, ways, strict=True)}
    return GroupWay(plans, room, sum(way.cost_seconds for way in ways))


def _free_at_most(device: Device, freed_bytes: int, whole_bytes: int, untold_bytes: int) -> int:
    """The node adds its margin to the need of every job, with an engine on the device or without."""
    if device.margin_bytes is None:
        return min(device.free_bytes + freed_bytes, whole_bytes) - untold_bytes
    return min(device.free_bytes + freed_bytes - device.margin_bytes, whole_bytes)


def _sharer(engine: Engine, plan: Plan) -> Sharer:
    return Sharer(engine.id, plan, engine.device_bytes, {} if engine.learned is None else engine.learned.shared)


def whole_of(ways: Iterable[GroupWay]) -> GroupWay:
    return next(way for way in ways if way.is_whole)


def cheapest_way(ways: Iterable[GroupWay], need_bytes: Mapping[DeviceId, int]) -> GroupWay | None:
    """``ways``: cheapest first."""
    return next((way for way in ways if way.covers(need_bytes)), None)
