"""The socket of a memory service: who may connect, a thread for each client, and the end."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import select
import socket
import struct
import threading
import time
from collections.abc import Collection
from pathlib import Path
from typing import Final

from . import protocol
from .errors import ServiceError, ServiceRefused, to_wire
from .holdings import Holdings
from .requests import Client

PATH_BYTES_MAX: Final = 107  # of a Unix socket
_BACKLOG: Final = 64
_END_SECONDS_MAX: Final = 10.0
_HANG_UP_SECONDS_MAX: Final = 1.0
_ACCEPT_PAUSE_SECONDS: Final = 0.1
_CREDENTIALS: Final = struct.Struct("3i")
_log = logging.getLogger(__name__)


class SocketTaken(ServiceError):
    """The socket cannot be had; the text says why and what to do."""


class Server:
    """The socket of a service. `run` serves until `stop`; the socket's file is gone afterwards."""

    def __init__(self, holdings: Holdings, path: Path, *, allowed_uids: Collection[int] = ()) -> None:
        """Binds. Raises SocketTaken with one line that says what to change."""
        self._holdings = holdings
        self._path = path
        self._allowed_uids = {os.geteuid(), *allowed_uids}
        self._stop = os.eventfd(0, os.EFD_CLOEXEC)
        self._threads: dict[threading.Thread, Client] = {}
        self._guard = threading.Lock()  # of the threads
        self._lock_fd = _lock(path)
        try:
            self._listener = _bind(path)
        except BaseException:
            os.close(self._lock_fd)
            raise

    def stop(self) -> None:
        """Safe in a signal handler."""
        os.eventfd_write(self._stop, 1)

    def run(self) -> None:
        poller = select.poll()
        poller.register(self._listener, select.POLLIN)
        poller.register(self._stop, select.POLLIN)
        try:
            while all(fd != self._stop for fd, _ in poller.poll()):
                self._accept()
        finally:
            self._end()

    def _accept(self) -> None:
        try:
            connection, _ = self._listener.accept()
        except OSError as error:  # the client is gone again, or we have too many descriptors
            _log.warning("a connection was not accepted: %s", error)
            select.select([self._stop], [], [], _ACCEPT_PAUSE_SECONDS)
            return
        connection.settimeout(self._holdings.limits.send_seconds_max)
        pid, uid, _ = _CREDENTIALS.unpack(
            connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        )
        with self._guard:
            self._threads = {thread: client for thread, client in self._threads.items() if thread.is_alive()}
            count = len(self._threads)
        most = self._holdings.limits.clients_max
        if uid not in self._allowed_uids:
            _refuse(connection, f"user {uid} may not use this memory service; its own user is {os.geteuid()}")
        elif count >= most and not self._make_room(count - most + 1):
            _refuse(connection, f"the memory service has {count} clients, and {most} at most; end one of them first")
        else:
            self._start(connection, pid)

    def _start(self, connection: socket.socket, pid: int) -> None:
        served = Client(self._holdings, connection, pid)
        thread = threading.Thread(target=served.run, name=f"lull-memory-client-{pid}", daemon=True)
        with self._guard:
            self._threads[thread] = served
        thread.start()

    def _make_room(self, places: int) -> bool:
        """Hangs up on clients that hold no lock and say nothing; whether there is room for one more then."""
        limits = self._holdings.limits
        silent_until = time.monotonic() - limits.crowded_silent_seconds_max
        with self._guard:
            found = [
                (since, thread, client)
                for thread, client in self._threads.items()
                if (since := client.silent_since) is not None and since <= silent_until
            ]
        chosen = sorted(found, key=lambda one: one[0])[:places]
        if len(chosen) < places:
            return False
        for _, _, client in chosen:
            client.hang_up()
        deadline = time.monotonic() + _HANG_UP_SECONDS_MAX
        for _, thread, _ in chosen:
            thread.join(max(0.0, deadline - time.monotonic()))
        return not any(thread.is_alive() for _, thread, _ in chosen)

    def _end(self) -> None:
        self._holdings.stopping = True
        self._path.unlink(missing_ok=True)
        self._listener.close()
        with self._guard:
            threads = dict(self._threads)
        for client in threads.values():
            client.hang_up()
        deadline = time.monotonic() + _END_SECONDS_MAX
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        os.close(self._stop)
        os.close(self._lock_fd)


def _refuse(connection: socket.socket, text: str) -> None:
    with contextlib.suppress(OSError), connection:
        protocol.send(connection, {"ok": False, "error": to_wire(ServiceRefused(text))})


def _lock(path: Path) -> int:
    """Held for the life of the service, so that of two starts at once one finds the other."""
    if len(os.fsencode(path)) > PATH_BYTES_MAX:
        raise SocketTaken(f"socket {path}: longer than the {PATH_BYTES_MAX} bytes of a Unix socket's path; use another")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = path.parent.stat()
        if status.st_uid != os.geteuid():
            raise SocketTaken(
                f"socket {path}: the folder {path.parent} belongs to user {status.st_uid}; use a folder of its own, "
                "which is made if it is not there"
            )
        if status.st_mode & 0o077:
            raise SocketTaken(
                f"socket {path}: the folder {path.parent} is open to others; use a folder of its own, which is made "
                "private if it is not there"
            )
        fd = os.open(f"{path}.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise SocketTaken(f"socket {path}: {error.strerror}") from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        raise SocketTaken(f"socket {path}: another memory service runs there; stop it or use another socket") from None
    return fd


def _bind(path: Path) -> socket.socket:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.is_socket():
            if _answers(path):
                raise SocketTaken(f"socket {path}: another process listens there; stop it or use another socket")
            path.unlink()  # of a service that was killed: we hold its lock
        elif os.path.lexists(path):
            raise SocketTaken(f"socket {path}: there is a file that is no socket; remove it or use another path")
        before = os.umask(0o177)
        try:
            listener.bind(str(path))
        finally:
            os.umask(before)
        listener.listen(_BACKLOG)
    except OSError as error:
        listener.close()
        raise SocketTaken(f"socket {path}: {error.strerror}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
