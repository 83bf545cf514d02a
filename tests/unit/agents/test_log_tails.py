"""The last bytes of ended attempts go to the server, once, whatever happens in between."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import httpx
import pytest

from lull.agents import log_tails
from lull.agents.log_tails import TAIL_BYTES_MAX, LogTails, read_tail
from lull.agents.node import Node
from tests.waiting import wait_until_async


def attempt(root: Path, attempt_id: str, stdout: dict[int, bytes], total_bytes: int | None = None) -> Path:
    """An ended attempt whose pieces of stdout begin where their keys say."""
    path = root / "attempts" / attempt_id
    segments = path / "logs" / "stdout"
    segments.mkdir(parents=True)
    for start, data in stdout.items():
        (segments / f"{start:020d}").write_bytes(data)
    total = max((start + len(data) for start, data in stdout.items()), default=0)
    (path / "exit.json").write_text(json.dumps({"log_bytes": {"stdout": total_bytes or total}}))
    return path


def test_the_last_bytes_are_read_over_the_pieces_and_without_a_gap(tmp_path: Path) -> None:
    short = attempt(tmp_path, "short", {0: b"head"})
    assert read_tail(short, "stdout") == (0, b"head")
    assert read_tail(short, "stderr") == (0, b"")
    pieces = attempt(tmp_path, "pieces", {0: b"0123", 4: b"4567", 8: b"89"})
    assert read_tail(pieces, "stdout", 5) == (5, b"56789")
    gap = attempt(tmp_path, "gap", {0: b"0123", 6: b"6789"})
    assert read_tail(gap, "stdout", 9) == (6, b"6789")
    long = attempt(tmp_path, "long", {0: b"x" * TAIL_BYTES_MAX + b"end"})
    assert read_tail(long, "stdout") == (3, b"x" * (TAIL_BYTES_MAX - 3) + b"end")
    with pytest.raises(FileNotFoundError):
        read_tail(tmp_path / "nothing", "stdout")


@dataclass
class Server:
    """What came, and what is answered: a status for each POST, 204 when none is left."""

    answers: list[int] = field(default_factory=list)
    got: list[tuple[str, str, bytes]] = field(default_factory=list)

    def handle(self, request: httpx.Request) -> httpx.Response:
        if self.answers:
            return httpx.Response(self.answers.pop(0))
        self.got.append((request.url.path, request.headers["lull-log-offset"], request.content))
        return httpx.Response(204)


class OneNode:
    """Only what is looked at: where the attempts are, and whether the server is there."""

    def __init__(self, root: Path) -> None:
        self.settings = cast(Any, type("Settings", (), {"data_dir": root}))
        self.connected = asyncio.Event()
        self.connected.set()


async def tried(root: Path, server: Server, until: Callable[[], bool], *added: str) -> None:
    transport = httpx.MockTransport(server.handle)
    async with httpx.AsyncClient(transport=transport, base_url="http://lull") as client:
        tails = LogTails(cast(Node, OneNode(root)), client)
        for attempt_id in added:
            tails.add(attempt_id)
        task = asyncio.create_task(tails.run())
        try:
            await wait_until_async(until, 5, "the ends of the logs to be sent")
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_what_an_earlier_agent_could_not_send_is_sent_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tails, "_AFTER_SECONDS", 0.0)
    monkeypatch.setattr(log_tails, "_AGAIN_SECONDS", 0.0)
    path = attempt(tmp_path, "a", {5: b"the end"})
    server = Server([503, 204, 500])
    await tried(tmp_path, server, (path / "log_tail_sent").exists)
    assert server.got[0] == ("/agent/attempts/a/log-tail/stdout", "5", b"the end")
    sent = len(server.got)
    other = attempt(tmp_path, "b", {0: b"other"})
    await tried(tmp_path, server, (other / "log_tail_sent").exists, "gone")
    assert [where for where, *_ in server.got[sent:]] == [
        "/agent/attempts/b/log-tail/stdout",
        "/agent/attempts/b/log-tail/stderr",
    ]


async def test_one_that_the_server_does_not_want_holds_up_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(log_tails, "_AFTER_SECONDS", 0.0)
    attempt(tmp_path, "a", {0: b"a"})
    last = attempt(tmp_path, "b", {0: b"b"})
    server = Server([404, 404])
    await tried(tmp_path, server, (last / "log_tail_sent").exists)
    assert {where.split("/")[3] for where, *_ in server.got} == {"b"}
