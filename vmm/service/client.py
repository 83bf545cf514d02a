"""The engine's end of a connection to the memory service: synchronous, and bounded in every wait."""

from __future__ import annotations

import logging
import os
import select
import socket
import threading
import time
from pathlib import Path
from typing import Any, Final

from ..errors import LullMemoryError
from . import protocol
from .errors import MalformedFrame, ServiceRefused, ServiceUnavailable, from_wire
from .protocol import Message
from .state import Lock

CONNECT_SECONDS_MAX: Final = 30.0
CALL_SECONDS_MAX: Final = 30.0
# A service that answers nobody for so long is stopped or stuck: it is not waited for as one that has work is.
ALIVE_EVERY_SECONDS: Final = 5.0
ALIVE_SECONDS_MAX: Final = 20.0
_RETRY_SECONDS: Final = 0.02
_CONNECT_SECONDS_MIN: Final = 1.0  # for a service that is there and busy
_AFTER_ALL: Final = 1 << 62  # no event has such a number
_log = logging.getLogger(__name__)


class ServiceClient:
    """One connection; its lock, once it has one, lives as long as it does. Thread-safe: one call at a time."""

    def __init__(self, path: Path, *, connect_seconds_max: float = CONNECT_SECONDS_MAX) -> None:
        """Waits for a service that is just starting. Raises ServiceUnavailable."""
        self.path = path
        self._lock = threading.Lock()
        self._socket: socket.socket | None = _connect(path, connect_seconds_max)

    @property
    def connected(self) -> bool:
        """False once a call has failed on the way, or the service has hung up."""
        with self._lock:
            return self._alive()

    @property
    def lost(self) -> bool:
        """Not connected, as far as can be said at once: while a call is under way nothing is known."""
        if not self._lock.acquire(blocking=False):
            return False
        try:
            return not self._alive()
        finally:
            self._lock.release()

    def call(
        self, op: str, *, seconds_max: float = CALL_SECONDS_MAX, fd: int | None = None, **fields: Any
    ) -> tuple[Message, int | None]:
        """The answer with its descriptor, which is the caller's. Raises what the service raised.

        ServiceUnavailable if there was no answer: then the connection is closed, and its lock is gone.
        """
        with self._lock:
            if self._socket is None:
                raise ServiceUnavailable(f"memory service {self.path}: the connection is closed")
            frame = protocol.pack({"op": op, **fields})  # what cannot be sent costs no lock
            try:
                self._socket.settimeout(protocol.FRAME_SECONDS_MAX)
                protocol.send_frame(self._socket, frame, fd)
                self._await_answer(self._socket, seconds_max)
                received = protocol.receive(self._socket, first_byte_seconds_max=protocol.FRAME_SECONDS_MAX)
            except ServiceUnavailable as error:
                self._close()
                raise ServiceUnavailable(f"memory service {self.path}: no answer to {op}, and {error}") from None
            except TimeoutError:
                self._close()
                raise ServiceUnavailable(f"memory service {self.path}: no answer to {op} in {seconds_max} s") from None
            except (OSError, MalformedFrame) as error:
                refusal = self._last_words() if isinstance(error, BrokenPipeError | ConnectionResetError) else None
                self._close()
                if refusal is not None:
                    raise refusal from None
                raise ServiceUnavailable(f"memory service {self.path}: {op}: {error}") from error
            if received is None:
                self._close()
                raise ServiceUnavailable(f"memory service {self.path}: it hung up at {op}")
        answer, answer_fd = received
        if answer.get("ok") is not True:
            protocol.close_quietly(answer_fd)
            raise from_wire(answer.get("error") or {})
        return answer, answer_fd

    def ask(self, op: str, *, seconds_max: float = CALL_SECONDS_MAX, **fields: Any) -> Message:
        """As `call`, for what is answered without a descriptor."""
        answer, fd = self.call(op, seconds_max=seconds_max, **fields)
        protocol.close_quietly(fd)
        return answer

    def ask_fd(self, op: str, *, seconds_max: float = CALL_SECONDS_MAX, **fields: Any) -> tuple[Message, int]:
        """As `call`, for what is answered with a descriptor."""
        answer, fd = self.call(op, seconds_max=seconds_max, **fields)
        if fd is None:
            raise ServiceUnavailable(f"memory service {self.path}: {op} was answered without a descriptor")
        return answer, fd

    def close(self) -> None:
        with self._lock:
            self._close()

    def _await_answer(self, connection: socket.socket, seconds_max: float) -> None:
        """Looks now and then whether the service answers anybody. Raises TimeoutError, and ServiceUnavailable for one
        that is stopped."""
        deadline = time.monotonic() + seconds_max
        while not _is_readable(connection, min(ALIVE_EVERY_SECONDS, max(0.0, deadline - time.monotonic()))):
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 0:
                raise TimeoutError
            try:
                _ask_once(self.path, "events", min(ALIVE_SECONDS_MAX, left_seconds), after=_AFTER_ALL)
            except ServiceRefused:
                continue  # it has no place for one more, which is an answer
            except ServiceUnavailable:
                if not _is_readable(connection, 0):
                    raise

    def _last_words(self) -> LullMemoryError | None:
        """Why a service that has hung up did so, if it said it before our request reached it."""
        assert self._socket is not None, "a call is under way"
        try:
            received = protocol.receive(self._socket, first_byte_seconds_max=0)
        except (OSError, MalformedFrame):
            return None
        if received is None:
            return None
        protocol.close_quietly(received[1])
        return from_wire(received[0].get("error") or {})

    def _alive(self) -> bool:
        if self._socket is None:
            return False
        self._socket.settimeout(0)
        try:
            alive = self._socket.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True
        except OSError:
            alive = False
        if not alive:
            self._close()
        return alive

    def _close(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None


def read_state(path: Path, *, seconds_max: float = 5.0) -> Message:
    """What the service holds, without any lock. Raises ServiceUnavailable."""
    return _ask_once(path, "state", seconds_max)


def read_events(path: Path, *, after: int = 0, seconds_max: float = 5.0) -> list[Message]:
    """The newest events of the service, oldest first, without any lock. Raises ServiceUnavailable."""
    return list(_ask_once(path, "events", seconds_max, after=after)["events"])


def drop_pool(path: Path, name: str) -> None:
    """Clears a pool that nobody uses: by writing it and committing nothing. LockTimeout says who uses it.

    Raises ServiceRefused if there is no such pool.
    """
    client = ServiceClient(path, connect_seconds_max=0)
    try:
        names = sorted(pool["name"] for pool in client.ask("state")["pools"])
        if name not in names:
            raise ServiceRefused(f"memory service {path}: there is no pool {name!r}; it holds [{', '.join(names)}]")
        client.ask(
            "hello",
            version=protocol.VERSION,
            pool=name,
            lock=str(Lock.READ_WRITE),
            wait_seconds=0,
            oom_wait_seconds=0,
        )
    finally:
        client.close()


def _ask_once(path: Path, op: str, seconds_max: float, **fields: Any) -> Message:
    client = ServiceClient(path, connect_seconds_max=0)
    try:
        return client.ask(op, seconds_max=seconds_max, **fields)
    finally:
        client.close()


def _is_readable(connection: socket.socket, seconds_max: float) -> bool:
    poller = select.poll()
    poller.register(connection, select.POLLIN)
    return bool(poller.poll(int(seconds_max * 1000) + 1 if seconds_max else 0))


def _connect(path: Path, seconds_max: float) -> socket.socket:
    deadline = time.monotonic() + seconds_max
    said = False
    while True:
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(max(_CONNECT_SECONDS_MIN, deadline - time.monotonic()))
            connection.connect(os.fspath(path))
        except OSError as error:
            connection.close()
            starting = isinstance(error, FileNotFoundError | ConnectionRefusedError | BlockingIOError)
            if starting and os.path.lexists(path) and not path.is_socket():
                raise ServiceUnavailable(f"memory service {path}: this is no socket; give the service's") from None
            if not starting or time.monotonic() >= deadline:
                waited = f" after {seconds_max:g} s" if seconds_max else ""
                raise ServiceUnavailable(
                    f"memory service {path}: {error.strerror or error}{waited}; is `lull memory-service` running with "
                    "this --socket?"
                ) from error
            if not said:
                said = True
                _log.warning("memory service %s does not answer yet; waiting for it up to %g s", path, seconds_max)
        else:
            return connection
        time.sleep(_RETRY_SECONDS)
