"""Adapters, by kind; each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..settings import EngineSettings
    from .base import EngineAdapter
    from .ledger import Ledger


def make_adapter(settings: EngineSettings, ledger: Ledger) -> EngineAdapter:
    """The adapter of the engine's kind. ``ledger``: its own, for kinds that need one."""
    match settings.kind:
        case "trtllm":
            from .trtllm import TrtllmAdapter

            assert settings.control_key_file is not None
            return TrtllmAdapter(settings.url, settings.models[0], settings.control_key_file)
