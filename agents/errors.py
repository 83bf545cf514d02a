"""Errors of the agent, one class for each different handling.

AgentError
├── ConfigError              the operator has to change a file or a flag
├── JournalCorrupt           quarantine the node, find out by observation
├── JournalUnavailable       its disk or its lock refuses it: nothing is wrong with what it holds; start again later
├── JournalTooNew            refuse to start
├── EngineUnreachable        no answer: never taken for parked
├── EngineRefused            the engine said no before any change; `.status` is its HTTP status
├── EngineTimedOut           a call was sent and no answer came: look again, never repeat
├── EngineAuthRefused        the engine does not accept our signature: stop and alert
├── EngineLost               it is brought back by a restart, where its policy allows one
├── CanaryFailed             the engine answers wrongly: no traffic for this process of it any more; if it could not
│                            even be asked: no traffic until it was
├── DeviceAbsent             nobody can say what is on the device: nothing is started, parked or woken there
└── SpawnRefused             an attempt may not be started now
"""

from __future__ import annotations


class AgentError(Exception):
    """Something the agent's own code raises on purpose."""


class ConfigError(AgentError):
    """The operator has to change a file or a flag; the text names it."""


class JournalCorrupt(AgentError):
    """The journal cannot be read back; nothing may be guessed from it."""


class JournalUnavailable(AgentError):
    """The journal cannot be opened or made now, and it is not corrupt."""


class JournalTooNew(AgentError):
    """The journal was written by a newer version."""


class EngineUnreachable(AgentError):
    """The engine did not take the connection."""


class EngineRefused(AgentError):
    """The engine answered that it did not do it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"HTTP {status}: {text}")
        self.status = status
        self.text = text


class EngineTimedOut(AgentError):
    """The call was sent; whether it was done is unknown."""


class EngineAuthRefused(AgentError):
    """401: wrong key, clock out of the window, nonce used, or its replay cache is full. ``text`` says which."""


class EngineLost(AgentError):
    """Gone, failed, or not back by its deadline. ``timed_out`` tells the last from the others."""

    def __init__(self, text: str, *, timed_out: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out


class CanaryFailed(AgentError):
    """The answer is wrong, or did not come (``timed_out``), or was never asked for (``unasked``), which proves nothing
    against the engine."""

    def __init__(self, text: str, *, timed_out: bool = False, unasked: bool = False) -> None:
        super().__init__(text)
        self.timed_out = timed_out
        self.unasked = unasked


class SpawnRefused(AgentError):
    """The attempt may not be started; ``code`` is a pending reason."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code
        self.sentence = sentence


class DeviceAbsent(AgentError):
    """The device cannot be read; the text says why and what an operator can do."""
