"""Log bytes from an agent's POST to a client's GET, over a real socket."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterable, AsyncIterator
from dataclasses import dataclass

import httpx
import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState, FetchLog
from lull.api.relays import BUFFER_BYTES_MAX
from lull.api.services import Services
from lull.scheduler.actions import MarkSilent
from lull.scheduler.model import AttemptRow
from lull.scheduler.store import Store
from tests.waiting import wait_until_async
from tests.wire_node import WireNode, order_of


@dataclass
class LogNode:
    """A node with one running attempt, whose agent waits for FetchLog."""

    node: WireNode
    attempt: AttemptRow
    job_id: str

    async def fetch_order(self) -> FetchLog:
        async with self.node.orders() as lines:
            async for line in lines:
                envelope = order_of(line)
                self.node.after = max(self.node.after, envelope.seq)
                if isinstance(envelope.order, FetchLog):
                    return envelope.order
        raise AssertionError("the order stream ended")

    async def post(self, request_id: str, body: bytes | AsyncIterable[bytes], **headers: str) -> httpx.Response:
        named = {f"Lull-Log-{name.capitalize()}": value for name, value in headers.items()}
        return await self.node.http.post(f"/agent/logs/{request_id}", content=body, headers=named)


@pytest.fixture
async def logs(live: httpx.AsyncClient, store: Store) -> LogNode:
    node = WireNode(live)
    await node.register()
    job_id = (await live.post("/jobs", json={"argv": ["true"]})).json()["id"]
    attempt = await node.place(store, job_id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    return LogNode(node, attempt, job_id)


async def test_the_bytes_come_as_plain_text_from_where_they_begin(live: httpx.AsyncClient, logs: LogNode) -> None:
    body = b"\x1b[31mred\x00\xff\r\n<script>"
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs", params={"offset": 7, "stream": "stderr"}))
    order = await logs.fetch_order()
    assert (order.attempt_id, order.stream, order.offset, order.follow) == (logs.attempt.id, "stderr", 7, False)
    posted = await logs.post(order.request_id, body, offset="9", gap="2", end="1")
    assert posted.status_code == 204
    answer = await asyncio.wait_for(reading, 5)
    assert answer.content == body
    assert answer.headers["content-type"] == "text/plain; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["lull-log-offset"] == "9"
    assert answer.headers["lull-log-gap"] == "2"
    assert answer.headers["lull-log-attempt"] == "1"
    gone = await logs.post(order.request_id, b"late", end="1")
    assert (gone.status_code, gone.json()["code"]) == (410, "relay_gone")


async def test_several_posts_are_one_log_and_a_gap_is_told(live: httpx.AsyncClient, logs: LogNode) -> None:
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    assert (await logs.post(order.request_id, b"head", offset="0", end="0")).status_code == 204
    assert (await logs.post(order.request_id, b"tail", offset="10", gap="6", end="1")).status_code == 204
    assert (await asyncio.wait_for(reading, 5)).content == b"head\n[lull: 6 bytes of this log were not kept]\ntail"


async def test_following_passes_each_chunk_on_at_once(live: httpx.AsyncClient, logs: LogNode) -> None:
    wanted: asyncio.Queue[bytes | None] = asyncio.Queue()

    async def body() -> AsyncIterator[bytes]:
        while (chunk := await wanted.get()) is not None:
            yield chunk

    async with _follow(live, logs) as follower:
        posting = asyncio.create_task(logs.post(follower.order.request_id, body(), offset="0", end="1"))
        await wanted.put(b"first\n")
        response = await follower.response()
        chunks = response.aiter_raw()
        assert await asyncio.wait_for(anext(chunks), 5) == b"first\n"
        await wanted.put(b"second\n")
        assert await asyncio.wait_for(anext(chunks), 5) == b"second\n"
        await wanted.put(None)
        assert [chunk async for chunk in chunks] == []
        assert (await posting).status_code == 204


async def test_a_slow_reader_slows_the_agent_down(live: httpx.AsyncClient, logs: LogNode, services: Services) -> None:
    total = 64 * 2**20
    sent = 0

    async def body() -> AsyncIterator[bytes]:
        nonlocal sent
        while sent < total:
            sent += 2**16
            yield b"x" * 2**16

    async with _follow(live, logs) as follower:
        posting = asyncio.create_task(logs.post(follower.order.request_id, body(), offset="0", end="1"))
        response = await follower.response()
        relay = services.relays.get(follower.order.request_id)
        assert relay is not None
        seen = -1

        async def stands_still() -> bool:
            nonlocal seen
            before, seen = seen, sent
            return sent == before and relay._buffered_bytes >= BUFFER_BYTES_MAX

        await wait_until_async(stands_still, 10, "the agent to be stopped")
        assert sent < total // 2
        received = 0
        async for chunk in response.aiter_raw():
            received += len(chunk)
        assert received == total
        assert (await posting).status_code == 204


async def test_a_reader_that_leaves_stops_the_agent(live: httpx.AsyncClient, logs: LogNode, services: Services) -> None:
    asked_for_more = asyncio.Event()
    never = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        yield b"x"
        asked_for_more.set()
        await never.wait()

    async with _follow(live, logs) as follower:
        posting = asyncio.create_task(logs.post(follower.order.request_id, body(), offset="0", end="1"))
        await follower.response()
        await asyncio.wait_for(asked_for_more.wait(), 5)
    await wait_until_async(lambda: len(services.relays) == 0, 5, "the relay to be closed")
    never.set()
    # The connection was cut in the middle of the body: httpx sees the answer or the cut.
    with contextlib.suppress(httpx.TransportError):
        assert (await asyncio.wait_for(posting, 5)).status_code == 410


async def test_an_agent_that_breaks_off_breaks_the_readers_stream_too(live: httpx.AsyncClient, logs: LogNode) -> None:
    async def body() -> AsyncIterator[bytes]:
        yield b"so far"
        raise ConnectionError("the agent dies")

    async with _follow(live, logs) as follower:
        with pytest.raises(ConnectionError):
            await logs.post(follower.order.request_id, body(), offset="0", end="1")
        response = await follower.response()
        with pytest.raises(httpx.RemoteProtocolError):
            await response.aread()


async def test_an_agent_that_does_not_come_is_504(live: httpx.AsyncClient, logs: LogNode, services: Services) -> None:
    answer = await live.get(f"/jobs/{logs.job_id}/logs")
    assert (answer.status_code, answer.json()["code"]) == (504, "agent_silent")
    assert answer.json()["node_id"] == logs.node.node_id
    assert len(services.relays) == 0


async def test_an_agent_that_falls_silent_breaks_the_stream(live: httpx.AsyncClient, logs: LogNode) -> None:
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    assert (await logs.post(order.request_id, b"head", end="0")).status_code == 204
    with pytest.raises(httpx.RemoteProtocolError):
        await asyncio.wait_for(reading, 5)


async def test_an_empty_log_that_nobody_follows_ends(live: httpx.AsyncClient, logs: LogNode) -> None:
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    assert (await logs.post(order.request_id, b"", end="0")).status_code == 204
    assert (await asyncio.wait_for(reading, 5)).content == b""


@pytest.mark.parametrize(
    ("said", "status", "code"), [("log_expired", 410, "log_expired"), ("busy", 429, "too_many_streams")]
)
async def test_what_the_agent_cannot_send_is_a_problem(
    live: httpx.AsyncClient, logs: LogNode, said: str, status: int, code: str
) -> None:
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    assert (await logs.post(order.request_id, b"", problem=said)).status_code == 204
    answer = await asyncio.wait_for(reading, 5)
    assert (answer.status_code, answer.json()["code"]) == (status, code)


async def test_the_kept_end_of_a_log_is_answered_when_the_node_cannot(
    live: httpx.AsyncClient, logs: LogNode, store: Store
) -> None:
    path = f"/agent/attempts/{logs.attempt.id}/log-tail/stdout"
    kept = await live.post(path, content=b"the end", headers={"Lull-Log-Offset": "5"})
    assert kept.status_code == 204
    assert (await live.get(f"/jobs/{logs.job_id}/logs")).status_code == 504, "the job still runs: this is not its end"
    await logs.fetch_order()
    await logs.node.attempt_changed(logs.attempt, AttemptState.ENDED, AttemptEnd.EXITED, 0)
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    await logs.post(order.request_id, b"all of it: the end", end="1")
    assert (await reading).content == b"all of it: the end", "the node has more"
    # It does not come, it has none any more, it is known to be silent.
    for how in ("late", "expired", "silent"):
        reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs", params={"offset": 9, "follow": 1}))
        if how == "expired":
            await logs.post((await logs.fetch_order()).request_id, b"", problem="log_expired")
        answer = await asyncio.wait_for(reading, 5)
        assert (answer.status_code, answer.content) == (200, b"end"), how
        assert (answer.headers["lull-log-offset"], answer.headers["lull-log-source"]) == ("9", "server")
        if how == "late":
            await logs.fetch_order()
        if how == "expired":
            [row] = (await store.load_snapshot(0.0)).nodes
            assert await store.commit([MarkSilent(row.id, row.heard_count)], time.time()) == 1
    whole = await live.get(f"/jobs/{logs.job_id}/logs")
    assert (whole.content, whole.headers["lull-log-gap"]) == (b"the end", "5")
    assert (await live.get(f"/jobs/{logs.job_id}/logs", params={"offset": 99})).content == b""
    other = await live.get(f"/jobs/{logs.job_id}/logs", params={"stream": "stderr"})
    assert other.json()["code"] == "agent_silent"


async def test_the_end_of_a_log_is_checked(live: httpx.AsyncClient, logs: LogNode) -> None:
    attempt = f"/agent/attempts/{logs.attempt.id}/log-tail"
    assert (await live.post(f"{attempt}/stdout", content=b"x" * (2**16 + 1))).status_code == 422
    assert (await live.post(f"{attempt}/stdlog", content=b"x")).status_code == 422
    assert (await live.post("/agent/attempts/nope/log-tail/stdout", content=b"x")).status_code == 404
    assert (await live.post(f"{attempt}/stdout", content=b"x", headers={"Lull-Log-Offset": "-1"})).status_code == 422


async def test_an_agents_headers_are_checked(live: httpx.AsyncClient, logs: LogNode) -> None:
    assert (await logs.post("0" * 32, b"x")).json()["code"] == "relay_gone"
    reading = asyncio.create_task(live.get(f"/jobs/{logs.job_id}/logs"))
    order = await logs.fetch_order()
    for headers in ({"offset": "-1"}, {"gap": "x"}, {"problem": "a b"}):
        answer = await logs.post(order.request_id, b"x", **headers)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"].lower() == f"lull-log-{next(iter(headers))}"
    await logs.post(order.request_id, b"ok", end="1")
    assert (await reading).content == b"ok"


async def test_before_an_attempt_there_is_no_log(live: httpx.AsyncClient, store: Store) -> None:
    node = WireNode(live)
    await node.register()
    job_id = (await live.post("/jobs", json={"argv": ["true"]})).json()["id"]
    for follow in (0, 1):  # following waits for the bound of one request first
        answer = await live.get(f"/jobs/{job_id}/logs", params={"follow": follow})
        assert (answer.status_code, answer.json()["code"]) == (409, "no_attempt_yet")
        assert answer.json()["state"] == "queued"
    attempt = await node.place(store, job_id)
    assert (await live.get(f"/jobs/{job_id}/logs")).status_code == 409
    reading = asyncio.create_task(live.get(f"/jobs/{job_id}/logs", params={"follow": 1}))
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    order = await LogNode(node, attempt, job_id).fetch_order()
    await LogNode(node, attempt, job_id).post(order.request_id, b"begun", end="1")
    assert (await asyncio.wait_for(reading, 5)).content == b"begun"


async def test_a_job_that_ended_without_a_start_has_an_empty_log(live: httpx.AsyncClient) -> None:
    job_id = (await live.post("/jobs", json={"argv": ["true"]})).json()["id"]
    await live.post(f"/jobs/{job_id}/cancel")
    for follow in (0, 1):
        answer = await live.get(f"/jobs/{job_id}/logs", params={"follow": follow})
        assert (answer.status_code, answer.content) == (200, b"")
    assert (await live.get(f"/jobs/{job_id}/logs", params={"attempt": 1})).status_code == 404


async def test_an_attempt_is_chosen_by_number(live: httpx.AsyncClient, logs: LogNode) -> None:
    assert (await live.get(f"/jobs/{logs.job_id}/logs", params={"attempt": 2})).status_code == 409
    await logs.node.attempt_changed(logs.attempt, AttemptState.ENDED, AttemptEnd.EXITED, 0)
    assert (await live.get(f"/jobs/{logs.job_id}/logs", params={"attempt": 2, "follow": 1})).status_code == 404
    assert (await live.get(f"/jobs/{logs.job_id}/logs", params={"attempt": 0})).status_code == 422
    assert (await live.get(f"/jobs/{logs.job_id}/logs", params={"stream": "../x"})).status_code == 422


class _Follower:
    def __init__(self, opening: asyncio.Task[httpx.Response], order: FetchLog) -> None:
        self._opening = opening
        self.order = order

    async def response(self) -> httpx.Response:
        return await asyncio.wait_for(asyncio.shield(self._opening), 5)


@contextlib.asynccontextmanager
async def _follow(live: httpx.AsyncClient, logs: LogNode) -> AsyncIterator[_Follower]:
    """A GET with follow=1, and the order that it caused; the response is closed at the end."""
    request = live.build_request("GET", f"/jobs/{logs.job_id}/logs", params={"follow": 1})
    opening = asyncio.create_task(live.send(request, stream=True))
    follower = _Follower(opening, await logs.fetch_order())
    try:
        yield follower
    finally:
        await (await follower.response()).aclose()
