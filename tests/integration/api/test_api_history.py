"""Nodes, loans, usage and pages of events; and that every route wants the token."""

from __future__ import annotations

import re
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from lull.agents.protocol.wire import AttemptState
from lull.scheduler.store import Store
from tests.wire_node import GIB, WireNode


async def test_nodes_are_shown_with_their_devices(http: httpx.AsyncClient, node: WireNode) -> None:
    items = (await http.get("/nodes")).json()["items"]
    assert [item["id"] for item in items] == ["node-1"]
    shown = (await http.get("/nodes/node-1.example")).json()
    assert shown == (await http.get("/nodes/node-1")).json()
    assert shown["state"] == "up"
    assert [(device["id"], device["capacity_bytes"]) for device in shown["devices"]] == [("node-1-device-0", 2 * GIB)]
    assert (await http.get("/nodes/nope")).status_code == 404


async def test_a_loan_is_listed_and_shown_with_its_steps(http: httpx.AsyncClient, node: WireNode, store: Store) -> None:
    job_id = (await http.post("/jobs", json={"argv": ["true"]})).json()["id"]
    attempt = await node.place(store, job_id)
    step = {"kind": "loan_step", "loan_id": attempt.loan_id, "step": "accepted", "monotonic_seconds": 12.5}
    assert (await node.report(step)).json()["acknowledged"] == 1
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    page = (await http.get("/loans")).json()
    assert [loan["id"] for loan in page["items"]] == [attempt.loan_id]
    assert page["items"][0]["steps"] == []
    assert [loan["id"] for loan in (await http.get("/loans", params={"open": 1})).json()["items"]] == [attempt.loan_id]
    loan = (await http.get(f"/loans/{attempt.loan_id}")).json()
    assert [(entry["step"], entry["monotonic_seconds"]) for entry in loan["steps"]] == [("accepted", 12.5)]
    assert loan["attempt_ids"] == [attempt.id]
    assert (await http.get("/loans/nope")).status_code == 404
    assert (await http.get("/loans", params={"cursor": "nope"})).status_code == 422


async def test_usage_is_exact_and_its_range_is_checked(http: httpx.AsyncClient, node: WireNode) -> None:
    report = {"kind": "occupancy_changed", "device_id": node.device_id(0), "occupancy": "empty"}
    assert (await node.report(report)).status_code == 200
    usage = (await http.get("/usage")).json()
    assert {entry["device_id"] for entry in usage["items"]} == {node.device_id(0)}
    assert usage["items"][-1]["kind"] == "empty"
    of_device = (await http.get("/usage", params={"device": node.device_id(0)})).json()["items"]
    assert [entry["kind"] for entry in of_device] == [entry["kind"] for entry in usage["items"]]
    assert (await http.get("/usage", params={"device": "other"})).status_code == 404
    day = {"since": "2026-01-01T00:00:00Z", "until": "2026-01-02T00:00:00Z"}
    assert (await http.get("/usage", params=day)).json()["items"] == []
    wrong: list[tuple[dict[str, Any], str]] = [
        ({"since": "yesterday"}, "since"),
        ({"since": day["until"], "until": day["since"]}, "since"),
        ({"since": "2020-01-01T00:00:00Z"}, "at most 31 days"),
        ({"since": "9" * 400}, "since"),
        ({"since": "0001-01-01T00:00:00+23:59"}, "since"),
        ({"until": "0001-01-01T00:00:00Z"}, "since"),
    ]
    for params, says in wrong:
        answer = await http.get("/usage", params=params)
        assert answer.status_code == 422, params
        assert says in answer.json()["detail"]


@pytest.mark.parametrize("path", ["/events?since=9", "/agent/orders?node_id=n&after=9"])
async def test_a_number_beyond_the_databases_is_refused(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path + "9" * 19)
    assert answer.status_code == 422


async def test_pages_of_events(http: httpx.AsyncClient) -> None:
    for number in range(3):
        await http.post("/jobs", json={"argv": ["true"], "name": f"j{number}"})
    page = (await http.get("/events", params={"follow": 0})).json()
    numbers = [event["seq"] for event in page["items"]]
    assert numbers == sorted(set(numbers))
    assert page["next_seq"] == numbers[-1]
    first = (await http.get("/events", params={"follow": 0, "limit": 1})).json()
    assert [event["seq"] for event in first["items"]] == numbers[:1]
    rest = (await http.get("/events", params={"follow": 0, "since": first["next_seq"]})).json()
    assert [event["seq"] for event in rest["items"]] == numbers[1:]
    kind = page["items"][-1]["type"]
    only = (await http.get("/events", params={"follow": 0, "type": kind})).json()["items"]
    assert {event["type"] for event in only} == {kind}
    none = await http.get("/events", params={"follow": 0, "since": numbers[-1]})
    assert none.json() == {"items": [], "next_seq": numbers[-1]}
    assert {event["actor"] for event in page["items"]} == {"operator"}


@pytest.mark.parametrize("given", ["-1", "x", "9" * 30])
async def test_a_strange_last_event_id_is_refused(http: httpx.AsyncClient, given: str) -> None:
    answer = await http.get("/events", headers={"Last-Event-ID": given})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Last-Event-ID"


async def test_no_route_but_the_health_checks_answers_without_the_token(app: FastAPI) -> None:
    paths = [(method, path) for path, methods in app.openapi()["paths"].items() for method in methods]
    assert len(paths) >= 20
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://lull") as http:
        for method, path in [*paths, ("GET", "/api/v1/openapi.json"), ("GET", "/docs"), ("DELETE", "/x")]:
            answer = await http.request(method, re.sub(r"\{.*?\}", "x", path))
            assert answer.status_code == 401, (method, path)
            assert answer.json()["code"] == "unauthenticated"
        for path in ("/livez", "/readyz"):
            assert (await http.get(path)).text == "ok\n"


async def test_unknown_routes_and_methods_are_problems(http: httpx.AsyncClient) -> None:
    for path in ("/nope", "/jobs/", "http://lull/docs", "http://lull/redoc"):
        answer = await http.get(path)
        assert (answer.status_code, answer.json()["code"]) == (404, "not_found"), path
    answer = await http.delete("/jobs")
    assert (answer.status_code, answer.json()["code"]) == (405, "method_not_allowed")
    assert "GET" in answer.headers["allow"] or "POST" in answer.headers["allow"]


async def test_the_version(http: httpx.AsyncClient) -> None:
    assert set((await http.get("/version")).json()) == {"version", "protocol_version", "api"}
