"""What a park did, written down, and told to the operator where it did worse than the ones before."""

from __future__ import annotations

import time
from collections.abc import Mapping

from .engine_body import EngineBody


def seen_parked(
    engine: EngineBody,
    modes: Mapping[str, str],
    freed_bytes: dict[str, int],
    residual_bytes: dict[str, int],
    *,
    seconds: float | None,
    loan_id: str | None = None,
) -> None:
    """One park of a loan or of a trial: into the engine's history, with an alarm where it does worse than before."""
    _tell_too_little(engine, modes, freed_bytes, loan_id)
    engine.parks.parked(modes, freed_bytes, residual_bytes, seconds=seconds, at=time.time())
    _tell_growth(engine, modes, loan_id)


def seen_short(
    engine: EngineBody,
    modes: Mapping[str, str],
    freed_bytes: dict[str, int],
    residual_bytes: dict[str, int],
    *,
    released: bool,
    loan_id: str,
) -> None:
    """One that gave less than it had to. ``released``: something on every device, and it was at rest."""
    _tell_too_little(engine, modes, freed_bytes, loan_id)
    engine.parks.fell_short(modes, freed_bytes, residual_bytes, released=released)


def _tell_too_little(
    engine: EngineBody, modes: Mapping[str, str], freed_bytes: dict[str, int], loan_id: str | None
) -> None:
    less = engine.parks.too_little(modes, freed_bytes)
    if less:
        worst, of = min(less.items(), key=lambda item: item[1]["freed_bytes"] / item[1]["learned_bytes"])
        sentence = (
            f"a park of {', '.join(sorted(modes))} of engine {engine.name} freed {of['freed_bytes']} bytes on device"
            f" {worst}; {of['learned_bytes']} were learned"
        )
        engine.node.alert(
            "warning", "park_frees_less", sentence, engine_id=engine.engine_id, loan_id=loan_id, data={"devices": less}
        )


def _tell_growth(engine: EngineBody, modes: Mapping[str, str], loan_id: str | None) -> None:
    grown = engine.parks.growth(modes, engine.footprint)
    if grown:
        worst, residual = max(grown.items(), key=lambda item: item[1]["now_bytes"] - item[1]["first_bytes"])
        sentence = (
            f"engine {engine.name} keeps more with every park: {residual['now_bytes']} bytes on device {worst} after"
            f" {residual['first_bytes']} in its first one; drain and restart it: lull engine restart {engine.name}"
        )
        engine.node.alert(
            "warning", "residual_grows", sentence, engine_id=engine.engine_id, loan_id=loan_id, data={"devices": grown}
        )
