"""How long and how much output of attempts stays on this node. Of a running one nothing is taken.

What the journal forgets goes whole, after ``logs_keep_seconds``. Beyond ``logs_bytes_max`` the output of those that
ended first goes; their records stay, and who asks for the output is told that it has expired.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import structlog

from .attempt_run import attempt_path
from .node import Node

log = structlog.get_logger(__name__)

_EVERY_SECONDS: Final = 3600.0
_AT_MOST_EVERY_SECONDS: Final = 5.0
_BLOCK_BYTES: Final = 512  # of st_blocks


@dataclass(frozen=True, slots=True)
class Ended:
    at: float
    log_bytes: int


class LogRetention:
    def __init__(self, node: Node) -> None:
        self._node = node
        self._ended: dict[str, Ended] = {}
        self._soon = asyncio.Event()

    def look_soon(self) -> None:
        """An attempt ended: what it wrote stays as it is, and may be too much beside the others."""
        self._soon.set()

    async def run(self) -> None:
        settings, root = self._node.settings, attempt_path(self._node, "x").parent
        while True:
            self._soon.clear()
            for attempt_id in self._node.journal.forget_closed(time.time() - settings.logs_keep_seconds):
                await asyncio.to_thread(shutil.rmtree, root / attempt_id, True)
            await asyncio.to_thread(drop_oldest, root, settings.logs_bytes_max, self._ended)
            await asyncio.sleep(_AT_MOST_EVERY_SECONDS)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(_EVERY_SECONDS):
                    await self._soon.wait()


def drop_oldest(root: Path, bytes_max: int, ended: dict[str, Ended]) -> None:
    """Removes the output of those that ended first until all output under ``root`` is at most ``bytes_max``.

    ``ended``: what earlier looks saw of attempts that had ended, kept up to date. Blocks.
    """
    total_bytes = _look(root, ended)
    for attempt_id, one in sorted(ended.items(), key=lambda item: item[1].at):
        if total_bytes <= bytes_max:
            return
        if not one.log_bytes:
            continue
        shutil.rmtree(root / attempt_id / "logs", ignore_errors=True)  # it follows no link that a job has made
        left = Ended(one.at, _log_bytes(root / attempt_id))
        ended[attempt_id] = left
        total_bytes -= one.log_bytes - left.log_bytes
        log.info("the output of an ended attempt was dropped", attempt=attempt_id, bytes=one.log_bytes)


def _look(root: Path, ended: dict[str, Ended]) -> int:
    there: set[str] = set()
    running_bytes = 0
    with contextlib.suppress(FileNotFoundError), os.scandir(root) as entries:
        for entry in entries:
            there.add(entry.name)
            if entry.name in ended:
                continue
            at = _ended_at(root / entry.name)  # before its output is looked at: its last byte is written by then
            log_bytes = _log_bytes(root / entry.name)
            if at is None:
                running_bytes += log_bytes
            else:
                ended[entry.name] = Ended(at, log_bytes)
    for attempt_id in ended.keys() - there:
        del ended[attempt_id]
    return running_bytes + sum(one.log_bytes for one in ended.values())


def _ended_at(directory: Path) -> float | None:
    try:
        return os.lstat(directory / "exit.json").st_mtime
    except OSError:
        return None


def _log_bytes(directory: Path) -> int:
    total = 0
    if os.path.islink(directory / "logs"):
        return total  # a job's doing: what it leads to is not the agent's
    for folder, _, names in os.walk(directory / "logs"):
        for name in names:
            with contextlib.suppress(OSError):
                total += os.lstat(os.path.join(folder, name)).st_blocks * _BLOCK_BYTES
    return total
