"""Keeping two real children running."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Generator
from pathlib import Path

import pytest

from lull.cli.up_children import BACKOFF_SECONDS_MAX, BACKOFF_SECONDS_MIN, Child, Children, StopSignal, backoff_seconds
from tests.waiting import wait_until

LIVES = "import signal, sys\nprint('up', flush=True)\nsignal.pause()"
DIES = "import sys\nprint('no luck', flush=True)\nsys.exit(3)"


def child(tmp_path: Path, name: str, code: str) -> Child:
    return Child(name, [sys.executable, "-S", "-c", code], tmp_path / f"{name}.log")


class Watched:
    """Children that are watched in a thread, since the main one delivers signals."""

    def __init__(self, children: list[Child]) -> None:
        self.said: list[str] = []
        self.starts = 0
        self.may_restart = True
        self.stop = StopSignal()
        self.children = Children(children, os.environ, self.started, self.said.append, lambda: self.may_restart)
        self.thread = threading.Thread(target=self.children.watch, args=(self.stop,))

    def started(self) -> None:
        self.starts += 1

    def end(self) -> None:
        self.stop.requested = True
        if self.thread.is_alive():
            self.thread.join(20)
        self.children.end()
        self.stop.close()


@pytest.fixture
def watch() -> Generator[Callable[[list[Child]], Watched]]:
    all_watched: list[Watched] = []

    def begin(children: list[Child]) -> Watched:
        watched = Watched(children)
        all_watched.append(watched)
        for one in children:
            watched.children.start(one)
        return watched

    yield begin
    for watched in all_watched:
        watched.end()


def test_who_dies_is_started_again_and_the_other_one_is_left_alone(
    tmp_path: Path, watch: Callable[[list[Child]], Watched]
) -> None:
    first, second = child(tmp_path, "first", LIVES), child(tmp_path, "second", LIVES)
    watched = watch([first, second])
    watched.thread.start()
    assert first.process is not None
    assert second.process is not None
    killed, other = first.process.pid, second.process.pid
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: watched.starts == 3 and first.process, 20, "a new start")
    assert first.process is not None
    assert first.process.pid != killed
    assert second.process.pid == other
    assert any("first ended" in sentence for sentence in watched.said)


def test_the_end_is_sigterm_to_both(tmp_path: Path, watch: Callable[[list[Child]], Watched]) -> None:
    first, second = child(tmp_path, "first", LIVES), child(tmp_path, "second", LIVES)
    watched = watch([first, second])
    pids = [one.process.pid for one in (first, second) if one.process is not None]
    watched.children.end()
    assert len(pids) == 2
    assert all(not Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_child_that_cannot_start_ends_the_wait_for_it(
    tmp_path: Path, watch: Callable[[list[Child]], Watched]
) -> None:
    dying = child(tmp_path, "dying", DIES)
    watched = watch([dying])
    assert not watched.children.watch(watched.stop, until=lambda: False, seconds=20)
    assert dying.log_tail() == "no luck"
    assert watched.starts == 1


def test_nobody_is_started_again_while_the_box_is_being_stopped(
    tmp_path: Path, watch: Callable[[list[Child]], Watched]
) -> None:
    dying = child(tmp_path, "dying", DIES)
    watched = watch([dying])
    watched.may_restart = False
    assert not watched.children.watch(watched.stop, seconds=20)
    assert watched.starts == 1


def test_the_wait_has_a_bound(tmp_path: Path, watch: Callable[[list[Child]], Watched]) -> None:
    watched = watch([child(tmp_path, "living", LIVES)])
    assert not watched.children.watch(watched.stop, until=lambda: False, seconds=0.2)


def test_a_log_that_has_grown_is_put_aside(tmp_path: Path, watch: Callable[[list[Child]], Watched]) -> None:
    one = child(tmp_path, "one", LIVES)
    with one.log_path.open("wb") as log:
        log.truncate(65 << 20)
    watch([one])
    wait_until(one.log_tail, 10, "the child's first word")
    assert one.log_path.stat().st_size < 100
    assert one.log_path.with_suffix(".log.1").exists()


def test_the_back_off_grows_to_a_bound() -> None:
    waits = [backoff_seconds(number) for number in range(1, 100)]
    assert waits[0] == BACKOFF_SECONDS_MIN
    assert waits == sorted(waits)
    assert waits[-1] == BACKOFF_SECONDS_MAX


def test_a_signal_wakes_the_poll_and_is_remembered() -> None:
    with StopSignal().installed() as stop:
        assert not stop.requested
        os.kill(os.getpid(), signal.SIGTERM)
        assert stop.requested
        stop.drain()
