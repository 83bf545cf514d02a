"""Who may change what lies on a device: engines start side by side, a trial park goes alone.

An engine that starts beside one that is parked takes memory that the other needs to wake (llm-d FMA #746).
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Iterable
from contextlib import asynccontextmanager


class TurnNotGiven(Exception):
    """The others were not through in time."""


class DeviceTurns:
    def __init__(self) -> None:
        self._starting: Counter[str] = Counter()
        self._alone: set[str] = set()
        self._changed = asyncio.Condition()

    @asynccontextmanager
    async def starting(self, device_ids: Iterable[str]) -> AsyncGenerator[None]:
        """Beside other starts, not beside a trial."""
        ids = set(device_ids)
        async with self._changed:
            await self._changed.wait_for(lambda: not ids & self._alone)
            self._starting.update(ids)
        try:
            yield
        finally:
            async with self._changed:
                self._starting.subtract(ids)
                self._changed.notify_all()

    @asynccontextmanager
    async def alone(self, device_ids: Iterable[str], seconds_max: float) -> AsyncGenerator[None]:
        """Beside nobody. Raises TurnNotGiven."""
        ids = set(device_ids)

        def is_free() -> bool:
            return not ids & self._alone and not any(self._starting[each] for each in ids)

        try:
            async with asyncio.timeout(seconds_max), self._changed:
                await self._changed.wait_for(is_free)
                self._alone |= ids
        except TimeoutError as error:
            raise TurnNotGiven("another engine starts, or is tried, on its devices") from error
        try:
            yield
        finally:
            async with self._changed:
                self._alone -= ids
                self._changed.notify_all()
