"""The way of requests: the gateway and its port, what it lets through, and who can reach an engine past it."""

from __future__ import annotations

import asyncio
import errno
import ipaddress
import os
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import httpx
import psutil

from ..gates.base import GateError
from ..gates.gateway import GatewayGate, GatewayInfo
from ..processes import command_line
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene, port_of, running_agent

_CALL_SECONDS: Final = 5.0
_REDIRECTS_MAX: Final = 3
_UNNEEDED: Final = "no engine's requests go through the gateway: none is started"
_EVERYWHERE: Final = (str(ipaddress.IPv4Address(0)), str(ipaddress.IPv6Address(0)))
_LOOPBACK: Final = ("127.", "::1", "::ffff:127.")
# Only read where an engine has them, and never to be seen from outside.
CONTROL_PATHS: Final = ("/is_sleeping", "/memory_status", "/server_info", "/api/ps")


@dataclass(frozen=True, slots=True)
class PortFacts:
    """Who listens: ``pid`` is None where that cannot be seen. ``bind_trouble``: why nobody else could."""

    listen: str
    is_taken: bool
    pid: int | None
    words: str
    bind_trouble: str = ""


def look_at_port(listen: str) -> PortFacts:
    """Takes no port: it looks for a listener, and asks the kernel whether the address is this machine's."""
    host, _, port = listen.rpartition(":")
    for address, at, pid in listeners():
        if at == int(port) and (address in (host, *_EVERYWHERE) or host in _EVERYWHERE or host == "localhost"):
            words = " ".join(command_line(pid)[:6]) if pid else ""
            return PortFacts(listen, True, pid, os.fsencode(words).decode(errors="replace"))
    try:
        with socket.socket(socket.AF_INET) as probe:
            probe.bind((host, 0))  # any free port of that address
    except OSError as error:
        return PortFacts(listen, False, None, "", error.strerror or str(error))
    return PortFacts(listen, False, None, "")


def listeners() -> list[tuple[str, int, int | None]]:
    """(address, port, pid) of every TCP listener of this machine."""
    return [
        (str(one.laddr.ip), int(one.laddr.port), one.pid)
        for one in psutil.net_connections("tcp")
        if one.status == psutil.CONN_LISTEN and one.laddr
    ]


def judge_port(port: PortFacts, gateway: GatewayInfo | None, *, is_needed: bool) -> Finding:
    if not is_needed:
        return not_applicable(_UNNEEDED)
    if port.bind_trouble:
        return failed(f"{port.listen} cannot be listened on: {port.bind_trouble}", "correct gateway.listen")
    if not port.is_taken:
        return ok(f"{port.listen} is free")
    if gateway is not None and gateway.listen.rpartition(":")[2] == port.listen.rpartition(":")[2]:
        return ok(f"{port.listen} is held by this node's gateway (pid {gateway.pid})")
    who = "another process" if port.pid is None else f"process {port.pid} ({port.words or 'name not known'})"
    return failed(f"{port.listen} is held by {who}, not by this node's gateway", "end it, or change gateway.listen")


@dataclass(frozen=True, slots=True)
class GatewayFacts:
    has_socket: bool
    info: GatewayInfo | None
    trouble: str


def look_at_gateway(scene: Scene) -> GatewayFacts:
    return scene.once("gateway", lambda: _asked(scene))


def _asked(scene: Scene) -> GatewayFacts:
    control = scene.known.data_dir / "gateway.sock"
    if not control.exists():
        return GatewayFacts(False, None, "")

    async def ask() -> GatewayInfo:
        return await GatewayGate(control, call_seconds_max=_CALL_SECONDS).info()

    try:
        return GatewayFacts(True, asyncio.run(ask()), "")
    except GateError as error:
        return GatewayFacts(True, None, str(error))


def judge_gateway(facts: GatewayFacts, listen: str, *, agent_runs: bool, is_needed: bool) -> Finding:
    if not is_needed and facts.info is not None:
        seen = f"pid {facts.info.pid} runs on {facts.info.listen}, and no engine's requests go through it any more"
        return warning(seen, "start the agent: it ends it")
    if not is_needed:
        return not_applicable(_UNNEEDED)
    if facts.info is not None and facts.info.listen != listen:
        seen = f"it listens on {facts.info.listen}, and gateway.listen is {listen}"
        return warning(seen, "lull agent --stop, then start the agent again")
    if facts.info is not None:
        return ok(f"pid {facts.info.pid} on {facts.info.listen}, version {facts.info.version}")
    if facts.has_socket:
        way = "restart the agent: it starts one" if agent_runs else "start the agent: it starts one"
        return failed(f"no gateway answers on its control socket: {facts.trouble}", way)
    if agent_runs:
        return failed("the agent runs and has no gateway", "see the agent's log, and gateway.out in the data directory")
    return not_applicable("no gateway runs; the agent starts it")


def check_gateway(scene: Scene) -> list[Finding]:
    settings = scene.known
    runs, is_needed = running_agent(settings) is not None, settings.needs_gateway
    return [judge_gateway(look_at_gateway(scene), settings.gateway.listen, agent_runs=runs, is_needed=is_needed)]


def check_gateway_port(scene: Scene) -> list[Finding]:
    settings = scene.known
    port = look_at_port(settings.gateway.listen)
    return [judge_port(port, look_at_gateway(scene).info, is_needed=settings.needs_gateway)]


def judge_public_route(url: str, statuses: dict[str, int]) -> Finding:
    open_paths = [path for path, status in statuses.items() if 200 <= status < 300]
    if open_paths:
        seen = (
            f"{', '.join(open_paths)} of an engine can be asked there: whoever reaches it can put the engine to sleep"
        )
        return failed(seen, "let it pass /v1 only, and send it to the gateway instead of the engine", url)
    untold = [f"{path} (HTTP {status})" for path, status in statuses.items() if not _is_refusal(status)]
    if untold:
        seen = (
            f"whether control routes of an engine can be asked there is not told by its answers to {', '.join(untold)}"
        )
        return warning(seen, "look where it leads, or ask again once what is behind it answers", url)
    return ok("no control route of an engine can be asked there", url)


def _is_refusal(status: int) -> bool:
    return 400 <= status < 500 and status not in (408, 425, 429)


def look_at_route(url: str) -> dict[str, int]:
    """HTTP's status by path. Raises httpx.HTTPError, httpx.InvalidURL."""
    url = url.rstrip("/")
    with httpx.Client(timeout=_CALL_SECONDS, trust_env=False) as client:
        return {path: _status(client, url + path, path) for path in CONTROL_PATHS}


def _status(client: httpx.Client, url: str, path: str) -> int:
    """At the end of redirects that lead to the same route; one that leads elsewhere, to a login for example, is not
    followed."""
    reply = client.get(url)
    for _ in range(_REDIRECTS_MAX):
        if reply.next_request is None or not reply.next_request.url.path.rstrip("/").endswith(path):
            break
        reply = client.send(reply.next_request)
    return reply.status_code


def check_public_route(scene: Scene) -> list[Finding]:
    info = None if scene.settings is None else look_at_gateway(scene).info
    urls = [*scene.public_urls, *([] if info is None else [f"http://{info.listen}"])]
    found: list[Finding] = []
    for url in urls:
        try:
            found.append(judge_public_route(url, look_at_route(url)))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            seen = f"it does not answer: {type(error).__name__}: {error}"
            found.append(failed(seen, "correct --public-url, or see why it does not", url))
    return found or [not_applicable("no gateway of this node answers, and no --public-url is given")]


def judge_engine_bind(engine: str, addresses: Sequence[str]) -> Finding:
    open_to = sorted({address for address in addresses if not address.startswith(_LOOPBACK)})
    if not addresses:
        return not_applicable("nobody listens on its port", engine)
    if open_to:
        seen = f"listens on {', '.join(open_to)}: its control routes are open to whoever reaches this machine"
        return failed(seen, "start it with --host 127.0.0.1; clients use the gateway", engine)
    return ok("listens on loopback only", engine)


def check_engine_binds(scene: Scene) -> list[Finding]:
    try:
        listening = listeners()
    except OSError as error:
        if error.errno not in (errno.EACCES, errno.EPERM):
            raise
        return [not_applicable("listeners cannot be seen by this user")]
    found = [
        judge_engine_bind(engine.name, [address for address, port, _ in listening if port == port_of(engine)])
        for engine in scene.known.engines
    ]
    return found or [not_applicable("no engine is named")]


CHECKS = (
    Check("gateway", "traffic", "The gateway answers on its control socket.", check_gateway, needs=("data_dir",)),
    Check(
        "gateway_port",
        "traffic",
        "The gateway's port is free, or held by this node's gateway.",
        check_gateway_port,
        needs=("data_dir",),
    ),
    Check("public_route", "traffic", "No control route can be asked where clients are.", check_public_route, False),
    Check("engine_bind", "traffic", "Engines listen on loopback only.", check_engine_binds),
)
