"""What vLLM's sleep levels and tags are in a pool. Pure.

vLLM knows weights (of the model and its draft), kv_cache, runtime, cudagraph and workspace. Level 1 keeps all but the
KV cache and the workspace; level 2 loses the weights as well, and keeps what cannot be loaded again. A wake may leave
weights and KV cache asleep, nothing else (vLLM 0.32, device_allocator: DEFERRABLE_TAGS).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Final

WEIGHTS: Final = "weights"  # vLLM's word
KV_CACHE: Final = "kv_cache"  # both
MODEL_WEIGHTS: Final = "model_weights"
MODEL: Final = "model"  # named buffers
DRAFT_WEIGHTS: Final = "draft_model_weights"
DRAFT_MODEL: Final = "draft_model"
WORKSPACE: Final = "workspace"

_OF_WEIGHTS: Final = (MODEL_WEIGHTS, DRAFT_WEIGHTS)
_DEFERRABLE: Final = frozenset({*_OF_WEIGHTS, KV_CACHE})
_POOL_TAGS: Final = {WEIGHTS: _OF_WEIGHTS}

LEVELS: Final = (1, 2)  # at level 0 no worker is asked


def pool_tags(tags: Iterable[str]) -> tuple[str, ...]:
    """The pool's tags for vLLM's."""
    return tuple(one for tag in tags for one in _POOL_TAGS.get(tag, (tag,)))


def lost_at(level: int, tags: Collection[str]) -> tuple[str, ...]:
    """Which of the pool's ``tags`` lose their contents, whatever their mode. ValueError for a level that is none."""
    if level not in LEVELS:
        raise ValueError(f"level is {level!r}; a worker is put to sleep at level {' or '.join(map(str, LEVELS))}")
    lost = (KV_CACHE, WORKSPACE, *_OF_WEIGHTS) if level == 2 else (KV_CACHE, WORKSPACE)
    return tuple(tag for tag in tags if tag in lost)


def woken_by(tags: Iterable[str] | None, asleep: Collection[str]) -> tuple[str, ...]:
    """Which of the pool's tags ``asleep`` a wake of vLLM's ``tags`` brings back: these, and all that may not wait."""
    wanted = None if tags is None else set(pool_tags(tags))
    return tuple(tag for tag in asleep if wanted is None or tag in wanted or tag not in _DEFERRABLE)
