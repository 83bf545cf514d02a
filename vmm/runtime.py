"""Admission, drain, park and wake of one engine process over its pools.

The states and their edges are `lifecycle`'s; the order is TensorRT-LLM's: close admission, drain, hooks, backups,
release. What fails before a change, or is undone whole, goes back to where it was; anything else ends in FAILED.
Park and wake have two phases, so that several processes can act as one engine: what is prepared in all of them is then
committed in all or aborted in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from .errors import (
    AdmissionClosed,
    AlreadyParked,
    ContentsLost,
    DeviceFailed,
    DrainTimeout,
    LayoutChanged,
    RuntimeFailed,
    TransitionInProgress,
)
from .lifecycle import MemoryEvent, MemoryState, advance
from .pool_group import PoolGroup
from .pool_like import PoolLike
from .pool_owners import claim
from .shielded import in_thread
from .tags import TRTLLM_TAGS, normalize_tags, require_tags

Hook = Callable[[tuple[str, ...]], None]

DRAIN_SECONDS_DEFAULT: Final = 300.0
# What an engine cannot go on with: memory that is lost, or is not where it was.
_FATAL: Final = (ContentsLost, DeviceFailed, LayoutChanged)


@dataclass(frozen=True, slots=True)
class MemoryStatus:
    """``parked_tags`` is sorted. Do not rely on it while parking or failed."""

    state: MemoryState
    parked_tags: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Hooked:
    hook: Hook
    tags: frozenset[str] | None  # None: of every tag

    def call(self, tags: tuple[str, ...]) -> None:
        wanted = tags if self.tags is None else tuple(tag for tag in tags if tag in self.tags)
        if wanted:
            self.hook(wanted)


def _hooked(hook: Hook, tags: Collection[str] | None) -> _Hooked:
    if not callable(hook):
        raise TypeError(f"hook is {hook!r}; it must be a function that takes the tags")
    return _Hooked(hook, None if tags is None else frozenset(require_tags(tags)))


def _require_seconds(value: object) -> float:
    if value is None:
        return DRAIN_SECONDS_DEFAULT
    if isinstance(value, int | float) and not isinstance(value, bool) and value >= 0:  # nan is not
        return value
    raise ValueError(f"drain_seconds_max is {value!r}; it must be a number of seconds that is not negative")


@dataclass(frozen=True, slots=True)
class _Prepared:
    """What commit or abort will be about."""

    state: MemoryState
    tags: tuple[str, ...]


class Runtime:
    """Thread-safe. Park and wake block until they are done, or are awaited; every other call returns at once."""

    def __init__(self, pools: PoolLike | Sequence[PoolLike], *, drain_seconds_max: float | None = None) -> None:
        """``drain_seconds_max`` bounds the wait for steps in flight; 300 s unless given.

        ValueError where a pool has a runtime already, or is named twice."""
        self.pools: tuple[PoolLike, ...] = tuple(pools) if isinstance(pools, Sequence) else (pools,)
        if not self.pools:
            raise ValueError("pools is empty; a runtime needs at least one pool")
        if any(not hasattr(pool, "prepare_release") for pool in self.pools):
            raise TypeError(f"pools is {pools!r}; it must be a pool or a list of pools")
        self._group = PoolGroup(self.pools)
        self._drain_seconds_max = _require_seconds(drain_seconds_max)
        self._condition = threading.Condition()  # guards the five below; never held over a copy or a hook
        self._state = MemoryState.RUNNING
        self._parked_tags: frozenset[str] = frozenset()
        self._in_flight = 0
        self._prepared: _Prepared | None = None
        self._failure: str | None = None
        self._release_hooks: list[_Hooked] = []
        self._resume_hooks: list[_Hooked] = []
        claim(self.pools, self)

    def on_release(self, hook: Hook, *, tags: Collection[str] | None = None) -> Hook:
        """Called with the tags after the drain, before anything changes: drop what is pending against them.

        With ``tags``, only when some of these are released, and with those. The park may still be undone after it, so
        the engine must be able to go on. If it raises, nothing is released.
        """
        self._release_hooks.append(_hooked(hook, tags))
        return hook

    def on_resume(self, hook: Hook, *, tags: Collection[str] | None = None) -> Hook:
        """Called with the tags when their memory is back, before admission opens. If it raises, they stay parked."""
        self._resume_hooks.append(_hooked(hook, tags))
        return hook

    @contextmanager
    def step(self) -> Generator[None]:
        """Work on the memory belongs in here: refused with AdmissionClosed unless running, awaited by the drain."""
        self._learn_failed_device()
        with self._condition:
            if self._state is not MemoryState.RUNNING:
                raise AdmissionClosed(self._state)
            self._in_flight += 1
        try:
            yield
        finally:
            with self._condition:
                self._in_flight -= 1
                self._condition.notify_all()

    @property
    def in_flight(self) -> int:
        with self._condition:
            return self._in_flight

    def status(self) -> MemoryStatus:
        self._learn_failed_device()
        with self._condition:
            return MemoryStatus(self._state, tuple(sorted(self._parked_tags)))

    @property
    def failure(self) -> str | None:
        """Why the state is failed."""
        with self._condition:
            return self._failure

    def known_tags(self) -> tuple[str, ...]:
        """TensorRT-LLM's tags, and those in use here."""
        used = (tag for pool in self.pools for tag in (*pool.bytes_by_tag(), *pool.parked_tags()))
        return tuple(dict.fromkeys((*TRTLLM_TAGS, *used)))

    # -- park

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Parks the tags, all unless given. Parked ones again is no change; more than those is AlreadyParked."""
        if self.prepare_release(tags):
            self.commit_release()

    async def release_async(self, tags: Sequence[str] | None = None) -> None:
        """`release` in a thread of its own. Cancelling the wait does not cancel the park."""
        await in_thread("park", lambda: self.release(tags))

    def prepare_release(self, tags: Sequence[str] | None = None) -> bool:
        """Closes admission, drains, runs the hooks and makes every backup. False: there is nothing to do.

        If it raises, memory is as it was. After True, commit_release or abort_release must follow.
        """
        chosen = normalize_tags(tags, self.known_tags())
        if not self._begin_park(chosen):
            return False
        try:
            self._drain()
            for hooked in self._release_hooks:
                hooked.call(chosen)
            self._group.prepare_release(chosen)
        except BaseException as error:
            self._end_undone(MemoryEvent.ABORT_PARK, error)
            raise
        self._hold_prepared(_Prepared(MemoryState.PARKING, chosen), self._group.abort_release)
        return True

    def commit_release(self) -> None:
        """Gives the memory back on every device, or on none."""
        tags = self._take_prepared(MemoryState.PARKING, "release")
        try:
            self._group.commit_release(tags)
        except BaseException as error:
            self._end_undone(MemoryEvent.ABORT_PARK, error)
            raise
        self._complete(MemoryEvent.COMPLETE_PARK, frozenset(tags))

    def abort_release(self) -> None:
        """Running again. No change unless a release is prepared."""
        if self._drop_prepared(MemoryState.PARKING):
            self._undo(MemoryEvent.ABORT_PARK, self._group.abort_release)

    # -- wake

    def resume(self, tags: Sequence[str] | None = None) -> None:
        """Wakes the tags, all parked ones unless given. Those that are not parked are no change."""
        if self.prepare_resume(tags):
            self.commit_resume()

    async def resume_async(self, tags: Sequence[str] | None = None) -> None:
        """`resume` in a thread of its own. Cancelling the wait does not cancel the wake."""
        await in_thread("wake", lambda: self.resume(tags))

    def prepare_resume(self, tags: Sequence[str] | None = None) -> bool:
        """Brings memory and contents back and runs the hooks; admission stays closed. False: there is nothing to do.

        If it raises, everything is still parked. After True, commit_resume or abort_resume must follow.
        """
        waking = self._begin_wake(None if tags is None else normalize_tags(tags, self.known_tags()))
        if not waking:
            return False
        try:
            self._group.prepare_resume(waking)
            self._call_resume_hooks(waking)
        except BaseException as error:
            self._end_undone(MemoryEvent.ABORT_WAKE, error)
            raise
        self._hold_prepared(_Prepared(MemoryState.WAKING, waking), self._group.abort_resume)
        return True

    def commit_resume(self) -> None:
        """Opens admission once nothing is parked any more."""
        tags = self._take_prepared(MemoryState.WAKING, "resume")
        try:
            self._group.commit_resume()
        except BaseException as error:
            self.fail(f"a wake was half committed: {error}")
            raise
        with self._condition:
            left = self._parked_tags.difference(tags)
        self._complete(MemoryEvent.COMPLETE_WAKE_PARTLY if left else MemoryEvent.COMPLETE_WAKE, left)

    def abort_resume(self) -> None:
        """Parked again, as before prepare_resume. No change unless a resume is prepared."""
        if self._drop_prepared(MemoryState.WAKING):
            self._undo(MemoryEvent.ABORT_WAKE, self._group.abort_resume)

    def _call_resume_hooks(self, tags: tuple[str, ...]) -> None:
        try:
            for hooked in self._resume_hooks:
                hooked.call(tags)
        except BaseException as error:
            self._group.abort_resume(error)
            raise

    # -- failure

    def fail(self, reason: str) -> None:
        """Failed for good, from any state: a peer of this engine is lost, or its memory cannot be trusted.

        Returns at once. A park or wake under way ends with RuntimeFailed; the first reason is the one that stays.
        """
        with self._condition:
            if self._state is not MemoryState.FAILED:
                self._failure = reason or "no reason was given"
            self._state = advance(self._state, MemoryEvent.FAIL)
            self._condition.notify_all()

    def _learn_failed_device(self) -> None:
        for pool in self.pools:
            if (reason := pool.failed) is not None:
                self.fail(reason)

    def _end_undone(self, event: MemoryEvent, error: BaseException) -> None:
        """``error`` ended a transition: everything is as before it, or it says what is lost."""
        if isinstance(error, _FATAL):
            self.fail(str(error))
        with self._condition:
            if self._state is not MemoryState.FAILED:
                self._state = advance(self._state, event)

    def _undo(self, event: MemoryEvent, undo: Callable[[], None]) -> None:
        try:
            undo()
        except BaseException as error:
            self.fail(str(error))
            raise
        with self._condition:
            if self._state is not MemoryState.FAILED:  # in which an abort is no edge
                self._state = advance(self._state, event)

    # -- the machine

    def _begin_park(self, tags: tuple[str, ...]) -> bool:
        self._learn_failed_device()
        with self._condition:
            if self._state is MemoryState.PARKED:
                if self._parked_tags.issuperset(tags):
                    return False
                raise AlreadyParked(tags, self._parked_tags)
            if self._state is not MemoryState.RUNNING:
                raise self._refusal("release")
            self._state = advance(self._state, MemoryEvent.BEGIN_PARK)
            return True

    def _begin_wake(self, tags: tuple[str, ...] | None) -> tuple[str, ...]:
        self._learn_failed_device()
        with self._condition:
            if self._state is MemoryState.RUNNING:
                return ()
            if self._state is not MemoryState.PARKED:
                raise self._refusal("resume")
            waking = tuple(sorted(self._parked_tags if tags is None else self._parked_tags.intersection(tags)))
            if waking:
                self._state = advance(self._state, MemoryEvent.BEGIN_WAKE)
            return waking

    def _refusal(self, verb: str) -> RuntimeFailed | TransitionInProgress:
        text = f"Cannot {verb} memory while state is {self._state}"
        if self._state is MemoryState.FAILED:
            return RuntimeFailed(f"{text} ({self._failure}); replace the process")
        return TransitionInProgress(f"{text}; wait until it has ended")

    def _drain(self) -> None:
        deadline = time.monotonic() + self._drain_seconds_max
        with self._condition:
            while self._in_flight:
                if self._state is MemoryState.FAILED:
                    raise self._refusal("release")
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise DrainTimeout(self._in_flight, self._drain_seconds_max)
                self._condition.wait(left_seconds)

    def _hold_prepared(self, prepared: _Prepared, undo: Callable[[], None]) -> None:
        with self._condition:
            if self._state is not MemoryState.FAILED:
                self._prepared = prepared
                return
            refusal = self._refusal("change")  # somebody called fail meanwhile
        undo()
        raise refusal

    def _take_prepared(self, state: MemoryState, verb: str) -> tuple[str, ...]:
        with self._condition:
            if self._state is MemoryState.FAILED:
                raise self._refusal(verb)
            if self._prepared is None or self._prepared.state is not state:
                raise TransitionInProgress(f"Cannot commit a {verb} while state is {self._state}; prepare it first")
            tags, self._prepared = self._prepared.tags, None
            return tags

    def _drop_prepared(self, state: MemoryState) -> bool:
        """True: there is something to undo, and it is this caller's to do."""
        with self._condition:
            if self._prepared is None or self._prepared.state is not state:
                return False
            self._prepared = None
            return True

    def _complete(self, event: MemoryEvent, parked: frozenset[str]) -> None:
        with self._condition:
            self._parked_tags = parked
            if self._state is MemoryState.FAILED:
                raise self._refusal("change")
            self._state = advance(self._state, event)
