"""Tasks that belong together, and tasks whose failure ends the agent."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Coroutine
from typing import Any, Final, TypeVar

import structlog

log = structlog.get_logger(__name__)
T = TypeVar("T")

EXIT_FAULT: Final = 70


async def all_or_none(*works: Coroutine[Any, Any, T]) -> list[T]:
    """Every result; as soon as one raises, the others are cancelled and have ended before it is raised here."""
    tasks = [asyncio.create_task(work) for work in works]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def end_on_fault(task: asyncio.Task[Any]) -> None:
    """A done callback: a fault of our own ends the process at once, and the next agent takes up the journal."""
    if not task.cancelled() and (error := task.exception()) is not None:
        log.critical("agent task failed", task=task.get_name(), exc_info=error)
        os._exit(EXIT_FAULT)
