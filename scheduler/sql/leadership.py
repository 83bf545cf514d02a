"""The leader's row: a term and an expiry by the database's clock. The term guards; the expiry only keeps two from
taking turns."""

from __future__ import annotations

import time

from sqlalchemy import Double, literal_column, select, update

from ..errors import InvalidRequest, NotLeader
from ..tables import leader
from .writer import Tx

_ROW = 1
_TERM_MAX = 2**60  # what a database's integer holds, and room to count on
_TERM = select(leader.c.term).where(leader.c.id == _ROW).with_for_update(read=True)


def _database_now(tx: Tx) -> float:
    if tx.conn.dialect.name == "sqlite":
        clock = "(julianday('now') - 2440587.5) * 86400.0"
    else:
        clock = "extract(epoch from clock_timestamp())"
    return float(tx.conn.execute(select(literal_column(clock, Double))).scalar_one())


def lead(tx: Tx, holder: str, ttl_seconds: float, term: int, *, take_over: bool) -> int | None:
    """Renews ``term`` if it still rules, else takes a free or expired leadership under the next term."""
    row = tx.conn.execute(select(leader).where(leader.c.id == _ROW).with_for_update()).one()
    now = _database_now(tx)
    mine = term != 0 and row.term == term
    if not mine and not take_over and row.holder and row.expires_at > now:
        return None
    new = term if mine else row.term + 1
    tx.conn.execute(
        update(leader).where(leader.c.id == _ROW).values(term=new, holder=holder, expires_at=now + ttl_seconds)
    )
    if not mine:
        tx.event("leader_changed", f"{holder} leads", time.time(), data={"term": new, "before": row.holder})
    return int(new)


def raise_term(tx: Tx, seen: int, mine: int) -> int:
    """A node has seen term ``seen`` and refuses lower ones: a database that is new or older goes on above it. The
    leader, if it is the one with term ``mine``, leads on; another has to take its turn anew. The caller's term."""
    if seen <= tx.conn.execute(select(leader.c.term).where(leader.c.id == _ROW)).scalar_one():
        return mine
    if seen > _TERM_MAX:
        raise InvalidRequest("term", f"a term is at most {_TERM_MAX}")
    row = tx.conn.execute(select(leader).where(leader.c.id == _ROW).with_for_update()).one()
    if seen <= row.term:
        return mine
    leads = mine != 0 and mine == row.term
    free = {} if leads else {"holder": "", "expires_at": 0.0}
    tx.conn.execute(update(leader).where(leader.c.id == _ROW).values(term=seen + 1, **free))
    tx.event(
        "leader_changed",
        "a node has seen a higher term than this database: the term is raised above it",
        time.time(),
        severity="warning",
        data={"term": seen + 1, "before": row.term},
    )
    return seen + 1 if leads else mine


def ruling_term(tx: Tx) -> int:
    """For orders that are no decisions: any server gives them, and a node refuses a term that is over."""
    return int(tx.conn.execute(select(leader.c.term).where(leader.c.id == _ROW)).scalar_one())


def resign(tx: Tx, term: int) -> None:
    tx.conn.execute(update(leader).where(leader.c.id == _ROW, leader.c.term == term).values(holder="", expires_at=0.0))


def check_term(tx: Tx, term: int) -> None:
    """Raises NotLeader. On PostgreSQL the row stays locked to the commit: no other term can begin in between."""
    if tx.conn.execute(_TERM).scalar_one() != term:
        raise NotLeader(term)
