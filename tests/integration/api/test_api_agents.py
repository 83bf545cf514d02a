"""Register, orders and reports, over a real socket where a stream is needed."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import httpx
import pytest

from lull.agents.protocol.wire import RestartEngine
from lull.api.services import Services
from lull.scheduler.store import Store
from tests.waiting import wait_until_async
from tests.wire_node import JSON, WireNode, order_of


async def _next(lines: AsyncIterator[str]) -> str:
    return await asyncio.wait_for(anext(lines), 5)


async def _next_order(lines: AsyncIterator[str]) -> str:
    while True:
        line = await _next(lines)
        if line != '{"seq":0}':
            return line


async def test_another_protocol_version_is_refused(http: httpx.AsyncClient) -> None:
    answer = await http.post("/agent/register", json={"protocol_version": 99})
    assert answer.status_code == 422
    node = WireNode(http)
    await node.register()
    body = (
        '{"protocol_version":99,"node_id":"n","name":"n","version":"9","boot_id":"b","machine_id":"m","journal_id":"j",'
        '"devices":[],"engines":[],"loans":[],"attempts":[],"a_field_of_the_future":1}'
    )
    answer = await http.post("/agent/register", content=body, headers=JSON)
    assert answer.status_code == 422
    assert "run the same release of both" in answer.json()["detail"]


async def test_another_machine_with_the_same_node_id_is_refused(http: httpx.AsyncClient, node: WireNode) -> None:
    body = {
        "node_id": node.node_id, "name": "x", "version": "0.1.0", "boot_id": "b", "machine_id": "other",
        "journal_id": "j", "devices": [], "engines": [], "loans": [], "attempts": [],
    }  # fmt: skip
    answer = await http.post("/agent/register", json=body)
    assert (answer.status_code, answer.json()["code"]) == (409, "duplicate_identity")
    assert "data directory of its own" in answer.json()["detail"]


async def test_reports_are_acknowledged_and_bounded(http: httpx.AsyncClient, node: WireNode) -> None:
    answer = await node.report(
        {"kind": "alert", "severity": "warning", "code": "x", "sentence": "y"}, {"kind": "of_the_future"}
    )
    assert answer.json() == {"acknowledged": 2, "unsupported": [2]}
    too_many = await node.report(*[{"kind": "of_the_future"}] * 501)
    assert too_many.status_code == 422
    assert "500" in too_many.json()["detail"]
    node.incarnation -= 1
    stale = await node.report({"kind": "of_the_future"})
    assert (stale.status_code, stale.json()["code"]) == (409, "stale_agent")
    node.node_id = "nobody"
    assert (await node.report()).status_code == 404


async def test_orders_of_an_unknown_node_are_404(http: httpx.AsyncClient) -> None:
    answer = await http.get("/agent/orders", params={"node_id": "nope"})
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")
    assert (await http.get("/agent/orders")).json()["errors"][0]["field"] == "node_id"


async def test_an_order_comes_at_once_and_keep_alives_between(live: httpx.AsyncClient, store: Store) -> None:
    node = WireNode(live)
    await node.register()
    async with node.orders() as lines:
        assert await _next(lines) == '{"seq":0}'
        assert await _next(lines) == '{"seq":0}'
        seq = await store.add_order(node.node_id, RestartEngine(engine_id="e"))
        envelope = order_of(await _next_order(lines))
        assert (envelope.seq, envelope.order) == (seq, RestartEngine(engine_id="e"))
    again = WireNode(live, after=node.after)
    async with again.orders() as lines:
        assert order_of(await _next_order(lines)).seq == seq
    done = WireNode(live, after=seq)
    async with done.orders() as lines:
        assert await _next(lines) == '{"seq":0}'


async def test_only_what_the_node_sends_is_a_sign_of_its_life(live: httpx.AsyncClient, store: Store) -> None:
    node = WireNode(live)
    await node.register()
    before = (await store.get_node(node.node_id)).last_seen_at

    async with node.orders() as lines:
        for _ in range(3):
            await _next(lines)
    assert (await store.get_node(node.node_id)).last_seen_at == before, "a stopped agent's stream can be written to"
    assert (await node.report()).status_code == 200
    assert (await store.get_node(node.node_id)).last_seen_at > before


async def test_a_newer_stream_ends_the_older(live: httpx.AsyncClient, services: Services) -> None:
    node = WireNode(live)
    await node.register()
    async with node.orders() as older:
        await _next(older)
        async with node.orders() as newer:
            await _next(newer)
            await asyncio.wait_for(_exhaust(older), 5)
            await _next(newer)
            assert len(services.order_streams) == 1
    await wait_until_async(lambda: not services.order_streams, 5, "the streams to be forgotten")


async def test_a_newer_registration_ends_the_stream_and_refuses_the_older(live: httpx.AsyncClient) -> None:
    node = WireNode(live)
    await node.register()
    async with node.orders() as lines:
        await _next(lines)
        newer = WireNode(live)
        await newer.register()
        async with newer.orders() as newer_lines:
            await _next(newer_lines)
            await asyncio.wait_for(_exhaust(lines), 5)


async def test_a_stopping_server_ends_streams_at_once(live: httpx.AsyncClient, services: Services) -> None:
    node = WireNode(live)
    await node.register()
    async with node.orders() as lines, live.stream("GET", "/events") as events:
        await _next(lines)
        text = events.aiter_text()
        await asyncio.wait_for(anext(text), 5)
        begun = time.monotonic()
        services.topics.stop()
        await asyncio.wait_for(asyncio.gather(_exhaust(lines), _exhaust(text)), 5)
        assert time.monotonic() - begun < 1


@pytest.mark.parametrize("count", [250])
async def test_many_orders_come_in_order(live: httpx.AsyncClient, store: Store, count: int) -> None:
    node = WireNode(live)
    await node.register()
    wanted = [await store.add_order(node.node_id, RestartEngine(engine_id=str(n))) for n in range(count)]
    async with node.orders() as lines:
        assert [order_of(await _next_order(lines)).seq for _ in wanted] == wanted


async def _exhaust(lines: AsyncIterator[str]) -> None:
    async for _ in lines:
        pass
