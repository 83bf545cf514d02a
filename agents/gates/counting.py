"""Counts what is in flight for gates that cannot: by the engine's own gauges, else by a time that has to pass."""

from __future__ import annotations

import asyncio
import math
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from ..engines.http_call import accepted, bearer, call
from ..errors import AgentError
from .base import CountedBy, GateRefused, GateUnreachable
from .sections import CountingSection

_METRICS_SECONDS_MAX: Final = 5.0
_POLL_SECONDS_FIRST: Final = 0.05
_POLL_SECONDS_MAX: Final = 1.0
# A request may be between two gauges, or on its way; one look that finds nothing proves little.
_IDLE_LOOKS: Final = 3


def sum_of_gauges(text: str, names: Sequence[str]) -> int:
    """The sum of all samples of ``names`` in Prometheus' text format. Raises ValueError for one that is not there."""
    total = 0.0
    for name in names:
        samples = re.findall(rf"^{re.escape(name)}(?:\{{[^\n]*\}})?[ \t]+([^\s]+)", text, re.MULTILINE)
        if not samples:
            raise ValueError(f"there is no gauge {name}")
        total += sum(float(sample) for sample in samples)
    if not math.isfinite(total):
        raise ValueError(f"the gauges {', '.join(names)} are no numbers")
    return math.ceil(total)


class Counter:
    """In flight at the engine at ``url``, as ``section`` says that it is known."""

    def __init__(self, url: str, engine_kind: str, section: CountingSection, api_key_file: Path | None = None) -> None:
        self._url = url + section.metrics_path
        self._names = section.metrics_of(engine_kind)
        self._grace_seconds = section.drain_grace_seconds
        self._api_key_file = api_key_file
        self._closed_at: float | None = None

    @property
    def counted_by(self) -> CountedBy:
        return "engine" if self._names else "grace"

    def closed(self) -> None:
        """The gate is closed from now on. Closing it again changes nothing."""
        if self._closed_at is None:
            self._closed_at = asyncio.get_running_loop().time()

    def opened(self) -> None:
        """It may be open: it is to be opened now, or it was seen not to be closed."""
        self._closed_at = None

    async def in_flight(self) -> int | None:
        """None where nobody can tell. GateUnreachable if the engine does not."""
        if not self._names:
            return None
        try:
            reply = accepted(await call("GET", self._url, _METRICS_SECONDS_MAX, headers=bearer(self._api_key_file)))
            return sum_of_gauges(reply.text, self._names)
        except (AgentError, ValueError) as error:
            raise GateUnreachable(f"what is in flight cannot be told: {self._url}: {error}") from error

    async def in_flight_if_told(self) -> int | None:
        """None also where the engine does not tell: the gate of a dead engine is closed all the same."""
        try:
            return await self.in_flight()
        except GateUnreachable:
            return None

    async def wait_drained(self, seconds: float) -> int:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while True:
            self.closed()
            closed_at = self._closed_at
            assert closed_at is not None
            idle_at = closed_at + (self._grace_seconds or 0.0)
            if idle_at > deadline:
                left = f"the policy's drain_seconds_max leaves {max(0.0, deadline - loop.time()):g}"
                raise GateRefused(f"drain_grace_seconds is {self._grace_seconds:g} and {left}")
            await asyncio.sleep(max(0.0, idle_at - loop.time()))
            count = await self._wait_idle(deadline) if self._names else 0
            if count or self._closed_at == closed_at:  # else it was open meanwhile
                return count

    async def _wait_idle(self, deadline: float) -> int:
        loop = asyncio.get_running_loop()
        pause, idle_looks = _POLL_SECONDS_FIRST, 0
        while True:
            count = await self.in_flight() or 0
            idle_looks = 0 if count else idle_looks + 1
            if idle_looks >= _IDLE_LOOKS:
                return 0
            if loop.time() >= deadline:
                return max(count, 1)  # too few looks: not drained
            await asyncio.sleep(min(pause, max(0.0, deadline - loop.time())))
            pause = _POLL_SECONDS_FIRST if not count else min(_POLL_SECONDS_MAX, pause * 1.5)
