"""A rank's own part: turns what it is told into calls of its Runtime, and their outcomes into answers."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable
from typing import Final

from .ranks_protocol import Act, Event, Message, Phase, Rank, Step, Verb
from .runtime import Runtime

LEADER_LOST: Final = "the leader of its ranks is gone"
_CLOSE_SECONDS_MAX: Final = 5.0
_log = logging.getLogger(__name__)


class RankWorker:
    """`hear` and `lose_leader` return at once: parks and wakes run in a thread of their own, one at a time."""

    def __init__(self, runtime: Runtime, answer: Callable[[Message], None]) -> None:
        """``answer`` must not block for long, nor call back."""
        self.runtime = runtime
        self.error: BaseException | None = None
        """What the last preparation that did not succeed raised."""
        self._answer = answer
        self._lock = threading.Lock()  # guards the next three, and keeps answers in order
        self._rank = Rank()
        self._newest: Message | None = None  # the prepare of the newest operation
        self._reason = LEADER_LOST
        self._acts: queue.SimpleQueue[Act | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="lull-rank", daemon=True)
        self._thread.start()

    @property
    def failed(self) -> bool:
        with self._lock:
            return self._rank.phase is Phase.FAILED

    def hear(self, message: Message) -> None:
        with self._lock:
            self._rank, step = self._rank.hear(message)
            if step.act is Act.PREPARE:
                self._newest = message
            self._follow(step, message.reason)

    def lose_leader(self) -> None:
        with self._lock:
            self._rank, step = self._rank.lose_leader()
            self._follow(step, LEADER_LOST)

    def close(self) -> None:
        """Does nothing more after what it is doing now, which may be a drain; it is waited for a moment only."""
        self._acts.put(None)
        self._thread.join(_CLOSE_SECONDS_MAX)

    def _follow(self, step: Step, reason: str = "", error: BaseException | None = None) -> None:
        if step.act is Act.FAIL:
            self.runtime.fail(reason)  # returns at once, whatever the worker is doing
        elif step.act is not None:
            self._reason = reason
            self._acts.put(step.act)
        if step.answer is not None:
            name = "" if error is None else type(error).__name__
            self._answer(
                Message(step.answer, self._rank.operation, error=name, reason="" if error is None else str(error))
            )

    def _work(self) -> None:
        while (act := self._acts.get()) is not None:
            if act is Act.ABORT_AND_FAIL:
                self._abort_and_fail()
                continue
            event, error = self._do(act)
            if event is Event.DID_NOT_COMMIT:
                # If it has failed before the commit began, the runtime refuses it and still holds what it prepared.
                self._undo()
            with self._lock:
                if event is Event.DID_NOT_PREPARE:
                    self.error = error
                self._rank, step = self._rank.end(event)
                self._follow(step, error=error)

    def _do(self, act: Act) -> tuple[Event, BaseException | None]:
        assert self._newest is not None, "nothing is done without a prepare"
        releasing = self._newest.verb is Verb.RELEASE
        try:
            if act is Act.PREPARE:
                prepare = self.runtime.prepare_release if releasing else self.runtime.prepare_resume
                return (Event.DID_PREPARE if prepare(self._newest.tags) else Event.DID_NOTHING), None
            if act is Act.COMMIT:
                (self.runtime.commit_release if releasing else self.runtime.commit_resume)()
                return Event.DID_COMMIT, None
            (self.runtime.abort_release if releasing else self.runtime.abort_resume)()
        except BaseException as error:  # noqa: BLE001  whatever it is, the leader is told, and decides
            wrong = {
                Act.PREPARE: Event.DID_NOT_PREPARE,
                Act.COMMIT: Event.DID_NOT_COMMIT,
                Act.ABORT: Event.DID_NOT_ABORT,
            }
            return wrong[act], error
        return Event.DID_ABORT, None

    def _undo(self) -> None:
        """No change unless something is prepared."""
        event, error = self._do(Act.ABORT)
        if event is Event.DID_NOT_ABORT:
            _log.error("what was prepared could not be undone: %s", error)

    def _abort_and_fail(self) -> None:
        self._undo()
        with self._lock:
            reason = self._reason
        self.runtime.fail(reason)
