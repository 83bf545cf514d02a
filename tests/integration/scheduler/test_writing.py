"""The writer under load, under bad requests, under SIGKILL and without a database."""

from __future__ import annotations

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from lull.agents.protocol.wire import RestartEngine
from lull.scheduler.actions import OpenLoan, Place
from lull.scheduler.errors import DatabaseUnavailable, IdempotencyMismatch, InvalidRequest, NotLeader
from lull.scheduler.lifecycle import JobState
from lull.scheduler.model import DeviceId, JobId, NodeId
from lull.scheduler.requests import JobRequest
from lull.scheduler.store import Store
from tests.databases import Postgres
from tests.model_agent import GIB, ModelAgent, device
from tests.waiting import wait_until

Submit = Callable[..., Awaitable[str]]
REQUEST = JobRequest(argv=("true",))


async def test_a_bad_request_fails_alone_in_its_group(store: Store) -> None:
    """All are asked while one commit runs, so the next commit has them together."""
    await store.submit_job(REQUEST, "ann", "key", "body", time.time())

    def submit(key: str | None, body: str) -> Any:
        return store.submit_job(REQUEST, "ann", key, body, time.time())

    asked = [submit(None, "-") if number != 7 else submit("key", "other") for number in range(20)]
    answers = await asyncio.gather(
        *asked, store.add_order("nobody", RestartEngine(engine_id="no")), return_exceptions=True
    )
    assert isinstance(answers[7], IdempotencyMismatch)
    assert isinstance(answers[20], Exception)
    good = [answer for answer in answers if not isinstance(answer, BaseException)]
    assert len(good) == 19
    rows, _ = await store.list_jobs(limit=100)
    assert {row.id for row in rows} >= {answer.job_id for answer in good}
    events = await store.events_after(0, 1000, types=["job_changed"])
    assert len(events) == 20, "the events of the bad one are gone with it"
    assert [event.seq for event in events] == sorted(event.seq for event in events)


@pytest.mark.parametrize("url", ["postgresql:/ann:secret@host/db", "postgresql://ann:secret@host:x/db", "secret"])
def test_an_address_that_cannot_be_read_is_not_shown(url: str) -> None:
    with pytest.raises(InvalidRequest, match="database_url") as caught:
        Store(url)
    assert "secret" not in str(caught.value)


async def test_a_value_that_the_database_refuses_is_the_requests_fault(store: Store) -> None:
    long_key = "k" * 300
    if store.url.startswith("sqlite"):
        assert not (await store.submit_job(REQUEST, "ann", long_key, "-", 1.0)).replayed
    else:
        with pytest.raises(InvalidRequest, match="too long"):
            await store.submit_job(REQUEST, "ann", long_key, "-", 1.0)
    assert (await store.submit_job(REQUEST, "ann", "k", "-", 1.0)).job_id


async def test_of_two_claims_on_one_job_one_wins(store: Store, submit: Submit) -> None:
    agent = ModelAgent(store, devices=[device("a"), device("b", index=1)])
    await agent.register()
    job_id = JobId(await submit())

    def loan(name: str) -> OpenLoan:
        where = DeviceId(name)
        place = Place(job_id, 0, (where,), GIB)
        return OpenLoan(NodeId("node"), (where,), (), GIB, {where: GIB}, None, (place,))

    assert await store.commit([loan("a"), loan("b"), loan("a")], 1.0) == 1
    late = await asyncio.gather(store.commit([loan("a")], 1.0), store.commit([loan("b")], 1.0))
    assert list(late) == [0, 0]
    job = await store.get_job(job_id)
    assert (job.state, job.attempt_no, len(job.attempts)) == (JobState.STARTING, 1, 1)
    assert len((await store.list_loans(open_only=True))[0]) == 1, "a loan whose claim failed was never opened"
    second = JobId(await submit())
    blocked = OpenLoan(
        NodeId("node"),
        (DeviceId("a"),),
        (),
        GIB,
        {DeviceId("a"): GIB},
        None,
        (Place(second, 0, (DeviceId("a"),), GIB),),
    )
    assert await store.commit([blocked], 1.0) == 0, "one open loan a device"
    assert (await store.get_job(second)).state is JobState.QUEUED


async def test_only_the_leader_decides(database_url: str) -> None:
    one, two = Store(database_url), Store(database_url)
    await one.start()
    await two.start()
    try:
        assert await one.lead("one", 60.0) == 1
        assert await two.lead("two", 60.0) is None
        assert await one.lead("one", 60.0) == 1
        assert await one.commit([], 1.0) == 0
        assert await two.lead("two", 60.0, take_over=True) == 2
        with pytest.raises(NotLeader):
            await one.commit([], 1.0)
        assert one.term == 0
        assert await one.lead("one", 60.0) is None
        await two.resign()
        assert await one.lead("one", 60.0) == 3
        assert await two.lead("two", 0.0) is None
        with pytest.raises(NotLeader):
            await two.commit([], 1.0)
    finally:
        await one.close()
        await two.close()


_WRITER = """
import asyncio, os, sys, time
from lull.scheduler.requests import JobRequest
from lull.scheduler.store import Store

async def main(url, count):
    store = Store(url)
    await store.start()
    os.write(1, b"ready\\n")
    for number in range(count):
        result = await store.submit_job(JobRequest(argv=("true",)), "me", None, "-", time.time())
        os.write(1, f"{result.job_id}\\n".encode())  # one write a line: the writers share the file
    await store.close()

# One interpreter imports everything; its children are the writers.
children = []
for _ in range(int(sys.argv[3])):
    pid = os.fork()
    if pid == 0:
        asyncio.run(main(sys.argv[1], int(sys.argv[2])))
        os._exit(0)
    children.append(pid)
statuses = [os.waitpid(pid, 0)[1] for pid in children]
if children:
    sys.exit(any(statuses))
asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


def _start_writer(url: str, count: int, processes: int, output: Path) -> subprocess.Popen[bytes]:
    """``processes`` 0: the interpreter itself writes."""
    argv = [sys.executable, "-c", _WRITER, url, str(count), str(processes)]
    with output.open("ab") as file:
        return subprocess.Popen(argv, stdout=file, stderr=file)


async def test_four_processes_write_and_none_finds_the_database_locked(database_url: str, tmp_path: Path) -> None:
    output = tmp_path / "writers"
    writer = _start_writer(database_url, 30, 4, output)
    assert await asyncio.to_thread(writer.wait, 120) == 0, output.read_text()
    told = [line for line in output.read_text().split() if line != "ready"]
    store = Store(database_url)
    await store.start()
    rows, _ = await store.list_jobs(limit=1000)
    events = await store.events_after(0, 1000)
    await store.close()
    assert sorted(row.id for row in rows) == sorted(told)
    assert len(told) == 120
    assert [event.seq for event in events] == list(range(1, 121)), "no seq was given twice, none is missing"


async def test_a_writer_that_is_killed_loses_nothing_it_answered(sqlite_url: str, tmp_path: Path) -> None:
    output = tmp_path / "writer"
    writer = _start_writer(sqlite_url, 100_000, 0, output)
    try:
        await asyncio.to_thread(
            wait_until, lambda: output.read_text().count("\n") > 25, 60, "twenty-five answers of the writer"
        )
    finally:
        os.kill(writer.pid, signal.SIGKILL)
        writer.wait(30)
    answered = {line for line in output.read_text().split("\n")[1:-1] if line}
    store = Store(sqlite_url)
    await store.start()
    found: set[str] = set()
    cursor = None
    while True:
        rows, cursor = await store.list_jobs(limit=1000, cursor=cursor)
        found |= {row.id for row in rows}
        if cursor is None:
            break
    assert answered <= found
    assert len(found) <= len(answered) + 1, "one may have been committed and not yet answered"
    assert len(await store.events_after(0, 1000)) == min(len(found), 1000)
    await store.close()


async def test_a_database_that_goes_away_is_said_so_quickly_and_comes_back(
    postgres_url: str, postgres: Postgres
) -> None:
    store = Store(postgres_url)
    await store.start()
    await store.submit_job(REQUEST, "ann", None, "-", 1.0)
    postgres.stop("fast")  # without fsync an immediate stop would lose commits
    try:
        began = time.monotonic()
        with pytest.raises(DatabaseUnavailable):
            await store.submit_job(REQUEST, "ann", None, "-", 1.0)
        with pytest.raises(DatabaseUnavailable):
            await store.list_jobs()
        with pytest.raises(DatabaseUnavailable, match="cannot be reached"):
            await Store(postgres_url).start()
        assert time.monotonic() - began < 20
    finally:
        postgres.start()
    await store.submit_job(REQUEST, "ann", None, "-", 1.0)
    assert len((await store.list_jobs())[0]) == 2
    await store.close()


async def test_a_file_that_another_process_holds_is_unavailable(sqlite_url: str, monkeypatch: Any) -> None:

    monkeypatch.setattr("lull.scheduler.sql.database._BUSY_SECONDS", 0.1)
    store = Store(sqlite_url)
    await store.start()
    await store.submit_job(REQUEST, "ann", None, "-", 1.0)
    other = sqlite3.connect(sqlite_url.removeprefix("sqlite:///"), isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(DatabaseUnavailable, match="locked"):
        await store.submit_job(REQUEST, "ann", None, "-", 1.0)
    assert len((await store.list_jobs())[0]) == 1, "readers are not held up"
    other.execute("ROLLBACK")
    other.close()
    await store.submit_job(REQUEST, "ann", None, "-", 1.0)
    await store.close()
    with pytest.raises(DatabaseUnavailable, match="not open"):
        await store.list_jobs()
    with pytest.raises(DatabaseUnavailable, match="not open"):
        await store.submit_job(REQUEST, "ann", None, "-", 1.0)


@pytest.mark.parametrize("url", ["sqlite://", "mysql://x/y", "no address"])
def test_an_address_of_another_database_is_refused(url: str) -> None:
    with pytest.raises(InvalidRequest, match="database_url"):
        Store(url)


async def test_old_rows_are_trimmed(store: Store, submit: Submit) -> None:
    await submit()
    await store.submit_job(REQUEST, "ann", "key", "-", time.time())
    before = len(await store.events_after(0, 1000))
    assert await store.trim(time.time()) == 0
    assert await store.trim(time.time() + 100 * 24 * 3600.0) == before + 1
    assert await store.events_after(0, 1000) == []
    last = await submit()
    assert (await store.events_after(0, 1000))[-1].seq == before + 1, "numbers are never given twice"
    assert (await store.get_job(last)).state is JobState.QUEUED
