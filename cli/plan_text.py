"""How plans, and what was learned of parks, are written for people. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from .output import Row, part_of, parts_of, text_of
from .quantities import format_duration, format_size


def way_text(way: Row, names: Mapping[str, str]) -> str:
    """`kv_cache (park 0.4s, wake 0.6s)`; `model_weights, kv_cache (never measured)`. ``names``: of engines, by id."""
    tags = ", ".join(text_of(tag) for tag in way["tags"])
    with_engines = part_of(way, "with_engines")
    beside = "; ".join(f"{names.get(each, each)}: {', '.join(of)}" for each, of in with_engines.items())
    return f"{tags} ({seconds_text(way)})" + (f", with {beside}" if beside else "")


def seconds_text(figures: Row) -> str:
    known = [
        f"{name} {format_duration(figures[f'{name}_seconds'])}"
        for name in ("park", "wake")
        if figures.get(f"{name}_seconds") is not None
    ]
    return ", ".join(known) or "never measured"


def device_lines(way: Row) -> list[str]:
    freed = part_of(way, "freed_bytes")
    guess = "" if way["measured"] else " (all that it holds; nobody has seen what a park frees)"
    return [
        f"  {text_of(device)}: frees {format_size(freed.get(device, 0))}{guess}, then {format_size(room)} free"
        for device, room in sorted(part_of(way, "room_bytes").items())
    ]


def loan_plan_lines(row: Row, names: Mapping[str, str]) -> list[str]:
    """Of each engine of a loan: what was predicted beside what happened."""
    lines: list[str] = []
    for plan in parts_of(row, "plans"):
        whole = " (its whole policy)" if plan["whole"] else ""
        lines.append(
            f"plan of {names.get(plan['engine_id'], plan['engine_id'])}: {', '.join(plan['tags']) or '-'}{whole}"
        )
        lines.append(f"  predicted  {_figures(part_of(plan, 'predicted'))}")
        lines.append(f"  happened   {_figures(part_of(plan, 'happened'))}")
    return lines


def _figures(figures: Row) -> str:
    if not figures:
        return "-"
    freed = ", ".join(
        f"{format_size(nbytes)} on {text_of(device)}" for device, nbytes in part_of(figures, "freed_bytes").items()
    )
    return f"{freed or 'nothing'} freed; {seconds_text(figures)}"


def learned_text(way: Row) -> str:
    """One way of parking an engine, as `lull engine show` prints it."""
    tags = ", ".join(f"{text_of(tag)} {mode}" for tag, mode in part_of(way, "modes").items())
    if way.get("trouble"):
        return f"{tags}: not used, {text_of(way['trouble'])}"
    freed = sum(part_of(way, "freed_bytes").values())
    kept, first = (sum(part_of(way, name).values()) for name in ("residual_bytes", "residual_first_bytes"))
    grown = f" ({format_size(first)} in its first park)" if kept > first else ""
    parks = f"{way['parks']} park{'' if way['parks'] == 1 else 's'}"
    return f"{tags}: frees {format_size(freed)}, keeps {format_size(kept)}{grown}, {seconds_text(way)}, {parks}"
