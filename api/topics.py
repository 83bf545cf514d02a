"""Wakes waiting streams when something they watch was committed; one subscription to the store serves all.

Everything here runs on the event loop. A stream clears its watch, looks, and then waits: a change between the look
and the wait has set the watch again, so none is missed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterable
from contextlib import contextmanager


class Watch:
    """What one stream waits on."""

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def clear(self) -> None:
        self._event.clear()

    def set(self) -> None:
        self._event.set()

    async def wait(self, seconds: float) -> bool:
        """True when something changed within ``seconds``."""
        try:
            async with asyncio.timeout(seconds):
                await self._event.wait()
        except TimeoutError:
            return False
        return True


class Topics:
    """Watches by topic. ``stopping`` is set once, when the server ends: every stream then ends itself."""

    def __init__(self) -> None:
        self._watches: dict[str, set[Watch]] = {}
        self.stopping = asyncio.Event()

    def on_commit(self, topics: Iterable[str]) -> None:
        """For Store.subscribe."""
        for topic in topics:
            for watch in self._watches.get(topic, ()):
                watch.set()

    def stop(self) -> None:
        self.stopping.set()
        for watches in self._watches.values():
            for watch in watches:
                watch.set()

    @contextmanager
    def watch(self, *topics: str) -> Generator[Watch]:
        watch = Watch()
        for topic in topics:
            self._watches.setdefault(topic, set()).add(watch)
        try:
            yield watch
        finally:
            for topic in topics:
                watches = self._watches[topic]
                watches.discard(watch)
                if not watches:
                    del self._watches[topic]
