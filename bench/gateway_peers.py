"""Starts what is measured side by side: our gateway, a bare proxy on its library, HAProxy, nginx, LiteLLM.

Each is one process on one thread, in front of the same back end. What is not installed says so and is not compared.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..agents.gates.base import GateUnreachable
from ..agents.gates.gateway import GatewayGate

START_SECONDS_MAX: Final = 20.0
LITELLM_START_SECONDS_MAX: Final = 90.0
_END_SECONDS_MAX: Final = 10.0
_SAID_BYTES_MAX: Final = 2000


class NotRun(Exception):
    """Why a column has no figures."""


@dataclass(frozen=True, slots=True)
class Cores:
    """Which CPU the proxies get, and which the clients and the engine; the same ones where there is only one."""

    proxy: frozenset[int]
    rest: frozenset[int]

    @classmethod
    def of_this_machine(cls) -> Cores:
        usable = sorted(os.sched_getaffinity(0))
        if len(usable) < 2:
            return cls(frozenset(usable), frozenset(usable))
        return cls(frozenset(usable[:1]), frozenset(usable[1:]))

    @property
    def apart(self) -> bool:
        return not self.proxy & self.rest


@dataclass(frozen=True, slots=True)
class Column:
    """One that runs: where it listens, and the process that its CPU and memory are read from, with its children."""

    name: str
    address: str
    pid: int | None  # None: no proxy at all


@contextlib.contextmanager
def on_cores(cores: frozenset[int]) -> Generator[None]:
    """What is started in the block runs on these."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def free_port() -> int:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port: int = taken.getsockname()[1]
        return port


@contextlib.contextmanager
def process(
    argv: Sequence[str], cores: frozenset[int], log: Path, environment: Mapping[str, str] | None = None
) -> Generator[subprocess.Popen[bytes]]:
    with log.open("wb") as errors, on_cores(cores):
        started = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=errors,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            env=None if environment is None else {**os.environ, **environment},
        )
    try:
        yield started
    finally:
        started.send_signal(signal.SIGTERM)
        try:
            started.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
        assert started.stdout is not None
        started.stdout.close()


def _said(log: Path) -> str:
    return log.read_bytes()[-_SAID_BYTES_MAX:].decode("utf-8", "replace").strip()


def _wait_for_port(started: subprocess.Popen[bytes], port: int, log: Path, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while True:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1.0):
            return
        if started.poll() is not None or time.monotonic() > deadline:
            raise NotRun(f"it did not start: {_said(log) or f'no answer on port {port}'}")
        time.sleep(0.05)


@contextlib.contextmanager
def module(name: str, words: Sequence[str], cores: frozenset[int], log: Path) -> Generator[tuple[int, int]]:
    """A module of this package that prints its port when it listens: pid and port."""
    with process([sys.executable, "-P", "-m", name, *words], cores, log) as started:
        assert started.stdout is not None
        line = started.stdout.readline()
        if not line.strip().isdigit():
            raise NotRun(f"{name} did not start: {_said(log)}")
        yield started.pid, int(line)


@contextlib.contextmanager
def lull_gateway(directory: Path, cores: Cores, engine: str) -> Generator[Column]:
    """All features on; one route, its gate open."""
    port, control = free_port(), directory / "control.sock"
    words = ["--listen", f"127.0.0.1:{port}", "--control", str(control), "--state-dir", str(directory / "state")]
    argv = [sys.executable, "-P", "-m", "lull.agents.gateway", *words]
    log = directory / "lull.log"
    with process(argv, cores.proxy, log) as started:
        _wait_for_port(started, port, log, START_SECONDS_MAX)
        try:
            asyncio.run(_open(GatewayGate(control), engine))
        except GateUnreachable as error:
            raise NotRun(str(error)) from error
        yield Column("lull", f"127.0.0.1:{port}", started.pid)


async def _open(gate: GatewayGate, engine: str) -> None:
    await gate.ensure_route("bench", "bench", ["m"], f"http://{engine}")
    await gate.open("bench")


@contextlib.contextmanager
def bare(directory: Path, cores: Cores, engine: str) -> Generator[Column]:
    with module("lull.bench.gateway_bare", [engine], cores.proxy, directory / "bare.log") as (pid, port):
        yield Column("bare", f"127.0.0.1:{port}", pid)


def _program(name: str) -> str:
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")
    if found is None:
        raise NotRun(f"{name} is not installed")
    return found


_HAPROXY: Final = """
global
    nbthread 1
    maxconn 4000
defaults
    mode http
    timeout connect 5s
    timeout client 60s
    timeout server 60s
    option http-keep-alive
    option http-no-delay
    http-reuse always
frontend public
    bind 127.0.0.1:{port}
    default_backend engines
backend engines
    server engine {engine}{more}
"""


@contextlib.contextmanager
def haproxy(directory: Path, cores: Cores, engine: str, backup: str | None = None) -> Generator[Column]:
    """``backup``: our gateway, to which HAProxy turns while its engine is out of traffic."""
    name = "haproxy" if backup is None else "haproxy_with_lull"
    program, port = _program("haproxy"), free_port()
    more = "" if backup is None else f" check inter 1s\n    server lull {backup} backup"
    config, log = directory / f"{name}.cfg", directory / f"{name}.log"
    config.write_text(_HAPROXY.format(port=port, engine=engine, more=more))
    with process([program, "-db", "-f", str(config)], cores.proxy, log) as started:
        _wait_for_port(started, port, log, START_SECONDS_MAX)
        yield Column(name, f"127.0.0.1:{port}", started.pid)


_NGINX: Final = """
worker_processes 1;
daemon off;
pid {directory}/nginx.pid;
error_log {directory}/nginx.error warn;
events {{ worker_connections 4000; }}
http {{
    access_log off;
    client_body_temp_path {directory}/body;
    proxy_temp_path {directory}/proxy;
    fastcgi_temp_path {directory}/fastcgi;
    uwsgi_temp_path {directory}/uwsgi;
    scgi_temp_path {directory}/scgi;
    keepalive_requests 1000000000;
    upstream engine {{ server {engine}; keepalive 256; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=1024;
        location / {{
            proxy_pass http://engine;
            proxy_http_version 1.1;
            proxy_set_header Connection "";
            proxy_buffering off;
        }}
    }}
}}
"""


@contextlib.contextmanager
def nginx(directory: Path, cores: Cores, engine: str) -> Generator[Column]:
    program, port = _program("nginx"), free_port()
    config, log = directory / "nginx.conf", directory / "nginx.log"
    config.write_text(_NGINX.format(directory=directory, engine=engine, port=port))
    with process([program, "-c", str(config), "-p", str(directory)], cores.proxy, log) as started:
        _wait_for_port(started, port, log, START_SECONDS_MAX)
        yield Column("nginx", f"127.0.0.1:{port}", started.pid)


_LITELLM: Final = """
model_list:
  - model_name: m
    litellm_params:
      model: openai/m
      api_base: http://{engine}/v1
      api_key: none
"""


@contextlib.contextmanager
def litellm(directory: Path, cores: Cores, engine: str) -> Generator[Column]:
    program, port = _program("litellm"), free_port()
    config, log = directory / "litellm.yaml", directory / "litellm.log"
    config.write_text(_LITELLM.format(engine=engine))
    argv = [program, "--config", str(config), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]
    with process(argv, cores.proxy, log, {"LITELLM_MODE": "PRODUCTION", "LITELLM_LOG": "ERROR"}) as started:
        _wait_for_port(started, port, log, LITELLM_START_SECONDS_MAX)
        yield Column("litellm", f"127.0.0.1:{port}", started.pid)


Peer = Callable[[Path, Cores, str], contextlib.AbstractContextManager[Column]]
PEERS: Final[Mapping[str, Peer]] = {
    "lull": lull_gateway,
    "bare": bare,
    "haproxy": haproxy,
    "nginx": nginx,
    "litellm": litellm,
}
