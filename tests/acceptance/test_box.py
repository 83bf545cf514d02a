"""What users rely on, with real processes: killed, lied to, and always back.

One witness of each fact is outside of Lull: the engine's own file, the job's own file, /proc, the load's own count.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.protocol.loans import LoanStep
from lull.api.client import ProblemError
from tests.box import MIB, Box, box
from tests.tracing import held_at_its_end

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(300)]

# Tells that it runs, waits for a line in its pipe, and leaves a trace of its own that counts executions.
WAITS = """
import os, sys
with open(sys.argv[1] + ".runs", "a") as runs:
    runs.write(os.environ["LULL_ATTEMPT"] + "\\n")
print("up", flush=True)
open(sys.argv[1]).read()
print("down", flush=True)
raise SystemExit(int(sys.argv[2]))
"""


@pytest.fixture(scope="module")
def shared_box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Box]:
    """For tests that leave it as they found it: quiet, with its server and its agent."""
    with box(tmp_path_factory.mktemp("box")) as it:
        yield it


@pytest.fixture
def it(shared_box: Box) -> Box:
    shared_box.until_quiet()
    return shared_box


@pytest.fixture
def pipe(tmp_path: Path) -> Path:
    path = tmp_path / "pipe"
    os.mkfifo(path)
    return path


def runs(pipe: Path) -> list[str]:
    path = pipe.with_name(pipe.name + ".runs")
    return path.read_text().split() if path.exists() else []


def waiting_job(it: Box, pipe: Path, code: int = 0, **fields: Any) -> str:
    return it.submit([sys.executable, "-c", WAITS, str(pipe), str(code)], hbm_bytes=12 * MIB, **fields)


def until_up(it: Box, pipe: Path, times: int = 1) -> None:
    it.until(lambda: len(runs(pipe)) >= times, "the job tells that it runs")


def ask(it: Box, model: str = "alpha", timeout: float = 120) -> httpx.Response:
    body = {"model": model, "prompt": "hello", "max_tokens": 4, "temperature": 0}
    with httpx.Client(timeout=timeout, trust_env=False) as client:
        return client.post(f"http://127.0.0.1:{it.gateway_port}/v1/completions", json=body)


def test_three_loans_in_a_row_under_load_and_no_request_fails(it: Box) -> None:
    with ThreadPoolExecutor(2) as pool:
        before = {loan.id for loan in it.loans()}
        counted = len([line for line in it.witness("alpha") if line["kind"] == "request"])
        golden = ask(it).json()["choices"]
        asked = 1
        stop: list[bool] = []

        def load() -> list[httpx.Response]:
            replies = []
            while not stop:
                replies.append(ask(it))
            return replies

        clients = [pool.submit(load) for _ in range(2)]
        try:
            for _ in range(3):
                job = it.submit(["true"], hbm_bytes=12 * MIB)
                it.until_job(job, "succeeded")
                it.until_quiet()
        finally:
            stop.append(True)
        replies = [reply for client in clients for reply in client.result(120)]
        asked += len(replies)
        assert {reply.status_code for reply in replies} == {200}
        assert all(reply.json()["choices"] == golden for reply in replies)
        assert it.strays() == []
        assert len([line for line in it.witness("alpha") if line["kind"] == "request"]) == counted + asked
        assert len({loan.id for loan in it.loans()} - before) == 3


def test_an_engine_that_keeps_its_memory_sends_the_job_back_with_the_reason(tmp_path: Path) -> None:
    with box(tmp_path, {"alpha": {"faults": ["keep-memory"], "policy": {"settle_seconds_max": 0.5}}}) as it:
        job = it.submit(["sh", "-c", f"echo ran >> {tmp_path}/ran"], hbm_bytes=12 * MIB)

        def told() -> Any:
            found = it.client.job(job)
            return found.state == "queued" and any(reason.code == "HBMNotFreed" for reason in found.reasons)

        it.until(told, "the job waits again, with HBMNotFreed")
        it.ready()
        assert not (tmp_path / "ran").exists()
        assert ask(it).status_code == 200
        loans = len(it.loans())
        reason = next(reason for reason in it.client.job(job).reasons if reason.code == "HBMNotFreed")
        assert reason.next_check is not None, "it says when it is tried again"
        assert it.client.cancel(job).state == "cancelled"
        assert len(it.loans()) == loans, "a back-off lies between two tries"


def test_an_agent_killed_while_the_job_runs(it: Box, pipe: Path) -> None:
    job = waiting_job(it, pipe, code=7)
    until_up(it, pipe)
    it.kill_agent()
    pipe.write_text("")
    it.start_agent()
    ended = it.until_job(job, "failed")
    assert (ended.exit_code, ended.failure_reason) == (7, "exit_code")
    it.until_quiet()
    assert len(runs(pipe)) == 1
    assert b"".join(it.client.logs(job)) == b"up\ndown\n"
    assert it.strays() == []
    assert ask(it).status_code == 200


@pytest.mark.parametrize("moment", ["submitted", "running"])
def test_a_server_killed_at_any_time(it: Box, pipe: Path, moment: str) -> None:
    job = waiting_job(it, pipe)
    if moment == "running":
        until_up(it, pipe)
    it.kill_server()
    if moment == "running":
        # The agent ends the loan alone: the engine serves again with no server in sight.
        pipe.write_text("")
        held = ask(it)
        assert held.status_code == 200
    it.start_server()
    if moment == "submitted":
        until_up(it, pipe)
        pipe.write_text("")
    assert it.until_job(job, "succeeded").exit_code == 0
    it.until_quiet()
    assert len(runs(pipe)) == 1
    assert it.strays() == []


def test_an_engine_killed_while_parked_comes_back_after_the_job(it: Box, pipe: Path) -> None:
    golden = ask(it).json()["choices"]
    job = waiting_job(it, pipe)
    until_up(it, pipe)
    incarnation = it.client.engine("alpha").incarnation
    assert incarnation is not None
    pid = int(incarnation.split(":")[1])
    os.kill(pid, signal.SIGKILL)
    it.until(lambda: it.client.engine("alpha").state == "gone", "the engine's death is seen")
    assert it.client.job(job).state == "running"
    assert it.client.engine("alpha").gate == "closed"
    pipe.write_text("")
    assert it.until_job(job, "succeeded").exit_code == 0
    it.until_quiet()
    assert it.client.job(job).state == "succeeded"
    assert ask(it).json()["choices"] == golden
    assert it.strays() == []


def test_two_jobs_that_fit_run_under_one_park(it: Box) -> None:
    before = {loan.id for loan in it.loans()}
    # Both wait while the first loan is prepared, so both are chosen for it.
    jobs = [it.submit([sys.executable, "-c", "print('ran')"], hbm_bytes=12 * MIB) for _ in range(2)]
    for job in jobs:
        it.until_job(job, "succeeded")
    it.until_quiet()
    (loan_id,) = {loan.id for loan in it.loans()} - before
    steps = it.client.loan(loan_id).steps
    assert [step.step for step in steps].count(LoanStep.PARK_SENT) == 1
    assert [step.step for step in steps].count(LoanStep.SPAWNED) == 2


@pytest.mark.parametrize(
    ("argv", "fields", "state", "reason"),
    [
        ([sys.executable, "-c", "raise SystemExit(9)"], {}, "failed", "exit_code"),
        ([sys.executable, "-c", "import os; os.kill(os.getpid(), 11)"], {}, "failed", "signal"),
        (["sleep", "60"], {"time_limit_seconds": 0.3}, "timed_out", None),
        (["/no/such/command"], {}, "failed", None),
    ],
)
def test_the_job_s_state_says_what_happened(
    it: Box, argv: list[str], fields: dict[str, Any], state: str, reason: str | None
) -> None:
    job = it.submit(argv, hbm_bytes=12 * MIB, **fields)
    ended = it.until_job(job, "succeeded", "failed", "timed_out", "cancelled")
    assert ended.state == state
    if reason is not None:
        assert ended.failure_reason == reason
    it.until_quiet()
    assert it.client.job(job).engine_restore_state in (None, "restored")
    assert ask(it).status_code == 200


def test_a_cancelled_job_that_ignores_sigterm_and_leaks_a_child(it: Box, pipe: Path) -> None:
    script = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN);"
        "subprocess.Popen(['sleep', '300'], start_new_session=True);"
        f"open({str(pipe) + '.runs'!r}, 'a').write('up\\n'); time.sleep(300)"
    )
    job = it.submit([sys.executable, "-c", script], hbm_bytes=12 * MIB, kill_grace_seconds=0.5)
    until_up(it, pipe)
    it.client.cancel(job)
    assert it.until_job(job, "cancelled").state == "cancelled"
    it.until_quiet()
    attempt = it.client.job(job).attempts[0].id
    left = subprocess.run(["pgrep", "-f", "sleep 300"], capture_output=True, text=True).stdout.split()
    assert not [pid for pid in left if attempt.encode() in Path(f"/proc/{pid}/environ").read_bytes()]
    assert it.client.cancel(job).state == "cancelled"  # asked again: nothing changes


def test_a_job_that_cannot_be_killed_keeps_the_engine_parked_until_it_is_gone(it: Box, pipe: Path) -> None:
    job = waiting_job(it, pipe, kill_grace_seconds=0.2)
    until_up(it, pipe)
    (attempt,) = it.client.job(job).attempts
    started = json.loads((it.root / "agent" / "attempts" / attempt.id / "started.json").read_text())
    with held_at_its_end(started["pid"]) as tracer:
        if tracer is None:
            pytest.skip("this machine forbids tracing")
        it.client.cancel(job)
        assert it.until_job(job, "cancelled").state == "cancelled"
        it.until(lambda: it.client.nodes()[0].devices[0].quarantined, "the device is quarantined")
        assert {loan.state for loan in it.loans() if loan.state != "closed"} == {"faulted"}
        assert (it.client.engine("alpha").state, it.client.engine("alpha").gate) == ("parked", "closed")
        later = it.submit(["true"], hbm_bytes=12 * MIB)
        it.until(lambda: "DeviceQuarantined" in str(it.client.job(later).reasons), "the next job says why it waits")
        alerts = [event for event in it.client.events_page(limit=1000).items if event.severity == "critical"]
        assert any("SIGKILL" in alert.sentence and str(started["pid"]) in alert.sentence for alert in alerts)
        with ThreadPoolExecutor(1) as pool:
            waiting = pool.submit(ask, it)
            tracer.let_go()
            assert waiting.result(120).status_code == 200
    assert it.until_job(later, "succeeded").exit_code == 0
    it.until_quiet()
    assert it.client.nodes()[0].devices[0].quarantined is None
    assert it.strays() == []


def test_a_job_that_has_ended_cannot_be_cancelled(it: Box) -> None:
    job = it.submit(["true"], hbm_bytes=12 * MIB)
    it.until_job(job, "succeeded")
    with pytest.raises(ProblemError) as caught:
        it.client.cancel(job)
    assert (caught.value.status, caught.value.document["state"]) == (409, "succeeded")


def test_what_cannot_be_is_refused_at_submit(it: Box) -> None:
    with pytest.raises(ProblemError) as caught:
        it.submit(["true"], hbm_bytes=1 << 40)
    assert caught.value.status == 422
    assert caught.value.document["largest_hbm_bytes"] == 16 * MIB
    with pytest.raises(ProblemError) as caught:
        it.client.job("01a00000-0000-7000-8000-000000000000")
    assert caught.value.status == 404
    policy = it.client.policy("alpha")
    for wrong in ({"restore_modes": {"model_weights": "NONE"}}, {"share": "memory"}, {"drain_seconds_max": -1}):
        reply = it.client._http.put(
            "/api/v1/engines/alpha/policy", json={**policy.policy.model_dump(mode="json"), **wrong}
        )
        assert reply.status_code == 422, reply.text
        assert next(iter(wrong)) in reply.text


def test_a_policy_over_rest_rules_the_next_loan(it: Box, pipe: Path) -> None:
    view = it.client.policy("alpha")
    it.client.put_policy("alpha", view.policy.model_copy(update={"when": "manual"}))
    job = waiting_job(it, pipe)

    def waits() -> bool:
        return any(reason.code == "EngineManual" for reason in it.client.job(job).reasons)

    it.until(waits, "the job waits, since the engine is not lent")
    it.client.put_policy("alpha", view.policy.model_copy(update={"when": "always", "gate": "refuse"}))
    until_up(it, pipe)
    refused = ask(it)
    assert refused.status_code == 503
    assert int(refused.headers["retry-after"]) > 0
    pipe.write_text("")
    it.until_job(job, "succeeded")
    it.until_quiet()
    assert it.strays() == []
    kinds = [interval.kind for interval in it.client.usage().items]
    it.client.put_policy("alpha", view.policy)
    assert {"draining", "parking", "settling", "job", "waking", "verifying"} <= set(kinds)


@pytest.mark.postgres
def test_the_same_on_postgresql(tmp_path: Path, postgres_url: str, pipe: Path) -> None:
    with box(tmp_path, database_url=postgres_url) as it:
        job = waiting_job(it, pipe, code=4)
        until_up(it, pipe)
        it.kill_server()
        it.kill_agent()
        pipe.write_text("")
        it.start_agent()
        it.start_server()
        assert it.until_job(job, "failed").exit_code == 4
        it.until_quiet()
        assert len(runs(pipe)) == 1
