"""An engine sleeps without a job, as users see it: by the command line, over REST, with and without a server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.api.client import ProblemError
from tests.box import Box, box
from tests.cli_here import run_here

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

POLICY = {"settle_seconds_max": 30}


@pytest.fixture(scope="module")
def shared_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    root = tmp_path_factory.mktemp("box")
    available(root, 1 << 30)
    with box(root, {"alpha": {"policy": POLICY}}, agent={"meminfo_file": root / "meminfo"}) as it:
        yield it


@pytest.fixture
def it(shared_box: Box) -> Box:
    shared_box.until_quiet()
    return shared_box


def available(root: Path, nbytes: int) -> None:
    """What the kernel would say; changed in one step, since the agent reads it at any time."""
    draft = root / "meminfo.new"
    draft.write_text(f"MemTotal:       99999999 kB\nMemAvailable:   {nbytes >> 10} kB\n")
    draft.replace(root / "meminfo")


def ask(it: Box) -> Any:
    url = f"http://127.0.0.1:{it.gateway_port}/v1/completions"
    body = {"model": "alpha", "prompt": "hello", "max_tokens": 4, "temperature": 0}
    reply = httpx.post(url, json=body, timeout=120, trust_env=False)
    assert reply.status_code == 200, reply.text
    return reply.json()["choices"]


def lull(it: Box, *words: str) -> subprocess.CompletedProcess[str]:
    target = {
        "LULL_SERVER": f"http://127.0.0.1:{it.server_port}",
        "LULL_TOKEN_FILE": str(it.root / "server" / "token"),
        "LULL_CONFIG": str(it.root / "none.toml"),
    }
    return run_here(words, target)


def test_parked_by_hand_it_is_woken_by_a_request_and_both_are_shown(it: Box) -> None:
    before = ask(it)
    for words, code, says in (
        (("engine", "resume", "alpha"), 5, "alpha is running: it is not parked"),
        (("engine", "park", "nope"), 4, "there is no engine 'nope'"),
        (("engine", "park", "alpha", "--for", "soon"), 2, "--for: 'soon' is no duration"),
    ):
        refused = lull(it, *words)
        assert (refused.returncode, says in refused.stderr) == (code, True), refused.stderr
    parked = lull(it, "engine", "park", "alpha", "--for", "1h", "--wait")
    assert (parked.returncode, parked.stdout) == (0, "engine alpha: is parked\n"), parked.stderr
    again = lull(it, "engine", "park", "alpha", "--for", "2h")
    assert (again.returncode, "resume it first" in again.stderr) == (5, True), again.stderr
    engine = it.client.engine("alpha")
    assert (engine.state, engine.gate) == ("parked", "closed")
    assert engine.parked is not None
    assert (engine.parked.wanted_by, engine.parked.at_most_seconds) == ("operator", 3600)
    assert "the next request wakes it" in lull(it, "engine", "show", "alpha").stdout
    [device] = it.client.nodes()[0].devices
    assert (device.occupancy, device.loan_id) == ("empty", engine.loan_id)
    assert ask(it) == before
    it.until_quiet()
    loan = it.until(lambda: _told(it, str(engine.loan_id)), "the first byte is told")
    assert (loan.reason.code, 0 < loan.first_byte_seconds < 120) == ("Request", True)
    assert "first byte" in lull(it, "loan", "show", loan.id).stdout
    assert "by a request that got its first byte after" in lull(it, "engine", "show", "alpha").stdout
    assert it.strays() == []


def _told(it: Box, loan_id: str) -> Any:
    loan = it.client.loan(loan_id)
    return loan if loan.first_byte_seconds is not None else None


@pytest.mark.long
def test_with_no_server_in_sight_a_request_wakes_it_and_it_is_told_later(it: Box) -> None:
    before = ask(it)
    assert lull(it, "engine", "park", "alpha", "--wait").returncode == 0
    loan_id = str(it.client.engine("alpha").loan_id)
    it.kill_server()
    assert ask(it) == before
    it.kill_agent()
    it.start_agent()
    it.start_server()
    it.until_quiet()
    loan = it.until(lambda: _told(it, loan_id), "the first byte is told")
    assert loan.reason.code == "Request"
    assert it.strays() == []


@pytest.mark.long
def test_a_job_runs_in_the_sleep_and_the_engine_sleeps_on(it: Box) -> None:
    before = ask(it)
    operation = it.client.park_engine("alpha", idempotency_key="k")
    assert it.client.park_engine("alpha", idempotency_key="k").id == operation.id
    job_id = it.submit([sys.executable, "-c", "print('ran')"], hbm_bytes=1 << 20)
    job = it.until_job(job_id, "succeeded")
    assert job.loan_id == operation.loan_id
    assert it.client.loan(operation.loan_id).state == "lent"
    assert it.client.operation(operation.id).state == "succeeded"
    woken = lull(it, "engine", "resume", "alpha", "--wait")
    assert (woken.returncode, woken.stdout) == (0, "engine alpha: serves again\n"), woken.stderr
    assert ask(it) == before
    with pytest.raises(ProblemError, match="not parked"):
        it.client.resume_engine("alpha")


@pytest.mark.long
def test_under_pressure_it_sleeps_by_itself_until_it_is_asked(it: Box) -> None:
    before = ask(it)
    current = it.client.policy("alpha").policy.model_dump()
    pressed = {"on_pressure": True, "pressure_free_bytes_min": 512 << 20, "idle_seconds_min": 1.0}
    it.client.put_policy("alpha", {**current, **pressed})
    available(it.root, 256 << 20)
    try:
        engine = it.until(lambda: _asleep(it), "the engine sleeps by itself")
        assert engine.parked.wanted_by == "pressure"
        assert ask(it) == before
        it.until(lambda: it.client.loan(engine.loan_id).state == "closed", "it is awake")
        assert it.client.loan(engine.loan_id).reason.code == "Request"  # type: ignore[union-attr]
    finally:
        available(it.root, 1 << 30)
        it.client.put_policy("alpha", current)
    assert it.strays() == []


def _asleep(it: Box) -> Any:
    engine = it.client.engine("alpha")
    return engine if engine.parked is not None and engine.state == "parked" else None
