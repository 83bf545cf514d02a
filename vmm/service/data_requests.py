"""What a client of the memory service may ask about data under a sealed layout."""

from __future__ import annotations

import time
from typing import Final
from uuid import uuid4

from .connection import Answer, Connection, Handler
from .errors import InvalidRequest
from .protocol import ALLOCATION_BYTES_MAX, KEY_PATTERN, Fields
from .state import Phase

_PAGE_BYTES_MAX: Final = 512 << 10


class DataRequests(Connection):
    def data_requests(self) -> dict[str, Handler]:
        return {
            "seal": self._seal,
            "begin_write": self._begin_write,
            "end_write": self._end_write,
            "torn": self._torn,
            "places": self._places,
            "leave": self._leave_in_order,
        }

    def _seal(self, fields: Fields, _fd: int | None) -> Answer:
        """``places``: where the writer has mapped its allocations, in their order; a successor tries for the same."""
        places = fields.integers("places", 0, ALLOCATION_BYTES_MAX << 14)
        fields.end()
        pool, session = self.writing(), self.held()[1]
        with self.holdings.mutex:
            pool.layout.check()
            if len(places) != len(pool.layout.slots):
                raise InvalidRequest(f"places has {len(places)} addresses for {len(pool.layout.slots)} allocations")
            slot_of = {key: entry.slot for key, entry in pool.layout.entries.items()}
            pool.state.seal(session, pool.layout.digest(), uuid4().hex, slot_of, time.monotonic())
            pool.places = dict(zip(sorted(pool.layout.slots), places, strict=True))
            self.holdings.settle(pool)
            return {"layout_hash": pool.state.layout_hash, **self.seal_facts(pool)}, None

    def _begin_write(self, fields: Fields, _fd: int | None) -> Answer:
        """Before the first byte is written. ``keys`` null: all entries."""
        keys = fields.optional_texts("keys", KEY_PATTERN)
        fields.end()
        pool, session = self.held()
        with self.holdings.mutex:
            pool.state.writing_data(session).begin(keys)
            pool.state.backup_clean = False
            backups = pool.take_backups()
        for backup in backups:
            backup.free()
        return {}, None

    def _end_write(self, fields: Fields, _fd: int | None) -> Answer:
        keys = fields.optional_texts("keys", KEY_PATTERN)
        whole = bool(fields.integer("whole", 0, 1))
        fields.end()
        pool, session = self.held()
        with self.holdings.mutex:
            pool.state.writing_data(session).end(keys, whole=whole)
        return {}, None

    def _torn(self, fields: Fields, _fd: int | None) -> Answer:
        after = fields.optional_text("after", KEY_PATTERN)
        fields.end()
        pool, session = self.held()
        with self.holdings.mutex:
            return {"torn": [*pool.state.writing_data(session).page(after, _PAGE_BYTES_MAX)]}, None

    def _places(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        pool = self.holding(Phase.DATA_WRITER)
        with self.holdings.mutex:
            return {"places": [*pool.places.items()]}, None

    def _leave_in_order(self, fields: Fields, _fd: int | None) -> Answer:
        """The client maps nothing any more: its process need not end before another one gets the lock."""
        fields.end()
        _, session = self.held()
        with self.holdings.mutex:
            session.left = True
        return {}, None
