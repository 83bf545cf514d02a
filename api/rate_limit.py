"""Bounds how many requests one principal may send: a token bucket each, so that a loop gone wild slows nobody else.

Inside the envelope, which says who asks. Agents are exempt: what they send is bounded by the protocol, and a report
that is turned away is only sent again.
"""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Final

from starlette.types import ASGIApp, Receive, Scope, Send

from .middleware import AGENT_PREFIX
from .problems import Problem

BURST_SECONDS: Final = 5.0  # a full bucket holds what may come in so long
PRINCIPALS_MAX: Final = 10_000


class RateLimit:
    """ASGI middleware. ``clock``: seconds that never go back."""

    def __init__(
        self,
        app: ASGIApp,
        *,
        requests_per_second_max: float,
        principals_max: int = PRINCIPALS_MAX,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._app = app
        self._rate = requests_per_second_max
        self._full = max(1.0, requests_per_second_max * BURST_SECONDS)
        self._principals_max = principals_max
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()  # what is left, and when that was

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        state: dict[str, Any] = scope.get("state", {})
        principal: str | None = state.get("principal")
        if principal is not None and not scope["path"].startswith(AGENT_PREFIX):
            self._take(principal)
        await self._app(scope, receive, send)

    def _take(self, principal: str) -> None:
        now = self._clock()
        left, at = self._buckets.pop(principal, (self._full, now))
        left = min(self._full, left + (now - at) * self._rate)
        served = left >= 1.0
        self._buckets[principal] = (left - served, now)
        while len(self._buckets) > self._principals_max:
            self._buckets.popitem(last=False)  # the one that has been quiet longest: its bucket is the fullest
        if not served:
            wait_seconds = math.ceil((1.0 - left) / self._rate)
            raise Problem(
                "rate_limited",
                f"more than {self._rate:g} requests a second; wait {wait_seconds} s, or follow an event stream instead",
                headers={"Retry-After": str(wait_seconds)},
                extra={"requests_per_second_max": self._rate},
            )
