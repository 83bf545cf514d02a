"""The kinds of engines, and what is known of each before one is asked. Pure; server and agent go by it."""

from __future__ import annotations

from typing import Final, Literal

from ...vmm.tags import RestoreMode
from .capabilities import Capabilities, trtllm_capabilities
from .other_engines import COMMAND, CUDA_CHECKPOINT, LLAMA_SERVER, LMDEPLOY, OLLAMA, PROCESS, SGLANG
from .vllm_engines import VLLM, VLLM_METAL

EngineKind = Literal[
    "trtllm",
    "vllm",
    "vllm-metal",
    "sglang",
    "lmdeploy",
    "llama-server",
    "ollama",
    "cuda-checkpoint",
    "process",
    "command",
]

# True where restore modes are flags of the engine's start; else they are chosen at every park.
MODES_ARE_FLAGS: Final[dict[str, bool]] = {
    "trtllm": True,
    "vllm": False,
    "vllm-metal": False,
    "sglang": False,
    "lmdeploy": False,
    "llama-server": False,
    "ollama": False,
    "cuda-checkpoint": False,
    "process": False,
    "command": False,
}

# Parked, it may have no process: that it has none does not mean that it was lost.
MAY_END_AT_PARK: Final = frozenset({"process", "command"})

# Each wake loads the weights from disk, so its first answer is as good a witness as that of a new process.
LOADS_AT_WAKE: Final = frozenset({"llama-server", "ollama", "process"})

_KNOWN: Final[dict[str, Capabilities]] = {
    "vllm": VLLM,
    "vllm-metal": VLLM_METAL,
    "sglang": SGLANG,
    "lmdeploy": LMDEPLOY,
    "llama-server": LLAMA_SERVER,
    "ollama": OLLAMA,
    "cuda-checkpoint": CUDA_CHECKPOINT,
    "process": PROCESS,
    "command": COMMAND,
}


def known_capabilities(kind: str) -> Capabilities:
    """The most that an engine of ``kind`` can do; a kind that this version does not know is judged as trtllm."""
    return _KNOWN.get(kind) or trtllm_capabilities()


def usual_restore_modes(kind: str) -> dict[str, RestoreMode] | None:
    """What a policy that names no modes means for ``kind``, where that is not the usual default."""
    known = _KNOWN.get(kind)
    return None if known is None else {tag: modes[0] for tag, modes in known.plans[0].modes.items()}
