"""Sends the last bytes of every ended attempt's logs to the server, which has them when this node does not answer.

What was sent is marked in the attempt's directory, so that the next agent sends what this one could not.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final, get_args

import httpx
import structlog

from .attempt_run import attempt_path
from .attempts import AttemptError, LogStream
from .job_logs import read_log
from .node import Node

log = structlog.get_logger(__name__)

TAIL_BYTES_MAX: Final = 64 * 1024  # of each stream
_SENT: Final = "log_tail_sent"
_WAITING_MAX: Final = 10_000
_AFTER_SECONDS: Final = 1.0  # the loan's way back comes first
_AGAIN_SECONDS: Final = 10.0
_PIECES_MAX: Final = 1000
# The server will never take it: it does not know the attempt, or finds something wrong with it.
_REFUSED: Final = range(400, 429)


class LogTails:
    """``client`` is the one that is signed in at the server."""

    def __init__(self, node: Node, client: httpx.AsyncClient) -> None:
        self._node = node
        self._client = client
        self._waiting: dict[str, None] = {}
        self._more = asyncio.Event()

    def add(self, attempt_id: str) -> None:
        """The attempt has ended."""
        self._waiting[attempt_id] = None
        if len(self._waiting) > _WAITING_MAX:
            self._waiting.pop(next(iter(self._waiting)))
        self._more.set()

    async def run(self) -> None:
        """Until cancelled."""
        for attempt_id in await asyncio.to_thread(self._left_behind):
            self.add(attempt_id)
        while True:
            await self._more.wait()
            await asyncio.sleep(_AFTER_SECONDS)
            await self._node.connected.wait()
            self._more.clear()
            for attempt_id in list(self._waiting):
                if not await self._send(attempt_id):
                    break
                self._waiting.pop(attempt_id, None)
            if self._waiting:
                await asyncio.sleep(_AGAIN_SECONDS)
                self._more.set()

    def _left_behind(self) -> list[str]:
        """Those of earlier agents, oldest first: ids sort by when they were made."""
        root = attempt_path(self._node, "x").parent
        found = sorted(root.iterdir()) if root.is_dir() else []
        return [path.name for path in found if (path / "exit.json").exists() and not (path / _SENT).exists()]

    async def _send(self, attempt_id: str) -> bool:
        """False if the server cannot be reached now."""
        directory = attempt_path(self._node, attempt_id)
        try:
            for stream in get_args(LogStream):
                offset, data = await asyncio.to_thread(read_tail, directory, stream)
                reply = await self._client.post(
                    f"/agent/attempts/{attempt_id}/log-tail/{stream}",
                    content=data,
                    headers={"Content-Type": "application/octet-stream", "Lull-Log-Offset": str(offset)},
                )
                if reply.status_code in _REFUSED and reply.status_code != 401:
                    log.info("a log's end is not wanted", attempt=attempt_id, status=reply.status_code)
                elif reply.status_code != 204:
                    return False
            (directory / _SENT).touch(mode=0o600)
        except FileNotFoundError:
            pass  # it never had a directory, or has it no more
        except httpx.HTTPError as error:
            log.debug("a log's end was not sent", attempt=attempt_id, error=str(error))
            return False
        except (OSError, AttemptError) as error:
            log.warning("a log's end cannot be read or marked as sent", attempt=attempt_id, error=str(error))
        return True


def read_tail(directory: Path, stream: LogStream, limit_bytes: int = TAIL_BYTES_MAX) -> tuple[int, bytes]:
    """The last bytes of a stream, without a gap, and the offset of the first. Raises FileNotFoundError."""
    total_bytes = read_log(directory, stream, 0, 1).total_bytes
    start = offset = max(0, total_bytes - limit_bytes)
    data = b""
    for _ in range(_PIECES_MAX):
        chunk = read_log(directory, stream, offset, limit_bytes)
        if chunk.gap_bytes:
            start, data = chunk.offset, b""
        data += chunk.data
        offset = chunk.next_offset
        if not chunk.data or len(data) >= limit_bytes:
            break
    return start, data[:limit_bytes]
