"""The most that engines other than TensorRT-LLM's and vLLM's families can do, before one is asked. Pure."""

from __future__ import annotations

from typing import Final

from ...vmm.tags import RestoreMode
from .capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities, ParkPlan

_LOST: Final = [RestoreMode.NONE]


def _loaded_again(engine: str, plan: str, note: str) -> Capabilities:
    """A park that ends a process: the weights come from disk at every wake, and the KV cache is empty."""
    return Capabilities(
        engine=engine,
        plans=[ParkPlan(name=plan, modes={MODEL_WEIGHTS: _LOST, KV_CACHE: _LOST})],
        can_reload_weights=True,
        tells_tags=False,
        notes=[note],
    )


LLAMA_SERVER: Final = _loaded_again(
    "llama-server (router)", "unload", "the model's process ends: weights are loaded from disk at every wake"
)
OLLAMA: Final = _loaded_again("ollama", "unload", "the runner ends: weights are loaded from disk at every wake")
PROCESS: Final = _loaded_again("an engine that is ended and started", "end", "its start decides how long a wake takes")

LMDEPLOY: Final = Capabilities(
    engine="LMDeploy",
    plans=[ParkPlan(name="level 1", modes={MODEL_WEIGHTS: [RestoreMode.CPU], KV_CACHE: _LOST})],
    tells_tags=False,
    notes=["/sleep ends the requests that run: the gate is drained first"],
)

CUDA_CHECKPOINT: Final = Capabilities(
    engine="a CUDA program, by the driver's checkpoints",
    # The driver takes all that a process has on the GPU, whatever it is, and keeps it in host memory.
    plans=[ParkPlan(name="checkpoint", modes={MODEL_WEIGHTS: [RestoreMode.CPU], KV_CACHE: [RestoreMode.CPU]})],
    tells_tags=False,
    notes=["all of its GPU memory lies in host memory meanwhile, the KV cache too"],
)

SGLANG: Final = Capabilities(
    engine="SGLang",
    plans=[
        ParkPlan(
            name="release",
            modes={MODEL_WEIGHTS: [RestoreMode.CPU, RestoreMode.PINNED, RestoreMode.NONE], KV_CACHE: _LOST},
            any_subset=True,
        )
    ],
    can_reload_weights=True,
    tells_state=False,
    tells_tags=False,
)

COMMAND: Final = Capabilities(
    engine="an engine that the operator's commands park",
    plans=[
        ParkPlan(
            name="command",
            modes={
                MODEL_WEIGHTS: [RestoreMode.NONE, RestoreMode.CPU, RestoreMode.PINNED, RestoreMode.MEMSET],
                KV_CACHE: [RestoreMode.NONE, RestoreMode.CPU, RestoreMode.PINNED, RestoreMode.MEMSET],
            },
            any_subset=True,
        )
    ],
    can_reload_weights=True,
    tells_tags=False,
    notes=["what the modes mean is the commands' affair: they get the tags in LULL_TAGS"],
)
