"""A data writer's connection to its pool, and what it has mapped of it. Not thread-safe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Final

from ..errors import LullMemoryError
from .attachment import Attachment
from .errors import ServiceError, StaleLayout
from .state import Lock

_KEYS_A_FRAME: Final = 1000  # of at most 512 bytes each
_log = logging.getLogger(__name__)


class DataAttachment(Attachment):
    sealed = False  # and the data is ours to write
    _seal = ""
    _grants = 0

    def attach(self) -> None:
        """Adopts what another one has sealed: where that one had it, as far as these addresses are free here."""
        self.wishes = {int(slot): int(address) for slot, address in self.client.ask("places")["places"]}
        super().attach()
        self._note_seal(str(self.granted["seal"]), int(self.granted["grants"]))

    @property
    def same_addresses(self) -> bool:
        return all(self.wishes.get(slab.slot or 0) in (None, slab.allocation.address) for slab in self.slabs)

    def seal(self) -> None:
        places = [slab.allocation.address for slab in sorted(self.slabs, key=lambda slab: slab.slot or 0)]
        answer = self.client.ask("seal", places=places)
        self.layout_hash = str(answer["layout_hash"])
        self._note_seal(str(answer["seal"]), int(answer["grants"]))

    def commit(self) -> None:
        super().commit()
        self.sealed = False

    def begin_write(self, keys: Iterable[str]) -> None:
        for some in _batches(keys):
            self.client.ask("begin_write", keys=some)

    def end_write(self, keys: Iterable[str], *, whole: bool) -> None:
        for some in _batches(keys):
            self.client.ask("end_write", keys=some, whole=int(whole))

    def torn(self) -> set[str]:
        found: set[str] = set()
        after: str | None = None
        while page := self.client.ask("torn", after=after)["torn"]:
            found.update(page)
            after = page[-1]
        return found

    def lock_again(self, wait_seconds: float) -> None:
        if not self.sealed or self.client.connected:
            super().lock_again(wait_seconds)
            return
        self.connect_again()
        self.hello(Lock.WRITE_DATA, wait_seconds=wait_seconds, oom_wait_seconds=0, expect=self.layout_hash)
        self._require_ours()

    def join_again(self, wait_seconds: float) -> None:
        """After a lost connection: the lock again, or a new service that gets our memory."""
        if not self.sealed:
            super().join_again(wait_seconds)
            return
        lock = Lock.WRITE_DATA_OR_READ_WRITE
        ours = self.layout_hash
        if self.hello(lock, wait_seconds=wait_seconds, oom_wait_seconds=0) == Lock.READ_WRITE:
            self._donate()
        else:
            self.layout_hash = ours
            self._require_ours()

    def close(self) -> LullMemoryError | None:
        failure = self._drop_mappings()
        if failure is None and self.sealed and self.client.connected:
            self._leave()
        second = super().close()
        return failure or second

    def _finish_donation(self) -> None:
        if self.sealed:
            self.seal()
        else:
            self.commit()

    def _require_ours(self) -> None:
        """Nobody has had the lock between the last time and now, so what lies there is what we knew."""
        seal, grants = str(self.granted.get("seal")), int(self.granted.get("grants") or 0)
        if (seal, grants) != (self._seal, self._grants + 1):
            self._leave()
            self.client.close()
            raise StaleLayout(
                f"pool {self.name}: another engine has had its data since this one lost the service; end this engine"
            )
        self._note_seal(seal, grants)

    def _leave(self) -> None:
        """Else the service would wait for the end of our process before it lets another one write."""
        try:
            self.client.ask("leave")
        except ServiceError as error:
            _log.warning("pool %s: %s", self.name, error)

    def _note_seal(self, seal: str, grants: int) -> None:
        self.sealed, self._seal, self._grants = True, seal, grants


def _batches(keys: Iterable[str]) -> Iterator[list[str]]:
    left = sorted(keys)
    while left:
        yield left[:_KEYS_A_FRAME]
        left = left[_KEYS_A_FRAME:]
