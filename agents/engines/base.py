"""The seam between the agent and an engine: what every adapter offers, and what it answers.

An adapter speaks to one engine and knows nothing of loans, gates or memory proofs. It never repeats a call by itself:
a call that was sent and got no answer raises EngineTimedOut, and the caller looks again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from ..protocol.capabilities import Capabilities
from ..protocol.policy import CanaryPolicy, EnginePolicy
from ..protocol.wire import EngineState


@dataclass(frozen=True, slots=True)
class Observation:
    """The engine's own word. ``clock_skew_seconds``: its clock less ours, where it tells the time."""

    state: EngineState
    parked_tags: tuple[str, ...] = ()
    clock_skew_seconds: float | None = None
    detail: str = ""
    # With UNREACHABLE: it was not asked in a way that it can answer (our key, our own descriptors, a driver that is
    # silent), so this says nothing about the engine and is no reason to touch it. It serves on.
    is_our_fault: bool = False
    # With UNREACHABLE: it does not run, by somebody else's will (paused, locked), and is theirs to let go on. It gets
    # no traffic, and is not touched.
    is_held: bool = False

    @property
    def is_silent(self) -> bool:
        """It does not answer as it should, and nobody else is to blame: in the end it is started anew."""
        return self.state is EngineState.UNREACHABLE and not (self.is_our_fault or self.is_held)


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

    async def capabilities(self) -> Capabilities:
        """What the process that runs now can do, by asking it: its version alone is no proof.

        Called once for every process of the engine, when it is healthy, parked or not. An engine that serves and
        cannot be parked says so in ``unsupported``; it does not raise. Raises EngineUnreachable, EngineTimedOut.
        """
        ...

    async def observe(self) -> Observation:
        """The engine's state by its own word, with the ledger's where it has none; UNREACHABLE where neither is.

        Never raises, whatever the engine answers.
        """
        ...

    async def park(self, policy: EnginePolicy, seconds_max: float) -> None:
        """Asks once, in the way that ``policy`` wants. Its gate is closed and drained.

        Returns after the engine said it is done, which proves nothing about memory. Raises EngineRefused (before any
        change), EngineTimedOut, EngineUnreachable, EngineAuthRefused; OSError if its ledger cannot be written.
        """
        ...

    async def resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """Asks once, for all that is parked. There is room for it on every device. Raises as ``park``."""
        ...

    async def after_resume(self, policy: EnginePolicy, seconds_max: float) -> None:
        """What a running engine still needs before it is asked the canary: weights, empty caches, going on.

        Does nothing where nothing is left to do: it is also called for an engine that was found running. Raises as
        ``park``; the engine is not used then.
        """
        ...

    async def answer(self, canary: CanaryPolicy) -> Answer:
        """The engine's greedy answer, asked past the gate; raises EngineTimedOut and the others."""
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class ParksUnseen(Protocol):
    """An adapter whose engine may say `running` while a park call is still at work on it. With every other one, a call
    that was taken shows in the next look."""

    def unseen_seconds_max(self) -> float:
        """How long the last park call, whose answer nobody has seen, may still be at work; inf: nobody knows."""
        ...
