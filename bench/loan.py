"""How much of a loan is Lull's own time: loans of an idle engine, one after the other, from the journal's stamps.

Not counted are the two copies, the settle samples, the job, the drain with its golden answer, and the canary: they
belong to the engine, to the policy or to the job. What is left are differences of named steps, listed one by one.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

from .box import Box, BoxError, EnginePlan, open_box
from .loan_parts import PARTS, is_over, own_seconds, part_seconds, stamps_of

if TYPE_CHECKING:
    from ..api.client import Client

TARGET_SECONDS: Final = 0.1
ENGINE: Final = "alpha"
_MIB: Final = 1 << 20


def run(
    loans: int, weights_bytes: int, seconds: float, say: Callable[[str], None], on_trouble: Callable[[str], None]
) -> dict[str, Any]:
    """Raises BoxError when a loan does not end as it should."""
    free_bytes = max(8 * _MIB, weights_bytes // 4)
    plan = EnginePlan(ENGINE, weights_bytes, min(64 * _MIB, weights_bytes // 2), free_bytes)
    deadline = time.monotonic() + seconds
    measured: list[dict[str, float]] = []
    with open_box([plan], on_trouble) as box:
        say("starting server, agent, gateway and one engine")
        box.wait_ready(deadline - time.monotonic(), say)
        with box.client() as client:
            for number in range(1, loans + 1):
                parts = part_seconds(stamps_of(_one_loan(box, client, free_bytes + weights_bytes // 2, deadline)))
                measured.append(parts)
                say(f"loan {number} of {loans}: {sum(own_seconds(parts).values()) * 1000:.1f} ms of its own")
    return document_of(measured, weights_bytes)


def _one_loan(box: Box, client: Client, need_bytes: int, deadline: float) -> list[dict[str, Any]]:
    # A long poll, not a busy one: what is measured runs on the same processors.
    submitted = client.submit(["/bin/true"], name="bench", hbm_bytes=need_bytes)
    job = client.wait(submitted.id, max(0.0, deadline - time.monotonic()))
    loan_id = job.attempts[-1].loan_id if job.attempts else None
    if job.state != "succeeded" or loan_id is None:
        raise BoxError(f"job {job.id} {job.state}: {job.failure_reason or 'it had no loan'}")
    loan = client.loan(loan_id)

    def closed() -> bool:
        nonlocal loan
        loan = client.loan(loan_id)
        return is_over(loan.state, (step.step for step in loan.steps))

    box.wait_for(closed, deadline - time.monotonic(), "the end of a loan", lambda: f"loan {loan.state}")
    if loan.reason is not None:
        raise BoxError(f"loan {loan.id} did not go as planned: {loan.reason.sentence}")
    return [step.model_dump(mode="json") for step in loan.steps]


def document_of(measured: Sequence[Mapping[str, float]], weights_bytes: int) -> dict[str, Any]:
    """Percentiles over all loans, of the sum and of each part."""
    own = [sum(own_seconds(parts).values()) for parts in measured]
    return {
        "bench": "loan",
        "loans": len(measured),
        "engine_weights_bytes": weights_bytes,
        "own_seconds": _percentiles(own),
        "target_seconds": TARGET_SECONDS,
        "within_target": statistics.median(own) <= TARGET_SECONDS,
        "parts_seconds": [
            {
                "name": part.name,
                "from": part.start.value,
                "to": part.end.value,
                "counted_as": part.owner,
                **_percentiles([parts[part.name] for parts in measured]),
            }
            for part in PARTS
            if part.name in measured[0]
        ],
    }


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    ordered = sorted(values)
    last = len(ordered) - 1
    return {
        "p50": round(statistics.median(ordered), 6),
        "p95": round(ordered[round(0.95 * last)], 6),
        "min": round(ordered[0], 6),
        "max": round(ordered[last], 6),
    }
