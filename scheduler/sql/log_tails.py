"""The last bytes of ended attempts' logs, for when their node does not answer."""

from __future__ import annotations

from typing import Final

from sqlalchemy import Connection, delete, insert, select

from ..errors import InvalidRequest, NotFound
from ..model import LogTail
from ..tables import attempts, log_tails, nodes
from .writer import Tx

TAIL_BYTES_MAX: Final = 64 * 1024


def keep(tx: Tx, attempt_id: str, stream: str, offset: int, data: bytes, now: float) -> None:
    """In place of what was kept before."""
    if len(data) > TAIL_BYTES_MAX:
        raise InvalidRequest("body", f"{len(data)} bytes; of a stream at most {TAIL_BYTES_MAX} are kept")
    if tx.conn.execute(select(attempts.c.id).where(attempts.c.id == attempt_id)).one_or_none() is None:
        raise NotFound("attempt", attempt_id)
    here = (log_tails.c.attempt_id == attempt_id) & (log_tails.c.stream == stream)
    tx.conn.execute(delete(log_tails).where(here))
    tx.conn.execute(
        insert(log_tails).values(attempt_id=attempt_id, stream=stream, start_offset=offset, data=data, kept_at=now)
    )


def read(conn: Connection, attempt_id: str, stream: str) -> LogTail | None:
    statement = (
        select(log_tails.c.start_offset, log_tails.c.data, nodes.c.silent_since)
        .join(attempts, attempts.c.id == log_tails.c.attempt_id)
        .join(nodes, nodes.c.id == attempts.c.node_id)
        .where(log_tails.c.attempt_id == attempt_id, log_tails.c.stream == stream)
    )
    row = conn.execute(statement).one_or_none()
    return None if row is None else LogTail(row.start_offset, bytes(row.data), row.silent_since is not None)
