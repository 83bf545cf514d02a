from __future__ import annotations

import asyncio
import json
import stat
from typing import Any, cast

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms, GateRefused, GateRouteUnknown, GateUnreachable
from lull.agents.gates.gateway import GatewayGate
from lull.agents.protocol.wire import GateState
from tests.odd_json import DEEP, KEYS_DEEP
from tests.recording_engine import CHUNK
from tests.waiting import wait_until_async


async def test_new_route_is_closed_and_holds(start: Any) -> None:
    world = await start(open_gate=False)
    seen = await world.gate.observe("e1")
    assert (seen.state, seen.held, seen.in_flight, seen.last_request_seconds_ago) == (GateState.CLOSED, 0, 0, None)
    asking = world.ask(n=1)
    await world.held(1)
    assert not world.engine.arrivals
    await world.gate.open("e1")
    assert (await asking)[0] == 200


@pytest.mark.parametrize("reuse", [True, False])
async def test_held_requests_go_in_the_order_in_which_they_came(start: Any, reuse: bool) -> None:
    world = await start(reuse=reuse)
    assert await world.close() == 0
    asking = []
    for n in range(40):
        asking.append(world.ask(n=n))
        await world.requests(n + 1)
    await world.held(40)
    seen = await world.gate.observe("e1")
    assert seen.oldest_held_seconds is not None
    assert seen.oldest_held_seconds > 0
    assert not world.engine.arrivals
    await world.gate.open("e1")
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}
    assert world.engine.bodies("n") == list(range(40))


async def test_slow_engine_does_not_hold_back_those_that_waited(start: Any) -> None:
    """The second is not released by the first's answer but by its being sent."""
    world = await start(open_gate=False)
    asking = [world.ask(n=n, do="wait") for n in range(5)]
    await world.held(5)
    await world.gate.open("e1")
    await world.in_flight(5)
    await wait_until_async(lambda: len(world.engine.arrivals) == 5, 5, "all five arrive")
    world.engine.go.set()
    assert {status for status, _, _ in await asyncio.gather(*asking)} == {200}


async def test_released_requests_pass_an_engine_that_takes_no_connection(start: Any) -> None:
    world = await start(open_gate=False)
    await world.engine.stop()
    asking = [world.ask(n=n) for n in range(5)]
    await world.held(5)
    await world.gate.open("e1")
    assert [status for status, _, _ in await asyncio.gather(*asking)] == [502] * 5


async def test_hold_bound_is_503_with_retry_after(world: Any) -> None:
    await world.close(requests_max=1, retry=7)
    first = world.ask(n=0)
    await world.held(1)
    status, headers, body = await world.ask(n=1)
    assert (status, headers["Retry-After"]) == (503, "7")
    assert json.loads(body)["code"] == "hold_full"
    await world.gate.open("e1")
    assert (await first)[0] == 200
    assert world.engine.bodies("n") == [0]
    assert (await world.gate.observe("e1")).refused_total == 1


async def test_hold_deadline_is_503_with_retry_after(world: Any) -> None:
    await world.close(seconds_max=0.1)
    status, headers, body = await world.ask()
    assert (status, headers["Retry-After"]) == (503, "5")
    assert json.loads(body)["code"] == "hold_deadline"
    assert (await world.gate.observe("e1")).held == 0
    assert not world.engine.arrivals


async def test_refuse_is_503_at_once(world: Any) -> None:
    await world.close("refuse", retry=0)
    for stream in (False, True):
        status, headers, body = await world.ask(stream=stream)
        assert (status, headers["Retry-After"], headers["Content-Type"]) == (503, "0", "application/problem+json")
        assert json.loads(body)["code"] == "gate_refuses"
    await world.gate.open("e1")
    assert (await world.ask())[0] == 200
    assert len(world.engine.arrivals) == 1


async def test_hold_turned_into_refuse_answers_those_that_wait(world: Any) -> None:
    await world.close()
    asking = [world.ask() for _ in range(3)]
    await world.held(3)
    await world.close("refuse")
    assert [status for status, _, _ in await asyncio.gather(*asking)] == [503] * 3


async def test_held_client_that_leaves_never_reaches_the_engine(world: Any) -> None:
    await world.close()
    leaver, stayer = world.ask(n="leaver"), world.ask(n="stayer")
    await world.held(2)
    leaver.cancel()
    await world.held(1)
    await world.gate.open("e1")
    assert (await stayer)[0] == 200
    assert world.engine.bodies("n") == ["stayer"]


async def test_held_stream_gets_comments_and_then_its_answer(start: Any) -> None:
    world = await start(keepalive_seconds=0.05)
    await world.close()
    async with world.request(do="stream", stream=True) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        assert await answer.content.readexactly(26) == b": keepalive\n\n" * 2
        await world.gate.open("e1")
        rest = await answer.content.read()
    assert rest.replace(b": keepalive\n\n", b"") == CHUNK * 3 + b"data: [DONE]\n\n"


async def test_short_hold_of_a_stream_keeps_the_engines_own_head(world: Any) -> None:
    await world.close()
    asking = world.ask(do="status", status=400, stream=True)
    await world.held(1)
    await world.gate.open("e1")
    status, _, body = await asking
    assert (status, json.loads(body)["error"]["message"]) == (400, "no such token")


async def _held_stream(world: Any, **body: Any) -> tuple[bytes, Exception | None]:
    """What a streaming client gets that had comments before: all bytes, and how the stream broke."""
    text, broke = b"", None
    async with world.request(stream=True, **body) as answer:
        assert answer.status == 200
        assert await answer.content.readline() == b": keepalive\n"
        await world.gate.open("e1")
        try:
            async for chunk in answer.content.iter_any():
                text += chunk
        except aiohttp.ClientPayloadError as error:
            broke = error
    return text, broke


@pytest.mark.parametrize(("more", "said"), [({}, "no such token"), ({"deep": 60_000}, "[" * 1000)])
async def test_engines_refusal_after_comments_is_an_event_and_no_clean_end(
    start: Any, more: dict[str, int], said: str
) -> None:
    world = await start(keepalive_seconds=0.05)
    await world.close()
    reader, writer = await asyncio.open_connection(*world.gateway.listen.split(":"))
    body = json.dumps({"model": "m", "do": "status", "status": 400, "stream": True, **more}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await reader.readuntil(b": keepalive")
    await world.gate.open("e1")
    text = await asyncio.wait_for(reader.read(), 20)
    writer.close()
    event = json.loads(text.split(b"data: ")[1].split(b"\n")[0])
    assert event["error"]["message"] == said
    assert event["error"]["code"] == "engine_refused"
    assert not text.endswith(b"0\r\n\r\n")
    assert (await world.gate.observe("e1")).failed_total == 1


@pytest.mark.parametrize("body", [{"do": "echo"}, {"do": "die", "where": "head"}, {"do": "die", "where": "chunked"}])
async def test_answers_that_are_no_whole_stream_break_a_stream_with_comments(start: Any, body: Any) -> None:
    world = await start(keepalive_seconds=0.05)
    await world.close()
    _, broke = await _held_stream(world, **body)
    assert broke is not None
    await world.in_flight(0)


async def test_deadline_after_comments_is_an_event_and_no_clean_end(start: Any) -> None:
    world = await start(keepalive_seconds=0.05)
    await world.close(seconds_max=0.15)
    body = json.dumps({"model": "m", "stream": True}).encode()
    text = await world.raw(
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
    )
    assert b": keepalive" in text
    assert b'"code": "hold_deadline"' in text
    assert not text.endswith(b"0\r\n\r\n")


async def test_close_counts_and_drained_waits(world: Any) -> None:
    asking = [world.ask(do="wait") for _ in range(3)]
    await world.in_flight(3)
    assert await world.close() == 3
    assert await world.gate.wait_drained("e1", 0.05) == 3
    draining = asyncio.create_task(world.gate.wait_drained("e1", 10))
    late = world.ask(n="late")
    await world.held(1)
    assert not draining.done()
    world.engine.go.set()
    assert await draining == 0
    assert [status for status, _, _ in await asyncio.gather(*asking)] == [200] * 3
    assert "late" not in world.engine.bodies("n")
    await world.gate.open("e1")
    assert (await late)[0] == 200


async def test_abort_tells_clients_at_once_and_counts_until_the_engine_lets_go(world: Any) -> None:
    waiting = world.ask(do="wait")
    async with world.request(do="steps", stream=True) as stream:
        world.engine.step.put_nowait(CHUNK)
        assert await stream.content.readany() == CHUNK
        await world.in_flight(2)
        assert await world.close() == 2
        await world.gate.abort("e1")
        status, headers, body = await waiting
        assert (status, "Retry-After" in headers, json.loads(body)["code"]) == (503, True, "aborted")
        with pytest.raises(aiohttp.ClientPayloadError):
            await stream.content.read()
    assert await world.gate.wait_drained("e1", 5) == 0
    await wait_until_async(lambda: len(world.engine.cancelled) == 2, 5, "both handlers are cancelled")
    assert (await world.gate.observe("e1")).failed_total == 2


async def test_abort_of_an_engine_that_does_not_let_go_ends_within_its_bound(start: Any) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    ended = asyncio.Event()
    world = await start(abort_seconds_max=0.3)
    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        await world.gate.ensure_route("e2", "deaf", ["d"], f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        await world.gate.open("e2")
        leaver, asking = world.ask(model="d"), world.ask(model="d")

        async def both() -> bool:
            return bool((await world.gate.observe("e2")).in_flight == 2)

        await wait_until_async(both, 5, "both are in flight")
        leaver.cancel()
        assert await world.gate.close("e2", ClosedTerms("hold", 10, 60)) == 2
        await world.gate.abort("e2")
        assert (await asking)[0] == 503
        assert (await world.gate.observe("e2")).in_flight >= 1
        assert await world.gate.wait_drained("e2", 5) == 0
        ended.set()


async def test_abort_reaches_a_client_that_does_not_read(world: Any) -> None:
    _, writer = await asyncio.open_connection(*world.gateway.listen.split(":"), limit=1024)
    body = json.dumps({"model": "m", "do": "flood", "blocks": 4096}).encode()
    writer.write(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
    await world.in_flight(1)
    await world.close()
    await world.gate.abort("e1")
    assert await world.gate.wait_drained("e1", 5) == 0
    writer.close()


async def test_idle_connections_end_when_the_gate_closes(world: Any) -> None:
    """A parked engine keeps no connection on which something could come."""
    assert (await world.ask())[0] == 200
    route = world.gateway.routes.get("e1")
    assert route.pool is not None
    await world.close()
    assert route.pool is None
    await world.gate.open("e1")
    assert (await world.ask())[0] == 200
    assert len(world.engine.arrivals) == 2


async def test_put_again_keeps_the_gate_and_moves_the_upstream(world: Any) -> None:
    await world.gate.ensure_route("e1", "one", ["m", "alias"], world.engine.url)
    assert (await world.gate.observe("e1")).state is GateState.OPEN
    assert (await world.ask(model="alias"))[0] == 200
    await world.close()
    await world.gate.ensure_route("e1", "one", ["m"], world.engine.url)
    assert (await world.gate.observe("e1")).state is GateState.CLOSED
    assert (await world.ask(model="alias"))[0] == 404


async def test_bad_routes_and_terms_name_the_field(world: Any) -> None:
    with pytest.raises(GateRefused, match="upstream: "):
        await world.gate.ensure_route("e2", "two", ["n"], "ftp://x")
    with pytest.raises(GateRefused, match="models: "):
        await world.gate.ensure_route("e2", "two", [], world.engine.url)
    with pytest.raises(GateRefused, match="hold_seconds_max: "):
        await world.gate.close("e1", ClosedTerms("hold", 1, -1.0))
    with pytest.raises(GateRefused, match="gate: "):
        await world.gate.close("e1", ClosedTerms(cast("Any", "ask"), 1, 1.0))
    assert (await world.gate.observe("e1")).state is GateState.OPEN


async def test_removed_route_is_unknown(world: Any) -> None:
    asking = world.ask(do="wait")
    await world.in_flight(1)
    await world.close()
    with pytest.raises(GateRefused, match="in flight"):
        await world.gate.remove_route("e1")
    world.engine.go.set()
    assert (await asking)[0] == 200
    assert await world.gate.wait_drained("e1", 5) == 0
    held = world.ask()
    await world.held(1)
    await world.gate.remove_route("e1")
    assert (await held)[0] == 503
    await world.gate.remove_route("e1")
    assert (await world.ask())[0] == 404
    with pytest.raises(GateRouteUnknown):
        await world.gate.observe("e1")
    with pytest.raises(GateRouteUnknown):
        await world.gate.open("e1")


async def test_engine_ids_are_one_path_segment(world: Any) -> None:
    await world.gate.ensure_route("a/b c?", "odd", ["o"], world.engine.url)
    assert set(await world.gate.observe_all()) == {"e1", "a/b c?"}
    await world.gate.remove_route("a/b c?")


async def test_control_socket_is_for_its_owner_alone(world: Any) -> None:
    mode = world.control.stat().st_mode
    assert stat.S_ISSOCK(mode)
    assert stat.S_IMODE(mode) == 0o600
    assert stat.S_IMODE(world.state_dir.stat().st_mode) == 0o700


async def test_control_routes_are_not_on_the_public_address(world: Any) -> None:
    for path in ("/info", "/routes", "/routes/e1", "/routes/e1/open"):
        for method in ("GET", "POST"):
            async with world.client.request(method, f"{world.url}{path}") as answer:
                assert answer.status == 404


async def test_control_bodies_are_bounded_and_unknown_fields_refused(world: Any) -> None:
    connector = aiohttp.UnixConnector(str(world.control))
    async with aiohttp.ClientSession(connector=connector) as client:
        async with client.post("http://g/routes/e1/close", json={"hold_for": 3}) as answer:
            assert answer.status == 422
            assert (await answer.json(content_type=None))["detail"].startswith("hold_for: ")
        async with client.put("http://g/routes/e1", data=b"x" * 100_000) as answer:
            assert answer.status == 413
            assert answer.content_type == "application/problem+json"
        async with client.get("http://g/routes/e1/drained?seconds=nan") as answer:
            assert answer.status == 400
        async with client.get("http://g/nothing") as answer:
            assert answer.status == 404


async def test_agent_away_keeps_state(world: Any) -> None:
    """The control socket knows no session: open stays open, closed goes on holding, whoever asks next."""
    assert (await world.ask())[0] == 200
    await world.close()
    asking = world.ask()
    await world.held(1)
    next_agent = GatewayGate(world.control)
    assert (await next_agent.observe("e1")).held == 1
    await next_agent.open("e1")
    assert (await asking)[0] == 200


async def test_nobody_there_is_unreachable(sockets: Any) -> None:
    gate = GatewayGate(sockets / "nothing.sock")
    for call in (
        gate.observe("e"),
        gate.open("e"),
        gate.close("e", ClosedTerms("hold", 1, 1.0)),
        gate.wait_drained("e", 1),
    ):
        with pytest.raises(GateUnreachable, match=r"nothing\.sock"):
            await call


@pytest.mark.parametrize("body", [DEEP, KEYS_DEEP, b"[]", b"<html>"])
async def test_an_answer_that_is_no_object_is_none(sockets: Any, body: bytes) -> None:
    async def odd(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_unix_server(odd, str(sockets / "o.sock")):
        with pytest.raises(GateUnreachable, match="without a JSON object"):
            await GatewayGate(sockets / "o.sock").info()


async def test_calls_are_bounded(sockets: Any) -> None:
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async with await asyncio.start_unix_server(silent, str(sockets / "s.sock")):
        gate = GatewayGate(sockets / "s.sock", call_seconds_max=0.1)
        with pytest.raises(GateUnreachable):
            await gate.info()


async def test_who_waits_for_a_request_hears_of_it_at_once(start: Any) -> None:
    world = await start(open_gate=False)
    waiting = asyncio.create_task(world.gate.wait_wanted("e1", 30.0))
    asking = world.ask(n=1)
    seen = await asyncio.wait_for(waiting, 10)
    assert (seen.held, seen.first_byte_seconds) == (1, None)
    await world.gate.open("e1")
    assert (await asking)[0] == 200
    seen = await world.gate.observe("e1")
    assert 0 < seen.first_byte_seconds < 10
    assert (await world.gate.close("e1", ClosedTerms("refuse", 0, 1.0))) == 0
    seen = await world.gate.observe("e1")
    assert seen.first_byte_seconds is None
    waiting = asyncio.create_task(world.gate.wait_wanted("e1", 30.0))
    assert (await world.ask(n=2))[0] == 503
    assert (await asyncio.wait_for(waiting, 10)).asked_since_closed == 1
    assert (await world.gate.wait_wanted("e1", 30.0)).asked_since_closed == 1, "also for whoever asks only now"


async def test_nobody_who_comes_is_said_after_the_time(start: Any) -> None:
    world = await start(open_gate=False)
    seen = await world.gate.wait_wanted("e1", 0.05)
    assert (seen.held, seen.asked_since_closed) == (0, 0)
