"""PURE: what a loan would release of an engine for a given need, what else could be, and why it is not chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..agents.protocol.plans import Plan, way_in, worth_trying
from ..agents.protocol.sizes import in_words
from .model import DeviceId, Engine, EngineId, Snapshot
from .placement import Blocker, Group, build_groups
from .ways import GroupWay

_NOT_SEEN: Final = "nobody has seen what it frees: set trial_park = true for the engine in the agent's file"


@dataclass(frozen=True, slots=True)
class ShownWay:
    """One way to park the engine, and with it the others on its devices."""

    plan: Plan
    others: Mapping[EngineId, Plan]
    room_bytes: Mapping[DeviceId, int]  # free on each device once they are parked
    why_not: str | None = None  # None: it is the one that is chosen


@dataclass(frozen=True, slots=True)
class PlanAnswer:
    engine: Engine
    need_bytes: int
    gpus: int
    chosen: ShownWay | None
    alternatives: tuple[ShownWay, ...]
    nothing_suffices: str | None  # why, where nothing is chosen
    blocker: Blocker | None  # why it would not be done now


def answer(snapshot: Snapshot, engine_id: EngineId, need_bytes: int, gpus: int | None, now: float) -> PlanAnswer | None:
    """``need_bytes`` on each of ``gpus`` devices (None: all of the engine's). None: the engine has no known device."""
    group = next(
        (each for each in build_groups(snapshot, now) if any(engine.id == engine_id for engine in each.engines)), None
    )
    if group is None:
        return None
    engine = next(each for each in group.engines if each.id == engine_id)
    wanted = len([device for device in group.devices if device.id in engine.device_ids]) if gpus is None else gpus
    chosen: GroupWay | None = next((way for way in group.ways if _fitting(way, need_bytes) >= wanted), None)
    others = [_shown(way, engine, _why_not(way, chosen, need_bytes, wanted)) for way in group.ways if way is not chosen]
    return PlanAnswer(
        engine=engine,
        need_bytes=need_bytes,
        gpus=wanted,
        chosen=None if chosen is None else _shown(chosen, engine, None),
        alternatives=(*others, *_unknown(engine)),
        nothing_suffices=None if chosen is not None else _nothing(group, need_bytes, wanted),
        blocker=group.blocker,
    )


def _fitting(way: GroupWay, need_bytes: int) -> int:
    return sum(1 for room in way.room_bytes.values() if room >= need_bytes)


def _shown(way: GroupWay, engine: Engine, why_not: str | None) -> ShownWay:
    others = {engine_id: plan for engine_id, plan in way.plans.items() if engine_id != engine.id}
    return ShownWay(way.plans[engine.id], others, way.room_bytes, why_not)


def _why_not(way: GroupWay, chosen: GroupWay | None, need_bytes: int, gpus: int) -> str:
    short = {device: room for device, room in way.room_bytes.items() if room < need_bytes}
    if len(way.room_bytes) - len(short) < gpus:
        if not short:
            return f"there are {len(way.room_bytes)} of {gpus} devices"
        device, room = max(short.items(), key=lambda item: (item[1], item[0]))
        return f"device {device} would have {in_words(room)} of {in_words(need_bytes)}"
    assert chosen is not None
    if way.seconds == chosen.seconds:
        return "it costs as much and releases more"
    if way.seconds == float("inf"):
        return "what it costs was never measured"
    return f"it is predicted to take {way.seconds:.1f} s, the chosen one {chosen.seconds:.1f} s"


def _nothing(group: Group, need_bytes: int, gpus: int) -> str:
    if len(group.devices) < gpus:
        return f"the engine and those that share its devices lie on {len(group.devices)} of {gpus} devices"
    rooms = sorted(group.room_bytes.items(), key=lambda item: (-item[1], item[0]))
    device, room = rooms[gpus - 1]
    held = next(each for each in group.devices if each.id == device)
    others = f"; others hold {in_words(held.foreign_bytes)} of it" if held.foreign_bytes else ""
    return (
        f"with all parked as their policies say device {device} would have {in_words(room)} of"
        f" {in_words(need_bytes)}{others}"
    )


def _unknown(engine: Engine) -> list[ShownWay]:
    """What the engine offers and nobody may use: not seen yet, or gone wrong in a trial."""
    if engine.capabilities is None:
        return []
    shown: list[ShownWay] = []
    for modes in worth_trying(engine.capabilities, engine.policy):
        seen = None if engine.learned is None else way_in(engine.learned, modes)
        whole = modes == engine.policy.restore_modes
        if whole or (seen is not None and seen.trouble is None and any(seen.freed_bytes.values())):
            continue
        why = _NOT_SEEN
        if seen is not None:
            why = "its trial freed nothing" if seen.trouble is None else f"a trial of it went wrong: {seen.trouble}"
        shown.append(ShownWay(Plan(modes=modes, whole=False, known=False), {}, {}, why))
    return shown
