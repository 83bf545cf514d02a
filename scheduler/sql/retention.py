"""Everything that grows is cut: events, orders, operations, idempotency keys, old intervals, ends of logs. Jobs and
loans stay."""

from __future__ import annotations

from typing import Final

from sqlalchemy import ColumnElement, Table, delete, func, select, tuple_

from ..tables import events, idempotency_keys, log_tails, occupancy, operations, orders
from .writer import Tx

_DAY: Final = 24 * 3600.0
IDEMPOTENCY_SECONDS: Final = _DAY
EVENT_SECONDS: Final = 90 * _DAY
EVENTS_MAX: Final = 1_000_000
ORDER_SECONDS: Final = 7 * _DAY
OPERATION_SECONDS: Final = 90 * _DAY
OCCUPANCY_SECONDS: Final = 400 * _DAY
LOG_TAIL_SECONDS: Final = 14 * _DAY  # no shorter than a node keeps the whole log
LOG_TAILS_MAX: Final = 20_000  # two an attempt, each at most 64 KiB
_ROWS_MAX: Final = 5000  # of a table in one call


def trim(tx: Tx, now: float) -> int:
    last = tx.conn.execute(select(func.max(events.c.seq))).scalar() or 0
    newest = select(log_tails.c.kept_at).order_by(log_tails.c.kept_at.desc()).offset(LOG_TAILS_MAX).limit(1)
    over = tx.conn.execute(newest).scalar_one_or_none()
    tails_until = max(now - LOG_TAIL_SECONDS, over or 0.0)
    return (
        _delete(tx, events, (events.c.at < now - EVENT_SECONDS) | (events.c.seq <= last - EVENTS_MAX))
        + _delete(tx, orders, orders.c.created_at < now - ORDER_SECONDS)
        + _delete(tx, idempotency_keys, idempotency_keys.c.created_at < now - IDEMPOTENCY_SECONDS)
        + _delete(tx, operations, operations.c.created_at < now - OPERATION_SECONDS)
        + _delete(tx, occupancy, occupancy.c.ended_at < now - OCCUPANCY_SECONDS)
        + _delete(tx, log_tails, log_tails.c.kept_at <= tails_until)
    )


def _delete(tx: Tx, table: Table, condition: ColumnElement[bool]) -> int:
    keys = tuple(table.primary_key.columns)
    victims = select(*keys).where(condition).limit(_ROWS_MAX)
    return tx.conn.execute(delete(table).where(tuple_(*keys).in_(victims))).rowcount
