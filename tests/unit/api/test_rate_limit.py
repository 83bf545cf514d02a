"""The token bucket of each principal, behind the real envelope."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from starlette.responses import PlainTextResponse

from lull.api.auth import Authenticator, new_token
from lull.api.middleware import Envelope
from lull.api.problems import Problem
from lull.api.rate_limit import BURST_SECONDS, RateLimit

TOKEN = new_token()


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


def client(clock: Clock, rate: float = 2.0) -> httpx.AsyncClient:
    limited = RateLimit(PlainTextResponse("ok"), requests_per_second_max=rate, clock=clock)
    authenticator = Authenticator(hashlib.sha256(TOKEN.encode()).digest(), "ann")
    app = Envelope(limited, authenticator=authenticator, body_bytes_max=1000, agent_body_bytes_max=1000)
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://lull", headers={"Authorization": f"Bearer {TOKEN}"}
    )


async def test_a_burst_passes_and_then_the_rate_rules() -> None:
    clock = Clock()
    async with client(clock) as http:
        burst = int(2.0 * BURST_SECONDS)
        assert [(await http.get("/")).status_code for _ in range(burst)] == [200] * burst
        refused = await http.get("/")
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        assert refused.headers["content-type"] == "application/problem+json"
        assert refused.headers["x-request-id"]
        assert (refused.json()["code"], refused.json()["requests_per_second_max"]) == ("rate_limited", 2.0)
        assert (await http.get("/api/v1/agent/orders")).status_code == 200, "agents are exempt"
        assert (await http.get("/livez")).status_code == 200
        clock.now += 1.0
        assert [(await http.get("/")).status_code for _ in range(3)] == [200, 200, 429]
        clock.now += 1000.0
        assert [(await http.get("/")).status_code for _ in range(burst + 1)] == [200] * burst + [429]


async def test_a_slow_rate_says_how_long_to_wait() -> None:
    clock = Clock()
    async with client(clock, rate=0.1) as http:
        assert (await http.get("/")).status_code == 200
        clock.now += 2.0
        assert (await http.get("/")).headers["retry-after"] == "8"
        clock.now += 8.0
        assert (await http.get("/")).status_code == 200


async def test_each_has_a_bucket_of_its_own_and_there_are_not_more_than_so_many() -> None:
    limit = RateLimit(PlainTextResponse("ok"), requests_per_second_max=0.2, principals_max=3, clock=Clock())

    async def ask(principal: str) -> int:
        scope: dict[str, Any] = {"type": "http", "path": "/", "state": {"principal": principal}, "method": "GET"}

        async def nothing(*_: Any) -> Any:
            return None

        try:
            await limit(scope, nothing, nothing)
        except Problem as problem:
            return problem.status
        return 200

    assert [await ask(name) for name in ("a", "a", "b", "b")] == [200, 429, 200, 429]
    for number in range(50):
        assert await ask(f"p{number}") == 200
    assert len(limit._buckets) == 3


@pytest.mark.parametrize("value", ["0", "-1", "nan"])
def test_a_rate_that_is_none_is_refused(value: str) -> None:
    from lull.scheduler.settings import ServerSettings, SettingsError

    environ = {"LULL_SERVER__REQUESTS_PER_SECOND_MAX": value}
    with pytest.raises(SettingsError, match="REQUESTS_PER_SECOND_MAX"):
        ServerSettings.load(environ=environ)
    assert ServerSettings.load(environ={}).requests_per_second_max == 300.0
