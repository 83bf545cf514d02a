"""A job whose GPU is lost: its failure has that reason, whatever its program made of it; a preempted one is queued."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from lull.agents.protocol.wire import GPU_LOST, AttemptEnd, Reason
from lull.scheduler.lifecycle import JobState
from lull.scheduler.store import Store
from tests.model_agent import GIB, ModelAgent, device

Submit = Callable[..., Awaitable[str]]
LOST = Reason(code=GPU_LOST, sentence="GPU-1: NVML answers 'GPU is lost'")


@pytest.mark.parametrize(
    ("end", "reason", "state", "failure"),
    [
        (AttemptEnd.EXITED, LOST, JobState.FAILED, GPU_LOST),
        (AttemptEnd.EXITED, None, JobState.FAILED, "exit_code"),
        (AttemptEnd.PREEMPTED, LOST, JobState.QUEUED, None),
    ],
)
async def test_the_reason_of_the_attempt_is_that_of_the_job(
    store: Store,
    submit: Submit,
    deciding: Callable[[float], Awaitable[int]],
    end: AttemptEnd,
    reason: Reason | None,
    state: JobState,
    failure: str | None,
) -> None:
    agent = ModelAgent(store, devices=[device("GPU-1")])
    await agent.register()
    job_id = await submit(hbm_bytes=GIB)
    await deciding(0.0)
    [opened] = await agent.orders()
    order: Any = opened.order
    await agent.lend(order)
    await agent.run(order, order.attempts[0])
    exit_code = 1 if end is AttemptEnd.EXITED else None
    await agent.end(order, order.attempts[0], end, exit_code=exit_code, reason=reason)
    job = await store.get_job(job_id)
    assert (job.state, job.failure_reason) == (state, failure)
    if state is JobState.QUEUED:
        assert "GPU is lost" in job.reasons[0].sentence
