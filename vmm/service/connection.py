"""One client of the memory service, from its first frame to its end.

A connection asks for one lock on one pool and is that lock until it ends, however it ends. What the client got wrong is
answered; what is no request at all closes the connection, and nothing else.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import select
import socket
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Final, TypeVar

from ..errors import LullMemoryError, OutOfDeviceMemory
from ..host_device import process_key
from . import protocol
from .errors import InvalidRequest, LockTimeout, MalformedFrame, ServiceRefused, WrongLock, to_wire
from .held_pool import HeldPool
from .holdings import Holdings
from .protocol import HASH_PATTERN, POOL_PATTERN, Fields, Message
from .state import Lock, Phase, Session, Todo
from .survivors import may_write

_SURVIVOR_LOOK_SECONDS: Final = 0.02
_HUNG_UP: Final = select.POLLRDHUP | select.POLLHUP | select.POLLERR
_log = logging.getLogger(__name__)
_T = TypeVar("_T")

Answer = tuple[Message, int | None]  # with a descriptor that is closed once it is sent
Handler = Callable[[Fields, int | None], Answer]


class ClientGone(Exception):
    """The client has hung up while something was done for it."""


class Connection(ABC):
    """The part that every client has: frames, the lock, waiting, the end. Requests are in `requests`."""

    def __init__(self, holdings: Holdings, connection: socket.socket, pid: int) -> None:
        self.holdings = holdings
        self._socket = connection
        self._pid = pid
        self._process = process_key(pid)  # None: in another pid namespace, so nothing can be said about it
        self._pool: HeldPool | None = None
        self._session: Session | None = None
        self.silent_since: float | None = time.monotonic()  # without a lock, and nothing is done for it
        self._waker = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._handlers: dict[str, Handler] = {
            "state": self._state,
            "events": self._events,
            "hello": self._hello,
            "resume": self._resume,
            **self.requests(),
        }

    @abstractmethod
    def requests(self) -> dict[str, Handler]:
        """What may be asked under a lock."""

    def run(self) -> None:
        """Until the client hangs up or breaks the protocol. Never raises."""
        try:
            self._serve()
        except MalformedFrame as error:
            _log.warning("client %d: %s; its connection is closed", self._pid, error)
            with contextlib.suppress(OSError):
                protocol.send(self._socket, {"ok": False, "error": to_wire(error)})
        except (OSError, ClientGone) as error:
            _log.info("client %d: %s", self._pid, error or "has gone")
        except Exception:  # noqa: BLE001  a fault of ours in one connection must not end the others
            _log.exception("client %d: its connection is closed", self._pid)
        finally:
            self._end()

    def hang_up(self) -> None:
        """From another thread: its own finds the end of the stream."""
        with contextlib.suppress(OSError):  # closed already
            self._socket.shutdown(socket.SHUT_RDWR)

    def _serve(self) -> None:
        limits = self.holdings.limits
        while True:
            patience = limits.silent_seconds_max if self._session is None else None
            self.silent_since = time.monotonic() if self._session is None else None
            received = protocol.receive(self._socket, first_byte_seconds_max=patience)
            self.silent_since = None
            if received is None:
                return
            self._socket.settimeout(limits.send_seconds_max)
            message, fd = received
            try:
                answer, fd_out = self._answer(message, fd)
            finally:
                protocol.close_quietly(fd)
            try:
                protocol.send(self._socket, answer, fd_out)
            finally:
                protocol.close_quietly(fd_out)

    def _answer(self, message: Message, fd: int | None) -> Answer:
        name = message.pop("op", None)
        handler = self._handlers.get(name) if isinstance(name, str) else None
        if handler is None:
            raise MalformedFrame(f"op is {str(name)[:80]!r}; this service knows no such request")
        if fd is not None and name != "donate":
            raise MalformedFrame(f"{name} takes no descriptor")
        if self._session is None and name not in ("state", "events", "hello"):
            raise MalformedFrame(f"{name} comes before hello")
        try:
            content, fd_out = handler(Fields(message), fd)
        except MalformedFrame:
            raise
        except LullMemoryError as error:
            return {"ok": False, "error": to_wire(error)}, None
        return {"ok": True, **content}, fd_out

    # -- without a lock

    def _state(self, fields: Fields, _fd: int | None) -> Answer:
        fields.end()
        return self.holdings.describe(), None

    def _events(self, fields: Fields, _fd: int | None) -> Answer:
        after = fields.integer("after", 0, 1 << 62)
        fields.end()
        with self.holdings.mutex:
            events = self.holdings.events.after(after)
        shown = [{"number": e.number, "at": e.at, "kind": e.kind, "pool": e.pool, "data": e.data} for e in events]
        return {"events": shown}, None

    def _hello(self, fields: Fields, _fd: int | None) -> Answer:
        version = fields.integer("version", 0, 1 << 31)
        if version != protocol.VERSION:
            text = (
                f"protocol version {version} is spoken; this service speaks {protocol.VERSION}: update the older side"
            )
            raise ServiceRefused(text)
        name = fields.text("pool", POOL_PATTERN)
        lock = Lock(fields.text("lock", _LOCK_PATTERN))
        wait_seconds, oom_wait_seconds = fields.seconds("wait_seconds"), fields.seconds("oom_wait_seconds")
        expected = fields.optional_text("expect_layout", HASH_PATTERN)
        fields.end()
        if self._session is not None:
            raise MalformedFrame("hello comes twice")
        if lock is Lock.PARKED and expected is None:
            raise InvalidRequest("expect_layout is missing; whoever is parked knows its layout")
        with self.holdings.mutex:
            self._pool = self.holdings.pool(name)
            number = self.holdings.new_session(self._waker)
            now = time.monotonic()
            data = self._pool.state.data
            if data is not None and data.survivor is not None and data.survivor == self._process:
                data.survivor_gone(back=True)
            self._session = self._pool.state.request(number, self._pid, lock, now, wait_seconds, expected)
        return self._granted(oom_wait_seconds)

    def _resume(self, fields: Fields, _fd: int | None) -> Answer:
        wait_seconds, oom_wait_seconds = fields.seconds("wait_seconds"), fields.seconds("oom_wait_seconds")
        expected = fields.text("expect_layout", HASH_PATTERN)
        fields.end()
        pool, session = self.held()
        with self.holdings.mutex:
            pool.state.request_again(session, time.monotonic(), wait_seconds, expected)
        return self._granted(oom_wait_seconds)

    def _granted(self, oom_wait_seconds: float) -> Answer:
        """Waits for the lock, and makes the pool what the lock promises."""
        pool, session = self.held()
        try:
            self._wait_for_lock(pool, session)
            if session.refusal is not None:
                raise session.refusal
            if session.phase is Phase.WRITER:
                self.clear(pool)
            elif session.phase is Phase.WAKER:
                self.wake(pool, session, oom_wait_seconds)
        except LullMemoryError:
            if session.phase is Phase.REFUSED:  # it may ask for another lock on this connection
                self._leave()
            raise
        with self.holdings.mutex:
            content = {
                "granted": _GRANTED[session.phase],
                "session": session.number,
                "generation": pool.state.generation,
                "layout_hash": pool.state.layout_hash,
                "device": self.holdings.driver.device_uuid,
                **self.seal_facts(pool),
            }
        return content, None

    def seal_facts(self, pool: HeldPool) -> Message:
        """Which seal a data writer has, and how many have had it before; nothing for others."""
        data = pool.state.data
        return {} if data is None else {"seal": data.identity, "grants": data.grants}

    def _wait_for_lock(self, pool: HeldPool, session: Session) -> None:
        while True:
            with self.holdings.mutex:
                survives = _look_at_survivor(pool)
                self.holdings.settle(pool)
                if session.phase is not Phase.WAITING:
                    return
            soon = time.monotonic() + _SURVIVOR_LOOK_SECONDS
            self._wait_for_change(min(session.deadline, soon) if survives else session.deadline)

    def clear(self, pool: HeldPool) -> None:
        with self.holdings.mutex:
            allocations = len(pool.layout.slots)
            handles, backups = pool.take_contents()
        try:
            for handle in handles:
                pool.give_up(handle)
            for backup in backups:
                backup.free()
        finally:
            with self.holdings.mutex:
                pool.state.cleared(allocations)

    def wake(self, pool: HeldPool, session: Session, oom_wait_seconds: float) -> None:
        done = False
        try:
            self.retry_while_full(pool, pool.wake, oom_wait_seconds)
            done = True
        finally:
            with self.holdings.mutex:
                pool.state.woken(session, time.monotonic(), done=done)
                self.holdings.settle(pool)

    # -- for requests

    def held(self) -> tuple[HeldPool, Session]:
        assert self._pool is not None, "hello was"
        assert self._session is not None, "hello was"
        return self._pool, self._session

    def holding(self, *phases: Phase) -> HeldPool:
        pool, session = self.held()
        if session.phase not in phases:
            raise WrongLock(f"pool {pool.name}: this connection is {session.phase}, not {' or '.join(phases)}")
        return pool

    def writing(self) -> HeldPool:
        return self.holding(Phase.WRITER)

    def when_quiet(self, pool: HeldPool, ask: Callable[[], Todo]) -> Todo:
        """``ask()`` under the mutex, again after each change while another client's park or wake is under way."""
        deadline = time.monotonic() + self.holdings.limits.park_seconds_max
        while True:
            with self.holdings.mutex:
                todo = ask()
                self.holdings.settle(pool)
            if todo is not Todo.WAIT:
                return todo
            if time.monotonic() >= deadline:
                raise LockTimeout(f"pool {pool.name}: another client's {pool.state.activity} does not end")
            self._wait_for_change(deadline)

    def retry_while_full(self, pool: HeldPool, work: Callable[[], _T], seconds_max: float) -> _T:
        """Asks again while the device has no room, within the bound and while the client is there."""
        limits = self.holdings.limits
        deadline = time.monotonic() + min(seconds_max, limits.oom_wait_seconds_max)
        said = False
        while True:
            try:
                return work()
            except OutOfDeviceMemory as error:
                if not said:
                    said = True
                    self._say_full(pool, error)
                left_seconds = deadline - time.monotonic()
                if left_seconds <= 0:
                    raise
            self._pause(min(limits.oom_retry_seconds, left_seconds))

    def park(self, pool: HeldPool, session: Session | None) -> None:
        done = False
        try:
            if not pool.state.backup_clean:
                pool.back_up(pinned=pool.pinned)
            pool.give_back()
            done = True
        finally:
            with self.holdings.mutex:
                pool.state.parked(session, done=done)
                self.holdings.settle(pool)

    def _say_full(self, pool: HeldPool, error: OutOfDeviceMemory) -> None:
        with self.holdings.mutex:
            self.holdings.events.add(
                "allocation_oom",
                pool.name,
                pid=self._pid,
                requested_bytes=error.requested_bytes,
                free_bytes=error.free_bytes,
            )

    def _wait_for_change(self, deadline: float) -> None:
        """Returns when something about the pool has changed or the time has come."""
        self._pause(max(0.0, deadline - time.monotonic()), self._waker)
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._waker)

    def _pause(self, seconds: float, waker: int | None = None) -> None:
        poller = select.poll()
        poller.register(self._socket, _HUNG_UP)
        if waker is not None:
            poller.register(waker, select.POLLIN)
        # Rounded up: a wait that ends early would only be begun again.
        if any(fd == self._socket.fileno() for fd, _ in poller.poll(int(seconds * 1000) + 1)):
            raise ClientGone("hung up")

    def _end(self) -> None:
        try:
            self._leave()
        except Exception:  # noqa: BLE001  the thread ends here: nobody else could say it
            _log.exception("client %d: what it held could not be cleared", self._pid)
        finally:
            self._socket.close()
            os.close(self._waker)

    def _leave(self) -> None:
        if self._session is None or self._pool is None:
            return
        pool, session = self._pool, self._session
        self._pool = self._session = None
        lives = session.holds_data and self._process is not None and may_write(self._process)
        with self.holdings.mutex:
            todo = pool.state.gone(session, self._process if lives else None)
        try:
            if todo is Todo.CLEAR:
                self.clear(pool)
            elif todo is Todo.PARK and not self.holdings.stopping:
                self.park(pool, None)
        finally:
            with self.holdings.mutex:
                self.holdings.leave(pool, session.number)


def _look_at_survivor(pool: HeldPool) -> bool:
    """Whether a data writer that has lost its connection lives still; when it has ended, all may be torn."""
    data = pool.state.data
    if data is None or data.survivor is None:
        return False
    if may_write(data.survivor):
        return True
    data.survivor_gone(back=False)
    return False


_LOCK_PATTERN: Final = re.compile("|".join(Lock))
_GRANTED: Final = {
    Phase.WRITER: str(Lock.READ_WRITE),
    Phase.READER: str(Lock.READ_ONLY),
    Phase.DATA_WRITER: str(Lock.WRITE_DATA),
    Phase.PARKED: str(Lock.PARKED),
}
