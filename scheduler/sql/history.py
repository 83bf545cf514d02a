"""Occupancy intervals: contiguous per device, exact by the node's clock, `unknown` where nobody saw the device."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from sqlalchemy import delete, insert, select, update

from ...agents.protocol.wire import OccupancyChanged, OccupancyKind
from ..tables import devices, nodes, occupancy
from ..usage import Span, lost_sight, told
from .writer import Tx

_LAST = 2  # an unknown span and the one before it: nothing older can change


def occupancy_changed(tx: Tx, node_id: str, report: OccupancyChanged, at: float) -> None:
    """See ``usage.told``."""
    known = (
        select(nodes.c.start_id)
        .join(devices, devices.c.node_id == nodes.c.id)
        .where(devices.c.id == report.device_id, nodes.c.id == node_id)
        .with_for_update(of=devices)
    )
    node = tx.conn.execute(known).one_or_none()
    if node is None:
        return
    said = Span(
        at,
        None,
        report.occupancy,
        report.owner_id,
        report.loan_id,
        start_id=report.start_id,
        report_no=report.report_no,
    )
    first_no, tail = _tail(tx, report.device_id)
    _write(tx, report.device_id, first_no, tail, told(tail, said, live=report.start_id == node.start_id))


def node_lost_sight(tx: Tx, node_id: str, at: float, device_ids: Iterable[str] | None = None) -> None:
    """From ``at``, its last sign of life, on nobody sees the node's devices. Of all of them, or of those named."""
    mine = select(devices.c.id).where(devices.c.node_id == node_id).order_by(devices.c.id)
    if device_ids is not None:
        mine = mine.where(devices.c.id.in_(list(device_ids)))
    for device_id in tx.conn.execute(mine.with_for_update()).scalars().all():
        first_no, tail = _tail(tx, device_id)
        _write(tx, device_id, first_no, tail, lost_sight(tail, at))


def _tail(tx: Tx, device_id: str) -> tuple[int, list[Span]]:
    """The last spans, oldest first, and the number of the first of them."""
    last = select(occupancy).where(occupancy.c.device_id == device_id).order_by(occupancy.c.no.desc()).limit(_LAST)
    rows = tx.conn.execute(last).mappings().all()[::-1]
    spans = [
        Span(
            row["started_at"],
            row["ended_at"],
            OccupancyKind(row["kind"]),
            row["owner_id"],
            row["loan_id"],
            row["start_id"],
            row["report_no"],
        )
        for row in rows
    ]
    return (rows[0]["no"] if rows else 1), spans


def _write(tx: Tx, device_id: str, first_no: int, old: list[Span], new: list[Span]) -> None:
    """What changed, from the oldest on but for a span that is not needed any more: one open span at any moment."""
    of_device = occupancy.c.device_id == device_id
    if len(old) > len(new):
        tx.conn.execute(delete(occupancy).where(of_device, occupancy.c.no >= first_no + len(new)))
    seen_before = [_shown(span) for span in old]
    for number, span in enumerate(new, first_no):
        index = number - first_no
        if index >= len(old):
            tx.conn.execute(insert(occupancy).values(device_id=device_id, no=number, **_values(span)))
        elif old[index] != span:
            tx.conn.execute(update(occupancy).where(of_device, occupancy.c.no == number).values(**_values(span)))
    if [_shown(span) for span in new] != seen_before:
        tx.touch("nodes", "decide")


def _values(span: Span) -> dict[str, Any]:
    return {**asdict(span), "kind": span.kind.value}


def _shown(span: Span) -> tuple[object, ...]:
    return span.started_at, span.ended_at, span.kind, span.owner_id, span.loan_id
