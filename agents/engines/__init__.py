"""Adapters, by kind; each is imported when it is first asked for."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .base import EngineAdapter


def make_adapter(kind: str, *, base_url: str, model: str, key_file: Path) -> EngineAdapter:
    """The adapter of ``kind``; ValueError for one that does not exist."""
    if kind == "trtllm":
        from .trtllm import TrtllmAdapter

        return TrtllmAdapter(base_url, model, key_file)
    raise ValueError(f"engine kind {kind!r} is not known; known: trtllm")
