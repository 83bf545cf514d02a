"""Occupancy intervals: contiguous per device, exact by the node's clock."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from ...agents.protocol.wire import OccupancyChanged
from ..tables import devices, occupancy
from .writer import Tx


def occupancy_changed(tx: Tx, node_id: str, report: OccupancyChanged, at: float) -> None:
    """The open interval ends where the new one starts. A clock that went back cannot make one overlap another:
    the new one then starts where the open one did, in its place."""
    known = select(devices.c.id).where(devices.c.id == report.device_id, devices.c.node_id == node_id)
    if tx.conn.execute(known.with_for_update()).one_or_none() is None:
        return
    last = (
        tx.conn.execute(
            select(occupancy).where(occupancy.c.device_id == report.device_id).order_by(occupancy.c.no.desc()).limit(1)
        )
        .mappings()
        .one_or_none()
    )
    values = {"kind": report.occupancy.value, "owner_id": report.owner_id, "loan_id": report.loan_id}
    number = 1
    if last is not None:
        number = last["no"] + 1
        here = (occupancy.c.device_id == report.device_id) & (occupancy.c.no == last["no"])
        if all(last[name] == value for name, value in values.items()):
            return
        if at <= last["started_at"]:
            tx.conn.execute(update(occupancy).where(here).values(**values))
            tx.touch("nodes", "decide")
            return
        tx.conn.execute(update(occupancy).where(here).values(ended_at=at))
    tx.conn.execute(insert(occupancy).values(device_id=report.device_id, no=number, started_at=at, **values))
    tx.touch("nodes", "decide")
