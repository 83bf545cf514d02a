"""``lull.api.Client`` against the app behind a socket; the client is synchronous, so it runs in threads."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import httpx
import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState, FetchLog
from lull.api import Client, ClientError, ProblemError, ServerUnreachable, WaitTimeout, schemas
from lull.api.services import Services
from lull.scheduler.store import Store
from tests.odd_json import DEEP, KEYS_DEEP
from tests.wire_node import GIB, WireNode, order_of


@pytest.fixture
def client(live_url: str, token: str) -> Iterator[Client]:
    with Client(live_url, token, timeout_seconds=10) as made:
        yield made


async def test_jobs(client: Client) -> None:
    job = await asyncio.to_thread(client.submit, ["python", "x.py"], env={"A": "b"}, name="n", hbm_bytes=GIB)
    assert (job.state, job.argv, job.env) == ("queued", ["python", "x.py"], {"A": "b"})
    same = [await asyncio.to_thread(client.submit, ["true"], idempotency_key="k") for _ in range(2)]
    assert same[0].id == same[1].id
    page = await asyncio.to_thread(client.jobs, limit=1)
    assert page.next_cursor is not None
    assert [item.id for item in page.items] == [same[0].id]
    assert await asyncio.to_thread(lambda: [item.id for item in client.all_jobs()]) == [same[0].id, job.id]
    assert (await asyncio.to_thread(client.job, job.id)).id == job.id
    assert await asyncio.to_thread(client.attempts, job.id) == []
    assert (await asyncio.to_thread(client.cancel, job.id)).state == "cancelled"
    assert (await asyncio.to_thread(client.wait, job.id, 5)).state == "cancelled"
    with pytest.raises(WaitTimeout, match=r"still queued after 0\.05 s") as timeout:
        await asyncio.to_thread(client.wait, same[0].id, 0.05)
    assert timeout.value.job.id == same[0].id
    with pytest.raises(ProblemError, match="there is no job 'nope'") as missing:
        await asyncio.to_thread(client.job, "nope")
    assert (missing.value.status, missing.value.code) == (404, "not_found")
    with pytest.raises(ClientError, match="no id or name"):
        client.job("..")


async def test_wait_returns_as_soon_as_the_job_ends(client: Client) -> None:
    job = await asyncio.to_thread(client.submit, ["true"])
    waiting = asyncio.create_task(asyncio.to_thread(client.wait, job.id))
    await asyncio.to_thread(client.cancel, job.id)
    assert (await asyncio.wait_for(waiting, 5)).state == "cancelled"


async def test_a_wait_may_be_longer_than_the_time_that_any_other_answer_may_take(
    live_url: str, token: str, live: httpx.AsyncClient, store: Store
) -> None:
    node = WireNode(live)
    node.engines = (node.engine("alpha"),)
    await node.register()
    await store.lead("test", 60, take_over=True)
    with Client(live_url, token, timeout_seconds=2.0) as client:
        began = await asyncio.to_thread(client.park_engine, "alpha")
        job = await asyncio.to_thread(client.submit, ["true"])
        operation, over = await asyncio.gather(
            asyncio.to_thread(client.operation, began.id, wait_seconds=2.5),
            asyncio.to_thread(client.wait, job.id, 2.5),
            return_exceptions=True,
        )
    assert isinstance(operation, schemas.Operation), operation
    assert operation.state == "running"
    assert isinstance(over, WaitTimeout), over


async def test_nodes_engines_and_history(client: Client, live: httpx.AsyncClient, store: Store) -> None:
    node = WireNode(live)
    node.engines = (node.engine("alpha"),)
    await node.register()
    assert [shown.id for shown in await asyncio.to_thread(client.nodes)] == ["node-1"]
    assert (await asyncio.to_thread(client.node, "node-1.example")).devices[0].capacity_bytes == 2 * GIB
    assert [engine.name for engine in await asyncio.to_thread(client.engines)] == ["alpha"]
    assert (await asyncio.to_thread(client.engine, "alpha")).id == "node-1-alpha"
    policy = await asyncio.to_thread(client.policy, "alpha")
    changed = policy.policy.model_copy(update={"gate": "refuse"})
    written = await asyncio.to_thread(client.put_policy, "alpha", changed, expected_version=policy.version)
    assert written.policy.gate == "refuse"
    with pytest.raises(ProblemError) as conflict:
        await asyncio.to_thread(client.put_policy, "alpha", {"when": "manual"}, expected_version=policy.version)
    assert conflict.value.status == 412
    job = await asyncio.to_thread(client.submit, ["true"])
    attempt = await node.place(store, job.id)
    assert [loan.id for loan in (await asyncio.to_thread(client.loans, open_only=True)).items] == [attempt.loan_id]
    assert (await asyncio.to_thread(client.loan, attempt.loan_id)).node_id == "node-1"
    await asyncio.to_thread(client.usage, since="2026-01-01T00:00:00Z", until="2026-01-02T00:00:00Z")
    assert (await asyncio.to_thread(client.usage)).items is not None
    assert (await asyncio.to_thread(client.version)).api == "v1"
    assert (await asyncio.to_thread(client.events_page)).next_seq > 0


async def test_events_go_on_over_a_broken_stream(client: Client, live_url: str, token: str) -> None:
    events = client.events()
    await asyncio.to_thread(client.submit, ["true"])
    first = await asyncio.to_thread(next, events)
    # The connection under the stream is cut; the iterator makes a new one from the last event on.
    await asyncio.to_thread(_cut_connections, client)
    with Client(live_url, token) as other:
        await asyncio.to_thread(other.submit, ["true"])
    while True:
        second = await asyncio.wait_for(asyncio.to_thread(next, events), 10)
        assert second.seq > first.seq
        if second.type == first.type:
            break


async def test_events_go_on_after_heartbeats(client: Client, live: httpx.AsyncClient) -> None:
    events = client.events()
    await asyncio.to_thread(client.submit, ["true"])
    first = await asyncio.to_thread(next, events)
    waiting = asyncio.create_task(asyncio.to_thread(next, events))
    async with live.stream("GET", "/events", params={"type": "no_such_type"}) as silent:
        chunks = silent.aiter_text()
        for _ in range(3):
            assert ": heartbeat" in await asyncio.wait_for(anext(chunks), 5)
    await live.post("/jobs", json={"argv": ["true"]})
    assert (await asyncio.wait_for(waiting, 10)).seq > first.seq


def _cut_connections(client: Client) -> None:
    pool = client._http._transport._pool  # type: ignore[attr-defined]
    for connection in pool.connections:
        stream = connection._connection._network_stream
        stream.get_extra_info("socket").shutdown(socket.SHUT_RDWR)


async def test_logs_wait_for_the_start_and_go_on_with_the_next_attempt(
    client: Client, live: httpx.AsyncClient, store: Store
) -> None:
    node = WireNode(live)
    await node.register()
    job = await asyncio.to_thread(client.submit, ["true"])
    reading = asyncio.create_task(asyncio.to_thread(lambda: b"".join(client.logs(job.id, follow=True))))
    attempt = await node.place(store, job.id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    async with node.orders() as lines:
        order = await _fetch_order(lines)
        assert order.follow
        await _post(live, order, b"first half, ", end="0")
        await _post(live, order, b"second half\n", end="1")
        await node.attempt_changed(attempt, AttemptState.ENDED, AttemptEnd.PREEMPTED)
        await _close_loan(node, attempt.loan_id)
        again = await node.place(store, job.id, attempt_no=1)
        await node.attempt_changed(again, AttemptState.RUNNING)
        order = await _fetch_order(lines)
        assert order.attempt_id == again.id
        await _post(live, order, b"again\n", end="1")
        await node.attempt_changed(again, AttemptState.ENDED, AttemptEnd.EXITED, 0)
        assert await asyncio.wait_for(reading, 10) == b"first half, second half\nagain\n"


async def test_a_broken_log_is_resumed_where_it_broke(
    client: Client, live: httpx.AsyncClient, store: Store, services: Services
) -> None:
    node = WireNode(live)
    await node.register()
    job = await asyncio.to_thread(client.submit, ["true"])
    attempt = await node.place(store, job.id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    reading = asyncio.create_task(asyncio.to_thread(lambda: b"".join(client.logs(job.id))))
    async with node.orders() as lines:
        order = await _fetch_order(lines)
        await _post(live, order, b"0123", end="0")
        services.relays.fail_all("for a test")
        order = await _fetch_order(lines)
        assert order.offset == 4
        await _post(live, order, b"4567", end="1", offset="4")
    assert await asyncio.wait_for(reading, 10) == b"01234567"


@pytest.mark.parametrize("body", [b"<html>", DEEP, KEYS_DEEP])
async def test_no_server_and_another_server_are_told_apart(token: str, body: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Client(f"http://127.0.0.1:{port}", token) as nobody:
        for call in (nobody.version, lambda: next(nobody.logs("x"))):
            with pytest.raises(ServerUnreachable, match=f"127.0.0.1:{port}"):
                await asyncio.to_thread(call)

    def answer(_request: httpx.Request) -> httpx.Response:
        return httpx.Response(502, content=body)

    with (
        Client("http://proxy", token, transport=httpx.MockTransport(answer)) as other,
        pytest.raises(ProblemError) as e,
    ):
        other.version()
    assert (e.value.status, e.value.code) == (502, "not_lull")


async def test_a_wrong_token_is_a_problem(live_url: str) -> None:
    with Client(live_url, "lull_wrong") as client, pytest.raises(ProblemError) as refused:
        await asyncio.to_thread(client.version)
    assert refused.value.status == 401


async def _fetch_order(lines: AsyncIterator[str]) -> FetchLog:
    while True:
        envelope = order_of(await asyncio.wait_for(anext(lines), 10))
        if isinstance(envelope.order, FetchLog):
            return envelope.order


async def _post(live: httpx.AsyncClient, order: FetchLog, body: bytes, *, end: str, offset: str = "0") -> None:
    headers = {"Lull-Log-Offset": offset, "Lull-Log-End": end}
    answer = await live.post(f"/agent/logs/{order.request_id}", content=body, headers=headers)
    assert answer.status_code == 204, answer.text


async def _close_loan(node: WireNode, loan_id: str) -> None:
    closed = {"kind": "loan_changed", "loan_id": loan_id, "epoch": 1, "event": "given_up", "state": "closed"}
    answer = await node.report(closed)
    assert answer.status_code == 200, answer.text
