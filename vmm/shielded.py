"""Blocking work that an event loop starts and waits for, and that its cancellation does not cut off."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar

_T = TypeVar("_T")
_log = logging.getLogger(__name__)


async def in_thread(name: str, work: Callable[[], _T]) -> _T:
    """``work()`` in a thread of its own: no full executor can keep it waiting.

    A caller that is cancelled leaves it running: memory must not stay between two states. Then the log tells how it
    ended.
    """
    outcome: Future[_T] = Future()

    def run() -> None:
        try:
            result = work()
        except BaseException as error:  # noqa: BLE001  it is the caller's, who waits for it
            outcome.set_exception(error)
        else:
            outcome.set_result(result)

    threading.Thread(target=run, name=f"lull-{name}", daemon=True).start()
    waiting = asyncio.wrap_future(outcome)
    try:
        return await asyncio.shield(waiting)
    except asyncio.CancelledError:
        waiting.add_done_callback(lambda ended: _log_unheard(name, ended))
        raise


def _log_unheard(name: str, ended: asyncio.Future[_T]) -> None:
    error = None if ended.cancelled() else ended.exception()
    if error is not None:
        _log.error("%s failed after its caller had gone", name, exc_info=error)
