"""Waiting for something to become true, with a bound, and with what was last seen when it did not."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar, overload

T = TypeVar("T")

_POLL_SECONDS = 0.02


class DidNotHappen(AssertionError):
    """The bound passed. The message says what was waited for and what was last seen."""


def wait_until(look: Callable[[], T], seconds: float, what: str) -> T:
    """The first true value of ``look()``; raises DidNotHappen after ``seconds``."""
    deadline = time.monotonic() + seconds
    pause = threading.Event()
    while True:
        seen = look()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise DidNotHappen(f"{what} did not happen within {seconds} s; last seen: {seen!r}")
        pause.wait(_POLL_SECONDS)


@overload
async def wait_until_async(look: Callable[[], Awaitable[T]], seconds: float, what: str) -> T: ...
@overload
async def wait_until_async(look: Callable[[], T], seconds: float, what: str) -> T: ...
async def wait_until_async(look: Callable[[], Any], seconds: float, what: str) -> Any:
    """Like wait_until, for a look that may be a coroutine."""
    deadline = time.monotonic() + seconds
    while True:
        seen = look()
        if isinstance(seen, Awaitable):
            seen = await seen
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise DidNotHappen(f"{what} did not happen within {seconds} s; last seen: {seen!r}")
        pause = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_later(_POLL_SECONDS, pause.set_result, None)
        await pause
