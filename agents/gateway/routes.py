"""Which model is served by which engines, and each engine's gate. Routes outlive the gateway; open gates do not.

The file holds what an agent said about an engine, never whether its gate was open: after a start every gate is closed,
and requests for known models wait instead of failing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import os
import secrets
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field, field_validator
from yarl import URL

from .admission import Admission, AdmissionView, GateMode, Terms, Ticket
from .engine_connection import Pool
from .exchange import Exchange
from .problems import Problem
from .settings import Limits
from .siblings import Siblings

_log = logging.getLogger(__name__)

ROUTES_MAX: Final = 256
# Goes with each request as `Via`: one that comes back here went round, and would go on until no file is left to open.
HOP_MARK: Final = b"lull-" + secrets.token_hex(8).encode("ascii")
ENGINE_ID_CHARS_MAX: Final = 100
_FILE_VERSION: Final = 1
_FILE_BYTES_MAX: Final = 64 * 2**20  # more than as many routes as there may be can take

Model = Annotated[str, Field(min_length=1, max_length=256)]


class RouteSpec(BaseModel):
    """What an agent says about one engine."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: Annotated[str, Field(min_length=1, max_length=256)]
    models: Annotated[tuple[Model, ...], Field(min_length=1, max_length=64)]
    upstream: Annotated[str, Field(max_length=512)]

    @field_validator("upstream")
    @classmethod
    def _check_upstream(cls, value: str) -> str:
        try:
            url = URL(value)
            port = url.explicit_port
            url.raw_authority.encode("ascii")
        except ValueError as error:
            raise ValueError(f"{value!r} is not a URL: {error}") from None
        plain = url.path in ("", "/") and not url.query_string and not url.fragment and url.user is None
        if url.scheme != "http" or not url.host or port is None or not plain:
            raise ValueError(f"{value!r}: give the engine's own address, for example http://127.0.0.1:9001")
        return value


class ClosedTerms(BaseModel):
    """How the gate shall treat requests while it is closed. The defaults are those of a policy."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    gate: GateMode = "hold"
    hold_requests_max: Annotated[int, Field(ge=0, le=100_000)] = 1000
    hold_seconds_max: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] = 600.0
    retry_after_seconds: Annotated[int, Field(ge=0, le=24 * 3600)] | None = None

    def terms(self) -> Terms:
        return Terms(self.gate, self.hold_requests_max, self.hold_seconds_max, self.retry_after_seconds)


class _SavedRoute(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    engine_id: Annotated[str, Field(min_length=1, max_length=ENGINE_ID_CHARS_MAX)]
    spec: RouteSpec
    created_at: Annotated[int, Field(ge=0, le=2**53)]
    terms: ClosedTerms


class _SavedRoutes(BaseModel):
    model_config = ConfigDict(extra="ignore", frozen=True)

    routes: Annotated[list[_SavedRoute], Field(max_length=ROUTES_MAX)]


@dataclass(eq=False)
class Route:
    """One engine behind its gate."""

    engine_id: str
    spec: RouteSpec
    created_at: int
    admission: Admission
    limits: Limits
    reuse_connections: bool
    live: set[Exchange] = field(default_factory=set[Exchange])
    pool: Pool | None = None

    def __post_init__(self) -> None:
        self.take_spec(self.spec)

    def take_spec(self, spec: RouteSpec) -> None:
        self.spec = spec
        url = URL(spec.upstream)
        assert url.host is not None
        assert url.explicit_port is not None
        self._address = (url.host, url.explicit_port)
        host = url.raw_authority.encode("ascii")
        self._host_lines = b"Host: %s\r\n%s" % (host, b"" if self.reuse_connections else b"Connection: close\r\n")
        self._starts: dict[str, bytes] = {}

    def head_start(self, path: str, query: str) -> bytes:
        """The request line, and what only this engine is told."""
        if query:
            return b"POST %s?%s HTTP/1.1\r\n%s" % (path.encode(), query.encode("ascii"), self._host_lines)
        start = self._starts.get(path)
        if start is None:  # there are as many as inference has paths
            start = self._starts[path] = b"POST %s HTTP/1.1\r\n%s" % (path.encode(), self._host_lines)
        return start

    def _new_pool(self, *, reuse: bool) -> Pool:
        return Pool(*self._address, self.limits, reuse=reuse)

    def begin(self, ticket: Ticket) -> Exchange:
        if not self.admission.is_open:
            # Admitted right before the gate closed: in flight, on a connection that is not kept.
            return Exchange(ticket, self._new_pool(reuse=False), self.live)
        if self.pool is None:
            self.pool = self._new_pool(reuse=self.reuse_connections)
        return Exchange(ticket, self.pool, self.live)

    def renew_connections(self) -> None:
        """What is in flight keeps its connections; whatever comes later gets new ones."""
        if self.pool is not None:
            self.pool.retire()
            self.pool = None

    def close(self, terms: Terms, expected_open_seconds: float | None = None) -> int:
        """``expected_open_seconds``: from now until the gate will be opened, if the agent foresees it."""
        at = None if expected_open_seconds is None else time.monotonic() + expected_open_seconds
        in_flight = self.admission.close(terms, at)
        self.renew_connections()
        return in_flight

    def expect_open(self, seconds: float | None) -> None:
        """What was foreseen when the gate was closed is foreseen otherwise now."""
        if not self.admission.is_open:
            self.admission.expected_open_at = None if seconds is None else time.monotonic() + seconds

    def open(self) -> None:
        if not self.admission.is_open:
            self.renew_connections()
        self.admission.open()

    def abort(self) -> int:
        """Ends what is in flight, for the clients at once; returns how many requests that were."""
        exchanges = list(self.live)
        for exchange in exchanges:
            exchange.abort(self.limits.abort_seconds_max)
        return len(exchanges)

    def cut(self) -> None:
        """Lets go of engines that have not let go of requests whose clients are gone."""
        for exchange in list(self.live):
            exchange.cut()

    async def wait_idle(self, seconds_max: float) -> int:
        """Waits until nothing is in flight, at most ``seconds_max``; returns what still is."""
        deadline = time.monotonic() + seconds_max
        while self.admission.in_flight and (left := deadline - time.monotonic()) > 0:
            idle = asyncio.Event()
            forget = self.admission.when_idle(idle.set)
            try:
                async with asyncio.timeout(left):
                    await idle.wait()
            except TimeoutError:
                break
            finally:
                forget()
        return self.admission.in_flight

    async def wait_wanted(self, seconds_max: float) -> None:
        """Returns once the closed gate is wanted, or after ``seconds_max``."""
        deadline = time.monotonic() + seconds_max
        while not self.admission.is_wanted and (left := deadline - time.monotonic()) > 0:
            wanted = asyncio.Event()
            forget = self.admission.when_wanted(wanted.set)
            try:
                async with asyncio.timeout(left):
                    await wanted.wait()
            except TimeoutError:
                break
            finally:
                forget()

    def view(self) -> AdmissionView:
        return self.admission.view(time.monotonic())


class RouteTable:
    """All routes by engine and by model, kept in ``<state_dir>/routes.json``."""

    def __init__(self, state_dir: Path, limits: Limits, *, reuse_connections: bool) -> None:
        self._file = state_dir / "routes.json"
        self._limits = limits
        self._reuse = reuse_connections
        self._routes: dict[str, Route] = {}
        self._by_model: dict[str, Siblings] = {}
        self._by_gate: dict[Admission, Route] = {}
        self._saving = asyncio.Lock()
        self._saved_text = ""

    def __iter__(self) -> Iterator[Route]:
        return iter(list(self._routes.values()))

    def get(self, engine_id: str) -> Route:
        route = self._routes.get(engine_id)
        if route is None:
            raise Problem(404, "unknown_engine", f"There is no route of an engine {engine_id[:100]!r}.")
        return route

    def of_gate(self, gate: Admission) -> Route:
        return self._by_gate[gate]

    def find(self, model: str) -> Siblings:
        """The gates of the engines that serve the model. Raises Problem if none does."""
        siblings = self._by_model.get(model)
        if siblings is None:
            known = ", ".join(sorted(self._by_model)[:20]) or "none"
            raise Problem(404, "model_not_found", f"No engine here serves the model {model[:200]!r}; known: {known}.")
        return siblings

    def models(self) -> list[tuple[str, int]]:
        """Each with the second of the epoch since which it is known here."""
        return [
            (model, min(self._by_gate[gate].created_at for gate in siblings.gates))
            for model, siblings in sorted(self._by_model.items(), key=lambda item: item[0])
        ]

    def put(self, engine_id: str, spec: RouteSpec) -> Route:
        """Makes the route, or changes it without moving its gate. Several engines may serve one model."""
        route = self._routes.get(engine_id)
        if route is None:
            if len(self._routes) >= ROUTES_MAX:
                raise Problem(409, "too_many_routes", f"There are {ROUTES_MAX} routes already; delete one first.")
            route = self._add(engine_id, spec, int(time.time()), Terms())
        elif route.spec != spec:
            if route.spec.upstream != spec.upstream:
                route.renew_connections()
            route.take_spec(spec)
            self._index()
        return route

    def delete(self, engine_id: str) -> None:
        route = self.get(engine_id)
        if route.admission.in_flight:
            raise Problem(
                409, "in_flight", f"{route.admission.in_flight} requests are in flight; close the gate and drain first."
            )
        route.close(route.admission.terms)
        del self._routes[engine_id]
        self._index()  # what waited for it goes to a sibling or is refused

    def _add(self, engine_id: str, spec: RouteSpec, created_at: int, terms: Terms) -> Route:
        route = Route(engine_id, spec, created_at, Admission(terms), self._limits, self._reuse)
        self._routes[engine_id] = route
        self._index()
        return route

    def _index(self) -> None:
        gates: dict[str, dict[Admission, None]] = {model: {} for model in self._by_model}
        for route in self._routes.values():
            for model in route.spec.models:
                gates.setdefault(model, {})[route.admission] = None
        before, self._by_model = self._by_model, {}
        self._by_gate = {route.admission: route for route in self._routes.values()}
        for model, of_model in gates.items():
            siblings = before.get(model) or Siblings()
            if of_model:
                self._by_model[model] = siblings
            if tuple(of_model) != siblings.gates:
                siblings.set_gates(tuple(of_model))

    def load(self) -> None:
        """Every route comes back closed. A damaged file is set aside: the agent will say all of it again."""
        try:
            with open(self._file, "rb") as file:
                raw = file.read(_FILE_BYTES_MAX + 1)
        except FileNotFoundError:
            return
        try:
            if len(raw) > _FILE_BYTES_MAX:
                raise ValueError(f"it has more than {_FILE_BYTES_MAX} bytes")
            saved = _SavedRoutes.model_validate_json(raw).routes
        except ValueError as error:  # bytes that are no text and brackets without end are told as one, too
            self._set_aside(str(error)[:500])
            return
        for entry in saved:
            self._add(entry.engine_id, entry.spec, entry.created_at, entry.terms.terms())
        self._saved_text = raw.decode()

    def _set_aside(self, why: str) -> None:
        damaged = self._file.with_suffix(".damaged")
        try:
            os.replace(self._file, damaged)
        except OSError as error:
            _log.error("%s cannot be read (%s), nor set aside: %s", self._file, why, error)
        else:
            _log.error("%s cannot be read (%s); it is now %s", self._file, why, damaged)

    async def save(self) -> None:
        """Returns when the file on disk holds the routes as they are now or later, or when its disk refuses them.

        What is in force is in memory. A gateway that starts from an older file has every gate closed, and its agent
        says all of it again: that is no reason to leave an engine closed. The next call writes what is missing.
        """
        async with self._saving:
            text = self._text()
            if text == self._saved_text:
                return
            try:
                await asyncio.to_thread(_write_durably, self._file, text)
            except OSError as error:
                _log.error("%s is not written, its disk refuses it: %s", self._file, error)
                return
            self._saved_text = text

    def _text(self) -> str:
        routes = [
            {
                "engine_id": route.engine_id,
                "spec": route.spec.model_dump(mode="json"),
                "created_at": route.created_at,
                "terms": asdict(route.admission.terms),
            }
            for route in self._routes.values()
        ]
        return json.dumps({"version": _FILE_VERSION, "routes": routes}, indent=1)


def _write_durably(path: Path, text: str) -> None:
    fresh = path.with_suffix(".new")
    try:
        descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(fresh, path)
    except OSError:
        with contextlib.suppress(OSError):
            fresh.unlink()  # a full disk took a part of it
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)
