"""Parking and resuming an engine over REST: 202 with an operation, and what is answered where it cannot be."""

from __future__ import annotations

import httpx
import pytest

from tests.wire_node import WireNode


@pytest.fixture
async def node(http: httpx.AsyncClient) -> WireNode:
    node = WireNode(http)
    node.engines = (node.engine("alpha"),)
    await node.register()
    return node


async def test_a_park_is_an_operation_that_can_be_read(http: httpx.AsyncClient, node: WireNode) -> None:
    asked = await http.post("/engines/alpha/park", headers={"Idempotency-Key": "k"})
    assert asked.status_code == 202
    operation = asked.json()
    assert asked.headers["location"] == f"/api/v1/operations/{operation['id']}"
    assert (operation["kind"], operation["state"], operation["loan_state"]) == ("park", "running", "draining")
    again = await http.post("/engines/alpha/park", json={}, headers={"Idempotency-Key": "k"})
    assert (again.status_code, again.json()["id"]) == (202, operation["id"])
    other = await http.post("/engines/alpha/park", json={"for_seconds": 60}, headers={"Idempotency-Key": "k"})
    assert (other.status_code, other.json()["code"]) == (422, "idempotency_mismatch")
    seen = await http.get(f"/operations/{operation['id']}", params={"wait_seconds": 0.05})
    assert (seen.status_code, seen.json()) == (200, operation)
    loan = (await http.get(f"/loans/{operation['loan_id']}")).json()
    assert loan["without_job"] == {"wanted_by": "operator", "until_seconds": None, "wake_on_request": True}
    engine = (await http.get("/engines/alpha")).json()
    assert engine["parked"]["loan_id"] == operation["loan_id"]
    woken = await http.post("/engines/alpha/resume")
    assert (woken.status_code, woken.json()["kind"], woken.json()["state"]) == (202, "resume", "running")
    assert (await http.post(f"/loans/{loan['id']}/recall")).json()["recall_ordered"] is True


async def test_what_cannot_be_is_answered_with_the_way_out(http: httpx.AsyncClient, node: WireNode) -> None:
    running = await http.post("/engines/alpha/resume")
    assert (running.status_code, running.json()["code"], running.json()["state"]) == (409, "conflict", "running")
    for path in ("/engines/nope/park", "/engines/nope/resume", "/loans/nope/recall"):
        assert (await http.post(path)).status_code == 404
    assert (await http.get("/operations/nope")).status_code == 404
    for body, field in (
        ({"for": 60}, "for"),
        ({"for_seconds": 0}, "for_seconds"),
        ({"for_seconds": 1e9}, "for_seconds"),
    ):
        refused = await http.post("/engines/alpha/park", json=body)
        assert (refused.status_code, refused.json()["errors"][0]["field"]) == (422, field)
    bad = await http.post("/engines/alpha/park", headers={"Idempotency-Key": "two words"})
    assert (bad.status_code, bad.json()["errors"][0]["field"]) == (422, "Idempotency-Key")
