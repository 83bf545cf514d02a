"""The gate that is an operator's own, behind a signed webhook: it is asked to close, to open, and how it is.

Each answer says ``state`` and may say ``in_flight``. Whatever is not said in so many words is unknown, and unknown is
not closed. Where the webhook does not count, the engine's gauges do, or a time that the operator grants.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from ..protocol.wire import GateState
from .base import ClosedTerms, CountedBy, GateObservation, GateRefused, GateUnreachable
from .counting import Counter
from .sections import WebhookSection
from .webhook_call import Resolve, WebhookCaller, resolve

_POLL_SECONDS_FIRST: Final = 0.05
_POLL_SECONDS_MAX: Final = 1.0
_COUNT_MAX: Final = 1 << 31


class WebhookGate:
    """``counter``: who counts where the webhook does not; None: nobody."""

    def __init__(self, section: WebhookSection, name: str, counter: Counter | None, resolve: Resolve = resolve) -> None:
        self._caller = WebhookCaller(section, resolve)
        self._name = name
        self._counter = counter
        self._said_count = True

    @property
    def counted_by(self) -> CountedBy:
        return "gate" if self._said_count or self._counter is None else self._counter.counted_by

    async def ensure_route(self, engine_id: str, name: str, models: Sequence[str], upstream: str) -> None:
        await self._ask("ensure", engine_id, {"models": list(models), "upstream": upstream})

    async def remove_route(self, engine_id: str) -> None:
        await self._ask("remove", engine_id)

    async def close(self, engine_id: str, terms: ClosedTerms) -> int | None:
        if self._counter is not None:
            await self.observe(engine_id)  # it may have opened since it was closed: the answer below does not tell
        seen = await self._must_be(GateState.CLOSED, await self._ask("close", engine_id, {"terms": asdict(terms)}))
        if self._counter is not None:
            self._counter.closed()
        return seen.in_flight

    async def wait_drained(self, engine_id: str, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        deadline, pause = loop.time() + seconds, _POLL_SECONDS_FIRST
        while True:
            seen = await self._must_be(GateState.CLOSED, await self.observe(engine_id))
            self._said_count = seen.in_flight is not None
            if seen.in_flight is None:
                return await self._by_others(deadline - loop.time())
            if not seen.in_flight or loop.time() >= deadline:
                return seen.in_flight
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
            pause = min(_POLL_SECONDS_MAX, pause * 1.5)

    async def _by_others(self, seconds: float) -> int:
        if self._counter is None:
            raise GateRefused(
                "the webhook does not say in_flight, and nobody else counts: set webhook.drain_grace_seconds or"
                " webhook.in_flight_metrics"
            )
        return await self._counter.wait_drained(max(0.0, seconds))

    async def abort(self, engine_id: str) -> None:
        await self._ask("abort", engine_id)

    async def open(self, engine_id: str) -> None:
        if self._counter is not None:
            self._counter.opened()
        await self._must_be(GateState.OPEN, await self._ask("open", engine_id))

    async def observe(self, engine_id: str) -> GateObservation:
        seen = await self._ask("observe", engine_id)
        if self._counter is not None and seen.state is not GateState.CLOSED:
            self._counter.opened()
        return seen

    # ---- calls ------------------------------------------------------------------------------------------------

    async def _ask(self, verb: str, engine_id: str, more: Mapping[str, Any] | None = None) -> GateObservation:
        about = {"engine_id": engine_id, "engine": self._name, **(more or {})}
        return _observation(await self._caller.call(verb, about))

    async def _must_be(self, state: GateState, seen: GateObservation) -> GateObservation:
        if seen.state is not state:
            raise GateUnreachable(f"the webhook was asked for {state} and says {seen.state}")
        return seen


def _observation(answer: Mapping[str, Any]) -> GateObservation:
    try:
        state = GateState(str(answer.get("state", "unknown")))
    except ValueError:
        state = GateState.UNKNOWN
    return GateObservation(state=state, in_flight=_count(answer, "in_flight"), held=_count(answer, "held") or 0)


def _count(answer: Mapping[str, Any], key: str) -> int | None:
    value = answer.get(key)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _COUNT_MAX:
        raise GateUnreachable(f"the webhook's {key} is no count: {value!r:.100}")
    return value
