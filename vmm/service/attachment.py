"""An engine's connection to one pool of the service, and what it has mapped of it. Not thread-safe."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..blocks import Allocation
from ..driver import Access, Driver, Handle
from ..errors import ContentsLost, LullMemoryError
from ..placing import reserve
from ..tags import RestoreMode
from . import protocol
from .claims import claim, give_up
from .client import CALL_SECONDS_MAX, CONNECT_SECONDS_MAX, ServiceClient, read_state
from .errors import LayoutInvalid, ServiceRefused, ServiceUnavailable, StaleLayout
from .slabs import Place, Slab, drop_all, require_same
from .state import Lock

_log = logging.getLogger(__name__)


class Attachment:
    def __init__(
        self,
        driver: Driver,
        path: Path,
        name: str,
        tag: str,
        mode: RestoreMode,
        *,
        connect_seconds_max: float,
        wake_seconds_max: float,
    ) -> None:
        """Connects. Raises ServiceUnavailable; ServiceRefused if the driver is attached to this pool already."""
        self.driver = driver
        self.name = name
        self.tag = tag
        self.slabs: list[Slab] = []
        self.entries: dict[str, Place] = {}
        self.layout_hash: str | None = None
        self.granted: protocol.Message = {}  # the last answer to hello
        self.wishes: dict[int, int] = {}  # by slot, where its memory should lie
        self._connect_seconds_max = min(CONNECT_SECONDS_MAX, connect_seconds_max)
        self._path = path
        claim(driver, path, name)
        try:
            self.client = ServiceClient(path, connect_seconds_max=self._connect_seconds_max)
        except BaseException:
            give_up(driver, path, name)
            raise
        self._wake_seconds_max = wake_seconds_max  # a parked pool comes with its lock
        self._mode = mode

    def hello(self, lock: Lock, *, wait_seconds: float, oom_wait_seconds: float, expect: str | None = None) -> str:
        """Waits for the lock; what was granted. Learns the layout hash."""
        answer = self.client.ask(
            "hello",
            seconds_max=wait_seconds + oom_wait_seconds + self._wake_seconds_max,
            version=protocol.VERSION,
            pool=self.name,
            lock=str(lock),
            wait_seconds=wait_seconds,
            oom_wait_seconds=oom_wait_seconds,
            expect_layout=expect,
        )
        if answer["device"] != self.driver.device_uuid:
            there = answer["device"]
            raise ServiceRefused(f"memory service {self._path} serves {there}, not {self.driver.device_uuid}")
        self.layout_hash, self.granted = answer["layout_hash"], answer
        return str(answer["granted"])

    def lock_again(self, wait_seconds: float) -> None:
        """The lock that a parked engine gave up, also from a service that came after the one that had it."""
        expect = self.layout_hash
        assert expect is not None, "whoever is parked had read or committed"
        if self.client.connected:
            self.client.ask(
                "resume",
                seconds_max=wait_seconds + self._wake_seconds_max,
                expect_layout=expect,
                wait_seconds=wait_seconds,
                oom_wait_seconds=0,
            )
        else:
            self.connect_again()
            self.hello(Lock.READ_ONLY, wait_seconds=wait_seconds, oom_wait_seconds=0, expect=expect)

    def connect_again(self) -> None:
        self.client.close()
        self.client = ServiceClient(self._path, connect_seconds_max=self._connect_seconds_max)

    # -- what a writer adds

    def allocate(self, nbytes: int, oom_wait_seconds: float) -> Allocation:
        answer, fd = self._ask_memory(nbytes, oom_wait_seconds)
        try:
            slab = self._new_slab(int(answer["slot"]), nbytes, int(answer["reserved_bytes"]))
            try:
                slab.take(self.driver, self._import(answer, fd), Access.READ_WRITE)
            except BaseException:
                self.remove(slab)
                raise
        finally:
            os.close(fd)
        return slab.allocation

    def create_unmapped(self, nbytes: int, oom_wait_seconds: float) -> Handle:
        """Memory that is nobody's slab: the caller maps and releases it; the service has it until the lock ends."""
        answer, fd = self._ask_memory(nbytes, oom_wait_seconds)
        try:
            return self._import(answer, fd)
        finally:
            os.close(fd)

    def give_away(self) -> None:
        """Gives the memory of every slab back to the service; places and entries are remembered."""
        for slab in self.slabs:
            slab.drop(self.driver)
        for slab in self.slabs:
            slot, slab.slot = slab.slot, None
            if slot is not None and self.client.connected:  # else the lock is gone, and all that was written under it
                self.client.ask("free", slot=slot)

    def take_anew(self, oom_wait_seconds: float) -> None:
        """New memory at the places of all slabs, with the entries. If it raises, everything is given away again."""
        try:
            for slab in self.slabs:
                answer, fd = self._ask_memory(slab.allocation.nbytes, oom_wait_seconds)
                try:
                    slab.slot = int(answer["slot"])
                    slab.take(self.driver, self._import(answer, fd), Access.READ_WRITE)
                finally:
                    os.close(fd)
            for key, place in self.entries.items():
                self.publish(key, place)
        except BaseException:
            self.give_away()
            raise

    def remove(self, slab: Slab) -> None:
        """Gives the allocation back, with its entries."""
        slab.drop(self.driver)
        self.client.ask("free", slot=slab.slot)
        self.driver.free_address(slab.allocation.address, slab.allocation.reserved_bytes)
        self.slabs.remove(slab)
        self.entries = {key: place for key, place in self.entries.items() if place.slab is not slab}

    def publish(self, key: str, place: Place) -> None:
        self.client.ask(
            "put", key=key, slot=place.slab.slot, offset=place.offset, bytes=place.nbytes, value=place.value
        )
        self.entries[key] = place

    def commit(self) -> None:
        self.layout_hash = str(self.client.ask("commit")["layout_hash"])

    def slab_of(self, allocation: Allocation) -> Slab:
        for slab in self.slabs:
            if slab.allocation is allocation:
                return slab
        raise ValueError(f"{allocation} is not in this pool; it was freed already or belongs elsewhere")

    # -- mappings

    def attach(self) -> None:
        """A new reader: a place for each allocation, its memory, and the entries."""
        rows = self._rows()
        for slot, nbytes, reserved_bytes, _ in rows:
            self._new_slab(slot, nbytes, reserved_bytes)
        self.map_all(rows)
        by_slot = {slab.slot: slab for slab in self.slabs}
        after: str | None = None
        while page := self.client.ask("entries", after=after)["entries"]:
            for key, slot, offset, nbytes, value in page:
                self.entries[key] = Place(by_slot[slot], offset, nbytes, value)
            after = page[-1][0]

    def map_all(self, rows: Sequence[Sequence[Any]] | None = None) -> None:
        """Everything, read-only, or nothing. Raises StaleLayout if the service's allocations are not ours."""
        rows = self._rows() if rows is None else rows
        require_same(self.slabs, rows)
        try:
            for slab, row in zip(self.slabs, rows, strict=True):
                slab.slot = int(row[0])
                answer, fd = self.client.ask_fd("export", slot=slab.slot)
                try:
                    slab.take(self.driver, self._import(answer, fd), Access.READ)
                finally:
                    os.close(fd)
        except BaseException:
            drop_all(self.slabs, self.driver)
            raise

    def protect(self, access: Access) -> None:
        for slab in self.slabs:
            self.driver.set_access(slab.allocation.address, slab.allocation.reserved_bytes, access)

    def unmap_all(self) -> None:
        """The handles are kept."""
        for slab in self.slabs:
            slab.unmap(self.driver)

    def map_again(self) -> None:
        """After unmap_all."""
        for slab in self.slabs:
            slab.map_again(self.driver, Access.READ)

    def drop_all(self, during: str) -> None:
        """Gives everything back to the device; the places stay."""
        failure = drop_all(self.slabs, self.driver)
        if failure is not None:
            raise ContentsLost(during, lost=(), parked=(self.tag,), live=()) from failure

    def close(self) -> LullMemoryError | None:
        """Gives everything up; returns what could not be given back."""
        failure = self._drop_mappings()
        for slab in self.slabs:
            if not slab.mapped:
                self.driver.free_address(slab.allocation.address, slab.allocation.reserved_bytes)
        self.slabs.clear()
        self.entries.clear()
        self.client.close()
        if failure is None:  # else the driver holds memory of it still
            give_up(self.driver, self._path, self.name)
        return failure

    # -- a service that came after the one we knew

    def parked_by_others(self) -> bool:
        """The service has this very layout, in host memory."""
        pools = read_state(self._path)["pools"]
        found = [pool for pool in pools if pool["name"] == self.name]
        return bool(found) and found[0]["state"] == "parked" and found[0]["layout_hash"] == self.layout_hash

    def join_again(self, wait_seconds: float) -> None:
        """Becomes a reader of the new service, which gets our memory unless it has the same from another engine."""
        ours = self.layout_hash
        if self.hello(Lock.READ_WRITE_OR_READ_ONLY, wait_seconds=wait_seconds, oom_wait_seconds=0) == Lock.READ_WRITE:
            self._donate()
        theirs, self.layout_hash = self.layout_hash, ours
        if theirs != ours:
            raise StaleLayout(f"pool {self.name} of the service has layout {theirs}, this engine {ours}")

    def _donate(self) -> None:
        for slab in self.slabs:
            assert slab.handle is not None, "a pool that is not parked holds its handles"
            fd = self.driver.export_handle(slab.handle)
            try:
                answer, _ = self.client.call(
                    "donate",
                    fd=fd,
                    bytes=slab.allocation.nbytes,
                    tag=self.tag,
                    key=slab.handle.key,
                    reserved_bytes=slab.handle.nbytes,
                )
            finally:
                os.close(fd)
            slab.slot = int(answer["slot"])
        for key, place in self.entries.items():
            self.publish(key, place)
        self._finish_donation()

    def _finish_donation(self) -> None:
        self.commit()

    # -- inside

    def _drop_mappings(self) -> LullMemoryError | None:
        return drop_all(self.slabs, self.driver)

    def _ask_memory(self, nbytes: int, oom_wait_seconds: float) -> tuple[protocol.Message, int]:
        return self.client.ask_fd(
            "allocate",
            seconds_max=oom_wait_seconds + CALL_SECONDS_MAX,
            bytes=nbytes,
            tag=self.tag,
            oom_wait_seconds=oom_wait_seconds,
        )

    def _rows(self) -> list[list[Any]]:
        return list(self.client.ask("slots")["slots"])

    def _import(self, answer: protocol.Message, fd: int) -> Handle:
        try:
            exported = Handle(str(answer["key"]), int(answer["reserved_bytes"]))
        except (KeyError, TypeError, ValueError) as error:
            raise ServiceUnavailable(f"memory service {self._path}: its answer is incomplete: {error}") from error
        return self.driver.import_handle(fd, exported)

    def _new_slab(self, slot: int, nbytes: int, reserved_bytes: int) -> Slab:
        if not 0 < nbytes <= reserved_bytes:
            raise LayoutInvalid(f"allocation {slot}: {nbytes} bytes in {reserved_bytes}")
        address = reserve(self.driver, reserved_bytes, self.wishes.get(slot))
        slab = Slab(slot, Allocation(address, nbytes, reserved_bytes, self.tag, self._mode))
        self.slabs.append(slab)
        return slab
