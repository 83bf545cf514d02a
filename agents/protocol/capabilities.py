"""What an engine can do, as its adapter found out by asking it, and whether a policy can be honoured with that. Pure.

A policy names tags and what becomes of each; an engine offers ways to park. Agent and server judge by the same
function, so a refusal names the same nearest policy wherever it is given.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from pydantic import Field

from ...vmm.tags import KEEPS_CONTENTS, TRTLLM_TAGS, WEIGHT_TAGS, RestoreMode
from .policy import EnginePolicy
from .words import Message

MODEL_WEIGHTS: Final = "model_weights"
KV_CACHE: Final = "kv_cache"
_KEEPS: Final = [RestoreMode.CPU, RestoreMode.PINNED]
_ANY: Final = [RestoreMode.NONE, RestoreMode.MEMSET, RestoreMode.CPU, RestoreMode.PINNED]


class ParkPlan(Message):
    """One way to park: the tags that it releases, and the modes that each of them may be given, the usual one first."""

    name: str
    modes: dict[str, list[RestoreMode]]
    any_subset: bool = False  # the tags may also be released one by one

    def honours(self, wanted: Mapping[str, RestoreMode]) -> bool:
        if not self.any_subset and set(wanted) != set(self.modes):
            return False
        return all(mode in self.modes.get(tag, ()) for tag, mode in wanted.items())

    def nearest(self, wanted: Mapping[str, RestoreMode]) -> dict[str, RestoreMode]:
        """What this plan makes of ``wanted``: modes that it has stay, others become its usual ones."""
        tags = [tag for tag in self.modes if tag in wanted] if self.any_subset else list(self.modes)
        return {
            tag: wanted[tag] if wanted.get(tag) in self.modes[tag] else self.modes[tag][0]
            for tag in tags or list(self.modes)
        }


class Capabilities(Message):
    """``unsupported`` and ``fragile`` say why, in words for the operator; None where there is nothing to say."""

    engine: str  # what it is, with its version where it tells one: "vLLM 0.33.0"
    version: str | None = None
    unsupported: str | None = None  # it serves, and it cannot be parked
    fragile: str | None = None  # it can be parked, and is known to break in these cases
    plans: list[ParkPlan] = Field(default_factory=list[ParkPlan])
    can_reload_weights: bool = False
    tells_state: bool = True  # by a route of its own; else the agent's ledger says what it was told
    tells_tags: bool = True
    notes: list[str] = Field(default_factory=list[str])


def refusal(capabilities: Capabilities, policy: EnginePolicy) -> str | None:
    """Why the engine cannot honour ``policy``, with the nearest one that it can; None if it can."""
    if capabilities.unsupported is not None:
        return capabilities.unsupported
    wanted = policy.restore_modes
    if any(plan.honours(wanted) for plan in capabilities.plans):
        return None
    if not capabilities.plans:
        return f"{capabilities.engine} has no way to park"
    near = nearest(capabilities, wanted)
    return f"{capabilities.engine} {_what_not(capabilities, wanted)}; the nearest policy that it can honour: {near}"


def loses_weights(policy: EnginePolicy) -> bool:
    return any(tag in WEIGHT_TAGS and mode not in KEEPS_CONTENTS for tag, mode in policy.restore_modes.items())


def nearest(capabilities: Capabilities, wanted: Mapping[str, RestoreMode]) -> str:
    """The restore modes closest to ``wanted``, as they are written in TOML."""

    def far(modes: Mapping[str, RestoreMode]) -> tuple[int, int]:
        differing = sum(1 for tag in {*modes, *wanted} if modes.get(tag) != wanted.get(tag))
        return differing, len(set(modes) ^ set(wanted))

    modes = min((plan.nearest(wanted) for plan in capabilities.plans), key=far)
    return "restore_modes = { " + ", ".join(f'{tag} = "{mode}"' for tag, mode in modes.items()) + " }"


def _what_not(capabilities: Capabilities, wanted: Mapping[str, RestoreMode]) -> str:
    offered = {tag for plan in capabilities.plans for tag in plan.modes}
    for tag in wanted:
        if tag not in offered:
            return f"cannot release tag {tag!r} (it has {', '.join(sorted(offered))})"
    for tag, mode in wanted.items():
        if tag in WEIGHT_TAGS and mode not in KEEPS_CONTENTS and not capabilities.can_reload_weights:
            return f"cannot do that: tag {tag!r} with mode {mode} loses the weights and this engine cannot reload them"
    for tag, mode in wanted.items():
        modes = sorted({str(known) for plan in capabilities.plans for known in plan.modes.get(tag, ())})
        if str(mode) not in modes:
            return f"cannot give tag {tag!r} mode {mode} (it has {', '.join(modes)})"
    ways = "; ".join(f"{plan.name}: {', '.join(plan.modes)}" for plan in capabilities.plans)
    return f"cannot release {', '.join(wanted)} with these modes together (its ways are {ways})"


def trtllm_capabilities(version: str | None = None) -> Capabilities:
    """Fixed by the wire: any tags, and no way to load weights that were lost (no /update_weights in sleep mode)."""
    modes = {tag: list(_KEEPS if tag in WEIGHT_TAGS else _ANY) for tag in TRTLLM_TAGS}
    name = "TensorRT-LLM's runtime memory control"
    return Capabilities(engine=name, version=version, plans=[ParkPlan(name="by tag", modes=modes, any_subset=True)])
