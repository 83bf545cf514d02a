"""What the demo's facts come to: one JSON document, what went wrong in words, and a table for people. Pure."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Sequence
from typing import Any, Final, cast

from ..bench.loan_parts import MissingStamp, own_seconds, part_seconds, phase_seconds, stamps_of
from .demo_load import Record
from .demo_story import ENGINE_NAMES, Facts
from .demo_watch import Sample
from .quantities import format_duration, format_size

GAP_SECONDS_MIN: Final = 2.0  # shorter gaps between answers are the machine's noise, not a pause


def document_of(facts: Facts) -> dict[str, Any]:
    """The facts as one JSON document. `failures` says in words what did not come out as it should."""
    assert facts.sample_before is not None
    assert facts.sample_after is not None
    plan = facts.plan[ENGINE_NAMES.index(facts.lent)]
    other = facts.other
    other_bytes = [sample.engine_bytes(other, facts.devices[other]) for sample in facts.samples]
    parked = parked_sample(facts)
    steps = steps_of(facts)
    document: dict[str, Any] = {
        "engine_lent": facts.lent,
        "engine_answer_equal": facts.before is not None
        and facts.after is not None
        and facts.before.answers == facts.after.answers,
        "addresses_unchanged": facts.before is not None
        and facts.after is not None
        and facts.before.addresses == facts.after.addresses,
        "device_capacity_bytes": plan.capacity_bytes,
        **memory_of(facts, facts.sample_before, parked, facts.sample_after),
        **requests_of(facts.records),
        "requests_by_witness": facts.witness,
        "other_engine": {
            "name": other,
            "longest_gap_seconds": round(longest_gap_seconds(facts.records, other, *loan_window(steps)), 3),
            "device_bytes_min": min(other_bytes, default=0),
            "device_bytes_before": facts.sample_before.engine_bytes(other, facts.devices[other]),
        },
        **job_of(facts, parked),
        "loan_id": facts.loan.id if facts.loan else None,
        **times_of(steps),
        "processes": processes_of(facts.samples, parked),
    }
    document["failures"] = failures_of(document, facts)
    document["ok"] = not document["failures"]
    return document


def steps_of(facts: Facts) -> list[dict[str, Any]]:
    return [] if facts.loan is None else [step.model_dump(mode="json") for step in facts.loan.steps]


def parked_sample(facts: Facts) -> Sample | None:
    """The moment at which the job held most device memory."""
    best = max(facts.samples, key=lambda sample: sample.job_bytes(facts.device_uuid), default=None)
    return best if best is not None and best.job_bytes(facts.device_uuid) > 0 else None


def memory_of(facts: Facts, before: Sample, parked: Sample | None, after: Sample) -> dict[str, int | None]:
    uuid, lent = facts.device_uuid, facts.lent
    capacity = facts.plan[ENGINE_NAMES.index(lent)].capacity_bytes
    pids = before.engine_pids(lent)
    private_before = sum(before.anonymous.get(pid, 0) for pid in pids)
    memory: dict[str, int | None] = {
        "free_bytes_before": capacity - before.used_bytes(uuid),
        "free_bytes_parked": None,
        "free_bytes_after": capacity - after.used_bytes(uuid),
        "engine_device_bytes_before": before.engine_bytes(lent, uuid),
        "engine_device_bytes_parked": None,
        "engine_device_bytes_after": after.engine_bytes(lent, uuid),
        "backup_bytes": None,
    }
    if parked is not None:
        # What there was for the job: its own bytes are not counted as used.
        memory["free_bytes_parked"] = capacity - parked.used_bytes(uuid) + parked.job_bytes(uuid)
        memory["engine_device_bytes_parked"] = parked.engine_bytes(lent, uuid)
        memory["backup_bytes"] = sum(parked.anonymous.get(pid, 0) for pid in pids) - private_before
    return memory


def requests_of(records: Sequence[Record]) -> dict[str, Any]:
    failed = [record for record in records if not record.answered]
    return {
        "requests_sent": len(records),
        "requests_answered": len(records) - len(failed),
        "requests_failed": len(failed),
        "requests_failed_why": sorted({record.error or "no answer" for record in failed})[:10],
        "requests_wait_seconds_max": round(
            max((record.ended - record.sent for record in records if record.ended is not None), default=0.0), 3
        ),
    }


def job_of(facts: Facts, parked: Sample | None) -> dict[str, Any]:
    verdict = last_json(facts.job_output)
    job = facts.job
    return {
        "job_state": job.state if job else None,
        "job_exit_code": job.exit_code if job else None,
        "job_need_bytes": facts.need_bytes,
        "job_allocated_bytes": parked.job_bytes(facts.device_uuid) if parked else 0,
        "job_wrong_blocks": verdict.get("wrong_blocks"),
        "job_read_back_rounds": verdict.get("read_back_rounds"),
    }


def last_json(output: str) -> dict[str, Any]:
    """The last line of a log that is a JSON object."""
    for line in reversed(output.splitlines()):
        try:
            value: object = json.loads(line)
        except ValueError:
            continue
        if isinstance(value, dict):
            return cast(dict[str, Any], value)
    return {}


def times_of(steps: Sequence[dict[str, Any]]) -> dict[str, Any]:
    stamps = stamps_of(steps)
    try:
        parts = part_seconds(stamps)
    except MissingStamp as missing:
        return {"phase_seconds": phase_seconds(stamps), "overhead_seconds": None, "overhead_missing": str(missing)}
    own = own_seconds(parts)
    return {
        "phase_seconds": _rounded(phase_seconds(stamps)),
        "overhead_seconds": round(sum(own.values()), 6),
        "overhead_parts_seconds": _rounded(own),
        "other_parts_seconds": _rounded({name: seconds for name, seconds in parts.items() if name not in own}),
    }


def _rounded(seconds: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 6) for name, value in seconds.items()}


def loan_window(steps: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """From the first step to the last, on the clock of this process."""
    if not steps:
        return 0.0, 0.0
    # The node's stamps count since boot with suspend, Python's monotonic clock without.
    offset = time.clock_gettime(time.CLOCK_BOOTTIME) - time.monotonic()
    stamps = [float(step["monotonic_seconds"]) - offset for step in steps]
    return min(stamps), max(stamps)


def longest_gap_seconds(records: Sequence[Record], model: str, start: float, end: float) -> float:
    """The longest time between start and end in which no answer of `model` ended."""
    ends = [r.ended for r in records if r.model == model and r.answered and r.ended is not None]
    marks = [start, *sorted(ended for ended in ends if start < ended < end), end]
    return max((after - before for before, after in itertools.pairwise(marks)), default=0.0)


def processes_of(samples: Sequence[Sample], parked: Sample | None) -> list[dict[str, Any]]:
    """Every process at the moment when the job ran."""
    sample = parked or (samples[-1] if samples else None)
    return [] if sample is None else [seen.document() for seen in sample.processes if seen.role != "other"]


def failures_of(document: dict[str, Any], facts: Facts) -> list[str]:
    found = _memory_failures(document, facts)
    if document["job_exit_code"] != 0:
        found.append(f"the job ended as {document['job_state']} with exit code {document['job_exit_code']}")
    if document["job_wrong_blocks"] != 0:
        found.append(f"the job read back other bytes than it wrote: {document['job_wrong_blocks']} blocks")
    if document["requests_failed"]:
        why = "; ".join(document["requests_failed_why"])
        found.append(f"{document['requests_failed']} of {document['requests_sent']} requests failed: {why}")
    if not document["engine_answer_equal"]:
        found.append("an engine answers the fixed prompt differently than before")
    if not document["addresses_unchanged"]:
        found.append("an engine's memory is at other addresses than before")
    if facts.loan is not None and facts.loan.reason is not None:
        found.append(f"the loan did not go as planned: {facts.loan.reason.sentence}")
    found += _pause_failures(document)
    found += _witness_failures(facts)
    found += _process_failures(document["processes"])
    if document["overhead_seconds"] is None:
        found.append(f"Lull's own time cannot be told: {document['overhead_missing']}")
    return found


def _memory_failures(document: dict[str, Any], facts: Facts) -> list[str]:
    if document["engine_device_bytes_parked"] is None:
        return ["the job was never seen with device memory"]
    found: list[str] = []
    if document["job_allocated_bytes"] < facts.need_bytes:
        found.append(f"the job held {document['job_allocated_bytes']} of the {facts.need_bytes} bytes it was promised")
    if document["engine_device_bytes_parked"]:
        found.append(f"the parked engine still held {document['engine_device_bytes_parked']} bytes of the device")
    found += [
        f"{what}: {document[f'{what}_before']} before, {document[f'{what}_after']} after"
        for what in ("free_bytes", "engine_device_bytes")
        if document[f"{what}_after"] != document[f"{what}_before"]
    ]
    return found


def _pause_failures(document: dict[str, Any]) -> list[str]:
    other = document["other_engine"]
    found: list[str] = []
    if other["device_bytes_min"] < other["device_bytes_before"]:
        found.append(f"{other['name']} gave up memory too: {other['device_bytes_min']} bytes at the least")
    loan_seconds = sum(document["phase_seconds"].values())
    if other["longest_gap_seconds"] > max(GAP_SECONDS_MIN, loan_seconds / 2):
        found.append(f"{other['name']} paused: no answer for {other['longest_gap_seconds']} s of the loan")
    return found


def _witness_failures(facts: Facts) -> list[str]:
    """Engines count by themselves; their counts have to agree with what was sent."""
    found: list[str] = []
    for name, counts in facts.witness.items():
        sent = sum(1 for record in facts.records if record.model == name) + facts.asked_count
        if counts["requests"] != sent or counts["served"] != sent:
            found.append(f"{name} was sent {sent} requests, counted {counts['requests']} and served {counts['served']}")
        if counts["while_not_running"]:
            found.append(f"{counts['while_not_running']} requests reached {name} while it was not running")
    return found


def _process_failures(processes: Sequence[dict[str, Any]]) -> list[str]:
    roles = [process["role"] for process in processes]
    needed = ("server", "agent", "gateway", "engine", "runner", "job")
    found = [f"no process of its own was seen for: {role}" for role in needed if role not in roles]
    if roles.count("engine") not in (0, len(ENGINE_NAMES)):
        found.append(f"{roles.count('engine')} engine processes were seen")
    return found


def table_of(document: dict[str, Any]) -> list[tuple[str, str]]:
    """Rows for people."""
    other, phases = document["other_engine"], document["phase_seconds"]
    overhead = document["overhead_seconds"]
    return [
        ("engine lent", str(document["engine_lent"])),
        ("device", format_size(document["device_capacity_bytes"])),
        ("free on it", _three(document, "free_bytes")),
        ("held by the engine", _three(document, "engine_device_bytes")),
        ("kept in host memory", _size(document["backup_bytes"])),
        ("the job needed, held", f"{_size(document['job_need_bytes'])}, {_size(document['job_allocated_bytes'])}"),
        ("job's exit code", str(document["job_exit_code"])),
        (
            "requests",
            f"{document['requests_sent']} sent, {document['requests_answered']} answered,"
            f" {document['requests_failed']} failed",
        ),
        ("longest wait of one", format_duration(document["requests_wait_seconds_max"])),
        ("same answer after", "yes" if document["engine_answer_equal"] else "NO"),
        ("same addresses after", "yes" if document["addresses_unchanged"] else "NO"),
        (f"{other['name']}'s longest gap", format_duration(other["longest_gap_seconds"])),
        ("phases", ", ".join(f"{name} {format_duration(seconds)}" for name, seconds in phases.items())),
        ("Lull's own time", "unknown" if overhead is None else format_duration(overhead)),
    ]


def _three(document: dict[str, Any], what: str) -> str:
    before, parked, after = (_size(document[f"{what}_{when}"]) for when in ("before", "parked", "after"))
    return f"{before} before, {parked} lent, {after} after"


def _size(nbytes: int | None) -> str:
    return "unknown" if nbytes is None else format_size(nbytes)
