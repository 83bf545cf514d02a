"""The report is made of facts alone: each thing that can go wrong is told."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest

from lull.agents.protocol.loans import LoanState, LoanStep
from lull.api.schemas import Job, Loan, LoanStepView, ReasonView
from lull.bench.proc_facts import DeviceMemory
from lull.cli.demo_load import Record
from lull.cli.demo_report import document_of, last_json, longest_gap_seconds, table_of
from lull.cli.demo_story import MIB, Asked, Facts, plan_engines
from lull.cli.demo_watch import Sample, Seen

NOW = datetime(2030, 1, 1, tzinfo=UTC)
PLANS = plan_engines(32 * MIB)
ENGINE_BYTES = PLANS[0].weights_bytes + PLANS[0].kv_cache_bytes
NEED_BYTES = 28 * MIB
PIDS = {"server": 2, "agent": 3, "gateway": 4, "alpha": 5, "beta": 6, "runner": 7, "job": 8}


def sample(at: float, alpha: int = ENGINE_BYTES, job: int = 0, private: int = 10 * MIB) -> Sample:
    held = {5: {"A": alpha}, 6: {"B": ENGINE_BYTES}} | ({8: {"A": job}} if job else {})
    seen = tuple(
        Seen(
            "engine" if name in ("alpha", "beta") else name, name if name in ("alpha", "beta") else None, pid, 1, ("x",)
        )
        for name, pid in PIDS.items()
        if job or name not in ("runner", "job")
    )
    return Sample(at, seen, DeviceMemory(held, {"A": alpha + job, "B": ENGINE_BYTES}), {5: private, 6: 10 * MIB})


def loan(start: float) -> Loan:
    steps = [
        LoanStepView(step=step, at=NOW, monotonic_seconds=start + number * 0.1) for number, step in enumerate(LoanStep)
    ]
    return Loan(
        id="loan",
        node_id="n",
        state=LoanState.CLOSED,
        epoch=1,
        device_ids=["A"],
        engine_ids=["e"],
        need_bytes=NEED_BYTES,
        opened_at=NOW,
        steps=steps,
    )


def good_facts() -> Facts:
    start = time.clock_gettime(time.CLOCK_BOOTTIME)
    offset = start - time.monotonic()
    asked = Asked({"alpha": [{"text": "a"}], "beta": [{"text": "b"}]}, {"alpha": {"x": 1}, "beta": {"x": 2}})
    records = [
        Record(number, name, start - offset + number * 0.05, 0.0, start - offset + number * 0.05 + 0.01, 200)
        for number, name in enumerate(["alpha", "beta"] * 20)
    ]
    job = Job(
        id="job", state="succeeded", argv=["x"], created_at=NOW, exit_code=0, hbm_bytes=NEED_BYTES, submitted_by="me"
    )
    return Facts(
        plan=PLANS,
        devices={"alpha": "A", "beta": "B"},
        lent="alpha",
        need_bytes=NEED_BYTES,
        before=asked,
        after=asked,
        sample_before=sample(0),
        sample_after=sample(9),
        samples=[sample(0), sample(1, alpha=0, job=NEED_BYTES, private=42 * MIB), sample(2)],
        job=job,
        job_output='{"allocated_bytes": 1}\n{"wrong_blocks": 0, "read_back_rounds": 3}\n',
        loan=loan(start),
        records=records,
        asked_count=2,
        witness={
            name: {"requests": 22, "canaries": 2, "while_not_running": 0, "served": 22} for name in ("alpha", "beta")
        },
    )


def test_a_good_demo_has_every_number_and_no_failure() -> None:
    document = document_of(good_facts())
    assert document["failures"] == []
    assert document["ok"]
    assert document["engine_answer_equal"]
    assert document["addresses_unchanged"]
    capacity = PLANS[0].capacity_bytes
    assert document["device_capacity_bytes"] == capacity
    assert document["free_bytes_before"] == document["free_bytes_after"] == capacity - ENGINE_BYTES
    assert document["free_bytes_parked"] == capacity
    assert document["engine_device_bytes_before"] == document["engine_device_bytes_after"] == ENGINE_BYTES
    assert document["engine_device_bytes_parked"] == 0
    assert document["backup_bytes"] == 32 * MIB
    assert (document["requests_sent"], document["requests_answered"], document["requests_failed"]) == (40, 40, 0)
    assert document["job_exit_code"] == 0
    assert document["job_allocated_bytes"] == NEED_BYTES
    assert document["phase_seconds"]["parking"] == pytest.approx(0.1)
    assert document["overhead_seconds"] == pytest.approx(1.1)
    assert {process["role"] for process in document["processes"]} == {
        *("server", "agent", "gateway", "engine", "runner", "job"),
    }
    json.dumps(document)
    assert len(table_of(document)) > 10


def with_record(facts: Facts, **changes: Any) -> None:
    facts.records[0] = replace(facts.records[0], **changes)


def with_loan(facts: Facts, **changes: Any) -> None:
    assert facts.loan is not None
    facts.loan = facts.loan.model_copy(update=changes)


def with_job(facts: Facts, **changes: object) -> None:
    assert facts.job is not None
    facts.job = facts.job.model_copy(update=changes)


def asked(facts: Facts) -> Asked:
    assert facts.before is not None
    return facts.before


BROKEN: dict[str, tuple[Callable[[Facts], None], str]] = {
    "a request failed": (
        lambda f: with_record(f, status=503, error="status 503"),
        "1 of 40 requests failed: status 503",
    ),
    "a request got lost": (lambda f: with_record(f, ended=None, status=None), "requests failed: no answer"),
    "another answer": (lambda f: setattr(f, "after", Asked({"alpha": 1}, asked(f).addresses)), "fixed prompt"),
    "other addresses": (lambda f: setattr(f, "after", Asked(asked(f).answers, {})), "other addresses"),
    "no answer at all": (lambda f: setattr(f, "after", None), "fixed prompt"),
    "memory kept": (
        lambda f: setattr(f, "samples", [sample(1, alpha=MIB, job=NEED_BYTES)]),
        "parked engine still held 1048576 bytes",
    ),
    "memory not back": (lambda f: setattr(f, "sample_after", sample(9, alpha=MIB)), "engine_device_bytes: "),
    "job too small": (
        lambda f: setattr(f, "samples", [sample(1, alpha=0, job=MIB)]),
        "of the 29360128 bytes it was promised",
    ),
    "job never seen": (lambda f: setattr(f, "samples", [sample(1)]), "never seen with device memory"),
    "job read garbage": (lambda f: setattr(f, "job_output", '{"wrong_blocks": 4}'), "4 blocks"),
    "job said nothing": (lambda f: setattr(f, "job_output", ""), "None blocks"),
    "job failed": (lambda f: with_job(f, exit_code=3), "exit code 3"),
    "loan ended otherwise": (
        lambda f: with_loan(f, reason=ReasonView(code="HBMNotFreed", sentence="memory not free")),
        "memory not free",
    ),
    "reached a parked engine": (
        lambda f: f.witness["alpha"].update(while_not_running=1),
        "1 requests reached alpha while it was not running",
    ),
    "counts disagree": (lambda f: f.witness["beta"].update(requests=23), "beta was sent 22 requests, counted 23"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_what_goes_wrong_is_told(name: str) -> None:
    spoil, told = BROKEN[name]
    facts = good_facts()
    spoil(facts)
    document = document_of(facts)
    assert not document["ok"]
    assert any(told in sentence for sentence in document["failures"]), document["failures"]


def test_an_engine_that_pauses_is_told() -> None:
    facts = good_facts()
    assert facts.loan is not None
    steps = [
        step.model_copy(update={"monotonic_seconds": step.monotonic_seconds + 60 * (step.step is LoanStep.CLOSED)})
        for step in facts.loan.steps
    ]
    with_loan(facts, steps=steps)
    assert any("beta paused" in sentence for sentence in document_of(facts)["failures"])


def test_the_longest_gap_counts_the_edges() -> None:
    records = [Record(n, "m", 0, 0, ended, 200) for n, ended in enumerate([3.0, 4.0, 8.0])]
    assert longest_gap_seconds(records, "m", 0.0, 10.0) == 4.0
    assert longest_gap_seconds(records, "m", 3.0, 20.0) == 12.0
    assert longest_gap_seconds([], "m", 0.0, 10.0) == 10.0


def test_the_last_json_line_of_a_log_is_found_among_others() -> None:
    assert last_json('x\n{"a": 1}\n[2]\nend') == {"a": 1}
    assert last_json("") == {}
