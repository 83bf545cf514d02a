"""What is concluded about a vLLM from its version, its routes and its flags."""

from __future__ import annotations

from typing import Any

import pytest

from lull.agents.engines.vllm_facts import VllmFacts, capabilities_of, facts_of
from lull.agents.protocol.capabilities import Capabilities, refusal
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.vllm_engines import VLLM
from lull.vmm.tags import RestoreMode

LOST = EnginePolicy(restore_modes={"model_weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE})
KV_ONLY = EnginePolicy(restore_modes={"kv_cache": RestoreMode.NONE})
WEIGHTS_ONLY = EnginePolicy(restore_modes={"model_weights": RestoreMode.CPU})
CONTROL = ("/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache", "/release_kv_cache_memory")


def openapi(*paths: str, sleep_parameters: tuple[str, ...] | None = None) -> dict[str, Any]:
    shown: dict[str, Any] = {path: {"post": {}} for path in ("/v1/completions", *paths)}
    if sleep_parameters is not None:
        shown["/sleep"]["post"]["parameters"] = [{"name": name, "in": "query"} for name in sleep_parameters]
    return {"paths": shown}


def facts(version: str | None, *words: str, shown: Any = None) -> VllmFacts:
    return facts_of(version, openapi(*CONTROL) if shown is None else shown, words, has_dev_routes=False)


def able(version: str | None, *words: str, reload: bool = True, fragile: bool = False) -> Capabilities:
    return capabilities_of(facts(version, *words), can_reload=reload, allow_fragile=fragile)


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("0.33.0", (0, 33)),
        ("v0.17.1rc2", (0, 17)),
        ("0.9.2.dev17+g8c3f1e2", (0, 9)),
        ("1.0", (1, 0)),
        ("dev", (0, 31)),  # the lowest that has these routes
        (None, (0, 31)),
        ("0x33", (0, 31)),
    ],
)
def test_the_version_is_read_or_concluded_from_the_routes(text: str | None, version: tuple[int, int]) -> None:
    assert facts(text).version == version


def test_a_sleep_that_declares_its_parameters_is_one_of_0_32_and_mode_is_used_only_where_it_is() -> None:
    declares = facts(None, shown=openapi(*CONTROL, sleep_parameters=("level", "mode")))
    assert (declares.version, declares.takes_mode) == ((0, 32), True)
    # vllm-project/vllm#53082 takes `mode` out of it.
    assert not facts("0.35.0", shown=openapi(*CONTROL, sleep_parameters=("level",))).takes_mode
    assert facts("0.22.0").takes_mode
    assert not facts("0.16.0").takes_mode


def test_a_server_that_hides_its_routes_is_judged_by_its_version() -> None:
    hidden = facts_of("0.14.0", None, (), has_dev_routes=True)
    assert hidden.routes == {"/sleep", "/wake_up", "/is_sleeping", "/collective_rpc", "/reset_prefix_cache"}
    assert facts_of("0.33.0", None, (), has_dev_routes=False).routes == frozenset()


@pytest.mark.parametrize(
    ("version", "words", "says"),
    [
        ("0.16.3", (), "#15483"),
        ("0.22.0", ("--data-parallel-size", "2"), "#24879"),
        ("0.22.0", ("-dp", "2"), "#24879"),
        ("0.33.0", ("--data-parallel-rank=1",), "every rank is a server of its own"),
        ("0.22.1", ("--data_parallel_size", "2"), "#24879"),
        ("0.22.1", ("-dp=2",), "#24879"),
        ("0.22.1", ("--data-parallel-size", "1", "--data-parallel-size=2"), "#24879"),  # the last one counts
        ("0.33.0", ("-dpn", "0"), "-dpn every rank is a server of its own"),
        ("0.33.0", ("--data-parallel-external-lb",), "every rank is a server of its own"),
        ("0.33.0", ("--data_parallel_external_lb",), "every rank is a server of its own"),
        ("0.33.0", ("--data-parallel-ext",), "every rank is a server of its own"),  # argparse takes beginnings
        ("0.33.0", ("-dpe",), "every rank is a server of its own"),
        ("0.33.0", ("--data-parallel-hybrid-lb",), "every node has a server of its own"),
        ("0.33.0", ("-dph",), "every node has a server of its own"),
        ("0.33.0", ("--data-parallel-start-rank=4",), "every node has a server of its own"),  # means hybrid
        ("0.33.0", ("-dpr", "4"), "every node has a server of its own"),
        ("0.33.0", ("--data-parallel-multi-port-external-lb",), "every rank is a server of its own"),
        ("0.33.0", ("-dpm",), "every rank is a server of its own"),
        ("0.32.0", ("--kv-offloading-backend", "native"), "#45268"),
        ("0.31.0", ("--kv_offloading_backend=native",), "#45268"),
    ],
)
def test_what_is_known_to_end_it_is_refused(version: str, words: tuple[str, ...], says: str) -> None:
    said = refusal(able(version, *words), EnginePolicy())
    assert said is not None
    assert said.startswith(f"vLLM {version} cannot be parked: ")
    assert says in said


@pytest.mark.parametrize(
    ("version", "words"),
    [
        ("0.24.0", ("--data-parallel-size", "2")),
        ("0.33.0", ("--kv-offloading-backend", "native")),
        ("0.17.0", ()),
    ],
)
def test_what_is_mended_since_is_not(version: str, words: tuple[str, ...]) -> None:
    assert refusal(able(version, *words), EnginePolicy()) is None


def test_without_its_control_routes_it_cannot_be_parked() -> None:
    bare = capabilities_of(facts("0.33.0", shown=openapi()), can_reload=True, allow_fragile=True)
    assert bare.unsupported is not None
    assert "VLLM_SERVER_DEV_MODE=1" in bare.unsupported


@pytest.mark.parametrize(("version", "fragile"), [("0.14.0", True), ("0.24.9", True), ("0.25.0", False)])
def test_versions_below_the_safe_ones_are_marked_fragile(version: str, fragile: bool) -> None:
    assert (able(version, fragile=True).fragile is not None) is fragile


@pytest.mark.parametrize(
    "words",
    [
        ("--enable-lora",),
        ("--enable_lora",),
        ("--speculative-config", "{}"),
        ("--speculative_config={}",),
        ("--speculative-config.method", "eagle3"),
        ("-sc", "{}"),
        ("--lora-modules=a=b",),
        ("--lora_modules", "a=b"),
    ],
)
def test_adapters_and_drafts_are_kept_at_level_1(words: tuple[str, ...]) -> None:
    """Nothing loads them again after level 2 (vllm-project/vllm#48337, #39934, #55013)."""
    said = refusal(able("0.33.0", *words), LOST)
    assert said is not None
    assert 'restore_modes = { model_weights = "CPU", kv_cache = "NONE" }' in said
    assert refusal(able("0.33.0", *words), EnginePolicy()) is None
    assert refusal(able("0.33.0"), LOST) is None


def test_weights_are_lost_only_with_a_way_to_load_them_again() -> None:
    said = refusal(able("0.33.0", reload=False), LOST)
    assert said is not None
    assert "mode NONE loses the weights and this engine cannot reload them" in said


def test_the_kv_cache_alone_needs_its_route() -> None:
    assert refusal(able("0.33.0"), KV_ONLY) is None
    old = facts("0.28.0", shown=openapi("/sleep", "/wake_up", "/is_sleeping"))
    assert refusal(capabilities_of(old, can_reload=True, allow_fragile=False), KV_ONLY) is not None
    assert refusal(able("0.33.0"), WEIGHTS_ONLY) is not None


def test_what_one_can_do_is_never_more_than_its_kind_can() -> None:
    """What the server believes before the agent has asked."""
    assert [plan for plan in able("0.33.0").plans if plan not in VLLM.plans] == []


def test_what_an_operator_should_know_is_noted() -> None:
    notes = able("0.33.0", "vllm", "serve", "--tensor-parallel-size", "2", "--kv-offloading-backend=native").notes
    assert [note.partition(" ")[0] for note in notes] == ["without", "--disable-custom-all-reduce:", "the"]
    assert able("0.33.0", "vllm", "serve", "--worker-cls", "lull.x", "-tp", "1").notes == []
    assert able("0.33.0", "vllm", "serve", "--enable_sleep_mode", "-tp=2", "--disable_custom_all_reduce").notes == []
    (note,) = able("0.33.0", "vllm", "serve", "--enable-sleep-mode", "--config=/etc/vllm.yaml").notes
    assert "flags in that file are not seen" in note
