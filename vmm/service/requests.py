"""What a client of the memory service may ask under its lock: memory, entries, commit, park."""

from __future__ import annotations

import re
import time
from typing import Final

from ..driver import Handle
from ..errors import LullMemoryError
from ..tags import TAG_PATTERN, RestoreMode
from .connection import Answer, Handler
from .data_requests import DataRequests
from .errors import MalformedFrame
from .layout import Entry
from .protocol import ALLOCATION_BYTES_MAX, HANDLE_PATTERN, KEY_PATTERN, Fields
from .state import USING, Phase, Todo

_SLOT_MAX: Final = 1 << 31
_PAGE_BYTES_MAX: Final = 512 << 10
_MODE_PATTERN: Final = re.compile(f"{RestoreMode.CPU}|{RestoreMode.PINNED}")


class Client(DataRequests):
    def requests(self) -> dict[str, Handler]:
        return {
            "allocate": self._allocate,
            "donate": self._donate,
            "free": self._free,
            "put": self._put,
            "delete": self._delete,
            "commit": self._commit,
            "slots": self._slots,
            "entries": self._entries,
            "export": self._export,
            "prepare_park": self._prepare_park,
            "abort_park": self._abort_park,
            "commit_park": self._commit_park,
            "confirm": self._confirm,
            **self.data_requests(),
        }

    # -- the writer's

    def _allocate(self, fields: Fields, _fd: int | None) -> Answer:
        nbytes = fields.integer("bytes", 1, ALLOCATION_BYTES_MAX)
        tag, oom_wait_seconds = fields.text("tag", TAG_PATTERN), fields.seconds("oom_wait_seconds")
        fields.end()
        pool = self.writing()
        handle, record = self.retry_while_full(pool, lambda: pool.create(nbytes, tag), oom_wait_seconds)
        with self.holdings.mutex:
            slot = pool.add(handle, record)
        try:
            _, exported = pool.export(slot)
        except LullMemoryError:
            with self.holdings.mutex:
                pool.remove(slot)
            pool.give_up(handle)
            raise
        return {"slot": slot, "reserved_bytes": handle.nbytes, "key": handle.key}, exported

    def _donate(self, fields: Fields, fd: int | None) -> Answer:
        nbytes = fields.integer("bytes", 1, ALLOCATION_BYTES_MAX)
        tag = fields.text("tag", TAG_PATTERN)
        exported = Handle(fields.text("key", HANDLE_PATTERN), fields.integer("reserved_bytes", 1, ALLOCATION_BYTES_MAX))
        fields.end()
        if fd is None:
            raise MalformedFrame("donate comes without a descriptor")
        pool = self.writing()
        handle, record = pool.take_over(fd, exported, nbytes, tag)
        with self.holdings.mutex:
            slot = pool.add(handle, record)
        return {"slot": slot, "reserved_bytes": record.reserved_bytes}, None

    def _free(self, fields: Fields, _fd: int | None) -> Answer:
        slot = fields.integer("slot", 0, _SLOT_MAX)
        fields.end()
        pool = self.writing()
        with self.holdings.mutex:
            handle = pool.remove(slot)
        pool.give_up(handle)
        return {}, None

    def _put(self, fields: Fields, _fd: int | None) -> Answer:
        key = fields.text("key", KEY_PATTERN)
        slot = fields.integer("slot", 0, _SLOT_MAX)
        offset = fields.integer("offset", 0, ALLOCATION_BYTES_MAX)
        nbytes = fields.integer("bytes", 1, ALLOCATION_BYTES_MAX)
        value = fields.value("value")
        fields.end()
        pool = self.writing()
        with self.holdings.mutex:
            pool.layout.put(key, Entry(slot, offset, nbytes, value))
        return {}, None

    def _delete(self, fields: Fields, _fd: int | None) -> Answer:
        key = fields.text("key", KEY_PATTERN)
        fields.end()
        pool = self.writing()
        with self.holdings.mutex:
            pool.layout.delete(key)
        return {}, None

    def _commit(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        pool, session = self.holding(Phase.WRITER, Phase.DATA_WRITER), self.held()[1]
        with self.holdings.mutex:
            pool.layout.check()
            pool.state.commit(session, pool.layout.digest(), time.monotonic())
            self.holdings.settle(pool)
            return {"layout_hash": pool.state.layout_hash, "generation": pool.state.generation}, None

    # -- whoever holds memory

    def _slots(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        pool = self.holding(*USING)
        with self.holdings.mutex:
            slots = [[slot, r.nbytes, r.reserved_bytes, r.tag] for slot, r in sorted(pool.layout.slots.items())]
        return {"slots": slots}, None

    def _entries(self, fields: Fields, _fd: int | None) -> Answer:
        after = fields.optional_text("after", KEY_PATTERN)
        fields.end()
        pool = self.holding(*USING)
        with self.holdings.mutex:
            page = [[key, e.slot, e.offset, e.nbytes, e.value] for key, e in pool.layout.page(after, _PAGE_BYTES_MAX)]
        return {"entries": page}, None

    def _export(self, fields: Fields, _fd: int | None) -> Answer:
        slot = fields.integer("slot", 0, _SLOT_MAX)
        fields.end()
        handle, exported = self.holding(*USING).export(slot)
        return {"reserved_bytes": handle.nbytes, "key": handle.key}, exported

    # -- park

    def _prepare_park(self, fields: Fields, _fd: int | None) -> Answer:
        mode = RestoreMode(fields.text("mode", _MODE_PATTERN))
        keep = bool(fields.integer("keep_backup", 0, 1))
        fields.end()
        pool, session = self.held()
        todo = self.when_quiet(pool, lambda: pool.state.prepare_park(session))
        pool.pinned = mode is RestoreMode.PINNED
        pool.keep_backup = keep or pool.pinned
        if todo is Todo.BACK_UP:
            done = False
            try:
                pool.back_up(pinned=pool.pinned)
                done = True
            finally:
                with self.holdings.mutex:
                    pool.state.backed_up(session, done=done)
                    self.holdings.settle(pool)
        with self.holdings.mutex:
            return {"users": pool.state.users(), "backup_bytes": pool.backup_bytes()}, None

    def _abort_park(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        pool, session = self.held()
        with self.holdings.mutex:
            pool.state.abort_park(session)
        return {}, None

    def _commit_park(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        pool, session = self.held()
        todo = self.when_quiet(pool, lambda: pool.state.commit_park(session, time.monotonic()))
        if todo is Todo.PARK:
            self.park(pool, session)
        with self.holdings.mutex:
            return {"freed": todo is Todo.PARK, "users": pool.state.users()}, None

    def _confirm(self, fields: Fields, _fd: int | None) -> Answer:
        """The wake is complete: a backup that nobody wants to keep is dropped."""
        fields.end()
        pool = self.holding(Phase.READER, Phase.DATA_WRITER)
        with self.holdings.mutex:
            droppable = pool.state.may_drop_backup() and not pool.keep_backup
            backups = pool.take_backups() if droppable else []
            if droppable:
                pool.state.backup_clean = False
        for backup in backups:
            backup.free()
        return {}, None
