"""What the agent sees of an engine from outside, and has of it: for adapters whose engine tells too little."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from ..engine_process import EngineProcess


class EngineOutside(Protocol):
    @property
    def incarnation(self) -> str | None:
        """Tells the process that runs now from every other one; None while none does."""
        ...

    @property
    def process(self) -> EngineProcess | None:
        """None for an engine that somebody else runs."""
        ...

    def pids(self) -> set[int]:
        """Its own pid and those of its descendants; empty while it has no process."""
        ...

    async def held_bytes(self) -> dict[str, int]:
        """Bytes that its processes hold now on each of its devices, by device id."""
        ...
