"""A tag whose memory belongs to the memory service: the engine that comes first writes it, all others map it read-only.

The contents outlive every engine. A `ServicePool` parks and wakes with the engine's other pools (it is a PoolLike), but
its backup is made and kept by the service. It holds its own handles while it runs: a service that dies takes nothing
from a running engine, and the next park hands the memory to the service that came after it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final

from ..blocks import Allocation
from ..driver import Access, Driver, Handle
from ..errors import (
    ContentsLost,
    LullMemoryError,
    OutOfDeviceMemory,
    PoolClosed,
    TransitionInProgress,
    TransitionRefused,
    UnsupportedMode,
)
from ..pool_owners import steps_in_flight
from ..tags import KEEPS_CONTENTS, RestoreMode, require_mode, require_tag, require_tags
from . import checks
from .attachment import Attachment
from .errors import LayoutInvalid, ServiceUnavailable, StaleLayout, WrongLock
from .slabs import Place, pack
from .state import Lock

SLAB_BYTES: Final = 2 << 30
ALIGNMENT_BYTES: Final = 256
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Region:
    """A named piece of the pool, where it is mapped here."""

    address: int
    nbytes: int
    value: Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A named piece that is to be: its size, and any JSON that readers will want to know of it."""

    nbytes: int
    value: Any = None


class PoolPhase(Enum):
    QUIET = "quiet"
    RELEASE = "prepared release"
    RESUME = "prepared resume"


class ServicePool:
    """One engine's use of one pool of the service. Thread-safe; park and wake are not called at the same time."""

    _locks: tuple[Lock, ...] = (Lock.READ_WRITE, Lock.READ_ONLY, Lock.READ_WRITE_OR_READ_ONLY)

    def __init__(
        self,
        driver: Driver,
        socket_path: Path,
        name: str,
        *,
        tag: str = "model_weights",
        lock: Lock = Lock.READ_WRITE_OR_READ_ONLY,
        mode: RestoreMode = RestoreMode.CPU,
        keep_backup: bool = False,
        wait_seconds: float = 300.0,
        oom_wait_seconds: float = 60.0,
        park_seconds_max: float = 600.0,
    ) -> None:
        """Waits for the lock; a reader has everything mapped then.

        ``name``: engines that give the same share one copy, so it must say which model and how it is laid out.
        ``mode`` is what the service does when all users have parked; with ``keep_backup``, or PINNED, the backup stays
        for the next park. NONE and MEMSET are for a pool that is never committed, such as a KV cache: its writer gives
        the memory back and gets zeroed memory at the same addresses, and its lock stays. ``wait_seconds``: for the
        service to answer and for the lock. Raises ServiceUnavailable, LockTimeout, OutOfDeviceMemory; ValueError for
        a setting that is none; ServiceRefused if ``driver`` has this pool already.
        """
        require_tag(tag)
        mode = require_mode(mode)
        checks.require_use(name, lock, self._locks, wait_seconds, oom_wait_seconds, park_seconds_max)
        self.driver = driver
        self.name = name
        self.tag = tag
        self.writer = False
        self._mode = mode
        self._keep_backup = keep_backup
        self._wait_seconds = wait_seconds
        self._oom_wait_seconds = oom_wait_seconds
        self._park_seconds_max = park_seconds_max
        self._guard = threading.RLock()
        self._parked = False
        self._closed = False
        self._phase = PoolPhase.QUIET
        self._ours = False  # the prepared transition is about our tag
        self._parked_there = False  # and the service has parked the pool already
        self._there = self._connect(Path(socket_path))
        try:
            granted = self._there.hello(lock, wait_seconds=wait_seconds, oom_wait_seconds=oom_wait_seconds)
            self.writer = granted == Lock.READ_WRITE
            if not self.writer:
                self._there.attach()
                self._there.client.ask("confirm")
        except BaseException:
            self.close()
            raise

    def _connect(self, socket_path: Path) -> Attachment:
        return Attachment(self.driver, socket_path, self.name, self.tag, self._mode, **self._waits())

    def _waits(self) -> dict[str, float]:
        return {"connect_seconds_max": self._wait_seconds, "wake_seconds_max": self._park_seconds_max}

    # -- the writer's

    def allocate(self, nbytes: int) -> Allocation:
        """Memory of the service, mapped to write. The service waits for room before it says OutOfDeviceMemory."""
        checks.require_nbytes("nbytes", nbytes)
        with self._writing():
            return self._there.allocate(nbytes, self._oom_wait_seconds)

    def create_unmapped(self, nbytes: int) -> Handle:
        """Memory of the service for a `ScratchRange` to map in place of its blocks. It is free when this lock ends and
        the range is closed."""
        checks.require_nbytes("nbytes", nbytes)
        with self._writing():
            return self._there.create_unmapped(nbytes, self._oom_wait_seconds)

    def build(self, pieces: Mapping[str, Piece], *, slab_bytes: int = SLAB_BYTES) -> dict[str, Region]:
        """Memory for all the pieces, packed into few allocations so that attaching stays quick, with their entries.

        Raises LayoutInvalid for a piece that cannot be, and OutOfDeviceMemory; then the pool is as it was.
        """
        checks.require_pieces(pieces, slab_bytes)
        names = list(pieces)
        places = pack([pieces[name].nbytes for name in names], slab_bytes, ALIGNMENT_BYTES)
        sizes_bytes: dict[int, int] = {}
        for name, (slab, offset) in zip(names, places, strict=True):
            sizes_bytes[slab] = offset + pieces[name].nbytes
        allocations: dict[int, Allocation] = {}
        try:
            for slab, nbytes in sizes_bytes.items():
                allocations[slab] = self.allocate(nbytes)
            for name, (slab, offset) in zip(names, places, strict=True):
                self.publish(name, allocations[slab], offset, pieces[name].nbytes, pieces[name].value)
        except (OutOfDeviceMemory, LayoutInvalid):  # the lock is ours still: nothing of this is left in the pool
            for allocation in allocations.values():
                self.free(allocation)
            raise
        return self.regions()

    def publish(self, key: str, allocation: Allocation, offset: int, nbytes: int, value: Any = None) -> None:
        """Names bytes of an allocation, with JSON that says what they are. Raises LayoutInvalid."""
        checks.require_entry(key, nbytes, value)
        with self._writing():
            slab = self._there.slab_of(allocation)
            checks.require_place(key, allocation, offset, nbytes)
            self._there.publish(key, Place(slab, offset, nbytes, value))

    def free(self, allocation: Allocation) -> None:
        """Gives an allocation back before the commit, with its entries: what only loading needed."""
        with self._writing():
            self._there.remove(self._there.slab_of(allocation))

    def commit(self) -> None:
        """Seals the pool: from here on this engine reads as all others do. LayoutInvalid changes nothing."""
        with self._writing():
            self.driver.synchronize()
            self._there.protect(Access.READ)
            try:
                self._there.commit()
            except ServiceUnavailable:
                raise
            except LullMemoryError:
                self._there.protect(Access.READ_WRITE)
                raise
            self.writer = False

    # -- everybody's

    @property
    def layout_hash(self) -> str | None:
        """Of what is committed; None for a writer before its commit."""
        return self._there.layout_hash

    def regions(self) -> dict[str, Region]:
        """The entries, where they are mapped."""
        with self._guard:
            return {
                key: Region(place.slab.allocation.address + place.offset, place.nbytes, place.value)
                for key, place in self._there.entries.items()
            }

    def allocations(self, tag: str | None = None) -> tuple[Allocation, ...]:
        slabs = tuple(self._there.slabs)
        return tuple(slab.allocation for slab in slabs) if tag in (None, self.tag) else ()

    def close(self) -> None:
        """Gives everything up but what is committed, which stays with the service. Refused while work is under way."""
        with self._guard:
            if not self._closed and (count := steps_in_flight(self)):
                raise TransitionRefused(f"pool {self.name}: {count} step(s) work on it; end them before it is closed")
            self._closed = True
            failure = self._there.close()
            if failure is not None:
                raise failure

    # -- as a PoolLike. What only looks takes no lock: a park may be waiting for the service.

    @property
    def failed(self) -> str | None:
        """Why this pool cannot be used any more: the device is lost, it was closed, or what was written was cleared."""
        return self.driver.failed or (f"pool {self.name} is closed" if self._closed else self._cleared())

    def bytes_by_tag(self) -> dict[str, int]:
        allocations = self.allocations()
        return {self.tag: sum(allocation.reserved_bytes for allocation in allocations)} if allocations else {}

    def parked_tags(self) -> frozenset[str]:
        return frozenset({self.tag} if self._parked else ())

    def prepare_release(self, tags: Iterable[str]) -> None:
        """The last user has the service make the backup now; nothing else changes. Raises OutOfHostMemory."""
        with self._guard:
            self._begin(PoolPhase.RELEASE, self.tag in require_tags(tags) and not self._parked)
            if not self._ours:
                return
            try:
                self._require_parkable()
                self.driver.synchronize()
                if not self.writer:
                    self._ensure_known()
                    if not self._parked_there:
                        self._prepare_park()
            except BaseException:
                self._phase = PoolPhase.QUIET
                raise

    def abort_release(self) -> None:
        with self._guard:
            if not self._end(PoolPhase.RELEASE):
                return
            if self.writer:
                return
            if self._parked_there:
                self._there.client.close()  # it would be taken for a user whose memory is gone
            elif self._there.client.connected:
                try:
                    self._there.client.ask("abort_park")
                except ServiceUnavailable as error:  # the memory is ours still; the next park finds a service
                    _log.warning("pool %s: %s", self.name, error)

    def commit_release(self) -> None:
        """The handles are kept until the service has answered: if it dies here, the engine goes on with them."""
        with self._guard:
            if not self._end(PoolPhase.RELEASE):
                return
            if self.writer:
                self._give_away("the park")
                self._parked = True
                return
            try:
                self._there.unmap_all()
                if not self._parked_there:
                    self._there.client.ask("commit_park", seconds_max=self._park_seconds_max)
            except BaseException as error:
                self._stay(error)
                raise
            self._there.drop_all("the park")
            self._parked = True

    def prepare_resume(self, tags: Iterable[str]) -> None:
        """Maps the service's memory again, after the service has brought it back. OutOfDeviceMemory can be retried;
        ContentsLost says that the service does not have what this engine was built on."""
        with self._guard:
            self._begin(PoolPhase.RESUME, self.tag in require_tags(tags) and self._parked)
            if not self._ours:
                return
            try:
                if self.writer:
                    self._take_anew()
                    return
                self._there.lock_again(self._wait_seconds)
                try:
                    self._there.map_all()
                except BaseException:
                    self._park_again()
                    raise
            except StaleLayout as error:
                self._phase = PoolPhase.QUIET
                raise ContentsLost("the wake", lost=(self.tag,), parked=(), live=()) from error
            except BaseException:
                self._phase = PoolPhase.QUIET
                raise

    def abort_resume(self) -> None:
        with self._guard:
            if not self._end(PoolPhase.RESUME):
                return
            if self.writer:
                self._give_away("the wake")
            else:
                self._park_again()

    def commit_resume(self) -> None:
        with self._guard:
            if not self._end(PoolPhase.RESUME):
                return
            self._parked = False
            if self.writer:
                return
            try:
                self._there.client.ask("confirm")
            except ServiceUnavailable as error:  # the memory is mapped and ours; only its backup is kept longer
                _log.warning("pool %s: %s", self.name, error)

    def release(self, tags: Iterable[str]) -> None:
        self.prepare_release(tags)
        self.commit_release()

    def resume(self, tags: Iterable[str]) -> None:
        self.prepare_resume(tags)
        self.commit_resume()

    # -- inside

    def _give_away(self, during: str) -> None:
        try:
            self._there.give_away()
        except LullMemoryError as error:
            raise ContentsLost(during, lost=(), parked=(), live=(self.tag,)) from error

    def _take_anew(self) -> None:
        """A writer's memory, empty; behind a new lock if the service that gave the old one is gone."""
        if not self._there.client.connected:
            self._there.connect_again()
            self._there.hello(Lock.READ_WRITE, wait_seconds=self._wait_seconds, oom_wait_seconds=0)
        self._there.take_anew(0)

    def _require_parkable(self) -> None:
        if self.writer and self._mode in KEEPS_CONTENTS:
            raise WrongLock(f"pool {self.name} is not committed yet; commit it before the engine parks")
        if not self.writer and self._mode not in KEEPS_CONTENTS:
            raise UnsupportedMode(f"pool {self.name} is committed, and others rely on it: {self._mode} would lose it")

    def _prepare_park(self) -> None:
        self._there.client.ask(
            "prepare_park",
            seconds_max=self._park_seconds_max,
            mode=str(self._mode),
            keep_backup=int(self._keep_backup),
        )

    def _park_again(self) -> None:
        """A wake that is undone. The service has the backup still, so this copies nothing."""
        self._there.drop_all("the wake")
        try:
            self._prepare_park()
            self._there.client.ask("commit_park", seconds_max=self._park_seconds_max)
        except ServiceUnavailable as error:  # whoever is not connected uses nothing
            _log.warning("pool %s: %s", self.name, error)

    def _stay(self, error: BaseException) -> None:
        """A park that did not complete: the memory is where it was."""
        try:
            self._there.map_again()
        except LullMemoryError as second:
            raise ContentsLost("the park", lost=(), parked=(self.tag,), live=()) from second
        if self._there.client.connected:
            try:
                self._there.client.ask("abort_park")
            except LullMemoryError as second:
                error.add_note(f"and the service could not be told: {second}")
                self._there.client.close()

    def _ensure_known(self) -> None:
        """Before a park: the service knows us and our memory. One that came after ours gets it from us."""
        self._parked_there = False
        if self._there.client.connected:
            return
        self._there.connect_again()
        try:
            if self._there.parked_by_others():
                # To wake it for us, only to park it again, could need room that is not there.
                expect = self._there.layout_hash
                self._there.hello(Lock.PARKED, wait_seconds=self._wait_seconds, oom_wait_seconds=0, expect=expect)
                self._parked_there = True
            else:
                self._there.join_again(self._wait_seconds)
        except BaseException:
            self._there.client.close()
            raise

    @contextmanager
    def _writing(self) -> Generator[None]:
        with self._guard:
            self._require_open()
            if not self.writer:
                raise WrongLock(f"pool {self.name} is committed, and this engine only reads it")
            if (cleared := self._cleared()) is not None:
                raise ServiceUnavailable(cleared)
            try:
                yield
            except ServiceUnavailable as error:
                if (cleared := self._cleared()) is not None:
                    raise ServiceUnavailable(f"{cleared} ({error})") from error
                raise

    def _cleared(self) -> str | None:
        """A writer whose connection is gone has lost what it wrote. One whose mode keeps nothing lost nothing."""
        if not (self.writer and self._mode in KEEPS_CONTENTS and self._there.client.lost):
            return None
        return (
            f"pool {self.name}: the connection to the memory service was lost before a commit was answered, so the "
            "service has cleared this pool; build the engine again"
        )

    def _require_open(self) -> None:
        if self._closed:
            raise PoolClosed(f"pool {self.name} is closed; make another")

    def _begin(self, phase: PoolPhase, ours: bool) -> None:
        self._require_open()
        if self._phase is not PoolPhase.QUIET:
            raise TransitionInProgress(f"a {self._phase.value} is under way in pool {self.name}; wait for it")
        self._phase, self._ours = phase, ours

    def _end(self, phase: PoolPhase) -> bool:
        """Whether the transition that ends is about our tag."""
        if self._phase is not phase:
            raise TransitionInProgress(f"there is no {phase.value} in pool {self.name}; prepare it first")
        self._phase = PoolPhase.QUIET
        return self._ours
