"""`lull up`: server and agent as two children on one machine. Engines, gateway and jobs live on when it ends."""

from __future__ import annotations

import asyncio
import fcntl
import os
import signal
import socket
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Final

import platformdirs
import typer

from ..agents.gates.base import GateError
from ..agents.gates.gateway import GatewayGate
from ..agents.main import load_settings
from ..agents.processes import identity, is_same, send_signal
from ..agents.protocol.config_file import ConfigFileError
from ..agents.protocol.wire import ProcessIdentity
from ..agents.settings import AgentSettings
from ..api.auth import TokenFileError, read_token
from ..api.client import Client, ClientError
from .context import Target, config_path, read_config, write_context
from .exits import ExitCode, fail, reported
from .quantities import parse_duration
from .up_children import Child, Children, StopSignal
from .up_files import AGENT_FLAGS, UpPaths, UpRecord, default_agent_toml, put_back, read_record, write_record
from .up_stop import UP_MARK, stop_everything, wait_gone

SERVER_START_SECONDS_MAX: Final = 60.0
ORPHAN_END_SECONDS_MAX: Final = 20.0
CONTEXT_NAME: Final = "local"
LULL: Final = (sys.executable, "-P", "-m", "lull.cli")


def up(
    config: Annotated[
        Path | None, typer.Option("--config", metavar="AGENT.TOML", help="The agent's settings: devices, engines.")
    ] = None,
    data_dir: Annotated[Path | None, typer.Option("--data-dir", metavar="DIR", help="Where all is kept.")] = None,
    host: Annotated[str, typer.Option("--host", help="Address of the API.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=1, max=65535, help="Port of the API.")] = 7070,
    stop: Annotated[
        bool, typer.Option("--stop", help="Recall the loans and end everything, engines and gateway too.")
    ] = False,
    stop_timeout: Annotated[
        str, typer.Option("--stop-timeout", metavar="DURATION", help="How long engines may take to come back.")
    ] = "5m",
) -> None:
    """Run server and agent on this machine, on SQLite, until SIGTERM or Ctrl-C.

    One that dies is started again. Engines, gateway and jobs go on when this command ends, and the next `lull up`
    finds them; `lull up --stop` ends them too.
    """
    with reported():
        paths = UpPaths((data_dir or platformdirs.user_data_path("lull")).expanduser().resolve())
        if stop:
            try:
                seconds = parse_duration(stop_timeout)
            except ValueError as error:
                fail(f"--stop-timeout: {error}", ExitCode.USAGE)
            stop_everything(paths, seconds, say)
            return
        run_up(paths, config, host, port)


def say(sentence: str) -> None:
    print(f"lull up: {sentence}", file=sys.stderr, flush=True)


def run_up(paths: UpPaths, config: Path | None, host: str, port: int) -> None:
    paths.make()
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    toml = agent_config(paths, config, url)
    settings = _check_agent_config(paths, toml, url)
    with _only_one(paths), StopSignal().installed() as stop:
        earlier = read_record(paths)
        end_orphans(earlier)
        paths.stopping.unlink(missing_ok=True)
        server, agent = _children(paths, toml, url, host, port)
        children = _watched(paths, url, server, agent)
        try:
            children.start(server)
            _await_server(children, server, stop, url, paths)
            if not stop.requested:
                point_context(config_path(), Target(url, paths.token_file))
                _say_if_taken(settings.gateway.listen, GatewayGate(paths.agent_dir / "gateway.sock"))
                children.start(agent)
                say(f"API at {url}, token in {paths.token_file}, context {CONTEXT_NAME!r} in {config_path()}")
                children.watch(stop)
        finally:
            children.end()
            if agent.started_at == 0.0:  # nothing new that a later `--stop` would have to end
                put_back(paths, earlier)
    say("ended; engines, gateway and jobs go on" if not paths.stopping.exists() else "ended")


def point_context(path: Path, target: Target) -> None:
    """The context is the newest box's; whoever works with another one should know how to reach that."""
    before = read_config(path).get("contexts", {}).get(CONTEXT_NAME, {})
    write_context(path, CONTEXT_NAME, target)
    if before.get("server", target.server) != target.server:
        flags = f"--server {before['server']} --token-file {before.get('token_file', 'FILE')}"
        say(f"context {CONTEXT_NAME!r} was the one of {before['server']}, which is reached by {flags} now")


def agent_config(paths: UpPaths, config: Path | None, url: str) -> Path:
    """The settings to use: the named ones, those of the last start, or fresh ones for a machine without engines."""
    if config is not None:
        if not config.is_file():
            fail(f"--config: {config}: there is no such file", ExitCode.USAGE)
        return config.resolve()
    if not paths.agent_toml.exists():
        paths.agent_toml.write_text(default_agent_toml(paths, url))
        say(f"wrote {paths.agent_toml}: one host-memory device, no engine; add yours there or give --config")
    return paths.agent_toml


def _filled_in(paths: UpPaths, url: str) -> dict[str, str | Path]:
    """What this command knows better than the file, which need not have it."""
    return {"server_url": url, "token_file": paths.token_file, "data_dir": paths.agent_dir}


def _check_agent_config(paths: UpPaths, toml: Path, url: str) -> AgentSettings:
    """What the agent would refuse is refused here, before anything starts."""
    try:
        return load_settings(toml, dict(_filled_in(paths, url)))
    except ConfigFileError as error:
        fail(str(error), ExitCode.USAGE)


def _say_if_taken(listen: str, gate: GatewayGate) -> None:
    """The agent goes on without its gateway and tries again; whoever looks at this terminal should know."""

    async def runs() -> bool:
        try:
            await gate.info()
        except GateError:
            return False
        return True

    host, _, port = listen.rpartition(":")
    try:
        with socket.create_server((host, int(port))):
            return
    except OSError as error:
        if not asyncio.run(runs()):
            say(f"gateway.listen {listen}: {error.strerror or error}; no request reaches an engine until it is free")


def _children(paths: UpPaths, toml: Path, url: str, host: str, port: int) -> tuple[Child, Child]:
    server_argv = [*LULL, "server", "--data-dir", str(paths.server_dir), "--host", host, "--port", str(port)]
    agent_argv = [*LULL, "agent", "--config", str(toml)]
    for key, value in _filled_in(paths, url).items():
        agent_argv += [AGENT_FLAGS[key], str(value)]
    return Child("server", server_argv, paths.log("server")), Child("agent", agent_argv, paths.log("agent"))


def _watched(paths: UpPaths, url: str, server: Child, agent: Child) -> Children:
    both = (server, agent)
    myself = identity(os.getpid())
    assert myself is not None

    def record() -> None:
        running = {child.name: identity(child.process.pid) for child in both if child.process is not None}
        known = {name: process for name, process in running.items() if process is not None}
        mark, argv = str(paths.data_dir), list(agent.argv)
        write_record(paths, UpRecord(server_url=url, mark=mark, agent_argv=argv, up=myself, children=known))

    # At the end: `lull` in an engine's command is this one where the shell that we were started from knows none.
    path = os.pathsep.join([os.environ.get("PATH", os.defpath), str(Path(sys.executable).parent)])
    environ = {**os.environ, "PATH": path, UP_MARK: str(paths.data_dir)}
    return Children([server, agent], environ, record, say, may_restart=lambda: not paths.stopping.exists())


def _await_server(children: Children, server: Child, stop: StopSignal, url: str, paths: UpPaths) -> None:
    def answers() -> bool:
        # With our token: another server may hold the port.
        try:
            with Client(url, read_token(paths.token_file), timeout_seconds=2.0) as client:
                return bool(client.version().version)
        except (TokenFileError, ClientError):
            return False

    came_up = children.watch(stop, until=answers, seconds=SERVER_START_SECONDS_MAX) or stop.requested
    if came_up and server.reap() is None:
        return
    fail(f"the server did not start: {server.last_words()}  (log: {server.log_path})")


@contextmanager
def _only_one(paths: UpPaths) -> Generator[None]:
    """A lock for as long as this process lives; the kernel drops it however it ends."""
    descriptor = os.open(paths.data_dir / "up.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            record = read_record(paths)
            who = f" (process {record.up.pid}, API at {record.server_url})" if record else ""
            fail(f"another `lull up` runs in {paths.data_dir}{who}; end it or choose another --data-dir")
        yield
    finally:
        os.close(descriptor)


def end_orphans(record: UpRecord | None) -> None:
    """A `lull up` that was killed leaves its two children behind: they hold the port and the data directories."""
    for name, process in (record.children if record else {}).items():
        if is_same(process):
            say(f"ending the {name} that an earlier `lull up` left behind (process {process.pid})")
            _end_orphan(process)


def _end_orphan(process: ProcessIdentity) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        send_signal(process, number)
        if wait_gone([process], ORPHAN_END_SECONDS_MAX):
            return
    fail(f"process {process.pid} cannot be ended")
