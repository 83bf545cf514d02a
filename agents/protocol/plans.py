"""Plans: which tags of an engine a loan releases, and the cheapest of them that frees what is needed.

Pure; server and agent judge by the same functions. A plan never changes what becomes of a tag: its restore modes are
the policy's. It only leaves tags out, where the engine says that it can release the rest alone and somebody has seen
what that frees. Of a way that nobody has seen nothing is predicted: then it is the whole policy's park.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from pydantic import Field

from ...vmm.tags import KEEPS_CONTENTS, WEIGHT_TAGS, RestoreMode
from .capabilities import KV_CACHE, Capabilities, refusal
from .policy import EnginePolicy
from .words import Message

WAYS_MAX: Final = 8  # of one engine
COMBINATIONS_MAX: Final = 256  # of the engines that share devices
UNKNOWN_SECONDS: Final = float("inf")


class ParkLearned(Message):
    """What one way of parking was seen to do, with the engine as it is configured now. Bytes are by device id."""

    modes: dict[str, RestoreMode]  # the tags that it releases, and what becomes of each
    freed_bytes: dict[str, int] = Field(default_factory=dict[str, int])  # the least of the parks of this process
    residual_bytes: dict[str, int] = Field(default_factory=dict[str, int])  # that its processes kept in the last one
    # In the first park of the process that runs now: what it keeps should not grow from park to park.
    residual_first_bytes: dict[str, int] = Field(default_factory=dict[str, int])
    park_seconds: float | None = None  # from the call until the memory was proved free; of the last parks
    wake_seconds: float | None = None  # from the call until the answer was right
    parks: int = 0  # that were seen
    seen_at: float | None = None  # the last one, by the node's clock
    trouble: str | None = None  # why it is not used: a trial of it went wrong


class SharedBytes(Message):
    """A pool of a memory service that an engine uses, on one device: in it once, however many engines map it."""

    pool: str
    bytes: int
    tags: list[str] = Field(default_factory=list[str])
    engines: list[str] = Field(default_factory=list[str])  # ids of those that map it, this one included
    strangers: bool = False  # processes map it that are no engine's: it is not freed


class Learned(Message):
    """All that is known of an engine's parks. ``margin_bytes``: what the node adds to the need of a job."""

    ways: list[ParkLearned] = Field(default_factory=list[ParkLearned])
    margin_bytes: int = 0
    shared: dict[str, list[SharedBytes]] = Field(default_factory=dict[str, list[SharedBytes]])  # by device id, now


class Plan(Message):
    """What a loan releases of one engine, and what that is predicted to free and to cost."""

    modes: dict[str, RestoreMode]
    whole: bool  # all that the policy names
    freed_bytes: dict[str, int] = Field(default_factory=dict[str, int])  # by device id
    known: bool = True  # somebody has seen it; else ``freed_bytes`` is what its processes hold
    park_seconds: float | None = None
    wake_seconds: float | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        return tuple(sorted(self.modes))

    @property
    def seconds(self) -> float:
        """Predicted for park and wake together; infinite where one of them is not known."""
        if self.park_seconds is None or self.wake_seconds is None:
            return UNKNOWN_SECONDS
        return self.park_seconds + self.wake_seconds


@dataclass(frozen=True, slots=True)
class Way:
    """A plan that may be chosen, and what it counts as: never more than one that releases the same tags and more."""

    plan: Plan
    cost_seconds: float

    @property
    def order(self) -> tuple[float, int, int, tuple[str, ...]]:
        """Cheapest first. Of two that cost the same, the one that leaves more where it is."""
        return (self.cost_seconds, len(self.plan.modes), sum(self.plan.freed_bytes.values()), self.plan.tags)


def narrowed(policy: EnginePolicy, modes: Mapping[str, RestoreMode]) -> EnginePolicy:
    """The policy of a loan that releases ``modes`` only. ValueError if they are not the policy's own."""
    if not modes or any(policy.restore_modes.get(tag) is not mode for tag, mode in modes.items()):
        raise ValueError(f"a plan that releases {dict(modes)} is none of the policy's {dict(policy.restore_modes)}")
    return policy.model_copy(update={"restore_modes": dict(modes)})


def plans_refusal(policies: Mapping[str, EnginePolicy], plans: Mapping[str, Plan]) -> str | None:
    """Why the plans of a loan are none of its policies'; None if they are."""
    for engine_id, plan in plans.items():
        try:
            narrowed(policies[engine_id], plan.modes)
        except KeyError:
            return f"there is a plan for engine {engine_id} and no policy"
        except ValueError as error:
            return f"engine {engine_id}: {error}"
    return None


def can_release(capabilities: Capabilities, policy: EnginePolicy, modes: Mapping[str, RestoreMode]) -> bool:
    try:
        return refusal(capabilities, narrowed(policy, modes)) is None
    except ValueError:
        return False


def worth_trying(capabilities: Capabilities, policy: EnginePolicy) -> list[dict[str, RestoreMode]]:
    """The ways that a trial park tries, the smallest first and the whole policy last: the KV cache alone, what is lost
    anyway, all but the weights, and the tags of each other way that the engine offers."""
    wanted = policy.restore_modes
    sets = [
        {tag for tag in wanted if tag == KV_CACHE},
        {tag for tag, mode in wanted.items() if mode not in KEEPS_CONTENTS},
        {tag for tag in wanted if tag not in WEIGHT_TAGS},
        *(set(plan.modes) & set(wanted) for plan in capabilities.plans),
    ]
    found: list[dict[str, RestoreMode]] = []
    for tags in sorted(sets, key=lambda each: (len(each), sorted(each))):
        modes = {tag: mode for tag, mode in wanted.items() if tag in tags}
        if 0 < len(modes) < len(wanted) and modes not in found and can_release(capabilities, policy, modes):
            found.append(modes)
    return [*found[: WAYS_MAX - 1], dict(wanted)]


def ways_of(
    capabilities: Capabilities | None,
    policy: EnginePolicy,
    learned: Learned | None,
    held_bytes: Mapping[str, int],
    residual_bytes: Mapping[str, int],
) -> tuple[Way, ...]:
    """How the engine may be parked for a loan, cheapest first. The whole policy is always among them.

    ``held_bytes``: what it holds now, by device, which no plan frees more than. ``residual_bytes``: what it keeps when
    the whole policy is parked. Without ``capabilities`` it was not asked yet, and is parked whole.
    """
    plans = [_whole(policy, learned, held_bytes, residual_bytes)]
    for seen in [] if learned is None else learned.ways:
        partly = seen.modes != policy.restore_modes and seen.trouble is None and any(seen.freed_bytes.values())
        if partly and capabilities is not None and can_release(capabilities, policy, seen.modes):
            plans.append(
                Plan(
                    modes=seen.modes,
                    whole=False,
                    freed_bytes=_at_most(seen.freed_bytes, held_bytes),
                    park_seconds=seen.park_seconds,
                    wake_seconds=seen.wake_seconds,
                )
            )
    ways = sorted((Way(plan, _cost(plan, plans)) for plan in plans), key=lambda way: way.order)
    kept = ways[:WAYS_MAX]
    return tuple(kept if any(way.plan.whole for way in kept) else [*kept[:-1], *(w for w in ways if w.plan.whole)])


def _whole(
    policy: EnginePolicy,
    learned: Learned | None,
    held_bytes: Mapping[str, int],
    residual_bytes: Mapping[str, int],
) -> Plan:
    freed = {device: max(0, held - residual_bytes.get(device, 0)) for device, held in held_bytes.items()}
    seen = None if learned is None else way_in(learned, policy.restore_modes)
    if seen is None or seen.trouble is not None or not seen.freed_bytes:
        return Plan(modes=policy.restore_modes, whole=True, freed_bytes=freed, known=False)
    return Plan(
        modes=policy.restore_modes,
        whole=True,
        freed_bytes=_at_most(freed, seen.freed_bytes),
        park_seconds=seen.park_seconds,
        wake_seconds=seen.wake_seconds,
    )


def way_in(learned: Learned, modes: Mapping[str, RestoreMode]) -> ParkLearned | None:
    return next((seen for seen in learned.ways if seen.modes == dict(modes)), None)


def _at_most(wanted: Mapping[str, int], limit: Mapping[str, int]) -> dict[str, int]:
    return {device: min(nbytes, limit.get(device, 0)) for device, nbytes in wanted.items()}


def _cost(plan: Plan, plans: Iterable[Plan]) -> float:
    """Less work never counts as dearer, whatever a single measurement says."""
    return min(each.seconds for each in plans if set(plan.modes) <= set(each.modes))


def frees(ways: Iterable[Way], device_id: str) -> int:
    return sum(way.plan.freed_bytes.get(device_id, 0) for way in ways)


@dataclass(frozen=True, slots=True)
class Sharer:
    """What one engine holds, by device, of it what it shares, and the plan it would be parked by."""

    engine_id: str
    plan: Plan
    held_bytes: Mapping[str, int]
    shared: Mapping[str, Sequence[SharedBytes]] = field(default_factory=dict[str, Sequence[SharedBytes]])


def frees_together(sharers: Sequence[Sharer], device_id: str) -> int:
    """What the plans free on the device together: a shared pool once, and only if all that map it release it."""
    predicted = sum(sharer.plan.freed_bytes.get(device_id, 0) for sharer in sharers)
    users: dict[str, set[str]] = {}
    largest_bytes: dict[str, int] = {}
    kept: set[str] = set()
    released: dict[str, set[str]] = {}
    own_bytes = 0
    for sharer in sharers:
        pools = sharer.shared.get(device_id, ())
        own = max(0, sharer.held_bytes.get(device_id, 0) - sum(pool.bytes for pool in pools))
        own_bytes += min(own, sharer.plan.freed_bytes.get(device_id, 0))
        for pool in pools:
            users.setdefault(pool.pool, set()).update(pool.engines, {sharer.engine_id})
            largest_bytes[pool.pool] = max(largest_bytes.get(pool.pool, 0), pool.bytes)
            if pool.strangers:
                kept.add(pool.pool)
            if sharer.plan.modes.keys() >= set(pool.tags):
                released.setdefault(pool.pool, set()).add(sharer.engine_id)
    freed = {pool for pool, of in users.items() if pool not in kept and of <= released.get(pool, set())}
    return min(predicted, own_bytes + sum(largest_bytes[pool] for pool in freed))


def held_together(held: Iterable[tuple[Mapping[str, int], Mapping[str, Sequence[SharedBytes]]]]) -> int:
    """What several engines hold on all devices, a pool that they share once. Each: held bytes, and what is shared."""
    total_bytes = 0
    pools: dict[tuple[str, str], int] = {}
    for held_bytes, shared in held:
        for device_id, nbytes in held_bytes.items():
            its = shared.get(device_id, ())
            total_bytes += max(0, nbytes - sum(pool.bytes for pool in its))
            pools.update({(device_id, pool.pool): pool.bytes for pool in its})
    return total_bytes + sum(pools.values())


def suffices(ways: Sequence[Way], need_bytes: Mapping[str, int]) -> bool:
    """``ways``: one of each engine. ``need_bytes``: what has to become free, by device."""
    return all(frees(ways, device_id) >= need for device_id, need in need_bytes.items())


def combinations(ways: Sequence[Sequence[Way]]) -> list[tuple[Way, ...]]:
    """One way of each engine, the cheapest combination first; the one of all whole policies is among them.

    Where there are too many, each engine is parked in its cheapest way or whole.
    """
    count = 1
    for each in ways:
        count *= len(each)
    if count > COMBINATIONS_MAX:
        cheapest = tuple(each[0] for each in ways)
        whole = tuple(next(way for way in each if way.plan.whole) for each in ways)
        return sorted([whole] if cheapest == whole else [cheapest, whole], key=_order)
    return sorted(itertools.product(*ways), key=_order)


def _order(ways: Sequence[Way]) -> tuple[float, int, int, tuple[tuple[str, ...], ...]]:
    return (
        sum(way.cost_seconds for way in ways),
        sum(len(way.plan.modes) for way in ways),
        sum(sum(way.plan.freed_bytes.values()) for way in ways),
        tuple(way.plan.tags for way in ways),
    )


def cheapest(ways: Sequence[Sequence[Way]], need_bytes: Mapping[str, int]) -> tuple[Way, ...] | None:
    """The cheapest combination that frees ``need_bytes``; None if nothing does."""
    return next((each for each in combinations(ways) if suffices(each, need_bytes)), None)
