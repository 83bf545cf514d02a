"""What users do with jobs, on both databases."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from sqlalchemy import text, update

from lull.agents.protocol.wire import AttemptEnd
from lull.scheduler.decide import decide
from lull.scheduler.errors import Conflict, IdempotencyMismatch, InvalidRequest, NotFound, QueueFull, Unsatisfiable
from lull.scheduler.lifecycle import JobState
from lull.scheduler.model import LogTail
from lull.scheduler.requests import JobRequest
from lull.scheduler.sql import database, job_writes, retention
from lull.scheduler.sql.snapshots import JOBS_OF_A_SHAPE_MAX
from lull.scheduler.sql.writer import Tx
from lull.scheduler.store import Store
from lull.scheduler.tables import jobs
from tests.model_agent import GIB, ModelAgent, device
from tests.waiting import wait_until_async

Submit = Callable[..., Awaitable[str]]
REQUEST = JobRequest(argv=("python", "train.py"), env={"A": "ü"}, hbm_bytes=GIB, time_limit_seconds=5.5, priority=3)


async def test_a_submitted_job_reads_back_as_it_was_sent(store: Store) -> None:
    result = await store.submit_job(REQUEST, "ann", None, "-", 1000.25)
    job = await store.get_job(result.job_id)
    assert (job.argv, job.env, job.hbm_bytes, job.time_limit_seconds) == (REQUEST.argv, {"A": "ü"}, GIB, 5.5)
    assert (job.state, job.submitted_by, job.created_at, job.priority) == (JobState.QUEUED, "ann", 1000.25, 3)
    assert [reason.code for reason in job.reasons] == ["QueuedBehind"]
    assert job.reasons[0].data == {"n": 0}


async def test_an_idempotency_key_gives_one_job(store: Store) -> None:
    first = await store.submit_job(REQUEST, "ann", "key", "body", 1000.0)
    again = await store.submit_job(REQUEST, "ann", "key", "body", 1001.0)
    assert again == type(again)(first.job_id, replayed=True)
    with pytest.raises(IdempotencyMismatch, match="another body"):
        await store.submit_job(REQUEST, "ann", "key", "other", 1002.0)
    assert (await store.submit_job(REQUEST, "bob", "key", "other", 1002.0)).job_id != first.job_id
    later = await store.submit_job(REQUEST, "ann", "key", "other", 1000.0 + 25 * 3600)
    assert not later.replayed
    assert len((await store.list_jobs())[0]) == 3


async def test_two_servers_with_one_key_at_once_give_one_job(postgres_url: str) -> None:
    """The second asks while the first has not committed yet."""
    engine = database.open_engine(database.normalize_url(postgres_url), writes=True, pool_size=2)
    store = Store(postgres_url)
    await store.start()
    try:
        with engine.connect() as looking, engine.connect() as other, other.begin() as first:
            won = job_writes.submit(Tx(other), REQUEST, "ann", "key", "body", time.time(), 100)
            asked = asyncio.create_task(store.submit_job(REQUEST, "ann", "key", "body", time.time()))

            async def waits() -> bool:
                with looking.begin():
                    return bool(looking.execute(text("SELECT count(*) FROM pg_locks WHERE NOT granted")).scalar())

            await wait_until_async(waits, 20, "the second request waiting for the first")
            first.commit()
        assert await asked == type(won)(won.job_id, replayed=True)
    finally:
        await store.close()
        engine.dispose()


async def test_jobs_in_back_off_hide_no_others_of_their_shape(
    store: Store, database_url: str, submit: Submit, deciding: Callable[[], Awaitable[int]]
) -> None:
    late = [await submit() for _ in range(JOBS_OF_A_SHAPE_MAX)]
    engine = database.open_engine(database.normalize_url(database_url), writes=True)
    with engine.begin() as connection:
        connection.execute(update(jobs).where(jobs.c.id.in_(late)).values(not_before=time.time() + 300))
    engine.dispose()
    ready = await submit()
    agent = ModelAgent(store, devices=[device("a")])
    await agent.register()
    await deciding()
    assert [spec.job_id for spec in (await agent.one_order()).attempts] == [ready]


async def test_pages_go_through_all_jobs_once(store: Store, submit: Submit) -> None:
    ids = [await submit(project="a" if number % 2 else "b") for number in range(7)]
    seen: list[str] = []
    cursor = None
    while True:
        rows, cursor = await store.list_jobs(limit=3, cursor=cursor)
        seen += [row.id for row in rows]
        if cursor is None:
            break
    assert seen == ids[::-1]
    assert [row.id for row in (await store.list_jobs(project="a"))[0]] == [ids[5], ids[3], ids[1]]
    assert (await store.list_jobs(states=[JobState.FAILED]))[0] == []
    with pytest.raises(InvalidRequest, match="cursor"):
        await store.list_jobs(cursor="ÿ")
    with pytest.raises(InvalidRequest, match="limit"):
        await store.list_jobs(limit=1001)


async def test_cancel_is_final_and_repeatable(store: Store, submit: Submit) -> None:
    job_id = await submit()
    assert (await store.cancel_job(job_id, "ann", 5.0)).state is JobState.CANCELLED
    assert (await store.cancel_job(job_id, "ann", 6.0)).ended_at == 5.0
    with pytest.raises(NotFound, match="job"):
        await store.cancel_job("nope", "ann", 5.0)
    with pytest.raises(NotFound):
        await store.get_job("nope")


async def test_the_queue_has_a_bound(database_url: str) -> None:
    store = Store(database_url, queue_jobs_max=2)
    await store.start()
    try:
        for _ in range(2):
            await store.submit_job(REQUEST, "ann", None, "-", time.time())
        with pytest.raises(QueueFull, match="2 jobs"):
            await store.submit_job(REQUEST, "ann", "key", "-", time.time())
    finally:
        await store.close()


async def test_what_no_node_could_run_is_refused_with_the_largest_possible(store: Store) -> None:
    agent = ModelAgent(store, devices=[device("a"), device("b", index=1, capacity=3 * GIB)])
    await agent.register()
    with pytest.raises(Unsatisfiable, match=str(3 * GIB)) as caught:
        await store.submit_job(REQUEST.model_copy(update={"hbm_bytes": 4 * GIB}), "ann", None, "-", 1.0)
    assert caught.value.largest_bytes == 3 * GIB
    with pytest.raises(Unsatisfiable) as caught:
        await store.submit_job(REQUEST.model_copy(update={"hbm_bytes": 2 * GIB, "gpus": 2}), "ann", None, "-", 1.0)
    assert caught.value.largest_bytes == GIB
    with pytest.raises(Unsatisfiable, match="no node has 3 devices") as caught:
        await store.submit_job(REQUEST.model_copy(update={"gpus": 3}), "ann", None, "-", 1.0)
    assert caught.value.largest_gpus == 2


async def test_a_waiting_job_says_why_and_since_when(
    store: Store, submit: Submit, deciding: Callable[[float], Awaitable[int]]
) -> None:
    first, second = await submit(), await submit()
    await deciding(0.0)
    reasons = (await store.get_job(first)).reasons
    assert [reason.code for reason in reasons] == ["NoNode"]
    since = reasons[0].since
    assert [reason.code for reason in (await store.get_job(second)).reasons] == ["QueuedBehind", "NoNode"]
    assert (await store.get_job(second)).reasons[0].data == {"n": 1}
    assert await deciding(10.0) == 0, "reasons that did not change are not written again"
    later = (await store.get_job(first, since + 50)).reasons[0]
    assert later.since == since
    assert later.next_check is not None
    assert later.next_check > since + 50
    agent = ModelAgent(store, devices=[device("a", capacity=GIB)])
    await agent.register()
    await deciding(0.0)
    assert (await agent.one_order()).kind == "open_loan"


async def test_events_are_in_the_order_of_commits(store: Store, submit: Submit) -> None:
    first = await submit()
    await store.cancel_job(first, "bob", 7.0)
    events = await store.events_after(0, types=["job_changed"])
    assert [(event.from_state, event.to_state, event.actor) for event in events] == [
        (None, "queued", "me"),
        ("queued", "cancelled", "bob"),
    ]
    assert await store.events_after(events[-1].seq) == []
    assert await store.last_event_seq() == events[-1].seq


async def test_topics_are_told_after_the_commit(store: Store, submit: Submit) -> None:
    told: list[Any] = []
    end = store.subscribe(told.append)
    await submit()
    assert told
    assert {"jobs", "events", "decide"} <= told[0]
    end()
    count = len(told)
    await submit()
    assert len(told) == count


async def test_a_job_that_ended_cannot_be_cancelled(store: Store, submit: Submit, deciding: Any) -> None:
    agent = ModelAgent(store, devices=[device("a")])
    await agent.register()
    job_id = await submit()
    await deciding()
    order = await agent.one_order()
    await agent.lend(order)
    await agent.run(order, order.attempts[0])
    await agent.end(order, order.attempts[0], AttemptEnd.EXITED, exit_code=0)
    with pytest.raises(Conflict, match="ended already") as caught:
        await store.cancel_job(job_id, "ann", time.time())
    assert caught.value.state == "succeeded"


async def test_the_ends_of_logs_are_kept_for_a_while(store: Store, submit: Submit) -> None:
    agent = ModelAgent(store, devices=[device("gpu")])
    await agent.register()
    await submit()
    now = time.time()
    await store.commit(decide(await store.load_snapshot(now), now), now)
    attempt_id = (await agent.one_order()).attempts[0].attempt_id
    assert await store.log_tail(attempt_id, "stdout") is None
    for data in (b"first", b"\x00second\xff"):  # sent twice: the newest counts
        await store.keep_log_tail(attempt_id, "stdout", 7, data, now)
    assert await store.log_tail(attempt_id, "stdout") == LogTail(7, b"\x00second\xff", node_silent=False)
    assert await store.log_tail(attempt_id, "stderr") is None
    with pytest.raises(NotFound, match="attempt"):
        await store.keep_log_tail("nope", "stdout", 0, b"", now)
    with pytest.raises(InvalidRequest, match="at most"):
        await store.keep_log_tail(attempt_id, "stdout", 0, b"x" * (2**16 + 1), now)
    await store.trim(now + 13 * 24 * 3600)
    assert await store.log_tail(attempt_id, "stdout") is not None
    await store.trim(now + 15 * 24 * 3600)
    assert await store.log_tail(attempt_id, "stdout") is None


async def test_only_so_many_ends_of_logs_are_kept(
    store: Store, submit: Submit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "LOG_TAILS_MAX", 2)
    agent = ModelAgent(store, devices=[device("a"), device("b", index=1)])
    await agent.register()
    for _ in range(2):
        await submit()
    now = time.time()
    await store.commit(decide(await store.load_snapshot(now), now), now)
    ids = [spec.attempt_id for order in await agent.orders() for spec in order.order.attempts]
    for number, (attempt_id, stream) in enumerate((each, stream) for each in ids for stream in ("stdout", "stderr")):
        await store.keep_log_tail(attempt_id, stream, 0, b"x", now + number)
    await store.trim(now + 10)
    assert await store.log_tail(ids[0], "stdout") is None
    assert await store.log_tail(ids[0], "stderr") is None
    assert await store.log_tail(ids[1], "stdout") is not None
