"""What an engine can do where device and host share one memory: a backup there takes what the device gives. Pure."""

from __future__ import annotations

from ...vmm.tags import KEEPS_CONTENTS
from .capabilities import Capabilities, ParkPlan

_WHY = "its memory is unified: modes CPU and PINNED free nothing there"


def without_backups(offered: Capabilities) -> Capabilities:
    """``offered`` less every mode that keeps a backup in host memory; unsupported if no way to park is left."""
    plans = [plan for plan in map(_plan_without_backups, offered.plans) if plan is not None]
    lost = bool(offered.plans) and not plans
    return offered.model_copy(
        update={
            "engine": f"{offered.engine} on unified memory",
            "plans": plans,
            "unsupported": offered.unsupported or (f"{offered.engine} cannot be parked here: {_WHY}" if lost else None),
            "notes": [*offered.notes, _WHY],
        }
    )


def _plan_without_backups(plan: ParkPlan) -> ParkPlan | None:
    modes = {tag: [mode for mode in modes if mode not in KEEPS_CONTENTS] for tag, modes in plan.modes.items()}
    left = {tag: kept for tag, kept in modes.items() if kept}
    if not left or (len(left) < len(modes) and not plan.any_subset):
        return None
    return plan.model_copy(update={"modes": left})
