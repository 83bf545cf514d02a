from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import httpx
from httpx_sse import EventSource, ServerSentEvent, aconnect_sse

from lull.api.services import Services
from tests.waiting import wait_until_async


async def _submit(live: httpx.AsyncClient) -> None:
    assert (await live.post("/jobs", json={"argv": ["true"]})).status_code == 201


async def _next(messages: AsyncIterator[ServerSentEvent]) -> ServerSentEvent:
    return await asyncio.wait_for(anext(messages), 5)


def _messages(source: EventSource) -> AsyncIterator[ServerSentEvent]:
    """Without heartbeats, which httpx-sse hands out as messages without data once it has seen an id."""
    return (message async for message in source.aiter_sse() if message.data)


async def test_what_was_and_what_comes_in_one_stream(live: httpx.AsyncClient) -> None:
    await _submit(live)
    async with aconnect_sse(live, "GET", "/events") as source:
        assert source.response.headers["content-type"].startswith("text/event-stream")
        messages = _messages(source)
        first = await _next(messages)
        assert int(first.id) == first.json()["seq"]
        assert first.event == first.json()["type"]
        await _submit(live)
        second = await _next(messages)
        assert int(second.id) > int(first.id)


async def test_a_reader_goes_on_where_it_broke_off(live: httpx.AsyncClient) -> None:
    for _ in range(3):
        await _submit(live)
    seen = (await live.get("/events", params={"follow": 0})).json()["items"]
    headers = {"Last-Event-ID": str(seen[0]["seq"])}
    async with aconnect_sse(live, "GET", "/events", headers=headers, params={"since": 0}) as source:
        messages = _messages(source)
        assert [int((await _next(messages)).id) for _ in seen[1:]] == [event["seq"] for event in seen[1:]]
    async with aconnect_sse(live, "GET", "/events", params={"since": seen[-2]["seq"]}) as source:
        assert int((await _next(_messages(source))).id) == seen[-1]["seq"]


async def test_only_the_wanted_types_come(live: httpx.AsyncClient) -> None:
    await _submit(live)
    job_id = (await live.get("/jobs")).json()["items"][0]["id"]
    async with aconnect_sse(live, "GET", "/events", params={"type": "no_such_type"}) as source:
        chunks = source.response.aiter_text()
        assert ": heartbeat" in await asyncio.wait_for(anext(chunks), 5)
    await live.post(f"/jobs/{job_id}/cancel")
    kinds = [event["type"] for event in (await live.get("/events", params={"follow": 0})).json()["items"]]
    async with aconnect_sse(live, "GET", "/events", params={"type": kinds[-1]}) as source:
        assert (await _next(_messages(source))).event == kinds[-1]


async def test_there_are_at_most_so_many_and_they_are_counted_down(live: httpx.AsyncClient, services: Services) -> None:
    services.event_streams_max = 1
    async with live.stream("GET", "/events") as response:
        await asyncio.wait_for(anext(response.aiter_text()), 5)
        refused = await live.get("/events")
        assert (refused.status_code, refused.json()["code"]) == (429, "too_many_streams")
        assert (await live.get("/events", params={"follow": 0})).status_code == 200
    await wait_until_async(lambda: services.event_streams == 0, 5, "the stream to be counted down")
