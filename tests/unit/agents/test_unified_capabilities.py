"""On unified memory the modes that keep a backup are no way to park, whatever the engine can do."""

from __future__ import annotations

from lull.agents.protocol.capabilities import ParkPlan, refusal
from lull.agents.protocol.engine_kinds import known_capabilities
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.unified import without_backups
from lull.vmm.tags import RestoreMode


def test_an_engine_that_can_only_keep_its_weights_gives_its_caches_alone() -> None:
    here = without_backups(known_capabilities("trtllm"))
    assert refusal(here, EnginePolicy(restore_modes={"kv_cache": RestoreMode.NONE})) is None
    said = refusal(here, EnginePolicy())
    assert said is not None
    assert "on unified memory cannot release tag 'model_weights'" in said
    assert 'nearest policy that it can honour: restore_modes = { kv_cache = "NONE" }' in said


def test_one_that_releases_all_or_nothing_by_backups_cannot_be_parked() -> None:
    plan = ParkPlan(name="level 1", modes={"model_weights": [RestoreMode.CPU], "kv_cache": [RestoreMode.NONE]})
    offered = known_capabilities("vllm").model_copy(update={"plans": [plan]})
    here = without_backups(offered)
    assert here.unsupported is not None
    assert "CPU and PINNED free nothing there" in here.unsupported


def test_one_that_loads_its_weights_again_is_parked_as_anywhere() -> None:
    here = without_backups(known_capabilities("llama-server"))
    assert here.plans == known_capabilities("llama-server").plans
    assert here.unsupported is None
