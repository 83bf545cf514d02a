"""What a running vLLM can do: read from its routes, its version and its flags. Pure.

The routes decide what is there. The version decides what it does, as nothing else tells that; a version that cannot be
read counts as the lowest that has the routes which were seen.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, cast

from ..command_flags import flag
from ..protocol.capabilities import Capabilities, ParkPlan
from ..protocol.vllm_engines import KV_ONLY, LEVEL_1, LEVEL_2

SLEEP: Final = "/sleep"
WAKE_UP: Final = "/wake_up"
IS_SLEEPING: Final = "/is_sleeping"
RELEASE_KV: Final = "/release_kv_cache_memory"
COLLECTIVE_RPC: Final = "/collective_rpc"
RESET_PREFIX_CACHE: Final = "/reset_prefix_cache"

# Since when each route is there: for servers that do not show their routes (--disable-fastapi-docs).
_SINCE: Final = {
    SLEEP: (0, 7),
    WAKE_UP: (0, 7),
    IS_SLEEPING: (0, 8),
    RESET_PREFIX_CACHE: (0, 7),
    COLLECTIVE_RPC: (0, 11),
    RELEASE_KV: (0, 31),
}
_VERSION: Final = re.compile(r"v?(\d+)\.(\d+)(?:\.|$|[a-z+])")

_NO_DEV_MODE: Final = (
    "its control routes are not there: start it with VLLM_SERVER_DEV_MODE=1 in its environment, on 127.0.0.1 and behind"
    " the gate, because --api-key does not guard them"
)
_DIES_ASLEEP: Final = (
    "any request that reaches it while it sleeps ends it (vllm-project/vllm#15483); 0.25 is the first version to trust"
)


# Ways to share requests between data parallel ranks in which one /sleep does not reach them all.
_SERVERS_OF_THEIR_OWN: Final = {
    ("--data-parallel-rank", "-dpn"): "rank is",
    ("--data-parallel-external-lb", "-dpe"): "rank is",
    ("--data-parallel-multi-port-external-lb", "-dpm"): "rank is",
    ("--data-parallel-hybrid-lb", "-dph"): "node has",
    ("--data-parallel-start-rank", "-dpr"): "node has",  # it means the hybrid one
}


@dataclass(frozen=True, slots=True)
class VllmFacts:
    """``version`` is major and minor; ``declared``: the query parameters of /sleep, None where it does not tell."""

    version: tuple[int, int]
    version_text: str | None
    routes: frozenset[str]
    declared: frozenset[str] | None
    words: tuple[str, ...]  # that it was started with

    @property
    def pauses(self) -> bool:
        """/sleep stops the scheduler first; a request meanwhile waits for the wake."""
        return self.version >= (0, 17)

    @property
    def takes_mode(self) -> bool:
        # vllm-project/vllm#53082 takes `mode` out of /sleep again.
        return self.pauses and (self.declared is None or "mode" in self.declared)

    @property
    def wakes_in_stages(self) -> bool:
        """A partial wake leaves the scheduler paused (vllm-project/vllm#44483)."""
        return self.version >= (0, 24)

    @property
    def may_wake_again(self) -> bool:
        """A wake that failed halfway may be asked for again; before, that maps memory twice (#34600)."""
        return self.version >= (0, 25)

    def flag(self, *names: str) -> str | None:
        return flag(self.words, *names)

    @property
    def data_parallel(self) -> int:
        value = self.flag("--data-parallel-size", "-dp") or "1"
        return int(value) if value.isdecimal() else 1


def facts_of(version_text: str | None, openapi: Any, words: Sequence[str], *, has_dev_routes: bool) -> VllmFacts:
    """``openapi``: the body of /openapi.json, None if it is not served. ``has_dev_routes``: one of them answered."""
    match = _VERSION.match(version_text or "")
    version = (int(match[1]), int(match[2])) if match else (0, 0)
    paths: Any = cast("dict[str, Any]", openapi).get("paths") if isinstance(openapi, dict) else None
    if not isinstance(paths, dict):
        routes = {path for path, since in _SINCE.items() if has_dev_routes and version >= since}
        return VllmFacts(version, version_text, frozenset(routes), None, tuple(words))
    known = cast("dict[str, Any]", paths)
    declared = _parameters(known.get(SLEEP))
    if match is None:
        version = _lowest(known, declared)
    return VllmFacts(version, version_text, frozenset(known) & frozenset(_SINCE), declared, tuple(words))


def _parameters(path: Any) -> frozenset[str] | None:
    post: Any = cast("Mapping[str, Any]", path).get("post") if isinstance(path, dict) else None
    given: Any = cast("Mapping[str, Any]", post).get("parameters") if isinstance(post, dict) else None
    if not isinstance(given, list) or not given:
        return None  # up to 0.31 the handlers read their query themselves
    entries = cast("Sequence[Any]", given)
    return frozenset(str(cast("dict[str, Any]", entry).get("name")) for entry in entries if isinstance(entry, dict))


def _lowest(paths: Mapping[str, Any], declared: frozenset[str] | None) -> tuple[int, int]:
    if declared is not None:
        return (0, 32)
    return max((since for path, since in _SINCE.items() if path in paths), default=(0, 0))


def capabilities_of(facts: VllmFacts, *, can_reload: bool, allow_fragile: bool) -> Capabilities:
    """``can_reload``: the operator declared how lost weights are loaded again."""
    name = f"vLLM {facts.version_text or 'of an unknown version'}"
    unsupported = _why_not(facts, allow_fragile=allow_fragile)
    return Capabilities(
        engine=name,
        version=facts.version_text,
        unsupported=None if unsupported is None else f"{name} cannot be parked: {unsupported}",
        fragile=_why_fragile(facts),
        plans=_plans(facts, can_reload=can_reload),
        can_reload_weights=can_reload,
        tells_state=IS_SLEEPING in facts.routes,
        tells_tags=False,
        notes=_notes(facts),
    )


def _plans(facts: VllmFacts, *, can_reload: bool) -> list[ParkPlan]:
    plans = [LEVEL_1]
    # Level 2 loses adapters and drafts as well, and nothing loads those again (#48337, #39934, #55013).
    if can_reload and COLLECTIVE_RPC in facts.routes and not _has_lora(facts) and not _speculates(facts):
        plans.append(LEVEL_2)
    if RELEASE_KV in facts.routes:
        plans.append(KV_ONLY)
    return plans


def _why_not(facts: VllmFacts, *, allow_fragile: bool) -> str | None:
    if SLEEP not in facts.routes or WAKE_UP not in facts.routes:
        return _NO_DEV_MODE
    if not facts.pauses and not allow_fragile:
        return f"{_DIES_ASLEEP}. To park it all the same: [engines.vllm] allow_fragile = true"
    if facts.data_parallel > 1 and facts.version < (0, 24):
        return "with --data-parallel-size above 1 it dies asleep before 0.24 (vllm-project/vllm#24879)"
    for names, whose in _SERVERS_OF_THEIR_OWN.items():
        if facts.flag(*names) is not None:
            many = f"with {' or '.join(names)} every {whose} a server of its own that has to be asked"
            return f"{many}; run one server for all ranks"
    if facts.flag("--kv-offloading-backend") == "native" and facts.version < (0, 33):
        return "with --kv-offloading-backend native it is dead after its first sleep before 0.33 (#45268)"
    return None


def _why_fragile(facts: VllmFacts) -> str | None:
    if not facts.pauses:
        return _DIES_ASLEEP
    if facts.version < (0, 25):
        return "before 0.25 sleep does not wait for the device, and a wake that fails can only be mended by a restart"
    return None


def _notes(facts: VllmFacts) -> list[str]:
    notes: list[str] = []
    if facts.words and facts.flag("--enable-sleep-mode") is None and facts.flag("--worker-cls") is None:
        notes.append("without --enable-sleep-mode /sleep answers 200 and frees nothing; every park is judged by bytes")
    if _above_one(facts.flag("--tensor-parallel-size", "-tp")) and facts.flag("--disable-custom-all-reduce") is None:
        notes.append("--disable-custom-all-reduce: sleep mode and IPC of tensor parallel ranks exclude each other")
    if _has_lora(facts) or _speculates(facts):
        notes.append("level 1 only: level 2 loses adapters and drafts, which nothing loads again")
    if facts.flag("--config") is not None:
        notes.append("--config: flags in that file are not seen, and what they do to a sleep is not known here")
    if facts.flag("--kv-offloading-backend") is not None:
        notes.append("the host tier of KV offloading stays allocated while it sleeps")
    return notes


def _has_lora(facts: VllmFacts) -> bool:
    return facts.flag("--enable-lora") is not None or facts.flag("--lora-modules") is not None


def _speculates(facts: VllmFacts) -> bool:
    return any(facts.flag(*names) is not None for names in (("--speculative-config", "-sc"), ("--speculative-model",)))


def _above_one(value: str | None) -> bool:
    return value is not None and value.isdecimal() and int(value) > 1
