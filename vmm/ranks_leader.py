"""The thread that leads: it alone holds the Leader machine, gets every event in one queue, and knows the deadlines."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from dataclasses import dataclass, fields
from typing import Final

from .errors import LullMemoryError, RanksFailed
from .ranks_protocol import (
    Done,
    Failed,
    Leader,
    LeaderPhase,
    Message,
    Output,
    Send,
    Trouble,
    Undone,
    Verb,
)

CLOSED: Final = "the ranks were closed"
SECONDS_MAX: Final = 30 * 24 * 3600
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RankSettings:
    """How long the leader waits. A deadline that passes before the commit undoes the operation, one after it fails.

    ValueError for what is no number of seconds above 0."""

    join_seconds_max: float = 300.0  # for all ranks to connect
    prepare_seconds_max: float = (
        600.0  # for the drain (300 s unless set), the hooks and every backup; for a wake as well
    )
    commit_seconds_max: float = 60.0
    abort_seconds_max: float = 60.0  # beyond what is left of the prepare: a drain cannot be cut short
    status_seconds_max: float = 10.0

    def __post_init__(self) -> None:
        for field in fields(self):
            value: object = getattr(self, field.name)
            if not _is_seconds(value):
                raise ValueError(f"{field.name} is {value!r}; it must be above 0 and at most {SECONDS_MAX} seconds")


def _is_seconds(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value <= SECONDS_MAX  # nan is not


class RankUndone(LullMemoryError):
    """An operation was undone everywhere. Not for users: RankedRuntime raises what fits the trouble."""

    def __init__(self, trouble: Trouble) -> None:
        super().__init__(trouble.reason)
        self.trouble = trouble


@dataclass(frozen=True, slots=True)
class _Start:
    verb: Verb
    tags: tuple[str, ...] | None
    outcome: Future[bool]


@dataclass(frozen=True, slots=True)
class _Heard:
    rank: int
    message: Message


@dataclass(frozen=True, slots=True)
class _Lost:
    rank: int


@dataclass(frozen=True, slots=True)
class _Wrong:
    reason: str
    seen: threading.Event


_Tell = Callable[[Message], None]
_STOP: Final = None
_LOOK_SECONDS: Final = 1.0


class LeaderThread:
    def __init__(
        self, ranks: int, settings: RankSettings, tell: Mapping[int, _Tell], hang_up: Callable[[], None]
    ) -> None:
        """``tell`` raises LullMemoryError where a rank cannot be told. ``hang_up`` is called once, at a failure."""
        self._leader = Leader(frozenset(range(ranks)))
        self._settings = settings
        self._tell = tell
        self._hang_up = hang_up
        self._events: queue.SimpleQueue[_Start | _Heard | _Lost | _Wrong | None] = queue.SimpleQueue()
        self._outcome: Future[bool] | None = None
        self._deadline: float | None = None
        self._prepare_deadline = 0.0
        self._lock = threading.Lock()  # guards the next
        self._failure: str | None = None
        self._thread = threading.Thread(target=self._lead, name="lull-ranks", daemon=True)
        self._thread.start()

    @property
    def failure(self) -> str | None:
        with self._lock:
            return self._failure

    def operate(self, verb: Verb, tags: tuple[str, ...] | None) -> bool:
        """False: no rank had anything to do. Raises RankUndone or RanksFailed. One at a time."""
        outcome: Future[bool] = Future()
        self._events.put(_Start(verb, tags, outcome))
        self._until(outcome.done, lambda seconds: wait([outcome], seconds))
        return outcome.result() if outcome.done() else self._closed()

    def hear(self, rank: int, message: Message) -> None:
        self._events.put(_Heard(rank, message))

    def lose(self, rank: int) -> None:
        self._events.put(_Lost(rank))

    def fail(self, reason: str) -> None:
        """Returns when it is so everywhere that can still be told."""
        seen = threading.Event()
        self._events.put(_Wrong(reason, seen))
        self._until(seen.is_set, seen.wait)

    def close(self) -> None:
        self._events.put(_STOP)
        self._thread.join()

    def _until(self, done: Callable[[], bool], wait: Callable[[float], object]) -> None:
        """Every phase has a deadline, so it comes, unless the thread was closed meanwhile."""
        while not done() and self._thread.is_alive():
            wait(_LOOK_SECONDS)

    def _closed(self) -> bool:
        raise RanksFailed(CLOSED)

    def _lead(self) -> None:
        while True:
            try:
                left = None if self._deadline is None else max(0.0, self._deadline - time.monotonic())
                event = self._events.get(timeout=left)
            except queue.Empty:
                self._follow(*self._leader.expire())
                continue
            match event:
                case None:
                    self._end(RanksFailed(CLOSED))
                    return
                case _Start():
                    self._start(event)
                case _Heard():
                    self._follow(*self._leader.hear(event.rank, event.message))
                case _Lost():
                    self._follow(*self._leader.lose(event.rank))
                case _Wrong():
                    if self._leader.phase is not LeaderPhase.FAILED:
                        self._follow(*self._leader.fail(event.reason))
                    event.seen.set()

    def _start(self, event: _Start) -> None:
        if self._leader.phase is LeaderPhase.FAILED:
            event.outcome.set_exception(RanksFailed(self.failure or ""))
            return
        self._outcome = event.outcome
        self._follow(*self._leader.start(event.verb, event.tags))

    def _follow(self, leader: Leader, outputs: tuple[Output, ...]) -> None:
        if leader.phase is not self._leader.phase:
            self._set_deadline(leader.phase)
        self._leader = leader
        for output in outputs:
            match output:
                case Send():
                    self._send(output)
                case Done():
                    self._end(output.changed)
                case Undone():
                    self._end(RankUndone(output.trouble))
                case Failed():
                    self._fail(output.reason)

    def _set_deadline(self, phase: LeaderPhase) -> None:
        now = time.monotonic()
        match phase:
            case LeaderPhase.PREPARING:
                self._deadline = self._prepare_deadline = now + self._settings.prepare_seconds_max
            case LeaderPhase.COMMITTING:
                self._deadline = now + self._settings.commit_seconds_max
            case LeaderPhase.ABORTING:
                self._deadline = max(now, self._prepare_deadline) + self._settings.abort_seconds_max
            case LeaderPhase.IDLE | LeaderPhase.FAILED:
                self._deadline = None

    def _send(self, send: Send) -> None:
        try:
            self._tell[send.rank](send.message)
        except LullMemoryError as error:
            _log.warning("rank %d %s", send.rank, error)
            self.lose(send.rank)

    def _fail(self, reason: str) -> None:
        _log.error("the ranks have failed: %s", reason)
        with self._lock:
            self._failure = reason
        self._hang_up()
        self._end(RanksFailed(reason))

    def _end(self, result: bool | BaseException) -> None:
        outcome, self._outcome = self._outcome, None
        if outcome is None:
            return
        if isinstance(result, bool):
            outcome.set_result(result)
        else:
            outcome.set_exception(result)
