"""Who is in a pool and which transition it is in: the bookkeeping, under one lock that is never held over work.

While a transition runs, no allocation comes or goes; while one comes or goes, no transition begins. What a tag looked
like when it was parked is remembered, to be compared when it is woken.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Final

from .blocks import Allocation, Block
from .errors import ContentsLost, LayoutChanged, PoolClosed, RuntimeFailed, TransitionInProgress
from .statistics import TagRecord, TagStatistics, TransitionCost, summarize

_CHANGING_SECONDS_MAX: Final = 60.0


class Phase(Enum):
    RELEASE = "release"
    RELEASE_PREPARED = "prepared release"
    RESUME = "resume"
    RESUME_PREPARED = "prepared resume"


@dataclass(slots=True)
class Transition:
    phase: Phase
    tags: tuple[str, ...]
    blocks: list[Block] = field(default_factory=list[Block])
    cost: TransitionCost = field(default_factory=TransitionCost)

    def used_tags(self) -> set[str]:
        return {block.allocation.tag for block in self.blocks}

    @contextmanager
    def timed(self) -> Generator[None]:
        begin = time.monotonic()
        try:
            yield
        finally:
            self.cost.seconds += time.monotonic() - begin


class BlockTable:
    """Thread-safe."""

    def __init__(self) -> None:
        self._condition = threading.Condition()  # guards what follows
        self._blocks: dict[Allocation, Block] = {}
        self._freeing: set[Allocation] = set()
        self._parked_tags: set[str] = set()
        self._parked_layouts: dict[str, dict[int, tuple[int, int]]] = {}  # tag: address: nbytes, reserved_bytes
        self._records: dict[str, TagRecord] = {}
        self._changing = 0
        self._transition: Transition | None = None
        self.broken: ContentsLost | None = None  # set once
        self.closed = False  # set once

    # -- allocations

    @contextmanager
    def changing(self, tag: str | None) -> Generator[None]:
        """While memory of the tag is made or freed: a transition waits for the block, and refuses new ones."""
        with self._condition:
            if self._transition is not None:
                raise TransitionInProgress(f"a {self._transition.phase.value} is under way in this pool; wait for it")
            if tag is not None:
                self._require_open()
            if tag in self._parked_tags:
                raise LayoutChanged(f"tag {tag} is parked and its layout must not change; resume it first")
            self._changing += 1
        try:
            yield
        finally:
            with self._condition:
                self._changing -= 1
                self._condition.notify_all()

    def add(self, block: Block) -> None:
        """Its address may be that of a block which is leaving: the system gives a freed range out at once."""
        with self._condition:
            self._blocks[block.allocation] = block

    def adopt(self, block: Block) -> None:
        with self._condition:
            address = block.allocation.address
            if any(other.address == address for other in self._blocks if other not in self._freeing):
                raise ValueError(f"{address:#x} is in this pool already; forget it first")
            self.add(block)

    def require(self, allocation: Allocation) -> Block:
        with self._condition:
            block = self._blocks.get(allocation)
            if block is None or allocation in self._freeing:
                raise ValueError(f"{allocation} is not in this pool; it was freed already or belongs elsewhere")
            return block

    @contextmanager
    def leaving(self, allocation: Allocation) -> Generator[Block]:
        """The block is gone when this ends. If it raises, it stays, takes part in nothing, and can be asked again."""
        with self._condition:
            block = self.require(allocation)
            self._freeing.add(allocation)
            block.leaving = True
        try:
            yield block
            self.remove(allocation)
        finally:
            with self._condition:
                self._freeing.discard(allocation)

    def remove(self, allocation: Allocation) -> None:
        with self._condition:
            del self._blocks[allocation]
            self._parked_layouts.get(allocation.tag, {}).pop(allocation.address, None)

    def blocks(self, tag: str | None = None) -> list[Block]:
        """In the order in which they were made."""
        with self._condition:
            return [block for allocation, block in self._blocks.items() if tag in (None, allocation.tag)]

    def parked_tags(self) -> frozenset[str]:
        with self._condition:
            return frozenset(self._parked_tags)

    def statistics(self) -> dict[str, TagStatistics]:
        with self._condition:
            tags = dict.fromkeys([*(allocation.tag for allocation in self._blocks), *self._records])
            return {
                tag: summarize(
                    tag, self.blocks(tag), self._records.get(tag, TagRecord()), parked=tag in self._parked_tags
                )
                for tag in tags
            }

    def close(self) -> None:
        """Nothing comes any more, and nothing parks or wakes; what is there may still be freed."""
        with self._condition:
            if self._transition is not None:
                raise TransitionInProgress(f"a {self._transition.phase.value} is under way in this pool; wait for it")
            self.closed = True

    def _require_open(self) -> None:
        if self.closed:
            raise PoolClosed("this pool is closed and its memory is gone; make another")

    # -- transitions

    def begin(self, phase: Phase, tags: Iterable[str], *, parked: bool) -> Transition:
        with self._condition:
            wanted = tuple(tag for tag in dict.fromkeys(tags) if (tag in self._parked_tags) is parked)
            self._require_open()
            if self.broken is not None:
                raise RuntimeFailed(f"this pool can neither park nor wake any more: {self.broken}")
            if self._transition is not None:
                raise TransitionInProgress(f"a {self._transition.phase.value} is under way in this pool; wait for it")
            transition = self._transition = Transition(phase, wanted)
            # Set before waiting: no further allocation can begin.
            if not self._condition.wait_for(lambda: self._changing == 0, _CHANGING_SECONDS_MAX):
                self._transition = None
                raise TransitionInProgress(f"an allocation has been under way for {_CHANGING_SECONDS_MAX} s")
            transition.blocks = [b for b in self._blocks.values() if b.allocation.tag in wanted and not b.leaving]
        return transition

    def require_phase(self, phase: Phase) -> Transition:
        with self._condition:
            if self._transition is None or self._transition.phase is not phase:
                raise TransitionInProgress(f"there is no {phase.value} in this pool; prepare it first")
            return self._transition

    def end(self, transition: Transition) -> None:
        with self._condition:
            assert self._transition is transition, "one transition at a time"
            self._transition = None

    def note_parked(self, transition: Transition) -> None:
        """Before `end`."""
        with self._condition:
            self._parked_tags.update(transition.tags)
            for tag in transition.tags:
                self._parked_layouts[tag] = _layout(transition.blocks, tag)
            for tag in transition.used_tags():
                record = self._records.setdefault(tag, TagRecord())
                record.parks += 1
                record.last_park_seconds = transition.cost.seconds
                record.last_park_copied_bytes = transition.cost.copied_bytes.get(tag, 0)

    def note_awake(self, transition: Transition) -> None:
        """Before `end`."""
        with self._condition:
            self._parked_tags.difference_update(transition.tags)
            for tag in transition.tags:
                self._parked_layouts.pop(tag, None)
            for tag in transition.used_tags():
                record = self._records.setdefault(tag, TagRecord())
                record.wakes += 1
                record.last_wake_seconds = transition.cost.seconds
                record.last_wake_copied_bytes = transition.cost.copied_bytes.get(tag, 0)

    def require_same_layout(self, transition: Transition) -> None:
        """The woken blocks are those that were parked, each whole at its address; else LayoutChanged."""
        with self._condition:
            for tag in transition.tags:
                leaving = {block.allocation.address for block in self.blocks(tag) if block.leaving}
                was = {a: sizes for a, sizes in self._parked_layouts.get(tag, {}).items() if a not in leaving}
                now = _layout(transition.blocks, tag)
                if was != now:
                    raise LayoutChanged(f"tag {tag} was parked as {_words(was)} and was woken as {_words(now)}")
        for block in transition.blocks:
            handle, allocation = block.handle, block.allocation
            if handle is None or not block.mapped or handle.nbytes != allocation.reserved_bytes:
                raise LayoutChanged(
                    f"tag {allocation.tag}: {allocation.reserved_bytes} bytes were parked at {allocation.address:#x} "
                    f"and {0 if handle is None else handle.nbytes} were woken there"
                )

    def mark_broken(self, failure: ContentsLost) -> None:
        with self._condition:
            self.broken = failure


def _layout(blocks: Iterable[Block], tag: str) -> dict[int, tuple[int, int]]:
    allocations = (block.allocation for block in blocks if block.allocation.tag == tag)
    return {allocation.address: (allocation.nbytes, allocation.reserved_bytes) for allocation in allocations}


def _words(layout: dict[int, tuple[int, int]]) -> str:
    return ", ".join(f"{address:#x}+{nbytes}" for address, (nbytes, _) in sorted(layout.items())) or "nothing"
