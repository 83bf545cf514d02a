from __future__ import annotations

import httpx

from lull.api.app import create_app
from lull.api.auth import Authenticator
from lull.scheduler.store import Store
from tests.wire_node import WireNode


async def test_the_app_turns_away_who_asks_too_often_and_no_agent(store: Store, token: str) -> None:
    app = create_app(store, Authenticator.of(token), requests_per_second_max=0.5)
    headers = {"Authorization": f"Bearer {token}"}
    async with (
        app.router.lifespan_context(app),
        httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://lull/api/v1", headers=headers) as http,
    ):
        answers = [await http.get("/jobs") for _ in range(4)]
        assert [answer.status_code for answer in answers] == [200, 200, 429, 429]
        assert answers[-1].json()["code"] == "rate_limited"
        assert int(answers[-1].headers["retry-after"]) > 0
        await WireNode(http).register()
