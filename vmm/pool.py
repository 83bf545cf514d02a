"""Tagged device memory that can be given back and taken again at the same addresses.

A park has two phases: `prepare_release` makes every backup and changes nothing else; `commit_release` unmaps and
releases. A wake has two as well: `prepare_resume` brings memory and contents back and can be undone by `abort_resume`,
because the backups stay until `commit_resume`. A backup is only ever written while its device memory is whole, so
undoing never copies over a good one. Any error but ContentsLost means that everything is as it was before the call.
One transition at a time; no lock is held over a copy.
"""

from __future__ import annotations

import ctypes
import logging
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager
from importlib import import_module

from . import host_memory
from .backup import allocate_backup, promise
from .block_table import BlockTable, Phase, Transition
from .blocks import Allocation, Block
from .copier import Copier
from .driver import Driver, Handle
from .errors import ContentsLost, HostMemoryNotPinned, OutOfDeviceMemory, TransitionRefused
from .modes import ModeTable
from .pool_like import PoolGuest
from .pool_owners import steps_in_flight
from .seals import digest_of_backup, require_unchanged
from .statistics import TagStatistics
from .tags import RestoreMode, require_mode, require_tags
from .together import together
from .whole_numbers import require_whole

_log = logging.getLogger(__name__)


class Pool:
    """The allocations of one device. Thread-safe."""

    def __init__(
        self,
        driver: Driver,
        *,
        restore_modes: Mapping[str, RestoreMode] | None = None,
        prefer_pinned: bool | None = None,
        require_locked: bool = False,
        immutable_tags: Set[str] = frozenset(),
        verify_immutable: bool = False,
        release_host_after_wake: bool = False,
        copy_threads: int = 2,
        host_bytes_available: Callable[[], int] = host_memory.available_bytes,
    ) -> None:
        """``immutable_tags`` are written once: after their first wake they are read-only until `unseal`, and a further
        park copies nothing; ``verify_immutable`` checks at every such park that nothing has changed, by hash.

        ``prefer_pinned`` chooses between PINNED and CPU for tags without a mode; as the driver prefers unless given.
        Where the system does not let a PINNED backup be locked, it is used unlocked, or refused if ``require_locked``.
        PINNED and immutable backups are kept over a wake unless ``release_host_after_wake``.
        ``host_bytes_available`` is asked before backups are made.
        """
        self.driver = driver
        self.keep_memory_on_release = False
        """For tests of whoever drives an engine: say released, and keep the device memory."""
        self.guest: PoolGuest | None = None
        self._immutable_tags = frozenset(require_tags(immutable_tags, "immutable_tags"))
        self._modes = ModeTable(
            driver, restore_modes or {}, prefer_pinned=prefer_pinned, immutable_tags=self._immutable_tags
        )
        self._require_locked = require_locked
        self._verify_immutable = verify_immutable
        self._release_host_after_wake = release_host_after_wake
        self._host_bytes_available = host_bytes_available
        self._copier = Copier(driver, copy_threads)
        self._table = BlockTable()
        self._said_unlocked = False

    @property
    def failed(self) -> str | None:
        """Why nothing can be parked or woken any more: it is closed, the device is lost, or a transition not undone."""
        if self._table.closed:
            return "the pool is closed"
        broken = self._table.broken
        return self.driver.failed or (None if broken is None else str(broken))

    # -- allocations

    def allocate(self, nbytes: int, tag: str, mode: RestoreMode | None = None) -> Allocation:
        """Zeroed memory. ``mode`` defaults to the pool's for the tag, else NONE for kv_cache, CPU or PINNED for others.

        Allocations of one tag may have different modes. Raises InvalidTag and UnsupportedMode.
        """
        require_whole(nbytes, "nbytes", 1, sys.maxsize)
        chosen = self._modes.choose(tag, mode)
        granularity_bytes = self.driver.granularity()
        reserved_bytes = -(-nbytes // granularity_bytes) * granularity_bytes
        if reserved_bytes > (capacity_bytes := self.driver.capacity_bytes):
            raise OutOfDeviceMemory(reserved_bytes, self.driver.free_bytes(), capacity_bytes)
        with self.changing_layout(tag):
            address = self.driver.reserve(reserved_bytes)
            block = Block(Allocation(address, nbytes, reserved_bytes, tag, chosen))
            try:
                block.create(self.driver)
                block.attach(self.driver)
            except BaseException as error:
                self._discard(block, error)
                raise
            block.contents_here = True
            self._table.add(block)
        return block.allocation

    def free(self, allocation: Allocation) -> None:
        """Frees a live or parked allocation, with its backup and its addresses. If it raises, it can be asked again."""
        with self.changing_layout(None), self._table.leaving(allocation) as block:
            block.detach(self.driver)
            self.driver.free_address(allocation.address, allocation.reserved_bytes)
            block.free_backup()

    def restore_mode(self, tag: str, mode: RestoreMode | None = None) -> RestoreMode:
        """What an allocation of the tag would get. Raises as `allocate` does for a tag or mode that cannot be."""
        return self._modes.choose(tag, mode)

    def adopt(self, allocation: Allocation, handle: Handle) -> None:
        """Takes over memory that another allocator has made: mapped read-write at its address by this pool's driver.

        From now on it parks and wakes as ours does, under a new handle after each wake.
        """
        self._modes.choose(allocation.tag, require_mode(allocation.mode))
        if handle.nbytes != allocation.reserved_bytes:
            raise ValueError(f"the handle has {handle.nbytes} bytes and {allocation} says {allocation.reserved_bytes}")
        with self.changing_layout(allocation.tag):
            self._table.adopt(Block(allocation, handle, mapped=True, contents_here=True))

    def forget(self, allocation: Allocation) -> Handle | None:
        """Gives an adopted allocation back to its allocator: its addresses, and the handle that is mapped there now.

        None while it is parked: then nothing is mapped, and its backup is dropped.
        """
        with self.changing_layout(None):
            block = self._table.require(allocation)
            self._table.remove(allocation)
        block.free_backup()
        return block.handle

    def torch_scope(self, tag: str, mode: RestoreMode | None = None) -> AbstractContextManager[None]:
        """Puts the storage of every tensor that this thread makes inside into the pool: see `torch_scope`."""
        scope: AbstractContextManager[None] = import_module(".torch_scope", __package__).torch_scope(self, tag, mode)
        return scope

    def close(self) -> None:
        """Frees everything, for good; TransitionRefused while steps of its runtime work on the memory.

        If it raises otherwise, it can be asked again."""
        if steps := steps_in_flight(self):
            raise TransitionRefused(f"{steps} step(s) of the runtime work on this pool; end them before it is closed")
        self._table.close()
        with together(self.driver):
            for allocation in self.allocations():
                self.free(allocation)
        self._copier.close()

    def changing_layout(self, tag: str | None) -> AbstractContextManager[None]:
        """While memory of the tag is made or freed: a transition waits for the block, and refuses new ones."""
        return self._table.changing(tag)

    # -- what there is

    def allocations(self, tag: str | None = None) -> tuple[Allocation, ...]:
        """In the order in which they were made."""
        return tuple(block.allocation for block in self._table.blocks(tag))

    def bytes_by_tag(self) -> dict[str, int]:
        """What each tag takes of the device while it is not parked."""
        sizes: dict[str, int] = {}
        for allocation in self.allocations():
            sizes[allocation.tag] = sizes.get(allocation.tag, 0) + allocation.reserved_bytes
        return sizes

    def device_bytes(self) -> int:
        """What the pool holds of the device now."""
        return sum(block.allocation.reserved_bytes for block in self._table.blocks() if block.handle is not None)

    def backup_bytes(self) -> int:
        """Host memory in backups, those that are kept for the next park included."""
        return sum(backup.held_bytes for block in self._table.blocks() if (backup := block.backup) is not None)

    def parked_tags(self) -> frozenset[str]:
        return self._table.parked_tags()

    def statistics(self) -> dict[str, TagStatistics]:
        """By tag, for those that have or had allocations."""
        return self._table.statistics()

    def is_sealed(self, allocation: Allocation) -> bool:
        """Mapped read-only since its last wake: a write would be fatal."""
        return self._table.require(allocation).sealed

    def handle_of(self, allocation: Allocation) -> Handle | None:
        """What is mapped there now; None while it is parked."""
        return self._table.require(allocation).handle

    def backup_views(self, tag: str) -> tuple[memoryview, ...]:
        """For tests of whoever checks an engine after its wake: its backups, writable, while the tag is parked."""
        backups = [backup for block in self._table.blocks(tag) if (backup := block.backup) is not None]
        return tuple(
            memoryview((ctypes.c_char * backup.nbytes).from_address(backup.address)).cast("B") for backup in backups
        )

    # -- backups

    def warm_backups(self, tags: Iterable[str] | None = None) -> None:
        """Makes the backups of PINNED allocations now, of all tags unless given, so that the first park need not."""
        wanted = None if tags is None else frozenset(require_tags(tags))
        with self.changing_layout(None):
            pinned = [b for b in self._table.blocks() if b.allocation.mode == RestoreMode.PINNED and not b.leaving]
            missing = [b for b in pinned if b.backup is None and (wanted is None or b.allocation.tag in wanted)]
            with promise([b.allocation.nbytes for b in missing], self._host_bytes_available):
                self._allocate_backups(missing)

    def release_backups(self, tags: Iterable[str] | None = None) -> None:
        """Gives the host memory of backups back that are only kept for the next park; those in use stay.

        The next park of these tags makes and fills them again, of immutable tags as well.
        """
        wanted = None if tags is None else frozenset(require_tags(tags))
        with self.changing_layout(None):
            for block in self._table.blocks():
                if block.contents_here and (wanted is None or block.allocation.tag in wanted):
                    block.free_backup()

    def unseal(self, tags: Iterable[str]) -> None:
        """Makes immutable tags writable, for new weights; the next park copies them again.

        TransitionRefused while one of them is parked: its backup is all there is of it, and its wake would seal it."""
        wanted = frozenset(require_tags(tags))
        with self.changing_layout(None):
            if parked := sorted(wanted & self.parked_tags()):
                raise TransitionRefused(f"tag {', '.join(parked)} is parked; resume it before it is unsealed")
            for block in self._table.blocks():
                if block.sealed and block.allocation.tag in wanted:
                    block.attach(self.driver)
                    block.settle_backup()

    def _allocate_backups(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            allocation = block.allocation
            pinned = allocation.mode == RestoreMode.PINNED
            block.backup = allocate_backup(allocation.nbytes, pinned=pinned, driver=self.driver)
            if pinned and not block.backup.locked:
                self._accept_unlocked(block)

    def _accept_unlocked(self, block: Block) -> None:
        tag, nbytes = block.allocation.tag, block.allocation.nbytes
        if self._require_locked:
            block.free_backup()
            raise HostMemoryNotPinned(tag, nbytes, host_memory.lockable_bytes())
        if not self._said_unlocked:
            self._said_unlocked = True
            _log.warning("tag %s: its PINNED backup could not be page-locked and is used unlocked; copies work", tag)

    # -- park

    def release(self, tags: Iterable[str], *, drop: Iterable[str] = ()) -> None:
        """Parks the tags that are not parked. One without memory is parked too: it gets none until it is woken."""
        self.prepare_release(tags, drop=drop)
        self.commit_release()

    def prepare_release(self, tags: Iterable[str], *, drop: Iterable[str] = ()) -> None:
        """Backs up the tags that are not parked. Then commit_release or abort_release must follow.

        Those of ``drop`` lose their contents this once, whatever their mode, and the backups that they had.
        """
        dropped = frozenset(require_tags(drop, "drop"))
        transition = self._begin(Phase.RELEASE, tags, parked=False)
        for block in transition.blocks:
            block.dropped = block.allocation.tag in dropped
        try:
            with transition.timed():
                self._back_up(transition)
        except BaseException:
            self._end_release_undone(transition)
            raise
        transition.phase = Phase.RELEASE_PREPARED

    def _back_up(self, transition: Transition) -> None:
        to_copy = [block for block in transition.blocks if block.needs_copy_out]
        new = [block for block in to_copy if block.backup is None]
        self.driver.synchronize()
        require_unchanged(self.driver, transition.blocks)
        with promise([block.allocation.nbytes for block in new], self._host_bytes_available):
            self._allocate_backups(new)
            self._copier.run([block.copy_out() for block in to_copy])
        for block in to_copy:
            assert block.backup is not None, "allocated above"
            block.backup.clean = True
            if self._verify_immutable and block.allocation.tag in self._immutable_tags:
                block.digest = digest_of_backup(block.backup)
        transition.cost.add_copies(to_copy)

    def abort_release(self) -> None:
        self._end_release_undone(self._table.require_phase(Phase.RELEASE_PREPARED))

    def commit_release(self) -> None:
        transition = self._table.require_phase(Phase.RELEASE_PREPARED)
        if not self.keep_memory_on_release:
            try:
                with transition.timed(), together(self.driver):
                    for block in transition.blocks:
                        block.detach(self.driver)
            except BaseException as error:
                self._undo_commit_release(transition, error)
                raise
        for block in transition.blocks:
            if block.dropped:
                block.free_backup()
        self._table.note_parked(transition)
        self._end(transition)

    def _undo_commit_release(self, transition: Transition, error: BaseException) -> None:
        """Takes the memory again that was given back; from the backups, which are all good. What was dropped has
        none: where it went already, it is lost."""
        for block in transition.blocks:
            block.dropped = False
        try:
            self._restore(transition)
        except Exception as second:
            failure = self._break("the park", transition.blocks, error)
            self._end(transition)
            raise failure from second
        self._end_release_undone(transition)

    def _end_release_undone(self, transition: Transition) -> None:
        for block in transition.blocks:
            block.dropped = False
            block.settle_backup()
        self._end(transition)

    # -- wake

    def resume(self, tags: Iterable[str]) -> None:
        self.prepare_resume(tags)
        self.commit_resume()

    def prepare_resume(self, tags: Iterable[str]) -> None:
        """Brings the tags that are parked back. Then commit_resume or abort_resume must follow."""
        transition = self._begin(Phase.RESUME, tags, parked=True)
        try:
            with transition.timed():
                self._require_room(transition.blocks)
                self._restore(transition)
                self._table.require_same_layout(transition)
                for block in transition.blocks:
                    if block.allocation.tag in self._immutable_tags:
                        block.seal(self.driver)
        except BaseException as error:
            self._undo_resume(transition, error)
            raise
        transition.phase = Phase.RESUME_PREPARED

    def abort_resume(self) -> None:
        """Parked again, from the backups of before: what was written since prepare_resume is dropped."""
        self._undo_resume(self._table.require_phase(Phase.RESUME_PREPARED), None)

    def commit_resume(self) -> None:
        transition = self._table.require_phase(Phase.RESUME_PREPARED)
        for block in transition.blocks:
            block.dropped = False
            block.settle_backup()
            if self._release_host_after_wake:
                block.free_backup()
        self._table.note_awake(transition)
        self._end(transition)

    def _require_room(self, blocks: Sequence[Block]) -> None:
        missing = [block for block in blocks if block.handle is None]
        needed_bytes = sum(block.allocation.reserved_bytes for block in missing)
        if missing and needed_bytes > (free_bytes := self.driver.free_bytes()):
            raise OutOfDeviceMemory(needed_bytes, free_bytes, self.driver.capacity_bytes)

    def _restore(self, transition: Transition) -> None:
        """All handles first: running out of memory is the likeliest failure and is cheapest to undo there."""
        missing_bytes = [block.allocation.reserved_bytes for block in transition.blocks if block.handle is None]
        with together(self.driver, missing_bytes):
            for block in transition.blocks:
                block.create(self.driver)
        for block in transition.blocks:
            block.attach(self.driver)
        without_contents = [block for block in transition.blocks if not block.contents_here]
        self._copier.run([task for block in without_contents if (task := block.refill()) is not None])
        self.driver.synchronize()
        for block in without_contents:
            block.contents_here = True
        transition.cost.add_copies(block for block in without_contents if block.keeps_contents)

    def _undo_resume(self, transition: Transition, error: BaseException | None) -> None:
        failure: Exception | None = None
        with together(self.driver):
            for block in transition.blocks:
                try:
                    block.detach(self.driver)
                except Exception as second:  # noqa: BLE001  raised below; the others are given back all the same
                    failure = second
        broken = None if failure is None else self._break("the wake", transition.blocks, error)
        self._end(transition)
        if broken is not None:
            raise broken from failure

    # -- bookkeeping

    def _begin(self, phase: Phase, tags: Iterable[str], *, parked: bool) -> Transition:
        if self.guest is not None:
            self.guest.before_transition()
        try:
            return self._table.begin(phase, require_tags(tags), parked=parked)
        except BaseException:
            if self.guest is not None:
                self.guest.after_transition()
            raise

    def _end(self, transition: Transition) -> None:
        if self.guest is not None:
            self.guest.after_transition()
        self._table.end(transition)

    def _discard(self, block: Block, error: BaseException) -> None:
        try:
            block.detach(self.driver)
            self.driver.free_address(block.allocation.address, block.allocation.reserved_bytes)
        except Exception as second:  # noqa: BLE001  said with the error that is on its way
            error.add_note(f"and {block.allocation} could not be given back: {second}")

    def _break(self, during: str, blocks: Sequence[Block], cause: BaseException | None) -> ContentsLost:
        lost = {block.allocation.tag for block in blocks if block.contents_lost}
        live = {block.allocation.tag for block in blocks if block.in_place} - lost
        parked = {block.allocation.tag for block in blocks} - lost - live
        failure = ContentsLost(during, lost=lost, parked=parked, live=live)
        if cause is not None:
            failure.add_note(f"what was to be undone: {cause}")
        self._table.mark_broken(failure)
        return failure
