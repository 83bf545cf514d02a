"""The seam between the agent and an engine: what every adapter offers, and what it answers.

An adapter speaks to one engine and knows nothing of loans, gates or memory proofs. It never repeats a call by itself:
a call that was sent and got no answer raises EngineTimedOut, and the caller looks again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine's own word. ``clock_skew_seconds``: its clock less ours, where it tells the time."""

    state: EngineState
    parked_tags: tuple[str, ...] = ()
    clock_skew_seconds: float | None = None
    detail: str = ""
    # With UNREACHABLE: it was not asked in a way that it can answer (our key, our own descriptors), so its silence
    # says nothing about the engine and is no reason to touch it.
    is_our_fault: bool = False


@dataclass(frozen=True, slots=True)
class Answer:
    """What the engine said to the canary prompt. Token ids and log-probabilities where it gives them."""

    text: str
    token_ids: tuple[int, ...] | None = None
    token_logprobs: tuple[float, ...] | None = None


class EngineAdapter(Protocol):
    async def healthy(self) -> bool:
        """True if the engine answers its health route; never generates."""
        ...

    async def observe(self) -> Observation:
        """The engine's state by its own word; UNREACHABLE where it gives none."""
        ...

    def refusal(self, policy: EnginePolicy) -> str | None:
        """Why this engine cannot honour ``policy``; None if it can."""
        ...

    async def park(self, tags: Sequence[str], seconds_max: float) -> None:
        """Asks once. Returns after the engine said it is done, which proves nothing about memory.

        Raises EngineRefused (before any change), EngineTimedOut, EngineUnreachable, EngineAuthRefused.
        """
        ...

    async def resume(self, seconds_max: float) -> None:
        """Asks once, for all that is parked. Raises as ``park``."""
        ...

    async def answer(self, canary: CanaryPolicy) -> Answer:
        """The engine's greedy answer, asked past the gate; raises EngineTimedOut and the others."""
        ...

    async def aclose(self) -> None: ...
