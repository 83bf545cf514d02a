"""The gate that is `lull gateway`: a client of its control API over the Unix socket."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final, TypeVar, cast
from urllib.parse import quote

import httpx
from pydantic import BaseModel, ConfigDict, ValidationError

from ..loopback import loopback_client
from ..protocol.wire import GateState, ProcessIdentity
from .base import ClosedTerms, GateObservation, GateRefused, GateRouteUnknown, GateUnreachable

CALL_SECONDS_MAX: Final = 10.0
# The gateway bounds one poll; longer waits are several polls.
_POLL_SECONDS_MAX: Final = 60.0

_M = TypeVar("_M", bound=BaseModel)


class GatewayInfo(BaseModel):
    """Who answers on a control socket."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    pid: int
    start_ticks: int
    boot_id: str
    listen: str  # HOST:PORT for clients
    version: str

    @property
    def process(self) -> ProcessIdentity:
        return ProcessIdentity(boot_id=self.boot_id, pid=self.pid, start_ticks=self.start_ticks)


class _RouteDocument(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    engine_id: str
    state: GateState
    in_flight: int
    held: int
    oldest_held_seconds: float | None
    last_request_seconds_ago: float | None
    requests_total: int
    answered_total: int
    refused_total: int
    failed_total: int
    disconnected_total: int
    # A gateway that is older than its agent does not tell these.
    first_byte_seconds: float | None = None
    asked_since_closed: int = 0

    def observation(self) -> GateObservation:
        return GateObservation(**self.model_dump(exclude={"engine_id"}))


class _RoutesDocument(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    routes: list[_RouteDocument]


class GatewayGate:
    """Gate over one gateway. One connection a call: a gateway that was restarted is met anew each time."""

    def __init__(self, control: Path, *, call_seconds_max: float = CALL_SECONDS_MAX) -> None:
        self._control = control
        self._call_seconds_max = call_seconds_max

    async def info(self) -> GatewayInfo:
        return _parse(GatewayInfo, await self._call("GET", "/info"))

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        await self._call("PUT", _path(engine_id), {"name": name, "models": list(models), "upstream": upstream})

    async def remove_route(self, engine_id: str) -> None:
        with contextlib.suppress(GateRouteUnknown):  # gone already, which is what was asked for
            await self._call("DELETE", _path(engine_id))

    async def close(self, engine_id: str, terms: ClosedTerms) -> int:
        return _in_flight(await self._call("POST", _path(engine_id, "/close"), asdict(terms)))

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            wait_seconds = min(max(0.0, deadline - loop.time()), _POLL_SECONDS_MAX)
            path = f"{_path(engine_id, '/drained')}?seconds={math.ceil(wait_seconds * 1000) / 1000}"
            in_flight = _in_flight(await self._call("GET", path, wait_seconds=wait_seconds))
            if in_flight == 0 or loop.time() >= deadline:
                return in_flight

    async def wait_wanted(self, engine_id: str, seconds: float) -> GateObservation:
        """Waits until a request waits here or was refused, at most ``seconds``. GateRefused by a gateway that is older
        than its agent."""
        wait_seconds = min(seconds, _POLL_SECONDS_MAX)
        path = f"{_path(engine_id, '/wanted')}?seconds={math.ceil(wait_seconds * 1000) / 1000}"
        return _parse(_RouteDocument, await self._call("GET", path, wait_seconds=wait_seconds)).observation()

    async def expect_open(self, engine_id: str, seconds: float | None) -> None:
        """GateRefused by a gateway that is older than its agent."""
        await self._call("POST", _path(engine_id, "/expect"), {"open_seconds": seconds})

    async def abort(self, engine_id: str) -> None:
        await self._call("POST", _path(engine_id, "/abort"))

    async def open(self, engine_id: str) -> None:
        await self._call("POST", _path(engine_id, "/open"))

    async def observe(self, engine_id: str) -> GateObservation:
        return _parse(_RouteDocument, await self._call("GET", _path(engine_id))).observation()

    async def observe_all(self) -> dict[str, GateObservation]:
        """Every engine that the gateway knows, also those that no agent speaks of any more."""
        routes = _parse(_RoutesDocument, await self._call("GET", "/routes")).routes
        return {route.engine_id: route.observation() for route in routes}

    async def _call(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, wait_seconds: float = 0.0
    ) -> dict[str, Any]:
        try:
            # A client that outlives its call keeps a connection for ever that was cancelled right after it was made.
            async with (
                asyncio.timeout(self._call_seconds_max + wait_seconds),
                loopback_client(httpx.Timeout(None), socket=self._control, base_url="http://gateway") as client,
            ):
                response = await client.request(method, path, json=body)
        except (httpx.TransportError, OSError) as error:
            text = str(error) or type(error).__name__
            raise GateUnreachable(f"gateway at {self._control}: {method} {path}: {text}") from error
        if response.status_code == 204:
            return {}
        try:
            document = response.json()
        except (ValueError, RecursionError):
            document = None
        if not isinstance(document, dict):
            raise GateUnreachable(f"{method} {path}: HTTP {response.status_code} without a JSON object")
        answer = cast("dict[str, Any]", document)
        if response.is_success:
            return answer
        detail = str(answer.get("detail", ""))[:1000]
        if answer.get("code") == "unknown_engine":
            raise GateRouteUnknown(detail)
        if response.is_client_error:
            raise GateRefused(f"{method} {path}: HTTP {response.status_code}: {detail}")
        raise GateUnreachable(f"{method} {path}: HTTP {response.status_code}: {detail}")


def _path(engine_id: str, verb: str = "") -> str:
    return f"/routes/{quote(engine_id, safe='')}{verb}"


def _in_flight(answer: Mapping[str, Any]) -> int:
    count = answer.get("in_flight")
    if not isinstance(count, int):
        raise GateUnreachable(f"the answer tells no in_flight: {dict(answer)!r}")
    return count


def _parse(kind: type[_M], document: Any) -> _M:
    try:
        return kind.model_validate(document)
    except ValidationError as error:
        raise GateUnreachable(f"the gateway's answer is not a {kind.__name__}: {error.errors()[0]['msg']}") from None
