"""The kinds of engines, and what is known of each before one is asked. Pure; server and agent go by it."""

from __future__ import annotations

from typing import Final, Literal

from .capabilities import Capabilities, trtllm_capabilities

EngineKind = Literal["trtllm"]

# True where restore modes are flags of the engine's start; else they are chosen at every park.
MODES_ARE_FLAGS: Final[dict[str, bool]] = {"trtllm": True}


def known_capabilities(kind: str) -> Capabilities:
    """The most that an engine of ``kind`` can do; a kind that this version does not know is judged as trtllm."""
    del kind
    return trtllm_capabilities()
