"""The server as this node reaches it: there, ready, taking our token, of our version, on the same time."""

from __future__ import annotations

import importlib.metadata
import time
from dataclasses import dataclass
from email.utils import parsedate_to_datetime
from typing import Any, Final

import httpx

from ..key_files import KeyUnusable, read_header_key
from ..loopback import NO_TLS
from ..settings import AgentSettings
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene

_CALL_SECONDS: Final = 5.0
_SKEW_SECONDS_WARNED: Final = 5.0
_SKEW_SECONDS_MAX: Final = 60.0
_DATE_STEP_SECONDS: Final = 1.0  # a Date header is cut to whole seconds


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """``trouble``: why there is no answer. Statuses are HTTP's, None where it was not asked."""

    url: str
    trouble: str = ""
    ready_status: int | None = None
    version_status: int | None = None
    version: str | None = None
    skew_seconds: float | None = None  # its clock less ours
    token_trouble: str = ""


def look_at_server(settings: AgentSettings) -> ServerFacts:
    url = settings.server_url.rstrip("/")
    verify = NO_TLS if url.startswith("http://") else True
    with httpx.Client(timeout=_CALL_SECONDS, trust_env=False, verify=verify) as client:
        try:
            before = time.time()
            ready = client.get(f"{url}/readyz")
            skew = skew_seconds(ready.headers.get("date"), before, time.time())
        except httpx.HTTPError as error:
            return ServerFacts(url, trouble=f"{type(error).__name__}: {error}")
        try:
            token = read_header_key(settings.token_file)
        except KeyUnusable as error:
            said = f"{settings.token_file} {error}"
            return ServerFacts(url, ready_status=ready.status_code, skew_seconds=skew, token_trouble=said)
        try:
            reply = client.get(f"{url}/api/v1/version", headers={"authorization": f"Bearer {token}"})
            body: Any = reply.json() if reply.status_code == 200 else {}
        except (httpx.HTTPError, ValueError, RecursionError) as error:  # the last two: not JSON
            said = f"{type(error).__name__}: {error}"
            return ServerFacts(url, ready_status=ready.status_code, skew_seconds=skew, token_trouble=said)
    try:
        version = str(body["version"])
    except (KeyError, TypeError):
        version = None
    return ServerFacts(url, "", ready.status_code, reply.status_code, version, skew)


def skew_seconds(date: str | None, before: float, after: float) -> float | None:
    """The server's clock less ours, 0 where the two may be equal; None where it does not tell its time."""
    try:
        theirs = parsedate_to_datetime(date or "").timestamp()
    except (ValueError, TypeError):
        return None
    if theirs + _DATE_STEP_SECONDS < before:
        return theirs + _DATE_STEP_SECONDS - before
    return max(0.0, theirs - after)


def judge_server(facts: ServerFacts) -> Finding:
    if facts.trouble:
        return failed(f"{facts.url} does not answer: {facts.trouble}", "start it, or correct server_url")
    if facts.ready_status != 200:
        return failed(f"{facts.url}/readyz: HTTP {facts.ready_status}", "see the log of `lull server`: its database")
    return ok(f"{facts.url} is ready")


def judge_token(facts: ServerFacts) -> Finding:
    if facts.trouble:
        return not_applicable("the server does not answer")
    if facts.token_trouble:
        return failed(f"the token cannot be used: {facts.token_trouble}", "correct token_file")
    if facts.version_status in (401, 403):
        return failed(f"the server refuses the token: HTTP {facts.version_status}", "put a valid token in token_file")
    if facts.version_status != 200 or facts.version is None:
        return failed(f"{facts.url} is no Lull server: HTTP {facts.version_status}", "correct server_url")
    return ok("the server takes the token")


def judge_clock(facts: ServerFacts) -> Finding:
    if facts.skew_seconds is None:
        return not_applicable("the server tells no time")
    seen = f"the server's clock is {facts.skew_seconds:+.0f} s off this one"
    way = "let chrony or systemd-timesyncd set both clocks"
    if abs(facts.skew_seconds) > _SKEW_SECONDS_MAX:
        return failed(seen, way)
    return warning(seen, way) if abs(facts.skew_seconds) > _SKEW_SECONDS_WARNED else ok("the clocks agree")


def judge_versions(facts: ServerFacts, own: str) -> Finding:
    if facts.version is None:
        return not_applicable(f"this is {own}; the server does not tell its version")
    if facts.version != own:
        seen = f"this is {own}, the server is {facts.version}"
        return warning(seen, f"pip install 'gpu-lull[agent]=={facts.version}', then restart the agent")
    return ok(f"both are {own}")


def _looked(scene: Scene) -> ServerFacts:
    return scene.once("server", lambda: look_at_server(scene.known))


def check_server(scene: Scene) -> list[Finding]:
    return [judge_server(_looked(scene))]


def check_token(scene: Scene) -> list[Finding]:
    return [judge_token(_looked(scene))]


def check_clock(scene: Scene) -> list[Finding]:
    return [judge_clock(_looked(scene))]


def check_versions(scene: Scene) -> list[Finding]:
    return [judge_versions(_looked(scene), importlib.metadata.version("gpu-lull"))]


CHECKS = (
    Check("server", "server", "The server answers and is ready.", check_server, needs=("server_url", "token_file")),
    Check("token", "server", "The server takes the agent's token.", check_token, needs=("server_url", "token_file")),
    Check("clock", "server", "The clocks of server and node agree.", check_clock, needs=("server_url", "token_file")),
    Check(
        "versions", "server", "Agent and server are of one version.", check_versions, needs=("server_url", "token_file")
    ),
)
