"""The gateway as a process: its lock, sockets, pid file and end.

One gateway for one control socket: a lock file beside it is held for the process's life, so a socket that is found
without its lock held is stale and is replaced. SIGTERM: nothing new is taken, held requests are refused, what is in
flight may end within a bound; a second SIGTERM ends at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import logging.handlers
import os
import resource
import signal
import socket
import stat
import sys
from pathlib import Path
from typing import Final

import uvloop
from aiohttp import web

from ..processes import identity
from .admission import Refusal
from .control import Control
from .relay import Relay
from .routes import RouteTable
from .settings import GatewaySettings

_log = logging.getLogger(__name__)

_BACKLOG: Final = 1024
_LOG_BYTES_MAX: Final = 8 * 2**20
_SOCKET_PATH_BYTES_MAX: Final = 107  # sockaddr_un


class CannotStart(Exception):
    """The operator has to change something; the text says what."""


class ControlSocket:
    """The Unix socket that only this gateway owns."""

    def __init__(self, path: Path) -> None:
        self.path = path
        if len(os.fsencode(path)) > _SOCKET_PATH_BYTES_MAX:
            raise CannotStart(f"--control {path}: a socket's path has at most {_SOCKET_PATH_BYTES_MAX} bytes")
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        lock_path = path.with_name(path.name + ".lock")
        self._lock = os.open(lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(self._lock)
            raise CannotStart(f"another gateway is running with --control {path}; stop it first") from None
        try:
            self.listener = self._bind()
        except BaseException:
            os.close(self._lock)
            raise

    def _bind(self) -> socket.socket:
        try:
            kind = os.lstat(self.path).st_mode
        except FileNotFoundError:
            pass
        else:
            if not stat.S_ISSOCK(kind):
                raise CannotStart(f"--control {self.path} exists and is no socket; choose another path")
            self.path.unlink()
        listener = socket.socket(socket.AF_UNIX)
        # The mode has to be right from the first moment; nothing else runs in this process yet.
        umask = os.umask(0o177)
        try:
            listener.bind(str(self.path))
        except BaseException:
            listener.close()
            raise
        finally:
            os.umask(umask)
        return listener

    def close(self) -> None:
        self.path.unlink(missing_ok=True)
        self.listener.close()
        os.close(self._lock)


def _bind_public(settings: GatewaySettings) -> socket.socket:
    try:
        return socket.create_server(
            (settings.host, settings.port),
            family=socket.AF_INET6 if ":" in settings.host else socket.AF_INET,
            backlog=_BACKLOG,
        )
    except OSError as error:
        where = f"--listen {settings.host}:{settings.port}"
        if error.errno == errno.EADDRINUSE:
            raise CannotStart(f"{where}: the port is in use by another process; choose another one") from None
        raise CannotStart(f"{where}: {error.strerror or error}") from None


class Gateway:
    """All of one running gateway."""

    def __init__(self, settings: GatewaySettings) -> None:
        self.settings = settings
        files_max = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
        limits = settings.limits
        if files_max != resource.RLIM_INFINITY:
            limits = limits.within_files(files_max)
        self.routes = RouteTable(settings.state_dir, limits, reuse_connections=settings.reuse_connections)
        self.relay = Relay(self.routes, limits)
        self._control: Control | None = None
        self._control_runner: web.AppRunner | None = None
        self._control_socket: ControlSocket | None = None
        self._server: asyncio.Server | None = None
        self.listen = ""

    async def start(self) -> None:
        settings = self.settings
        settings.state_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        settings.pid_file.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._control_socket = ControlSocket(settings.control)
        try:
            public = _bind_public(settings)
        except BaseException:
            self._control_socket.close()
            raise
        host = f"[{settings.host}]" if ":" in settings.host else settings.host
        self.listen = f"{host}:{public.getsockname()[1]}"
        me = identity(os.getpid())
        assert me is not None
        self.routes.load()
        self._control = Control(self.routes, me, self.listen)
        control_runner = web.AppRunner(self._control.app(), access_log=None, shutdown_timeout=1.0)
        await control_runner.setup()
        self._control_runner = control_runner
        self._server = await asyncio.get_running_loop().create_server(
            self.relay.protocol, sock=public, backlog=_BACKLOG
        )
        await web.SockSite(control_runner, self._control_socket.listener).start()
        try:
            _write_pid_file(settings.pid_file, me.pid)
        except OSError as error:  # the control socket knows the pid as well
            _log.error("%s is not written: %s", settings.pid_file, error)
        _log.info("listening on http://%s, control %s", self.listen, settings.control)

    async def stop(self, hurry: asyncio.Event) -> None:
        """``hurry`` cuts the time for what is in flight short."""
        assert self._server is not None
        assert self._control is not None
        assert self._control_runner is not None
        assert self._control_socket is not None
        self._server.close()
        self.relay.stop()
        for route in self.routes:
            route.admission.close(route.admission.terms)
        for route in self.routes:  # once all are closed: what waits at one that closes may move to another
            route.admission.refuse_held(Refusal.STOPPING)
        await self._finish_in_flight(hurry)
        self._control.stopping.set()
        await self._control_runner.cleanup()
        self.relay.abort()
        await asyncio.sleep(0)  # connections are lost in the next turn of the loop; that hangs up
        for route in self.routes:
            route.cut()
            route.renew_connections()
        _remove_pid_file(self.settings.pid_file, os.getpid())
        self._control_socket.close()
        _log.info("stopped")

    async def _finish_in_flight(self, hurry: asyncio.Event) -> None:
        seconds_max = self.settings.limits.stop_seconds_max
        hurried = asyncio.ensure_future(hurry.wait())
        ended = asyncio.ensure_future(self.relay.wait_empty())
        try:
            async with asyncio.timeout(seconds_max):
                await asyncio.wait({hurried, ended}, return_when=asyncio.FIRST_COMPLETED)
        except TimeoutError:
            pass
        finally:
            hurried.cancel()
            ended.cancel()
        if self.relay.requests or self.relay.connections:
            left = (self.relay.requests, len(self.relay.connections))
            _log.warning("stopping with %d requests in flight and %d clients connected", *left)
        for route in self.routes:
            route.cut()


def _write_pid_file(path: Path, pid: int) -> None:
    fresh = path.with_name(path.name + ".new")
    try:
        fresh.write_text(f"{pid}\n", encoding="ascii")
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()
        raise


def _remove_pid_file(path: Path, pid: int) -> None:
    try:
        if path.read_text(encoding="ascii").strip() == str(pid):
            path.unlink()
    except FileNotFoundError:
        pass


def _log_to(path: Path | None) -> None:
    handler: logging.Handler
    if path is None:
        handler = logging.StreamHandler(sys.stderr)
    else:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        handler = logging.handlers.RotatingFileHandler(path, maxBytes=_LOG_BYTES_MAX, backupCount=1, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO, handlers=[handler])
    # A client that sends garbage gets its 400; it does not get a traceback into our log.
    logging.getLogger("aiohttp.server").setLevel(logging.CRITICAL)


async def _serve(settings: GatewaySettings) -> None:
    loop = asyncio.get_running_loop()
    stop, hurry = asyncio.Event(), asyncio.Event()

    def on_signal() -> None:
        (hurry if stop.is_set() else stop).set()

    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, on_signal)
    gateway = Gateway(settings)
    await gateway.start()
    with contextlib.suppress(OSError):  # into a file, as a rule: its disk may be full
        print(f"lull gateway: listening on http://{gateway.listen}, control {settings.control}", flush=True)  # noqa: T201
    await stop.wait()
    await gateway.stop(hurry)


def run(settings: GatewaySettings) -> int:
    """Runs until a signal; the exit code."""
    _log_to(settings.log_file)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        uvloop.run(_serve(settings))
    except CannotStart as error:
        print(f"lull gateway: {error}", file=sys.stderr, flush=True)  # noqa: T201
        return 1
    return 0
