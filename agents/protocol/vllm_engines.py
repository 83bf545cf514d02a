"""The most that vLLM and vllm-metal can do, before one is asked. Pure."""

from __future__ import annotations

from typing import Final

from ...vmm.tags import RestoreMode
from .capabilities import KV_CACHE, MODEL_WEIGHTS, Capabilities, ParkPlan

_LOST: Final = [RestoreMode.NONE]

LEVEL_1: Final = ParkPlan(name="level 1", modes={MODEL_WEIGHTS: [RestoreMode.CPU, RestoreMode.PINNED], KV_CACHE: _LOST})
LEVEL_2: Final = ParkPlan(name="level 2", modes={MODEL_WEIGHTS: _LOST, KV_CACHE: _LOST})
KV_ONLY: Final = ParkPlan(name="KV cache only", modes={KV_CACHE: _LOST})

VLLM: Final = Capabilities(engine="vLLM", plans=[LEVEL_1, LEVEL_2, KV_ONLY], can_reload_weights=True, tells_tags=False)
VLLM_METAL: Final = Capabilities(engine="vllm-metal", plans=[KV_ONLY], tells_tags=False)
