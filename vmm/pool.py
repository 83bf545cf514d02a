"""Tagged device memory that can be given back and taken again at the same addresses.

A park has two phases: `prepare_release` makes every backup and changes nothing else; `commit_release` unmaps and
releases. A wake has two as well: `prepare_resume` brings memory and contents back and can be undone by `abort_resume`,
because the backups stay until `commit_resume`. A backup is only ever written while its device memory is whole, so
undoing never copies over a good one. Any error but ContentsLost means that everything is as it was before the call.
One transition at a time; no lock is held over a copy.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from enum import Enum
from importlib import import_module
from typing import Final

from . import host_memory
from .backup import Copier, allocate_backup, promise
from .blocks import Allocation, Block
from .driver import Driver, Handle
from .errors import (
    ContentsLost,
    LayoutChanged,
    LullMemoryError,
    OutOfDeviceMemory,
    RuntimeFailed,
    TransitionInProgress,
    UnsupportedMode,
)
from .pool_like import PoolGuest
from .tags import KEEPS_CONTENTS, TAG_PATTERN, InvalidTag, RestoreMode

_ALLOCATING_SECONDS_MAX: Final = 60.0


class _Phase(Enum):
    RELEASE = "release"
    RELEASE_PREPARED = "prepared release"
    RESUME = "resume"
    RESUME_PREPARED = "prepared resume"


@dataclass(slots=True)
class _Transition:
    phase: _Phase
    tags: tuple[str, ...]
    blocks: list[Block]


class Pool:
    """The allocations of one device. Thread-safe."""

    def __init__(
        self,
        driver: Driver,
        *,
        restore_modes: Mapping[str, RestoreMode] | None = None,
        immutable_tags: Set[str] = frozenset(),
        copy_threads: int = 2,
        host_bytes_available: Callable[[], int] = host_memory.available_bytes,
    ) -> None:
        """``immutable_tags`` are written once: after their first wake they are read-only until `unseal`, and a further
        park copies nothing. ``host_bytes_available`` is asked before backups are made."""
        self.driver = driver
        self.keep_memory_on_release = False
        """For tests of whoever drives an engine: say released, and keep the device memory."""
        self.guest: PoolGuest | None = None
        self._restore_modes = dict(restore_modes or {})
        self._immutable_tags = frozenset(immutable_tags)
        self._host_bytes_available = host_bytes_available
        self._copier = Copier(driver, copy_threads)
        self._condition = threading.Condition()  # guards what follows
        self._blocks: dict[Allocation, Block] = {}
        self._freeing: set[Allocation] = set()
        self._parked_tags: set[str] = set()
        self._allocating = 0
        self._transition: _Transition | None = None
        self._broken: ContentsLost | None = None
        for tag, mode in self._restore_modes.items():
            _require_tag(tag)
            self._require_mode(tag, mode)

    @property
    def failed(self) -> str | None:
        """Why nothing can be parked or woken any more: the device is lost, or a transition was not undone."""
        return self.driver.failed or (None if self._broken is None else str(self._broken))

    # -- allocations

    def allocate(self, nbytes: int, tag: str, mode: RestoreMode | None = None) -> Allocation:
        """Zeroed memory. ``mode`` defaults to the pool's for the tag, else NONE for kv_cache and CPU for others."""
        if nbytes <= 0:
            raise ValueError(f"nbytes is {nbytes}; it must be positive")
        _require_tag(tag)
        chosen = mode or self._restore_modes.get(tag) or (RestoreMode.NONE if tag == "kv_cache" else RestoreMode.CPU)
        self._require_mode(tag, chosen)
        granularity_bytes = self.driver.granularity()
        reserved_bytes = -(-nbytes // granularity_bytes) * granularity_bytes
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
            with self._condition:
                self._blocks[block.allocation] = block
        return block.allocation

    def free(self, allocation: Allocation) -> None:
        """Frees a live or parked allocation, with its backup and its addresses. If it raises, it can be asked again."""
        with self.changing_layout(None):
            with self._condition:
                block = self._require_block(allocation)
                self._freeing.add(allocation)
                block.leaving = True
            try:
                block.detach(self.driver)
                self.driver.free_address(allocation.address, allocation.reserved_bytes)
                block.free_backup()
                with self._condition:
                    del self._blocks[allocation]
            finally:
                with self._condition:
                    self._freeing.remove(allocation)

    def adopt(self, allocation: Allocation, handle: Handle) -> None:
        """Takes over memory that another allocator has made: mapped read-write at its address by this pool's driver.

        From now on it parks and wakes as ours does, under a new handle after each wake.
        """
        _require_tag(allocation.tag)
        self._require_mode(allocation.tag, allocation.mode)
        if handle.nbytes != allocation.reserved_bytes:
            raise ValueError(f"the handle has {handle.nbytes} bytes and {allocation} says {allocation.reserved_bytes}")
        block = Block(allocation, handle, mapped=True, contents_here=True)
        with self.changing_layout(allocation.tag), self._condition:
            if any(other.address == allocation.address for other in self._blocks):
                raise ValueError(f"{allocation.address:#x} is in this pool already; forget it first")
            self._blocks[allocation] = block

    def forget(self, allocation: Allocation) -> Handle | None:
        """Gives an adopted allocation back to its allocator: its addresses, and the handle that is mapped there now.

        None while it is parked: then nothing is mapped, and its backup is dropped.
        """
        with self.changing_layout(None), self._condition:
            block = self._require_block(allocation)
            del self._blocks[allocation]
        block.free_backup()
        return block.handle

    def torch_scope(self, tag: str, mode: RestoreMode | None = None) -> AbstractContextManager[None]:
        """Puts the storage of every tensor that this thread makes inside into the pool: see `torch_scope`."""
        scope: AbstractContextManager[None] = import_module(".torch_scope", __package__).torch_scope(self, tag, mode)
        return scope

    def close(self) -> None:
        """Frees everything."""
        for allocation in self.allocations():
            self.free(allocation)

    def allocations(self, tag: str | None = None) -> tuple[Allocation, ...]:
        """In the order in which they were made."""
        with self._condition:
            return tuple(allocation for allocation in self._blocks if tag in (None, allocation.tag))

    def bytes_by_tag(self) -> dict[str, int]:
        """What each tag takes of the device while it is not parked."""
        sizes: dict[str, int] = {}
        for allocation in self.allocations():
            sizes[allocation.tag] = sizes.get(allocation.tag, 0) + allocation.reserved_bytes
        return sizes

    def device_bytes(self) -> int:
        """What the pool holds of the device now."""
        with self._condition:
            return sum(block.allocation.reserved_bytes for block in self._blocks.values() if block.handle is not None)

    def backup_bytes(self) -> int:
        """Host memory in backups, those that are kept for the next park included."""
        with self._condition:
            return sum(block.backup.held_bytes for block in self._blocks.values() if block.backup is not None)

    def parked_tags(self) -> frozenset[str]:
        with self._condition:
            return frozenset(self._parked_tags)

    def warm_backups(self) -> None:
        """Makes the backups of all PINNED allocations now, so that the first park need not."""
        with self.changing_layout(None):
            with self._condition:
                blocks = list(self._blocks.values())
            missing = [b for b in blocks if b.allocation.mode is RestoreMode.PINNED and b.backup is None]
            with promise([b.allocation.nbytes for b in missing], self._host_bytes_available):
                _allocate_backups(missing)

    def unseal(self, tags: Iterable[str]) -> None:
        """Makes immutable tags writable, for new weights; the next park copies them again."""
        wanted = frozenset(tags)
        with self.changing_layout(None):
            with self._condition:
                sealed = [b for b in self._blocks.values() if b.sealed and b.allocation.tag in wanted]
            for block in sealed:
                block.attach(self.driver)
                block.settle_backup()

    def is_sealed(self, allocation: Allocation) -> bool:
        """Mapped read-only since its last wake: a write would be fatal."""
        with self._condition:
            return self._require_block(allocation).sealed

    def handle_of(self, allocation: Allocation) -> Handle | None:
        """What is mapped there now; None while it is parked."""
        with self._condition:
            return self._require_block(allocation).handle

    def backup_views(self, tag: str) -> tuple[memoryview, ...]:
        """For tests of whoever checks an engine after its wake: its backups, writable, while the tag is parked."""
        with self._condition:
            backups = [b.backup for a, b in self._blocks.items() if a.tag == tag and b.backup is not None]
        return tuple(
            memoryview((ctypes.c_char * backup.nbytes).from_address(backup.address)).cast("B") for backup in backups
        )

    # -- park

    def release(self, tags: Iterable[str]) -> None:
        self.prepare_release(tags)
        self.commit_release()

    def prepare_release(self, tags: Iterable[str]) -> None:
        """Backs up the tags that are not parked. Then commit_release or abort_release must follow."""
        transition = self._begin(_Phase.RELEASE, tags, parked=False)
        to_copy = [block for block in transition.blocks if block.needs_copy_out]
        new = [block for block in to_copy if block.backup is None]
        try:
            self.driver.synchronize()
            with promise([block.allocation.nbytes for block in new], self._host_bytes_available):
                _allocate_backups(new)
                self._copier.run([block.copy_out() for block in to_copy])
        except BaseException:
            self._end_release_undone(transition)
            raise
        for block in to_copy:
            assert block.backup is not None, "allocated above"
            block.backup.clean = True
        transition.phase = _Phase.RELEASE_PREPARED

    def abort_release(self) -> None:
        self._end_release_undone(self._require_phase(_Phase.RELEASE_PREPARED))

    def commit_release(self) -> None:
        transition = self._require_phase(_Phase.RELEASE_PREPARED)
        if not self.keep_memory_on_release:
            try:
                for block in transition.blocks:
                    block.detach(self.driver)
            except BaseException as error:
                self._undo_commit_release(transition, error)
                raise
        with self._condition:
            self._parked_tags.update(transition.tags)
        self._end(transition)

    def _undo_commit_release(self, transition: _Transition, error: BaseException) -> None:
        """Takes the memory again that was given back; from the backups, which are all good."""
        try:
            self._restore(transition.blocks)
        except Exception as second:
            self._end(transition)
            raise self._break("the park", transition.blocks, error) from second
        self._end_release_undone(transition)

    def _end_release_undone(self, transition: _Transition) -> None:
        for block in transition.blocks:
            block.settle_backup()
        self._end(transition)

    # -- wake

    def resume(self, tags: Iterable[str]) -> None:
        self.prepare_resume(tags)
        self.commit_resume()

    def prepare_resume(self, tags: Iterable[str]) -> None:
        """Brings the tags that are parked back. Then commit_resume or abort_resume must follow."""
        transition = self._begin(_Phase.RESUME, tags, parked=True)
        try:
            missing = [block for block in transition.blocks if block.handle is None]
            needed_bytes = sum(block.allocation.reserved_bytes for block in missing)
            if missing and needed_bytes > (free_bytes := self.driver.free_bytes()):
                raise OutOfDeviceMemory(needed_bytes, free_bytes, self.driver.capacity_bytes)
            self._restore(transition.blocks)
            for block in transition.blocks:
                if block.allocation.tag in self._immutable_tags:
                    block.seal(self.driver)
        except BaseException as error:
            self._undo_resume(transition, error)
            raise
        transition.phase = _Phase.RESUME_PREPARED

    def abort_resume(self) -> None:
        """Parked again, from the backups of before: what was written since prepare_resume is dropped."""
        self._undo_resume(self._require_phase(_Phase.RESUME_PREPARED), None)

    def commit_resume(self) -> None:
        transition = self._require_phase(_Phase.RESUME_PREPARED)
        for block in transition.blocks:
            block.settle_backup()
        with self._condition:
            self._parked_tags.difference_update(transition.tags)
        self._end(transition)

    def _restore(self, blocks: Sequence[Block]) -> None:
        """All handles first: running out of memory is the likeliest failure and is cheapest to undo there."""
        for block in blocks:
            block.create(self.driver)
        for block in blocks:
            block.attach(self.driver)
        without_contents = [block for block in blocks if not block.contents_here]
        for block in without_contents:
            if block.allocation.mode is RestoreMode.MEMSET:
                self.driver.set(block.allocation.address, 0, block.allocation.nbytes)
        self._copier.run([block.copy_in() for block in without_contents if block.keeps_contents])
        self.driver.synchronize()
        for block in without_contents:
            block.contents_here = True

    def _undo_resume(self, transition: _Transition, error: BaseException | None) -> None:
        failure: LullMemoryError | None = None
        for block in transition.blocks:
            try:
                block.detach(self.driver)
            except LullMemoryError as second:
                failure = second  # the others are given back all the same
        self._end(transition)
        if failure is not None:
            raise self._break("the wake", transition.blocks, error) from failure

    # -- bookkeeping

    def _begin(self, phase: _Phase, tags: Iterable[str], *, parked: bool) -> _Transition:
        if self.guest is not None:
            self.guest.before_transition()
        try:
            return self._begin_here(phase, tags, parked=parked)
        except BaseException:
            if self.guest is not None:
                self.guest.after_transition()
            raise

    def _begin_here(self, phase: _Phase, tags: Iterable[str], *, parked: bool) -> _Transition:
        with self._condition:
            wanted = tuple(tag for tag in dict.fromkeys(tags) if (tag in self._parked_tags) is parked)
            if self._broken is not None:
                raise RuntimeFailed(f"this pool can neither park nor wake any more: {self._broken}")
            if self._transition is not None:
                raise TransitionInProgress(f"a {self._transition.phase.value} is under way in this pool; wait for it")
            transition = self._transition = _Transition(phase, wanted, [])
            # Set before waiting: no further allocation can begin.
            if not self._condition.wait_for(lambda: self._allocating == 0, _ALLOCATING_SECONDS_MAX):
                self._transition = None
                raise TransitionInProgress(f"an allocation has been under way for {_ALLOCATING_SECONDS_MAX} s")
            transition.blocks = [b for b in self._blocks.values() if b.allocation.tag in wanted and not b.leaving]
        return transition

    def _end(self, transition: _Transition) -> None:
        if self.guest is not None:
            self.guest.after_transition()
        with self._condition:
            assert self._transition is transition, "one transition at a time"
            self._transition = None

    def _require_block(self, allocation: Allocation) -> Block:
        block = self._blocks.get(allocation)
        if block is None or allocation in self._freeing:
            raise ValueError(f"{allocation} is not in this pool; it was freed already or belongs elsewhere")
        return block

    def _require_phase(self, phase: _Phase) -> _Transition:
        with self._condition:
            if self._transition is None or self._transition.phase is not phase:
                raise TransitionInProgress(f"there is no {phase.value} in this pool; prepare it first")
            return self._transition

    @contextmanager
    def changing_layout(self, tag: str | None) -> Generator[None]:
        """While memory of the tag is made or freed: a transition waits for the block, and refuses new ones."""
        with self._condition:
            if self._transition is not None:
                raise TransitionInProgress(f"a {self._transition.phase.value} is under way in this pool; wait for it")
            if tag in self._parked_tags:
                raise LayoutChanged(f"tag {tag} is parked and its layout must not change; resume it first")
            self._allocating += 1
        try:
            yield
        finally:
            with self._condition:
                self._allocating -= 1
                self._condition.notify_all()

    def _discard(self, block: Block, error: BaseException) -> None:
        try:
            block.detach(self.driver)
            self.driver.free_address(block.allocation.address, block.allocation.reserved_bytes)
        except LullMemoryError as second:
            error.add_note(f"and {block.allocation} could not be given back: {second}")

    def _break(self, during: str, blocks: Sequence[Block], cause: BaseException | None) -> ContentsLost:
        lost = {block.allocation.tag for block in blocks if block.contents_lost}
        live = {block.allocation.tag for block in blocks if block.contents_here} - lost
        parked = {block.allocation.tag for block in blocks} - lost - live
        failure = ContentsLost(during, lost=lost, parked=parked, live=live)
        if cause is not None:
            failure.add_note(f"what was to be undone: {cause}")
        with self._condition:
            self._broken = failure
        return failure

    def _require_mode(self, tag: str, mode: RestoreMode) -> None:
        if self.driver.unified and mode in KEEPS_CONTENTS:
            raise UnsupportedMode(
                f"restore mode {mode} of tag {tag}: device {self.driver.device_uuid} shares its memory with the host, "
                "so a backup would free nothing; use NONE or MEMSET and reload"
            )


def _allocate_backups(blocks: Sequence[Block]) -> None:
    for block in blocks:
        pinned = block.allocation.mode is RestoreMode.PINNED
        block.backup = allocate_backup(block.allocation.nbytes, pinned=pinned)


def _require_tag(tag: str) -> None:
    if not TAG_PATTERN.fullmatch(tag):
        raise InvalidTag(f"tag is {tag!r}; use lower-case letters, digits and underscores, at most 63")
