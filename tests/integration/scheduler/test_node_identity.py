"""Two agents with one node's identity: one of them rules, the other changes nothing. On both databases."""

from __future__ import annotations

import copy
from collections.abc import Awaitable, Callable

import pytest

from lull.agents.protocol.wire import AttemptEnd, AttemptState, OpenLoan
from lull.scheduler.errors import DuplicateIdentity, StaleIncarnation
from lull.scheduler.lifecycle import JobState
from lull.scheduler.store import Store
from tests.model_agent import ModelAgent, device, silence

Submit = Callable[..., Awaitable[str]]
Deciding = Callable[..., Awaitable[int]]


@pytest.fixture
async def agent(store: Store) -> ModelAgent:
    agent = ModelAgent(store, devices=[device("gpu")])
    agent.marks = {"incarnation": (await agent.register()).incarnation}
    return agent


def clone_of(agent: ModelAgent) -> ModelAgent:
    """A virtual machine cloned with all that it has: the same machine-id and data directory, but another boot."""
    clone = copy.copy(agent)
    clone.loans, clone.attempts, clone.marks = dict(agent.loans), dict(agent.attempts), dict(agent.marks)
    clone.boot_id, clone.start_id = "boot of the clone", "start of the clone"
    return clone


async def test_a_clone_of_a_live_node_is_refused_and_gets_nothing(
    store: Store, agent: ModelAgent, running: OpenLoan, submit: Submit, deciding: Deciding
) -> None:
    clone = clone_of(agent)
    clone.loans, clone.attempts = {}, {}  # after its boot it holds nothing
    for _ in range(3):
        with pytest.raises(DuplicateIdentity, match="another boot") as refused:
            await clone.register()
    assert refused.value.retry_after_seconds is not None
    told = await store.events_after(0, 1000, types=["alert"])
    assert [event.data["code"] for event in told] == ["duplicate_identity"], "said once"
    assert (await store.get_job(running.attempts[0].job_id)).state is JobState.RUNNING
    # The original goes on: its reports count, its orders come, and only to it.
    await agent.end(running, running.attempts[0], AttemptEnd.EXITED, exit_code=0)
    await agent.give_back(running)
    await submit()
    await deciding()
    assert isinstance(await agent.one_order(), OpenLoan)
    job = await store.get_job(running.attempts[0].job_id)
    assert (job.state, job.attempt_no) == (JobState.SUCCEEDED, 1)


async def test_a_copy_of_the_directory_on_the_same_machine_is_refused(store: Store, agent: ModelAgent) -> None:
    copied = clone_of(agent)
    copied.boot_id, copied.home = agent.boot_id, "copy"
    with pytest.raises(DuplicateIdentity, match="another data directory"):
        await copied.register()


async def test_an_agent_that_starts_again_is_taken_at_once(store: Store, agent: ModelAgent) -> None:
    agent.start_id = "next"
    await agent.register()
    agent.home = ""  # one that does not tell
    await agent.register()


async def test_a_rebooted_node_is_taken_once_the_old_lease_is_over(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    rebooted = clone_of(agent)
    with pytest.raises(DuplicateIdentity, match="heard"):
        await rebooted.register()
    await silence(store)
    rebooted.loans, rebooted.attempts = {}, {}
    await rebooted.register()
    job = await store.get_job(running.attempts[0].job_id)
    assert (job.state, job.failure_reason) == (JobState.FAILED, "node_rebooted")


async def test_a_lease_ends_also_while_no_leader_looks(store: Store, agent: ModelAgent) -> None:
    rebooted = clone_of(agent)
    seen = (await store.get_node("node")).last_seen_at
    with pytest.raises(DuplicateIdentity):
        await store.register(rebooted.message(), seen + 29)
    await store.register(rebooted.message(), seen + 31)


async def test_the_one_that_was_replaced_can_do_nothing_any_more(
    store: Store, agent: ModelAgent, running: OpenLoan
) -> None:
    """The clone came while the original was cut off: the original is the one that is refused from then on."""
    clone = clone_of(agent)
    await silence(store)
    clone.marks["incarnation"] = (await clone.register()).incarnation
    with pytest.raises(StaleIncarnation):
        await agent.orders()
    with pytest.raises(StaleIncarnation):
        await agent.end(running, running.attempts[0], AttemptEnd.EXITED, exit_code=0)
    with pytest.raises(DuplicateIdentity, match="another boot"):
        await agent.register()
    await silence(store)
    with pytest.raises(DuplicateIdentity, match="older copy"):
        await agent.register()
    agent.journal_id = "a new one"  # as the error says
    await agent.register()
    attempt = (await store.get_job(running.attempts[0].job_id)).attempts[0]
    assert attempt.state is not AttemptState.PLACED
