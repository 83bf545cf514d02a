"""The server process: one data directory, one socket, one store, one scheduler loop, one end.

Everything that can be wrong at the start is found before the first request and said in one line. SIGTERM ends it:
open streams end themselves first, since every one of them watches ``Topics.stopping``.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import json
import os
import signal
import socket
import sys
from collections.abc import Generator
from pathlib import Path
from typing import Final

import structlog
import uvicorn
import uvloop
from filelock import FileLock, Timeout

from ..scheduler.errors import SchedulerError
from ..scheduler.loop import SchedulerLoop
from ..scheduler.settings import ServerSettings
from ..scheduler.store import Store
from .app import create_app, installed_version
from .auth import Authenticator, TokenFileError, read_or_create_token
from .process_logs import configure_logging
from .services import Services

GRACE_SECONDS: Final = 1  # for streams that do not end by themselves
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_BACKLOG: Final = 1024
# Unacknowledged bytes for so long mean that the peer is gone. Without it a keep-alive line to a node that was
# unplugged would seem delivered for a quarter of an hour and renew its lease all the while.
_UNACKNOWLEDGED_MILLISECONDS: Final = 45_000

_log = structlog.get_logger("lull.server")


class StartError(Exception):
    """The server cannot start. Its text is the one line that the operator reads."""


def run(settings: ServerSettings, *, insecure: bool = False) -> int:
    """Serves until SIGTERM or SIGINT; the exit code. ``insecure`` allows an address that others can reach."""
    try:
        with _data_directory(settings.data_dir):
            authenticator = Authenticator.of(read_or_create_token(settings.token_path))
            with (
                _listen(settings.host, settings.port, insecure=insecure) as listener,
                asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
            ):
                runner.run(_serve(settings, authenticator, listener))
    except (StartError, TokenFileError, SchedulerError) as error:
        sys.stderr.write(f"lull server: {error}\n")
        return 1
    return 0


async def _serve(settings: ServerSettings, authenticator: Authenticator, listener: socket.socket) -> None:
    store = Store(settings.database_url, queue_jobs_max=settings.queue_jobs_max, lease_seconds=settings.lease_seconds)
    try:
        await store.start()
        configure_logging()  # only now: what cannot start says so in one line of plain text
        app = create_app(
            store,
            authenticator,
            body_bytes_max=settings.body_bytes_max,
            requests_per_second_max=settings.requests_per_second_max,
        )
        loop = SchedulerLoop(store, settings)
        await loop.start()
        try:
            config = uvicorn.Config(
                app,
                http="httptools",
                ws="none",
                log_config=None,
                access_log=False,
                server_header=False,
                backlog=_BACKLOG,
                timeout_keep_alive=75,
                timeout_graceful_shutdown=GRACE_SECONDS,
            )
            services: Services = app.state.services
            await _Server(config, services, settings, store.url).serve(sockets=[listener])
        finally:
            await loop.stop()
    finally:
        await store.close()


class _Server(uvicorn.Server):
    """uvicorn, with an exit code of 0 after SIGTERM, streams that end at once, and a file that says where it is."""

    def __init__(self, config: uvicorn.Config, services: Services, settings: ServerSettings, database: str) -> None:
        super().__init__(config)
        self._services = services
        self._settings = settings
        self._database = database
        self._address_file = settings.data_dir / "server.json"

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        url = _url_of((sockets or [])[0])
        _write_address(self._address_file, url)
        sys.stdout.write(f"lull server listens on {url}\n")
        sys.stdout.flush()
        _log.info(
            "server started",
            url=url,
            version=installed_version(),
            data_dir=str(self._settings.data_dir),
            database=self._database,
        )

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._address_file.unlink(missing_ok=True)
        await super().shutdown(sockets)
        _log.info("server stopped")

    @contextlib.contextmanager
    def capture_signals(self) -> Generator[None]:
        # uvicorn's own raises the signal again at the end, so that SIGTERM would look like a crash.
        loop = asyncio.get_running_loop()
        for number in _SIGNALS:
            loop.add_signal_handler(number, self._on_signal)
        try:
            yield
        finally:
            for number in _SIGNALS:
                loop.remove_signal_handler(number)

    def _on_signal(self) -> None:
        if self.should_exit:
            self.force_exit = True
        self.should_exit = True
        self._services.topics.stop()
        self._services.relays.fail_all("the server is shutting down")


@contextlib.contextmanager
def _data_directory(path: Path) -> Generator[None]:
    """Makes the directory and holds it: two servers on one SQLite file would both decide."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = FileLock(path / "server.lock", timeout=0, mode=0o600)
        lock.acquire()
    except Timeout:
        raise StartError(
            f"another lull server{_who_runs(path)} uses {path}; stop it, or choose another --data-dir"
        ) from None
    except OSError as error:
        raise StartError(f"{path}: the data directory cannot be used: {error.strerror}") from None
    try:
        yield
    finally:
        lock.release()


def _who_runs(path: Path) -> str:
    try:
        found = json.loads((path / "server.json").read_bytes())
        return f" (pid {int(found['pid'])}, {found['url']})"
    except (OSError, ValueError, KeyError, TypeError):
        return ""


@contextlib.contextmanager
def _listen(host: str, port: int, *, insecure: bool) -> Generator[socket.socket]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except socket.gaierror as error:
        raise StartError(f"--host {host}: {error.strerror}") from None
    if not insecure and not all(ipaddress.ip_address(entry[4][0]).is_loopback for entry in found):
        raise StartError(
            f"--host {host} can be reached from other machines, and this server speaks plain HTTP: anybody on the way"
            " could read the token, which runs commands. Listen on 127.0.0.1 and put a proxy with TLS or an SSH"
            " tunnel in front; or say --insecure-i-know"
        )
    family, kind, protocol, _, address = found[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, _UNACKNOWLEDGED_MILLISECONDS)
        try:
            listener.bind(address)
            # At once: with SO_REUSEADDR two sockets may be bound to one port as long as neither listens.
            listener.listen(_BACKLOG)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                text = f"port {port} on {host} is in use; stop what uses it, or choose another --port (0: any)"
            else:
                text = f"cannot listen on {host} port {port}: {error.strerror}"
            raise StartError(text) from None
        yield listener


def _url_of(listener: socket.socket) -> str:
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _write_address(path: Path, url: str) -> None:
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    draft.write_text(json.dumps({"pid": os.getpid(), "url": url}) + "\n")
    draft.rename(path)
