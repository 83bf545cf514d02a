"""Fields of `[[engines]]` that only some engines have a use for: elsewhere they would be ignored in silence. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

_COMMAND: Final = frozenset({"command"})
_VLLM: Final = frozenset({"vllm"})
_CHECKPOINT: Final = frozenset({"cuda-checkpoint"})

KINDS_OF: Final[dict[str, frozenset[str]]] = {
    "control_key_file": frozenset({"trtllm", "sglang"}),
    "health_path": frozenset({"process", "command", "cuda-checkpoint"}),
    "park_command": _COMMAND,
    "resume_command": _COMMAND,
    "observe_command": _COMMAND,
    "observe_seconds_max": _COMMAND,
    "vllm.reload": _VLLM,
    "vllm.loras": _VLLM | {"vllm-metal"},
    "vllm.allow_fragile": _VLLM,
    "cuda_checkpoint.pids_from": _CHECKPOINT,
    "cuda_checkpoint.processes_max": _CHECKPOINT,
    "cuda_checkpoint.lock_seconds_max": _CHECKPOINT,
}
# Of how the agent starts and ends an engine.
OF_SUPERVISED: Final = ("env", "health_seconds_max", "stop_seconds_max")


def misplaced(given: Iterable[str], kind: str, *, is_supervised: bool) -> str | None:
    """What is wrong with the fields that were ``given``, as `field: text`; None if each has its use."""
    for field in given:
        kinds = KINDS_OF.get(field)
        if kinds is not None and kind not in kinds:
            return f"{field}: only for kind {' and '.join(repr(one) for one in sorted(kinds))}; remove it"
        if field in OF_SUPERVISED and not is_supervised:
            return f"{field}: only with a command; this engine is started by somebody else, so remove it"
    return None
