"""Several processes that park and wake as one engine: rank 0 leads, the others follow over a Unix socket.

What is prepared by all ranks is committed by all; whatever goes wrong before that is undone by all. After it, and
whenever a rank dies, does not answer or is not where the others are, the engine is failed on every rank, and the reason
names the rank. How they agree is `ranks_protocol`; a rank's memory is its own Runtime's.
"""

from __future__ import annotations

import logging
import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Final

from .errors import AlreadyParked, RankRefused, RanksFailed, RuntimeFailed, TransitionInProgress, TransitionRefused
from .lifecycle import MemoryState
from .ranks_leader import CLOSED, LeaderThread, RankSettings, RankUndone
from .ranks_protocol import Message, Trouble, Verb
from .ranks_wire import Hello, Link, RankLinkError, StatusAnswer, StatusQuery, Welcome, connect, listen
from .ranks_worker import RankWorker
from .runtime import MemoryStatus, Runtime
from .shielded import in_thread
from .tags import InvalidTag

__all__ = ["RankFollower", "RankLinkError", "RankSettings", "RankedRuntime"]

_HELLO_SECONDS_MAX: Final = 5.0
_THREAD_SECONDS_MAX: Final = _HELLO_SECONDS_MAX + 1  # nothing that a connection's thread waits for takes longer
_REFUSALS: Final = frozenset(kind.__name__ for kind in (AlreadyParked, TransitionInProgress, RuntimeFailed))
_log = logging.getLogger(__name__)


class RankedRuntime:
    """Rank 0: what parks and wakes the whole engine. Thread-safe; everything has a deadline."""

    def __init__(self, runtime: Runtime, path: Path, ranks: int, settings: RankSettings | None = None) -> None:
        """Listens at ``path`` (mode 0600) for ``ranks - 1`` followers. Until all are there, park and wake are refused;
        if they do not come within ``join_seconds_max``, the engine is failed."""
        _require(runtime, ranks=ranks)
        if ranks < 1:
            raise ValueError(f"ranks is {ranks}; the leader itself is one")
        path = Path(path)
        self.runtime = runtime
        self._path = path
        self._ranks = ranks
        self._settings = settings or RankSettings()
        self._condition = threading.Condition()  # guards what follows
        self._links: dict[int, Link] = {}
        self._threads: list[threading.Thread] = []
        self._busy: str | None = None
        self._answers: dict[int, StatusAnswer] = {}
        self._query = 0
        self._closed = False
        self._worker = RankWorker(runtime, lambda message: self._leader.hear(0, message))
        tell: dict[int, Callable[[Message], None]] = {rank: self._teller(rank) for rank in range(1, ranks)}
        self._listener = listen(path, backlog=ranks) if ranks > 1 else None
        self._leader = LeaderThread(ranks, self._settings, {0: self._worker.hear, **tell}, self._hang_up)
        if self._listener is not None:
            self._threads.append(threading.Thread(target=self._accept, name="lull-ranks-accept", daemon=True))
            self._threads[0].start()

    @property
    def failure(self) -> str | None:
        """Why the engine is failed. Names the ranks that are the reason."""
        return self._leader.failure or self.runtime.failure or (CLOSED if self._closed else None)

    def wait_joined(self, seconds_max: float) -> bool:
        """True when every rank is there."""
        with self._condition:
            return self._condition.wait_for(lambda: not self._missing(), seconds_max)

    def release(self, tags: Sequence[str] | None = None) -> None:
        """Parks the tags on every rank, or on none: see `Runtime.release`. Raises RankRefused where a rank could not,
        RanksFailed where it could not be undone."""
        self._operate(Verb.RELEASE, tags)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        self._operate(Verb.RESUME, tags)

    async def release_async(self, tags: Sequence[str] | None = None) -> None:
        await in_thread("park-ranks", lambda: self.release(tags))

    async def resume_async(self, tags: Sequence[str] | None = None) -> None:
        await in_thread("wake-ranks", lambda: self.resume(tags))

    def status(self) -> MemoryStatus:
        """What every rank says; if they do not agree, or one does not answer in time, the engine is failed by that.

        While a park or wake is under way it is rank 0's own, since the others may be a step ahead or behind. After
        `close` it is failed.
        """
        with self._condition:
            if self._closed:
                return MemoryStatus(MemoryState.FAILED, self.runtime.status().parked_tags)
            if self.failure is not None or self._busy == "operation" or self._missing():
                return self.runtime.status()
            if not self._condition.wait_for(lambda: self._busy is None, self._settings.status_seconds_max):
                return self.runtime.status()
            self._busy = "status"
            self._query += 1
            self._answers.clear()
            query, links = StatusQuery(self._query), dict(self._links)
        try:
            own = status_answer(self.runtime, query.number)
            silent = self._ask(query, links)
            differences = [
                f"rank {rank} {'is ' + answer.state if answer.state != own.state else 'has other tags parked'}"
                f"{': ' + answer.failure if answer.failure else ''}"
                for rank, answer in sorted(self._answers.items())
                if _differs(own, answer)
            ]
            differences += [f"rank {rank} did not say its state in time" for rank in silent]
            if differences and self.failure is None:
                self._leader.fail(f"ranks disagree: rank 0 is {own.state}, {', '.join(differences)}")
            parked = {tag for answer in (own, *self._answers.values()) for tag in answer.parked_tags}
        finally:
            self._free()
        now = self.runtime.status()
        return MemoryStatus(now.state, tuple(sorted(parked))) if now.state == own.state else now

    def close(self) -> None:
        """Ends leading: the other ranks lose their leader by it, and this is failed. The Runtime goes on alone."""
        with self._condition:
            if self._closed:
                return
            self._closed = True
        self._stop_listening()
        self._leader.close()  # first, so that it takes no hanging up for a death
        self._hang_up()
        for thread in tuple(self._threads):
            thread.join(_THREAD_SECONDS_MAX)
        self._worker.close()

    # -- operations

    def _operate(self, verb: Verb, tags: Sequence[str] | None) -> None:
        with self._condition:
            if self.failure is not None:
                raise RanksFailed(f"Cannot {verb} memory while state is failed ({self.failure}); replace the engine")
            if missing := self._missing():
                raise TransitionInProgress(f"Cannot {verb} memory: rank(s) {missing} have not joined; wait for them")
            if self._busy == "status":
                self._condition.wait_for(lambda: self._busy is None, 2 * self._settings.status_seconds_max)
            if self._busy is not None:
                raise TransitionInProgress(f"Cannot {verb} memory while another park or wake is under way; wait for it")
            self._busy = "operation"
        try:
            self._leader.operate(verb, None if tags is None else tuple(tags))
        except RankUndone as undone:
            raise self._error(undone.trouble, verb) from None
        finally:
            self._free()

    def _error(self, trouble: Trouble, verb: Verb) -> BaseException:
        if trouble.rank == 0 and self._worker.error is not None:
            return self._worker.error
        if trouble.error == InvalidTag.__name__:
            return InvalidTag(trouble.reason)
        who = "" if trouble.rank is None else f"rank {trouble.rank}: "
        text = f"{who}{trouble.reason}; the {verb} was undone on every rank"
        return TransitionRefused(text) if trouble.error in _REFUSALS else RankRefused(text)

    def _free(self) -> None:
        with self._condition:
            self._busy = None
            self._condition.notify_all()

    def _ask(self, query: StatusQuery, links: dict[int, Link]) -> list[int]:
        """The ranks that did not answer in time; one that is gone is lost, which is another matter."""
        for rank, link in links.items():
            try:
                link.send(query)
            except RankLinkError:
                self._leader.lose(rank)
        with self._condition:
            self._condition.wait_for(
                lambda: self.failure is not None or self._answers.keys() >= links.keys(),
                self._settings.status_seconds_max,
            )
            return [] if self.failure is not None else sorted(links.keys() - self._answers.keys())

    # -- connections

    def _missing(self) -> list[int]:
        return [rank for rank in range(1, self._ranks) if rank not in self._links]

    def _teller(self, rank: int) -> Callable[[Message], None]:
        def tell(message: Message) -> None:
            with self._condition:
                link = self._links.get(rank)
            if link is None:
                raise RankLinkError("has not joined")
            link.send(message)

        return tell

    def _hang_up(self) -> None:
        with self._condition:
            links = list(self._links.values())
            self._condition.notify_all()
        for link in links:
            link.hang_up()

    def _accept(self) -> None:
        """One after the other: a stranger costs at most the time in which it has to say who it is."""
        assert self._listener is not None, "only with other ranks"
        deadline = time.monotonic() + self._settings.join_seconds_max
        while missing := self._missing_unless_closed():
            try:
                self._listener.settimeout(max(0.01, deadline - time.monotonic()))
                connection, _ = self._listener.accept()
                connection.settimeout(None)
                rank, link = self._joined(connection)
            except TimeoutError:
                self._leader.fail(f"rank(s) {missing} did not join within {self._settings.join_seconds_max} s")
                break
            except RankLinkError as error:
                _log.warning("a process that wanted to be a rank %s", error)
                continue
            except OSError:
                break  # closed
            thread = threading.Thread(target=self._listen_to, args=(rank, link), name=f"lull-rank-{rank}", daemon=True)
            with self._condition:
                self._links[rank] = link
                thread.start()
                self._threads.append(thread)
                self._condition.notify_all()
        self._stop_listening()

    def _missing_unless_closed(self) -> list[int]:
        with self._condition:
            return [] if self._closed else self._missing()

    def _joined(self, connection: socket.socket) -> tuple[int, Link]:
        link = Link(connection)
        try:
            hello = link.receive(_HELLO_SECONDS_MAX)
            if not isinstance(hello, Hello):
                raise RankLinkError("did not say who it is")
            refusal = self._refusal(hello)
            link.send(Welcome(refusal))
            if refusal:
                raise RankLinkError(f"was refused: {refusal}")
        except RankLinkError:
            link.close()
            raise
        return hello.rank, link

    def _refusal(self, hello: Hello) -> str:
        if hello.ranks != self._ranks:
            return f"it counts {hello.ranks} ranks, the leader {self._ranks}"
        if hello.rank not in range(1, self._ranks):
            return f"there is no rank {hello.rank} to follow: they are 1 to {self._ranks - 1}"
        with self._condition:
            return f"rank {hello.rank} is here already" if hello.rank in self._links else ""

    def _listen_to(self, rank: int, link: Link) -> None:
        try:
            while True:
                frame = link.receive()
                if isinstance(frame, Message):
                    self._leader.hear(rank, frame)
                elif isinstance(frame, StatusAnswer):
                    with self._condition:
                        if frame.number == self._query:
                            self._answers[rank] = frame
                            self._condition.notify_all()
                else:
                    raise RankLinkError(f"sent a {type(frame).__name__}, which no rank sends")
        except RankLinkError as error:
            _log.info("rank %d %s", rank, error)
            self._leader.lose(rank)
        finally:
            link.close()

    def _stop_listening(self) -> None:
        if self._listener is None:
            return
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        self._path.unlink(missing_ok=True)


class RankFollower:
    """Every other rank: its Runtime is parked and woken by the leader. It fails when its leader is gone."""

    def __init__(
        self, runtime: Runtime, path: Path, rank: int, ranks: int, settings: RankSettings | None = None
    ) -> None:
        """Returns when the leader has taken it in. Raises RankLinkError if that is not within ``join_seconds_max``, or
        if the leader refuses."""
        _require(runtime, rank=rank, ranks=ranks)
        path = Path(path)
        self.runtime = runtime
        join_seconds_max = (settings or RankSettings()).join_seconds_max
        pause = threading.Event()
        self._link = connect(path, join_seconds_max, pause.wait, time.monotonic)
        try:
            self._link.send(Hello(rank, ranks))
            welcome = self._link.receive(join_seconds_max)
            if not isinstance(welcome, Welcome) or welcome.refusal:
                raise RankLinkError(f"the leader refused rank {rank}: {getattr(welcome, 'refusal', welcome)}")
        except RankLinkError:
            self._link.close()
            raise
        self._worker = RankWorker(runtime, self._answer)
        self._thread = threading.Thread(target=self._listen, name="lull-rank-follow", daemon=True)
        self._thread.start()

    def wait(self, seconds_max: float | None = None) -> bool:
        """Until the leader is gone, or has failed the engine: True. False if ``seconds_max`` have passed."""
        self._thread.join(seconds_max)
        return not self._thread.is_alive()

    def close(self) -> None:
        """Leaves: the engine is failed by it."""
        self._link.hang_up()
        self._thread.join()
        self._worker.close()
        self._link.close()

    def _answer(self, frame: Message | StatusAnswer) -> None:
        try:
            self._link.send(frame)
        except RankLinkError as error:
            # The thread that listens hears it too, after what the leader has said before.
            _log.warning("the leader %s", error)

    def _listen(self) -> None:
        try:
            while True:
                frame = self._link.receive()
                if isinstance(frame, Message):
                    self._worker.hear(frame)
                elif isinstance(frame, StatusQuery):
                    self._answer(status_answer(self.runtime, frame.number))
                else:
                    raise RankLinkError(f"sent a {type(frame).__name__}, which no leader sends")
        except RankLinkError as error:
            _log.warning("the leader %s", error)
        finally:
            self._link.hang_up()
            self._worker.lose_leader()


def _require(runtime: object, **numbers: object) -> None:
    if not isinstance(runtime, Runtime):
        raise TypeError(f"runtime is {runtime!r}; it must be a Runtime")
    for name, value in numbers.items():
        if type(value) is not int:
            raise TypeError(f"{name} is {value!r}; it must be a whole number")


def status_answer(runtime: Runtime, number: int) -> StatusAnswer:
    status = runtime.status()
    return StatusAnswer(number, status.state, status.parked_tags, runtime.known_tags(), runtime.failure or "")


def _differs(one: StatusAnswer, other: StatusAnswer) -> bool:
    """A tag that one of them does not have says nothing."""
    both = set(one.known_tags) & set(other.known_tags)
    return one.state != other.state or bool((set(one.parked_tags) ^ set(other.parked_tags)) & both)
