"""Clients that cannot be kept waiting with comments are told at once when it is not worth to wait."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import pytest

from lull.agents.gates.base import ClosedTerms, GateRefused
from tests.recording_engine import CHUNK, RecordingEngine


async def test_later_than_the_policy_lets_a_request_wait_is_503_with_the_time(start: Any) -> None:
    world = await start(keepalive_seconds=0.05)
    await world.close(seconds_max=60.0)
    await world.gate.expect_open("e1", 7200.0)
    status, headers, body = await world.ask()
    assert (status, json.loads(body)["code"]) == (503, "opens_too_late")
    assert 7190 <= int(headers["Retry-After"]) <= 7200
    seen = await world.gate.observe("e1")
    assert (seen.held, seen.refused_total) == (0, 1)
    assert seen.last_request_seconds_ago is not None, "it is demand all the same"
    # One that streams is kept with comments instead: the engine may be resumed sooner.
    async with world.request(do="stream", stream=True) as answer:
        assert answer.status == 200
        assert await answer.content.readline() == b": keepalive\n"
        await world.gate.open("e1")
        assert (await answer.content.read()).replace(b": keepalive\n", b"").strip().startswith(CHUNK.strip())


async def test_soon_enough_is_held(world: Any) -> None:
    await world.close(seconds_max=60.0)
    await world.gate.expect_open("e1", 59.0)
    asking = world.ask()
    await world.held(1)
    await world.gate.open("e1")
    assert (await asking)[0] == 200


async def test_what_is_foreseen_is_forgotten(world: Any) -> None:
    """By the word of the agent, by the next close, and by an opening."""
    for forget in ("said", "close", "open"):
        await world.close(seconds_max=60.0)
        await world.gate.expect_open("e1", 7200.0)
        assert (await world.ask())[0] == 503
        if forget == "said":
            await world.gate.expect_open("e1", None)
        if forget == "open":
            await world.gate.open("e1")
            await world.gate.expect_open("e1", 7200.0)  # too late: it is open
        await world.close(seconds_max=60.0)
        asking = world.ask()
        await world.held(1)
        await world.gate.open("e1")
        assert (await asking)[0] == 200


async def test_the_first_of_several_engines_counts(start: Any) -> None:
    world = await start()
    other = await RecordingEngine().start()
    try:
        await world.gate.ensure_route("e2", "two", ["m"], other.url)
        await world.close(seconds_max=60.0)
        await world.gate.close("e2", ClosedTerms("hold", 10, 60.0))
        await world.gate.expect_open("e1", 7200.0)
        unknown = world.ask()  # nothing is known of the other one
        await world.held(1)
        await world.gate.expect_open("e2", 3600.0)
        _, headers, _ = await world.ask()
        assert 3590 <= int(headers["Retry-After"]) <= 3600
        await world.gate.open("e2")
        assert (await unknown)[0] == 200
    finally:
        await other.stop()


async def test_refusals_tell_the_time_where_it_is_known_and_the_agent_says_no_other(world: Any) -> None:
    await world.close("refuse")
    await world.gate.expect_open("e1", 90.0)
    _, headers, _ = await world.ask()
    assert 85 <= int(headers["Retry-After"]) <= 90
    await world.close("refuse", retry=7)
    await world.gate.expect_open("e1", 90.0)
    assert (await world.ask())[1]["Retry-After"] == "7"


async def test_it_may_be_said_with_the_close(world: Any) -> None:
    async with aiohttp.ClientSession(connector=aiohttp.UnixConnector(str(world.control))) as client:
        for body, status in (({"expected_open_seconds": 7200}, 503), ({"expected_open_seconds": None}, 200)):
            async with client.post("http://g/routes/e1/close", json={"hold_seconds_max": 60, **body}) as answer:
                assert answer.status == 200
            asking = world.ask()
            if status == 200:
                await world.held(1)
                async with client.get("http://g/routes/e1") as answer:
                    assert (await answer.json())["expected_open_seconds"] is None
                await world.gate.open("e1")
            assert (await asking)[0] == status


async def test_bad_forecasts_name_the_field(world: Any) -> None:
    await world.close()
    with pytest.raises(GateRefused, match="open_seconds: "):
        await world.gate.expect_open("e1", -1.0)


async def test_a_client_that_streams_is_told_its_deadline_as_an_event(start: Any) -> None:
    world = await start(keepalive_seconds=0.02)
    await world.close(seconds_max=0.1)
    await world.gate.expect_open("e1", 7200.0)
    body = b'{"model": "m", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(body)
    async with asyncio.timeout(10):
        text = await world.raw(head + body)
    assert b": keepalive" in text
    assert b'"code": "hold_deadline"' in text
