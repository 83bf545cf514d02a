"""The agent's side of the wire: it registers, reads the stream of orders, and sends reports until they are taken.

A lost reply costs nothing: reports are acknowledged by number, orders are remembered by number. Without a
scheduler everything on the node goes on; the journal keeps what there is to tell.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final, cast

import httpx
import structlog
from pydantic import ValidationError

from .errors import AgentError, ConfigError
from .journal import Journal
from .key_files import KeyUnusable, read_header_key
from .loopback import NO_TLS
from .protocol.wire import OrderEnvelope, PolicyInForce, Register, Registered, ReportBatch, ReportsAnswer

log = structlog.get_logger(__name__)

_CALL_SECONDS: Final = 30.0
_SILENCE_SECONDS_MAX: Final = 30.0  # the server sends a keep-alive line every 10 s
_SIGN_OF_LIFE_SECONDS: Final = 10.0
_LINE_BYTES_MAX: Final = 4 << 20
_BACK_OFF_SECONDS: Final = (0.1, 5.0)
_STEADY_SECONDS: Final = 5.0  # of service, after which a broken connection is a first failure again
_BATCH: Final = 500
_TOO_BIG: Final = 413
# No report of what was done is larger. A server that refuses a smaller body has a proxy with a wrong limit before it.
_REPORT_BYTES_MAX: Final = 64 << 10


class RegisterAgain(AgentError):
    """The scheduler does not know this agent's registration any more."""


class Upstream:
    """One connection to one server. ``make_register`` and ``on_order`` are the daemon's."""

    def __init__(
        self,
        server_url: str,
        token_file: Path,
        journal: Journal,
        connected: asyncio.Event,
        make_register: Callable[[], Awaitable[Register]],
        on_registered: Callable[[Registered], Awaitable[None]],
        on_order: Callable[[OrderEnvelope], Awaitable[None]],
    ) -> None:
        self._token_file = token_file
        self._journal = journal
        self._connected = connected
        self._make_register = make_register
        self._on_registered = on_registered
        self._on_order = on_order
        self._node_id = ""
        self._incarnation = 0
        self._unsent = asyncio.Event()
        journal.on_report.append(self._unsent.set)
        self.client = httpx.AsyncClient(
            base_url=server_url.rstrip("/") + "/api/v1",
            timeout=httpx.Timeout(_CALL_SECONDS, connect=5.0),
            # One that is cancelled right after it was made stays in the pool: a bound would be used up some day.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=20),
            trust_env=False,
            verify=NO_TLS if server_url.startswith("http://") else True,
        )

    def read_token(self) -> str:
        try:
            return read_header_key(self._token_file)
        except KeyUnusable as error:
            raise ConfigError(f"token_file {self._token_file} {error}") from error

    async def aclose(self) -> None:
        await self.client.aclose()

    # ---- the connection ---------------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until cancelled: registers, then reads orders and sends reports until the connection breaks."""
        loop = asyncio.get_running_loop()
        low, high = _BACK_OFF_SECONDS
        failures = 0
        while True:
            said = "the stream of orders ended"
            serves_since = math.inf
            try:
                await self._register()
                serves_since = loop.time()
                await self._serve()
            except (httpx.HTTPError, AgentError, ValueError, OSError) as error:  # ValueError: an answer that is none
                said = f"{type(error).__name__}: {error}"
            finally:
                self._connected.clear()
            # A server that takes every registration and nothing after it must not be asked without a pause.
            failures = 1 if loop.time() - serves_since >= _STEADY_SECONDS else failures + 1
            level = log.warning if failures in (1, 10) else log.debug
            level("no scheduler", failures=failures, error=said)
            await asyncio.sleep(min(high, low * 2 ** min(failures, 8)) * random.uniform(0.5, 1.0))

    async def _register(self) -> None:
        self.client.headers["Authorization"] = f"Bearer {self.read_token()}"
        register = await self._make_register()
        reply = await self.client.post("/agent/register", **_json(register))
        if reply.status_code != 200:
            raise AgentError(f"register: HTTP {reply.status_code}: {reply.text[:500]}")
        registered = read_registered(reply.content)
        self._node_id, self._incarnation = register.node_id, registered.incarnation
        self._journal.acknowledge(registered.acknowledged)
        await self._on_registered(registered)
        log.info("registered", incarnation=registered.incarnation, term=registered.term)

    async def _serve(self) -> None:
        self._connected.set()
        tasks = [asyncio.create_task(self._read_orders()), asyncio.create_task(self._send_reports())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _read_orders(self) -> None:
        after = self._journal.highest("orders_after")
        limits = httpx.Timeout(_CALL_SECONDS, read=_SILENCE_SECONDS_MAX)
        query: dict[str, str | int] = {"node_id": self._node_id, "after": after}
        async with self.client.stream("GET", "/agent/orders", params=query, timeout=limits) as reply:
            if reply.status_code != 200:
                text = (await reply.aread())[:500].decode(errors="replace")
                raise RegisterAgain(f"orders: HTTP {reply.status_code}: {text}")
            rest = b""
            async for chunk in reply.aiter_bytes():
                *lines, rest = (rest + chunk).split(b"\n")
                if len(rest) > _LINE_BYTES_MAX:
                    raise AgentError(f"an order longer than {_LINE_BYTES_MAX} bytes")
                for line in lines:
                    if line:
                        envelope = read_order(line)
                        if envelope.seq:
                            await self._on_order(envelope)

    async def _something_new(self) -> bool:
        """False after a while without a report."""
        try:
            async with asyncio.timeout(_SIGN_OF_LIFE_SECONDS):
                await self._unsent.wait()
        except TimeoutError:
            return False
        return True

    async def _send_reports(self) -> None:
        most = _BATCH
        while True:
            self._unsent.clear()
            reports = self._journal.unsent(most)
            if not reports and not await self._something_new():
                reports = []  # an empty batch says that this agent lives: its lease is renewed by what it does
            elif not reports:
                continue
            batch = ReportBatch(
                node_id=self._node_id,
                incarnation=self._incarnation,
                journal_id=self._journal.journal_id,
                reports=reports,
            )
            sent = _json(batch)
            reply = await self.client.post("/agent/reports", **sent)
            if reply.status_code == _TOO_BIG and len(reports) > 1:
                most = len(reports) // 2
                continue
            if reply.status_code == _TOO_BIG and self._drop_too_big(reports, len(sent["content"])):
                continue
            if reply.status_code != 200:
                size = f" for {len(sent['content'])} bytes" if reply.status_code == _TOO_BIG else ""
                raise RegisterAgain(f"reports: HTTP {reply.status_code}{size}: {reply.text[:500]}")
            answer = ReportsAnswer.model_validate_json(reply.content)
            if answer.unsupported:
                log.warning("the scheduler does not know these reports", ids=answer.unsupported)
            self._journal.acknowledge(answer.acknowledged)
            most = min(_BATCH, most + max(1, most // 4))

    def _drop_too_big(self, reports: list[dict[str, Any]], body_bytes: int) -> bool:
        """Whether the one report was put aside, so that those behind it are told."""
        return bool(reports) and body_bytes > _REPORT_BYTES_MAX and self._journal.drop_too_big(reports[0]["id"])


def read_order(line: bytes) -> OrderEnvelope:
    """One line of the stream. An order that this version cannot read becomes one that it does not know: it is
    answered `unsupported`, and those behind it are not held up. Raises AgentError for what is no order at all."""
    try:
        return OrderEnvelope.model_validate_json(line)
    except ValidationError as error:
        try:
            raw: dict[str, Any] = _decoded(line)
            kind = f"unreadable {raw['order']['kind']}: {error.errors()[0]['loc']}"
            return OrderEnvelope.model_validate({**raw, "order": {"kind": kind[:200]}})
        except (ValueError, KeyError, TypeError, ValidationError) as again:
            raise AgentError(f"a line of the order stream is no order: {line[:200]!r}") from again


def read_registered(content: bytes) -> Registered:
    """The answer to a registration; policies that this version cannot read are left out, and the old ones rule on."""
    try:
        return Registered.model_validate_json(content)
    except ValidationError:
        decoded = _decoded(content)
        raw = cast("dict[str, Any]", decoded) if isinstance(decoded, dict) else {}
        if not isinstance(raw.get("policies"), list):
            raise
        kept: list[PolicyInForce] = []
        for one in raw["policies"]:
            try:
                kept.append(PolicyInForce.model_validate(one))
            except ValidationError as error:
                log.error("a policy cannot be read", policy=one, error=str(error))
        return Registered.model_validate({**raw, "policies": kept})


def _decoded(content: bytes) -> Any:
    """Raises ValueError, also for what is nested too deep to be read."""
    try:
        return json.loads(content)
    except RecursionError as error:
        raise ValueError(str(error)) from error


def _json(message: Any) -> dict[str, Any]:
    return {"content": message.model_dump_json().encode(), "headers": {"Content-Type": "application/json"}}
