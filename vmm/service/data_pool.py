"""A pool whose layout is sealed and whose data stays writable, by one engine at a time: a KV cache that outlives it.

The first engine builds and seals; when it ends, however it ends, the memory stays with the service, and the next engine
adopts it: the same calls in the same order give it the same places. Everything is mapped read-only but what is inside a
`writing` block, so after a crash only what was being written then may be torn, and is named.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ..blocks import Allocation
from ..driver import Access, Driver, Handle
from ..errors import TransitionInProgress, TransitionRefused
from ..tags import KEEPS_CONTENTS, RestoreMode, require_mode
from . import checks
from .data_attachment import DataAttachment
from .errors import LayoutInvalid, ServiceUnavailable, StaleLayout, WrongLock
from .pool import PoolPhase, Region, ServicePool
from .slabs import Place, Slab
from .state import DATA_LOCKS, Lock

_log = logging.getLogger(__name__)


class DataPool(ServicePool):
    """Thread-safe; park and wake are not called at the same time, nor while something is being written."""

    _locks = (Lock.READ_WRITE, *sorted(DATA_LOCKS))
    _there: DataAttachment

    def __init__(
        self,
        driver: Driver,
        socket_path: Path,
        name: str,
        *,
        tag: str = "kv_cache",
        lock: Lock = Lock.WRITE_DATA_OR_READ_WRITE,
        mode: RestoreMode = RestoreMode.CPU,
        keep_backup: bool = False,
        wait_seconds: float = 300.0,
        oom_wait_seconds: float = 60.0,
        park_seconds_max: float = 600.0,
    ) -> None:
        """Waits for the lock. `adopted` says whether there is something already; READ_WRITE clears it first.

        ``mode``: CPU or PINNED, for what is sealed keeps its contents over a park. Raises as `ServicePool` does.
        """
        if require_mode(mode) not in KEEPS_CONTENTS:
            raise ValueError(f"mode is {mode}; data under a sealed layout is kept over a park: use CPU or PINNED")
        self._replayed = 0  # of the slabs that were adopted
        self._marks: set[str] = set()  # entries that are being written
        self._open: Counter[int] = Counter()  # how many blocks write to each slab, by its id
        self._torn: set[str] = set()
        self._lost: str | None = None
        self.adopted = False
        super().__init__(
            driver,
            socket_path,
            name,
            tag=tag,
            lock=lock,
            mode=mode,
            keep_backup=keep_backup,
            wait_seconds=wait_seconds,
            oom_wait_seconds=oom_wait_seconds,
            park_seconds_max=park_seconds_max,
        )
        self.adopted = not self.writer
        if self.adopted:
            try:
                self._torn = self._there.torn()
            except BaseException:
                self.close()
                raise

    def _connect(self, socket_path: Path) -> DataAttachment:
        return DataAttachment(self.driver, socket_path, self.name, self.tag, self._mode, **self._waits())

    # -- building, and building again what is there

    def allocate(self, nbytes: int) -> Allocation:
        """Of an adopted pool the next allocation that is there; StaleLayout if that has another size."""
        if not self.adopted:
            return super().allocate(nbytes)
        checks.require_nbytes("nbytes", nbytes)
        with self._replaying():
            slabs = self._there.slabs
            there = slabs[self._replayed].allocation if self._replayed < len(slabs) else None
            if there is None or there.nbytes != nbytes:
                has = "no more" if there is None else f"{there.nbytes} bytes"
                raise StaleLayout(f"pool {self.name}: allocation {self._replayed} of {nbytes} bytes; there is {has}")
            self._replayed += 1
            return there

    def publish(self, key: str, allocation: Allocation, offset: int, nbytes: int, value: Any = None) -> None:
        """Of an adopted pool: StaleLayout if this is not the entry that is there."""
        if not self.adopted:
            super().publish(key, allocation, offset, nbytes, value)
            return
        checks.require_entry(key, nbytes, value)
        with self._replaying():
            if self._there.entries.get(key) != Place(self._there.slab_of(allocation), offset, nbytes, value):
                raise StaleLayout(f"pool {self.name}: entry {key} is not what was sealed under that name")

    def create_unmapped(self, nbytes: int) -> Handle:
        raise WrongLock(f"pool {self.name} maps its own memory, read-only but while it is written; use a ServicePool")

    def seal(self) -> None:
        """The layout is fixed from here on, and outlives this engine; its data is written in `writing` blocks.

        Of an adopted pool: StaleLayout unless everything that is there was asked for again, or nothing was."""
        with self._guard:
            self._require_open()
            if self.adopted:
                if self._replayed not in (0, len(self._there.slabs)):
                    count = len(self._there.slabs)
                    raise StaleLayout(f"pool {self.name}: {self._replayed} of {count} allocations were asked for again")
                return
        with self._writing():
            self.driver.synchronize()
            self._there.protect(Access.READ)
            try:
                self._there.seal()
            except ServiceUnavailable:
                raise
            except BaseException:
                self._there.protect(Access.READ_WRITE)
                raise
            self.writer = False

    def commit(self) -> None:
        """No more data: this engine reads from here on, as all others may. LayoutInvalid while something is torn."""
        if self.writer:
            super().commit()
            return
        with self._guard:
            self._require_data()
            if unfinished := sorted(self._marks | self._torn):
                raise LayoutInvalid(f"pool {self.name}: {', '.join(unfinished[:5])} are not written whole; write them")
            self._there.commit()

    # -- data

    @property
    def torn(self) -> tuple[str, ...]:
        """Entries whose last write may not have come to its end: here, or in an engine before. In order."""
        with self._guard:
            return tuple(sorted(self._torn))

    @property
    def same_addresses(self) -> bool:
        """Everything lies where the engine that sealed it had it, so pointers into it are right."""
        return self._there.same_addresses

    @contextmanager
    def writing(self, *names: str) -> Generator[dict[str, Region]]:
        """Entries, all unless named, to write inside the block; a write to them outside is fatal. One block an entry.

        An entry counts as whole when its block ends, and as torn if that raises or this engine dies in it.
        """
        with self._guard:
            keys = self._begin_write(names)
        try:
            yield {key: region for key, region in self.regions().items() if key in keys}
        except BaseException:
            with self._guard:
                self._end_write(keys, whole=False)
            raise
        with self._guard:
            self._end_write(keys, whole=True)

    def _begin_write(self, names: tuple[str, ...]) -> frozenset[str]:
        """Said to the service before it becomes possible."""
        self._require_data()
        if self._parked or self._phase is not PoolPhase.QUIET:
            raise TransitionInProgress(f"pool {self.name} is parked or about to be; write when it is awake")
        entries = self._there.entries
        if unknown := sorted(set(names) - entries.keys()):
            raise LayoutInvalid(f"pool {self.name} has no entry {', '.join(unknown[:5])}")
        keys = frozenset(names or entries)
        if twice := sorted(keys & self._marks):
            raise TransitionInProgress(f"pool {self.name}: {', '.join(twice[:5])} are being written by another block")
        self._say(lambda: self._there.begin_write(keys))
        self._marks |= keys
        opened = [slab for slab in self._slabs_of(keys) if not self._open[id(slab)]]
        self._open.update(id(slab) for slab in self._slabs_of(keys))
        try:
            self._protect(opened, Access.READ_WRITE)
        except BaseException:
            self._end_write(keys, whole=True)
            raise
        return keys

    def _end_write(self, keys: frozenset[str], *, whole: bool) -> None:
        """Said to the service after the last byte. If the device cannot say that, the marks stay."""
        self.driver.synchronize()
        slabs = self._slabs_of(keys)
        self._open -= Counter(id(slab) for slab in slabs)
        self._protect([slab for slab in slabs if not self._open[id(slab)]], Access.READ)
        if whole:
            self._torn -= keys
        else:
            self._torn |= {key for key, place in self._there.entries.items() if place.slab in slabs}
        self._marks -= keys
        self._say(lambda: self._there.end_write(keys, whole=whole))

    def _protect(self, slabs: Iterable[Slab], access: Access) -> None:
        for slab in slabs:
            if slab.mapped:
                self.driver.set_access(slab.allocation.address, slab.allocation.reserved_bytes, access)

    def _slabs_of(self, keys: Iterable[str]) -> list[Slab]:
        wanted = {id(self._there.entries[key].slab) for key in keys}
        return [slab for slab in self._there.slabs if id(slab) in wanted]

    # -- a service that is gone or new

    @property
    def failed(self) -> str | None:
        return super().failed or self._lost

    def _say(self, tell: Callable[[], None]) -> None:
        """Without a service nobody else can have this memory while our process lives: it is said when one is back."""
        try:
            tell()
        except ServiceUnavailable as error:
            _log.warning("pool %s: %s", self.name, error)

    def _ensure_known(self) -> None:
        self._parked_there = False
        if self._there.client.connected:
            return
        self._there.connect_again()
        try:
            self._there.join_again(self._wait_seconds)
            if self._there.sealed:
                self._there.end_write(self._torn, whole=False)
                self._there.begin_write(self._marks)
        except StaleLayout as error:
            self._lost = str(error)
            raise
        except BaseException:
            self._there.client.close()
            raise

    def _require_parkable(self) -> None:
        if self.writer:
            raise WrongLock(f"pool {self.name} is not sealed yet; seal it before the engine parks")
        if self._marks:
            raise TransitionRefused(f"pool {self.name}: {', '.join(sorted(self._marks)[:5])} are being written")

    def _require_data(self) -> None:
        self._require_open()
        if not self._there.sealed:
            raise WrongLock(f"pool {self.name} is {'not sealed yet' if self.writer else 'committed'}: it has no data")
        if self._lost is not None:
            raise StaleLayout(self._lost)

    @contextmanager
    def _replaying(self) -> Generator[None]:
        with self._guard:
            self._require_open()
            yield
