from __future__ import annotations

import asyncio
from typing import Any

import httpx
import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState
from lull.scheduler.store import Store
from tests.wire_node import GIB, WireNode


async def _submit(http: httpx.AsyncClient, **fields: Any) -> httpx.Response:
    headers = fields.pop("headers", {})
    return await http.post("/jobs", json={"argv": ["true"], **fields}, headers=headers)


async def test_a_submitted_job_is_queued_and_can_be_read_back(http: httpx.AsyncClient) -> None:
    answer = await _submit(
        http, argv=["python", "train.py", "é\n"], env={"A": "1"}, name="n", priority=5, project="p", hbm_bytes=GIB
    )
    assert answer.status_code == 201
    job = answer.json()
    assert answer.headers["location"] == f"/api/v1/jobs/{job['id']}"
    assert job["state"] == "queued"
    assert job["submitted_by"] == "operator"
    assert job["created_at"].endswith("Z")
    read = (await http.get(f"/jobs/{job['id']}")).json()
    assert read["argv"] == ["python", "train.py", "é\n"]
    stable = set(job) - {"reasons"}
    assert {key: read[key] for key in stable} == {key: job[key] for key in stable}


async def test_the_same_key_and_body_is_the_same_job(http: httpx.AsyncClient) -> None:
    key = {"Idempotency-Key": "k1"}
    first = await _submit(http, env={"A": "1", "B": "2"}, headers=key)
    again = await http.post(
        "/jobs",
        content=b'{"env": {"B": "2", "A": "1"},  "argv": ["true"]}',
        headers={**key, "Content-Type": "application/json"},
    )
    assert (first.status_code, again.status_code) == (201, 200)
    assert again.json()["id"] == first.json()["id"]
    assert len((await http.get("/jobs")).json()["items"]) == 1
    other = await _submit(http, env={"A": "2"}, headers=key)
    assert other.status_code == 422
    assert other.json()["code"] == "idempotency_mismatch"


@pytest.mark.parametrize("key", ["", "a b", "x" * 256])
async def test_a_key_that_cannot_be_one_is_refused(http: httpx.AsyncClient, key: str) -> None:
    answer = await _submit(http, headers={"Idempotency-Key": key})
    assert answer.status_code == 422
    assert answer.json()["errors"][0]["field"] == "Idempotency-Key"


@pytest.mark.parametrize(
    ("body", "status", "code", "says"),
    [
        (b'{"argv": ["a"], "priorty": 1}', 422, "invalid_request", "did you mean 'priority'?"),
        (b'{"argv": []}', 422, "invalid_request", "argv:"),
        (b'{"argv": ["a\\u0000b"]}', 422, "invalid_request", "NUL"),
        (b'{"argv": ["a"], "hbm_bytes": -1}', 422, "invalid_request", "hbm_bytes:"),
        (b"{", 400, "malformed_json", "JSON"),
        (b"", 400, "malformed_json", "JSON"),
        (b"\xff\xfe", 400, "malformed_json", "JSON"),
        (b"[1]", 422, "invalid_request", "body:"),
        (b'"' + b"x" * 2**20 + b'"', 413, "body_too_large", "1048576 bytes"),
    ],
)
async def test_a_bad_body_is_a_clear_problem(
    http: httpx.AsyncClient, body: bytes, status: int, code: str, says: str
) -> None:
    answer = await http.post("/jobs", content=body, headers={"Content-Type": "application/json"})
    assert (answer.status_code, answer.json()["code"]) == (status, code), answer.text
    assert answer.headers["content-type"] == "application/problem+json"
    assert says in answer.json()["detail"]
    assert (await http.get("/jobs")).json()["items"] == []


async def test_another_media_type_is_refused_by_name(http: httpx.AsyncClient) -> None:
    answer = await http.post("/jobs", data={"argv": "true"})
    assert (answer.status_code, answer.json()["code"]) == (415, "unsupported_media_type")
    assert "Content-Type: application/json" in answer.json()["detail"]


async def test_a_need_that_no_device_can_meet_names_the_largest(http: httpx.AsyncClient, node: WireNode) -> None:
    answer = await _submit(http, hbm_bytes=3 * GIB)
    assert answer.status_code == 422
    problem = answer.json()
    assert problem["code"] == "unsatisfiable"
    assert problem["largest_hbm_bytes"] == 2 * GIB
    assert problem["errors"][0]["field"] == "hbm_bytes"
    assert (await _submit(http, hbm_bytes=2 * GIB)).status_code == 201
    assert (await _submit(http, gpus=2)).json()["largest_gpus"] == 1


async def test_a_filter_that_no_project_can_equal_is_named(http: httpx.AsyncClient) -> None:
    answer = await http.get("/jobs?project=%00")
    assert (answer.status_code, answer.json()["errors"][0]["field"]) == (422, "project")


async def test_without_nodes_any_need_is_queued(http: httpx.AsyncClient) -> None:
    assert (await _submit(http, hbm_bytes=2**49)).status_code == 201


async def test_a_full_queue_says_when_to_come_back(http: httpx.AsyncClient) -> None:
    for _ in range(5):
        assert (await _submit(http)).status_code == 201
    answer = await _submit(http)
    assert (answer.status_code, answer.json()["code"]) == (429, "queue_full")
    assert int(answer.headers["retry-after"]) > 0


async def test_pages_lead_through_all_jobs_newest_first(http: httpx.AsyncClient) -> None:
    ids = [(await _submit(http, name=f"j{number}")).json()["id"] for number in range(5)]
    seen: list[str] = []
    params: dict[str, Any] = {"limit": 2}
    while True:
        page = (await http.get("/jobs", params=params)).json()
        seen += [job["id"] for job in page["items"]]
        if page["next_cursor"] is None:
            break
        params["cursor"] = page["next_cursor"]
    assert seen == ids[::-1]
    assert (await http.get("/jobs", params={"cursor": "nonsense"})).status_code == 422


async def test_lists_are_filtered_and_bounded(http: httpx.AsyncClient) -> None:
    kept = (await _submit(http, project="a")).json()["id"]
    gone = (await _submit(http, project="b")).json()["id"]
    assert (await http.post(f"/jobs/{gone}/cancel")).status_code == 202

    async def ids(**params: Any) -> list[str]:
        return [job["id"] for job in (await http.get("/jobs", params=params)).json()["items"]]

    assert await ids(state="queued") == [kept]
    assert await ids(state=["queued", "cancelled"]) == [gone, kept]
    assert await ids(project="b") == [gone]
    for params, field in (({"limit": 0}, "limit"), ({"limit": 1001}, "limit"), ({"state": "done"}, "state")):
        answer = await http.get("/jobs", params=params)
        assert answer.status_code == 422
        assert answer.json()["errors"][0]["field"].startswith(field)


@pytest.mark.parametrize("path", ["/jobs/nope", "/jobs/nope/attempts", "/jobs/nope/logs", "/jobs/%00", "/jobs/..%2Fx"])
async def test_an_unknown_job_is_404(http: httpx.AsyncClient, path: str) -> None:
    answer = await http.get(path)
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


async def test_cancelling(http: httpx.AsyncClient, node: WireNode, store: Store) -> None:
    job_id = (await _submit(http)).json()["id"]
    cancelled = await http.post(f"/jobs/{job_id}/cancel")
    assert (cancelled.status_code, cancelled.json()["state"]) == (202, "cancelled")
    assert (await http.post("/jobs/nope/cancel")).status_code == 404

    ended_id = (await _submit(http)).json()["id"]
    attempt = await node.place(store, ended_id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    await node.attempt_changed(attempt, AttemptState.ENDED, AttemptEnd.EXITED, 3)
    refused = await http.post(f"/jobs/{ended_id}/cancel")
    assert refused.status_code == 409
    assert refused.json()["code"] == "job_ended"
    assert refused.json()["state"] == "failed"
    job = (await http.get(f"/jobs/{ended_id}")).json()
    assert (job["exit_code"], job["failure_reason"], job["attempts"][0]["end"]) == (3, "exit_code", "exited")
    listed = (await http.get(f"/jobs/{ended_id}/attempts")).json()["items"]
    assert [entry["id"] for entry in listed] == [attempt.id]


async def test_a_running_job_is_stopped_through_its_node(http: httpx.AsyncClient, node: WireNode, store: Store) -> None:
    job_id = (await _submit(http)).json()["id"]
    attempt = await node.place(store, job_id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    stopping = await http.post(f"/jobs/{job_id}/cancel")
    assert (stopping.status_code, stopping.json()["state"]) == (202, "stopping")


async def test_waiting_for_the_end(http: httpx.AsyncClient) -> None:
    job_id = (await _submit(http)).json()["id"]
    still = await http.get(f"/jobs/{job_id}", params={"wait_seconds": 0.05})
    assert still.json()["state"] == "queued"
    waiting = asyncio.create_task(http.get(f"/jobs/{job_id}", params={"wait_seconds": 30}))
    await http.post(f"/jobs/{job_id}/cancel")
    assert (await asyncio.wait_for(waiting, 5)).json()["state"] == "cancelled"
    assert (await http.get(f"/jobs/{job_id}", params={"wait_seconds": 61})).status_code == 422


async def test_a_closed_database_is_503_and_says_when_to_come_back(http: httpx.AsyncClient, store: Store) -> None:
    assert (await http.get("http://lull/readyz")).status_code == 200
    await store.close()
    for answer in (await _submit(http), await http.get("/jobs"), await http.get("/engines")):
        assert (answer.status_code, answer.json()["code"]) == (503, "database_unavailable")
        assert int(answer.headers["retry-after"]) > 0
    ready = await http.get("http://lull/readyz")
    assert (ready.status_code, ready.text) == (503, "not ready\n")
    assert (await http.get("http://lull/livez")).status_code == 200
