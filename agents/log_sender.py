"""Answers FetchLog: sends a stream's bytes up in POSTs, one after the other, until its end or its reader's."""

from __future__ import annotations

import asyncio
from typing import Final

import httpx
import structlog

from .attempt_run import attempt_path
from .attempts import AttemptError
from .job_logs import LogChunk, read_log
from .node import Node
from .protocol.wire import FetchLog

log = structlog.get_logger(__name__)

_FOLLOW_POLL_SECONDS: Final = 0.2
_SIGN_OF_LIFE_SECONDS: Final = 5.0
_READER_SECONDS_MAX: Final = 120.0  # a reader that pauses holds the server's buffer, and so us, for longer than a call
_SENDERS_MAX: Final = 32


class LogSender:
    """Sends at most a few logs at once; more are answered ``busy``."""

    def __init__(self, node: Node, client: httpx.AsyncClient) -> None:
        self._node = node
        self._client = client
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, order: FetchLog) -> None:
        full = len(self._tasks) >= _SENDERS_MAX
        task = asyncio.get_running_loop().create_task(self._answer(order, "busy" if full else None))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, order: FetchLog, problem: str | None) -> None:
        try:
            if problem is None:
                await self._send(order)
            else:
                await self._problem(order, problem)
        except (httpx.HTTPError, OSError, AttemptError) as error:
            log.info("a log was not sent to its end", attempt=order.attempt_id, error=str(error))

    async def _send(self, order: FetchLog) -> None:
        offset, silent_seconds = order.offset, 0.0
        directory = attempt_path(self._node, order.attempt_id)
        while True:
            try:
                chunk = await asyncio.to_thread(read_log, directory, order.stream, offset)
            except FileNotFoundError:
                await self._problem(order, "log_expired")
                return
            is_last = chunk.ended and not chunk.data
            # Without `follow` the last byte that there is now is the end.
            if not order.follow and chunk.next_offset >= chunk.total_bytes:
                is_last = True
            if chunk.data or is_last or silent_seconds >= _SIGN_OF_LIFE_SECONDS:
                if not await self._post(order, chunk, is_last) or is_last:
                    return
                silent_seconds = 0.0
            offset = chunk.next_offset
            if not chunk.data:
                await asyncio.sleep(_FOLLOW_POLL_SECONDS)
                silent_seconds += _FOLLOW_POLL_SECONDS

    async def _post(self, order: FetchLog, chunk: LogChunk, is_last: bool) -> bool:
        """False once nobody reads any more."""
        reply = await self._client.post(
            f"/agent/logs/{order.request_id}",
            content=chunk.data,
            timeout=_READER_SECONDS_MAX,
            headers={
                "Content-Type": "application/octet-stream",
                "Lull-Log-Offset": str(chunk.offset),
                "Lull-Log-Gap": str(chunk.gap_bytes),
                "Lull-Log-End": "1" if is_last else "0",
            },
        )
        return reply.status_code == 204

    async def _problem(self, order: FetchLog, code: str) -> None:
        await self._client.post(
            f"/agent/logs/{order.request_id}",
            content=b"",
            headers={"Content-Type": "application/octet-stream", "Lull-Log-Problem": code, "Lull-Log-End": "1"},
        )
