"""Capped logs: whatever is written in whatever pieces, what is kept is kept exactly, and the rest is a counted gap."""

from __future__ import annotations

import json
import os
import resource
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lull.agents.attempts import AttemptDir, LogChunk, read_log
from lull.agents.runner_files import StreamLog


def pattern(begin: int, end: int) -> bytes:
    return bytes((offset * 7 + offset // 251) % 256 for offset in range(begin, end))


@contextmanager
def working_in(path: Path) -> Generator[None]:
    before = Path.cwd()
    os.chdir(path)
    try:
        yield
    finally:
        os.chdir(before)


def read_all(path: Path, limit_bytes: int = 1 << 20) -> list[LogChunk]:
    chunks: list[LogChunk] = []
    offset = 0
    while True:
        chunk = read_log(path, "stdout", offset, limit_bytes)
        chunks.append(chunk)
        assert chunk.offset == offset + chunk.gap_bytes
        assert chunk.next_offset == chunk.offset + len(chunk.data)
        if not chunk.data:
            return chunks
        assert chunk.data == pattern(chunk.offset, chunk.next_offset)
        offset = chunk.next_offset


@settings(deadline=None, max_examples=50)  # files are made and read: how long that takes is the disk's
@given(
    pieces=st.lists(st.integers(1, 90), max_size=40),
    head=st.integers(0, 120),
    tail=st.integers(0, 200),
    limit=st.integers(5, 50),
)
def test_what_is_kept_is_exact(
    tmp_path_factory: pytest.TempPathFactory, pieces: list[int], head: int, tail: int, limit: int
) -> None:
    path = tmp_path_factory.mktemp("attempt")
    with working_in(path):
        log = StreamLog("stdout", head, tail)
        for size in pieces:
            log.write(pattern(log.total, log.total + size))
        log.close()
    total = sum(pieces)
    assert log.total == total
    (path / "exit.json").write_text(json.dumps({"end": "exited", "log_bytes": {"stdout": total}}))
    chunks = read_all(path, limit)
    kept = sum(len(chunk.data) for chunk in chunks)
    gaps = sum(chunk.gap_bytes for chunk in chunks)
    assert kept + gaps == total
    assert chunks[-1].ended
    assert chunks[-1].next_offset == total
    assert len([chunk for chunk in chunks if chunk.gap_bytes]) <= 1, "one gap, between head and tail"
    assert min(total, head) <= kept <= head + tail
    if tail >= 8:
        assert kept >= min(total, head + tail * 3 // 4), "seven of eight pieces of the tail, the last just begun"
    files = sum(file.stat().st_size for file in (path / "logs/stdout").iterdir())
    assert files == kept


def test_nothing_follows_only_once_the_record_is_there(tmp_path: Path) -> None:
    assert read_log(tmp_path, "stdout", 0) == LogChunk(0, b"", 0, 0, False, 0)
    with working_in(tmp_path):
        log = StreamLog("stdout", 100, 0)
        log.write(pattern(0, 10))
        assert read_log(tmp_path, "stdout", 4) == LogChunk(4, pattern(4, 10), 10, 0, False, 10)
        assert read_log(tmp_path, "stdout", 10) == LogChunk(10, b"", 10, 0, False, 10)
        assert read_log(tmp_path, "stdout", 99) == LogChunk(99, b"", 99, 0, False, 10)
        log.close()
    AttemptDir(tmp_path).write("exit.json", {"end": "runner_lost"})
    assert read_log(tmp_path, "stdout", 4) == LogChunk(4, pattern(4, 10), 10, 0, True, 10)
    assert read_log(tmp_path, "stdout", 10).ended
    assert read_log(tmp_path, "stderr", 0).ended


def test_a_disk_that_refuses_costs_only_what_it_refused(tmp_path: Path) -> None:
    now = 0.0
    with working_in(tmp_path):
        log = StreamLog("stdout", 1000, 1000, clock=lambda: now)
        log.write(pattern(0, 300))
        with file_size_limit(400):
            log.write(pattern(300, 600))  # 100 fit
            log.write(pattern(600, 700))  # not tried again at once
        log.write(pattern(700, 750))
        now = 1.5
        log.write(pattern(750, 800))
        log.close()
    chunks = read_all(tmp_path)
    assert [(chunk.offset, chunk.next_offset) for chunk in chunks if chunk.data] == [(0, 400), (750, 800)]
    assert sum(chunk.gap_bytes for chunk in chunks) == 350


def test_a_disk_that_refuses_again_and_again_leaves_no_heap_of_files(tmp_path: Path) -> None:
    now = 0.0
    with working_in(tmp_path):
        log = StreamLog("stdout", 1 << 20, 1 << 20, clock=lambda: now)
        for turn in range(200):
            now = 2.0 * turn
            with file_size_limit(0):
                log.write(b"x")
        log.write(b"y")
        log.close()
    assert log.total == 201
    assert len(list((tmp_path / "logs/stdout").iterdir())) <= 40


@contextmanager
def file_size_limit(limit_bytes: int) -> Generator[None]:
    """Writes beyond it fail, as on a full disk."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_a_job_plants_is_not_followed(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(b"secret")
    attempt = tmp_path / "attempt"
    stream = attempt / "logs/stdout"
    stream.mkdir(parents=True)
    (stream / f"{0:020d}").symlink_to(secret)
    os.mkfifo(stream / f"{5:020d}")
    (stream / f"{6:020d}").mkdir()
    (stream / "name").write_bytes(b"x")
    (stream / f"{7:020d}").write_bytes(b"log")
    assert read_log(attempt, "stdout", 0) == LogChunk(7, b"log", 10, 7, False, 10)
    stream.rename(tmp_path / "elsewhere")
    stream.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="stdout"):
        read_log(attempt, "stdout", 0)
    link = tmp_path / "link"
    link.symlink_to(attempt)
    with pytest.raises(OSError, match="link"):
        read_log(link, "stderr", 0)


@pytest.mark.parametrize(
    ("stream", "offset", "limit"),
    [("../../etc/passwd", 0, 1), ("stdin", 0, 1), ("stdout", -1, 1), ("stdout", 0, 0), ("stdout", 0, 1 << 30)],
)
def test_bad_questions(tmp_path: Path, stream: str, offset: int, limit: int) -> None:
    with pytest.raises(ValueError, match="must"):
        read_log(tmp_path, stream, offset, limit)  # type: ignore[arg-type]


def test_an_attempt_whose_files_expired(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_log(tmp_path / "gone", "stdout", 0)
