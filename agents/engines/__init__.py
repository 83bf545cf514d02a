"""Adapters, by kind; each is imported when it is first asked for."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..settings import EngineSettings
    from .base import EngineAdapter
    from .ledger import Ledger
    from .outside import EngineOutside


def make_adapter(settings: EngineSettings, ledger: Ledger, outside: EngineOutside) -> EngineAdapter:
    """The adapter of the engine's kind. ``ledger``: its own, for kinds that need one; ``outside``: its process."""
    url, model, key = settings.url, settings.models[0], settings.api_key_file
    match settings.kind:
        case "trtllm":
            from .trtllm import TrtllmAdapter

            assert settings.control_key_file is not None
            return TrtllmAdapter(url, model, settings.control_key_file, key)
        case "vllm":
            from .vllm import VllmAdapter

            return VllmAdapter(settings, ledger, outside)
        case "vllm-metal":
            from .vllm_metal import VllmMetalAdapter

            return VllmMetalAdapter(settings, ledger, outside)
        case "sglang":
            from .sglang import SglangAdapter

            return SglangAdapter(
                url, model, ledger, outside, admin_key_file=settings.control_key_file, api_key_file=key
            )
        case "lmdeploy":
            from .lmdeploy import LmdeployAdapter

            return LmdeployAdapter(url, model, settings.command or (), key)
        case "llama-server":
            from .llama_server import LlamaServerAdapter

            return LlamaServerAdapter(url, model, key)
        case "ollama":
            from .ollama import OllamaAdapter

            return OllamaAdapter(url, model, key)
        case "cuda-checkpoint":
            from .cuda_checkpoint import CudaCheckpointAdapter

            return CudaCheckpointAdapter(settings, ledger, outside)
        case "process":
            from .process import ProcessAdapter

            return ProcessAdapter(settings, ledger, outside)
        case "command":
            from .command import CommandAdapter

            return CommandAdapter(settings, ledger, outside)
