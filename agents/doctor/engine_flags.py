"""How engines are started: flags and environment without which a park frees nothing, or a wake goes wrong."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from ..command_flags import flag
from ..processes import command_line, environ_value
from ..settings import AgentSettings, EngineSettings
from .findings import Finding, failed, not_applicable, ok, warning
from .scene import Check, Scene, engine_process

_ALLOCATOR: Final = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_IN_TORCH: Final = frozenset({"vllm", "sglang", "lmdeploy", "trtllm"})
# What is read of a process's environment.
_NAMES: Final = (
    *_ALLOCATOR,
    "VLLM_SERVER_DEV_MODE",
    "TRTLLM_RUNTIME_CONTROL_API_KEY",
    "OLLAMA_KEEP_ALIVE",
    "NCCL_GRAPH_REGISTER",
    "NCCL_CUMEM_HOST_ENABLE",
)


class Started:
    """One engine as it was started, or would be: words of its command, and its environment."""

    def __init__(self, kind: str, words: Sequence[str], environ: Mapping[str, str], devices: int) -> None:
        self.kind = kind
        self.words = list(words)
        self.environ = environ
        self.devices = devices

    def flag(self, *names: str) -> str | None:
        return flag(self.words, *names)

    def has(self, *flags: str) -> bool:
        return any(self.flag(name) is not None for name in flags)

    @property
    def is_the_engine_itself(self) -> bool:
        """Not a wrapper, whose words say nothing about the engine's."""
        return any(name in word for name in ("vllm", "sglang", "trtllm-serve", "llama-server") for word in self.words)


def started(settings: AgentSettings, engine: EngineSettings) -> Started:
    """A running process's own words and environment, where they can be read; else those of the file."""
    process = engine_process(settings, engine)
    words = (command_line(process.pid) if process is not None else []) or list(engine.command or ())
    environ = {**{name: os.environ[name] for name in _NAMES if name in os.environ}, **engine.env}
    if process is not None and environ_value(process.pid, "PATH") is not None:
        environ = {name: value for name in _NAMES if (value := environ_value(process.pid, name)) is not None}
    return Started(engine.kind, words, environ, len(engine.device_indexes))


def judge_allocator(name: str, one: Started) -> Finding:
    for variable in _ALLOCATOR:
        if "expandable_segments:true" in one.environ.get(variable, "").replace(" ", "").lower():
            seen = f"{variable} has expandable_segments: a park frees nothing (vllm#11743, pytorch#147851)"
            return failed(seen, f"take expandable_segments out of {variable}", name)
    return ok("the allocator of torch does not use expandable segments", name)


def check_allocator(scene: Scene) -> list[Finding]:
    found = [
        judge_allocator(engine.name, started(scene.known, engine))
        for engine in scene.known.engines
        if engine.kind in _IN_TORCH
    ]
    return found or [not_applicable("no engine uses torch's memory pools")]


def _vllm(name: str, one: Started) -> list[Finding]:
    found: list[Finding] = []
    if one.environ.get("VLLM_SERVER_DEV_MODE") != "1":
        found.append(failed("VLLM_SERVER_DEV_MODE is not 1: it has no /sleep", "set it in its environment", name))
    if not one.has("--enable-sleep-mode", "--worker-cls", "--sleep-mode-backend"):
        seen = "--enable-sleep-mode is missing: /sleep answers 200 and frees nothing"
        found.append(failed(seen, "add --enable-sleep-mode to its command", name))
    ranks = one.flag("--tensor-parallel-size", "-tp")
    if ranks not in (None, "", "1") and not one.has("--disable-custom-all-reduce"):
        seen = f"-tp {ranks} with custom all-reduce: it may crash while it captures graphs (vllm#45611)"
        found.append(warning(seen, "add --disable-custom-all-reduce", name))
    return found


def _sglang(name: str, one: Started) -> list[Finding]:
    if one.has("--enable-memory-saver"):
        return []
    seen = "--enable-memory-saver is missing: a release answers 200 and frees nothing (sglang#4336)"
    return [failed(seen, "add --enable-memory-saver to its command", name)]


def _trtllm(name: str, one: Started) -> list[Finding]:
    if not any("trtllm-serve" in word for word in one.words):
        return []  # the reference engine, or one built on lull.vmm, has its routes always
    found: list[Finding] = []
    if not one.has("--enable_sleep_mode"):
        found.append(failed("--enable_sleep_mode is missing", "add --enable_sleep_mode to its command", name))
    if not one.environ.get("TRTLLM_RUNTIME_CONTROL_API_KEY"):
        seen = "TRTLLM_RUNTIME_CONTROL_API_KEY is not set: its control routes are not there"
        found.append(failed(seen, "set it in its environment to the text of control_key_file", name))
    return found


def _ollama(name: str, one: Started) -> list[Finding]:
    if one.environ.get("OLLAMA_KEEP_ALIVE") == "-1":
        return []
    seen = "OLLAMA_KEEP_ALIVE is not -1: it unloads the model by itself after five minutes without a request"
    return [warning(seen, 'env = { OLLAMA_KEEP_ALIVE = "-1" }', name)]


def _llama_server(name: str, one: Started) -> list[Finding]:
    if one.has("-m", "--model"):
        return [failed("started with -m it is no router, and has no /models/unload", 'use kind = "process"', name)]
    if one.has("--no-models-autoload"):
        return []
    seen = "without --no-models-autoload any request to it loads the model again"
    return [warning(seen, "add --no-models-autoload to its command", name)]


_BY_KIND: Final[Mapping[str, Callable[[str, Started], list[Finding]]]] = {
    "vllm": _vllm,
    "sglang": _sglang,
    "trtllm": _trtllm,
    "ollama": _ollama,
    "llama-server": _llama_server,
}


def judge_flags(name: str, one: Started) -> list[Finding]:
    judge = _BY_KIND.get(one.kind)
    if judge is None:
        return [not_applicable(f"kind {one.kind} needs no flags", name)]
    if one.kind != "ollama" and not one.is_the_engine_itself:
        return [not_applicable("its command is not the engine's own, so its flags cannot be seen", name)]
    return judge(name, one) or [ok("its flags let it be parked", name)]


def check_flags(scene: Scene) -> list[Finding]:
    found = [one for engine in scene.known.engines for one in judge_flags(engine.name, started(scene.known, engine))]
    return found or [not_applicable("no engine is named")]


def judge_nccl(name: str, one: Started) -> Finding:
    if one.devices < 2:
        return not_applicable("it lives on one device", name)
    wanted = "NCCL_CUMEM_HOST_ENABLE" if one.kind == "cuda-checkpoint" else "NCCL_GRAPH_REGISTER"
    if one.environ.get(wanted) == "0":
        return ok(f"{wanted} is 0", name)
    why = "a checkpoint may never end (nccl#2350)" if one.kind == "cuda-checkpoint" else "graphs hang (sglang#40648)"
    return warning(f"{wanted} is not 0: after a wake {why}", f'env = {{ {wanted} = "0" }}', name)


def check_nccl(scene: Scene) -> list[Finding]:
    kinds = ("vllm", "sglang", "cuda-checkpoint")
    found = [judge_nccl(one.name, started(scene.known, one)) for one in scene.known.engines if one.kind in kinds]
    return found or [not_applicable("no engine uses NCCL")]


CHECKS = (
    Check("allocator", "engines", "Torch's allocator lets memory be freed (no expandable segments).", check_allocator),
    Check("start_flags", "engines", "Engines were started with what a park needs.", check_flags),
    Check("nccl", "engines", "NCCL is told what survives a wake.", check_nccl),
)
