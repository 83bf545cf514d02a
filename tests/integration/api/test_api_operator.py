"""The verbs of operators over REST: what they answer, and with what."""

from __future__ import annotations

import asyncio
import os
import subprocess
import time
from pathlib import Path

import httpx
import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState
from lull.scheduler.actions import MarkSilent
from lull.scheduler.model import AttemptRow
from lull.scheduler.store import Store
from tests.cli_here import run_here
from tests.wire_node import WireNode


@pytest.fixture
async def attempt(http: httpx.AsyncClient, store: Store) -> AttemptRow:
    """One that runs on a node that has fallen silent."""
    node = WireNode(http)
    node.engines = (node.engine("alpha"), node.engine("beta", supervised=False))
    await node.register()
    job_id = (await http.post("/jobs", json={"argv": ["true"]})).json()["id"]
    placed = await node.place(store, job_id)
    await node.attempt_changed(placed, AttemptState.RUNNING)
    [row] = (await store.load_snapshot(0.0)).nodes
    assert await store.commit([MarkSilent(row.id, row.heard_count)], time.time()) == 1
    return placed


async def test_an_attempt_is_resolved_and_a_second_start_needs_a_word(
    http: httpx.AsyncClient, attempt: AttemptRow
) -> None:
    path = f"/attempts/{attempt.id}"
    assert (await http.get(path)).json()["state"] == "unknown"
    for body, field in (({"outcome": "requeue"}, "confirm"), ({"outcome": "won"}, "outcome"), ({"as": "x"}, "outcome")):
        refused = await http.post(f"{path}/resolve", json=body)
        assert refused.status_code == 422
        assert field in {error["field"] for error in refused.json()["errors"]}
    assert "second time" in (await http.post(f"{path}/resolve", json={"outcome": "requeue"})).json()["detail"]
    done = await http.post(f"{path}/resolve", json={"outcome": "requeue", "confirm": True})
    assert (done.status_code, done.json()["end"]) == (200, "lost")
    assert (await http.get(f"/jobs/{attempt.job_id}")).json()["state"] == "queued"
    late = await http.post(f"{path}/resolve", json={"outcome": "failed"})
    assert (late.status_code, late.json()["code"], late.json()["state"]) == (409, "conflict", "ended")
    assert (await http.post("/attempts/nope/resolve", json={"outcome": "failed"})).status_code == 404


async def test_the_command_line_asks_to_be_sure_where_a_job_may_run_twice(
    attempt: AttemptRow, live_url: str, token: str, tmp_path: Path
) -> None:
    token_file = tmp_path / "token"
    token_file.write_text(token)
    token_file.chmod(0o600)
    own = {"LULL_CONFIG": str(tmp_path / "none.toml"), "LULL_SERVER": live_url, "LULL_TOKEN_FILE": str(token_file)}

    def resolve(*words: str) -> subprocess.CompletedProcess[str]:
        return run_here(("job", "resolve", attempt.job_id, "--as", *words), {"PATH": os.environ["PATH"], **own})

    unsure = await asyncio.to_thread(resolve, "requeue")
    assert (unsure.returncode, "--yes" in unsure.stderr) == (2, True), unsure.stderr
    sure = await asyncio.to_thread(resolve, "requeue", "--yes")
    assert (sure.returncode, sure.stdout) == (0, f"job {attempt.job_id}: queued\n"), sure.stderr


async def test_loans_and_engines_answer_with_their_state(http: httpx.AsyncClient, attempt: AttemptRow) -> None:
    lent = await http.post(f"/loans/{attempt.loan_id}/give-up")
    assert (lent.status_code, lent.json()["state"]) == (409, "settling")
    engine = await http.post("/engines/alpha/restart")
    assert (engine.status_code, engine.json()["state"]) == (409, "running")
    assert attempt.loan_id in engine.json()["detail"]
    assert "whoever runs it" in (await http.post("/engines/beta/restart")).json()["detail"]
    for path in ("/loans/nope/give-up", "/engines/nope/restart", "/jobs/nope/hold", "/jobs/nope/retry"):
        assert (await http.post(path)).status_code == 404


async def test_a_free_engine_is_to_be_restarted(http: httpx.AsyncClient) -> None:
    node = WireNode(http)
    node.engines = (node.engine("alpha"),)
    await node.register()
    answer = await http.post("/engines/alpha/restart")
    assert (answer.status_code, answer.json()["name"]) == (202, "alpha")
    assert answer.headers["location"] == "/api/v1/engines/node-1-alpha"


async def test_jobs_are_held_released_and_retried(http: httpx.AsyncClient) -> None:
    job_id = (await http.post("/jobs", json={"argv": ["true"], "name": "n"})).json()["id"]
    held = (await http.post(f"/jobs/{job_id}/hold")).json()
    assert (held["state"], held["reasons"][0]["code"]) == ("held", "Held")
    assert (await http.post(f"/jobs/{job_id}/release")).json()["state"] == "queued"
    early = await http.post(f"/jobs/{job_id}/retry")
    assert (early.status_code, early.json()["state"]) == (409, "queued")
    await http.post(f"/jobs/{job_id}/cancel")
    key = {"Idempotency-Key": "k"}
    retried = await http.post(f"/jobs/{job_id}/retry", headers=key)
    assert (retried.status_code, retried.json()["name"], retried.json()["state"]) == (201, "n", "queued")
    assert retried.headers["location"] == f"/api/v1/jobs/{retried.json()['id']}"
    assert (await http.post(f"/jobs/{job_id}/retry", headers=key)).status_code == 200
    assert (await http.post(f"/jobs/{job_id}/retry", headers={"Idempotency-Key": "a b"})).status_code == 422
    assert (await http.post(f"/jobs/{job_id}/hold")).json()["code"] == "job_ended"


async def test_what_has_not_changed_is_not_sent_again(http: httpx.AsyncClient, store: Store, node: WireNode) -> None:
    job_id = (await http.post("/jobs", json={"argv": ["true"]})).json()["id"]
    attempt = await node.place(store, job_id)
    await node.attempt_changed(attempt, AttemptState.RUNNING)
    waiting = (await http.post("/jobs", json={"argv": ["true"]})).json()["id"]
    paths = ["/jobs", f"/jobs/{job_id}", f"/jobs/{waiting}", "/engines", "/nodes", "/nodes/node-1", "/loans"]
    paths += [f"/loans/{attempt.loan_id}", f"/attempts/{attempt.id}"]
    tags: dict[str, str] = {}
    for path in paths:
        tags[path] = (await http.get(path)).headers["etag"]
        for given in (tags[path], tags[path].removeprefix("W/"), f'"other", {tags[path]}', "*"):
            again = await http.get(path, headers={"If-None-Match": given})
            assert (again.status_code, again.content, again.headers["etag"]) == (304, b"", tags[path]), path
        assert (await http.get(path, headers={"If-None-Match": '"other"'})).status_code == 200
    await node.attempt_changed(attempt, AttemptState.ENDED, AttemptEnd.EXITED, 0)
    for path in ("/jobs", f"/jobs/{job_id}", f"/attempts/{attempt.id}"):
        changed = await http.get(path, headers={"If-None-Match": tags[path]})
        assert (changed.status_code, changed.headers["etag"] != tags[path]) == (200, True), path
