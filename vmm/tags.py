"""Tags name classes of an engine's memory; restore modes say what becomes of a tag's contents over a park."""

from __future__ import annotations

import re
from collections.abc import Iterable
from enum import StrEnum
from typing import Final, cast

from .errors import UnsupportedMode

# TensorRT-LLM's ExecutorMemoryType values that may be released (NVIDIA/TensorRT-LLM#19016).
TRTLLM_TAGS: Final = (
    "model_weights",
    "model",
    "draft_model_weights",
    "draft_model",
    "kv_cache",
    "sampler",
    "drafter",
    "guided_decoder",
    "spec_resource_manager",
    "model_extra",
    "executor_extra",
)
INIT_ONLY_TAGS: Final = ("_no_capture_init_kv_cache", "_no_capture_init_extra_resources")
WEIGHT_TAGS: Final = frozenset({"model_weights", "model", "draft_model_weights", "draft_model"})

TAG_PATTERN: Final = re.compile(r"[a-z_][a-z0-9_]{0,62}")


class RestoreMode(StrEnum):
    CPU = "CPU"  # pageable backup
    PINNED = "PINNED"  # pre-faulted backup that is kept, locked where the limit allows
    NONE = "NONE"  # contents are lost; undefined (here: zero) after a wake
    MEMSET = "MEMSET"  # contents are lost; zeroed at every re-materialisation, not at first allocation


KEEPS_CONTENTS: Final = frozenset({RestoreMode.CPU, RestoreMode.PINNED})


class InvalidTag(ValueError):
    """A tag that does not exist, may not be released, or is badly spelled."""


def require_mode(value: object, name: str = "restore mode") -> RestoreMode:
    """A RestoreMode, also by its exact name. Anything else would lose what it was to keep: UnsupportedMode."""
    if isinstance(value, str) and value in RestoreMode.__members__:
        return RestoreMode(value)
    raise UnsupportedMode(f"{name} is {value!r}; use one of {', '.join(RestoreMode)}")


def require_tag(value: object, name: str = "tag") -> str:
    """A well spelled tag; else InvalidTag."""
    if isinstance(value, str) and TAG_PATTERN.fullmatch(value):
        return value
    raise InvalidTag(f"{name} is {value!r}; use lower-case letters, digits and underscores, at most 63")


def require_tags(value: object, name: str = "tags") -> tuple[str, ...]:
    """Several tags, in first-seen order without repeats. A text is not taken letter by letter: InvalidTag."""
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise InvalidTag(f"{name} is {value!r}; it must be a list of tags")
    return tuple(dict.fromkeys(require_tag(tag, name) for tag in cast("Iterable[object]", value)))


def normalize_tags(tags: Iterable[str] | None, known: Iterable[str]) -> tuple[str, ...]:
    """``tags`` in first-seen order without repeats; None means every known tag that may be released.

    Raises InvalidTag for an empty list, an unknown tag and an initialization-only tag, in
    TensorRT-LLM's words.
    """
    allowed = tuple(dict.fromkeys(known))
    if tags is None:
        return tuple(tag for tag in allowed if tag not in INIT_ONLY_TAGS)
    if isinstance(tags, str):
        raise InvalidTag(f"tags is {tags!r}; it must be a list of tags")
    chosen = tuple(dict.fromkeys(tags))
    if not chosen:
        raise InvalidTag("Runtime memory tags must not be empty.")
    for tag in chosen:
        if tag in INIT_ONLY_TAGS:
            raise InvalidTag(f"Runtime memory tag '{tag}' is an initialization-only tag and cannot be released.")
        if tag not in allowed:
            raise InvalidTag(f"Invalid runtime memory tag '{tag}'. Expected one of: {', '.join(sorted(allowed))}")
    return chosen
