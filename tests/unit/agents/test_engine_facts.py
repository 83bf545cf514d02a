"""What is read from an engine's own words about what it can do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.agents.engines import lmdeploy, sglang, trtllm
from lull.agents.errors import EngineRefused
from lull.agents.protocol.capabilities import MODEL_WEIGHTS, refusal
from lull.agents.protocol.policy import EnginePolicy
from lull.vmm.tags import RestoreMode
from tests.engines.canned_server import canned

INFO: dict[str, Any] = {"version": "0.5.23", "enable_memory_saver": True, "enable_weights_cpu_backup": True}
LOST = EnginePolicy(restore_modes={"model_weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE})


@pytest.mark.parametrize(
    ("changes", "loses"),
    [
        ({}, False),
        ({"enable_weights_cpu_backup": False}, True),
        ({"speculative_algorithm": "EAGLE3"}, True),
        ({"speculative_algorithm": "EAGLE3", "enable_draft_weights_cpu_backup": True}, False),
    ],
)
def test_sglang_loses_weights_that_no_flag_keeps(changes: dict[str, Any], loses: bool) -> None:
    assert sglang.loses_weights({**INFO, **changes}) is loses


def test_sglang_keeps_or_loads_by_its_flags() -> None:
    keeps = sglang.read_capabilities(INFO)
    assert (refusal(keeps, EnginePolicy()), keeps.fragile) == (None, None)
    assert 'model_weights = "CPU"' in (refusal(keeps, LOST) or "")
    loads = sglang.read_capabilities({**INFO, "enable_weights_cpu_backup": False})
    assert refusal(loads, LOST) is None
    assert 'model_weights = "NONE"' in (refusal(loads, EnginePolicy()) or "")
    kv_only = EnginePolicy(restore_modes={"kv_cache": RestoreMode.NONE})
    assert refusal(loads, kv_only) is None
    draft = sglang.read_capabilities({**INFO, "speculative_algorithm": "EAGLE3"})
    assert "--enable-draft-weights-cpu-backup" in (draft.fragile or "")


def test_sglang_without_its_memory_saver_or_its_words() -> None:
    assert "--enable-memory-saver" in (
        sglang.read_capabilities({**INFO, "enable_memory_saver": False}).unsupported or ""
    )
    assert sglang.read_capabilities({}).unsupported is not None


async def test_trtllm_whose_kv_cache_cannot_be_released_refuses_and_says_why(tmp_path: Path) -> None:
    """Its KV-cache manager V2 answers 400: nothing was changed."""
    key = tmp_path / "key"
    key.write_text("secret")
    body = b'{"error": {"message": "tag kv_cache cannot be released with KV-cache manager V2"}}'
    async with canned({"/release_memory": body}, status=400) as url:
        with pytest.raises(EngineRefused, match="HTTP 400: tag kv_cache cannot be released"):
            await trtllm.TrtllmAdapter(url, "llama", key).park(EnginePolicy(), 5)


@pytest.mark.parametrize("body", [b'{"paths": null}', b'{"paths": ["/sleep"]}', b'{"openapi": "3.1.0"}'])
async def test_lmdeploy_that_does_not_show_its_routes_is_refused(body: bytes) -> None:
    async with canned({"/openapi.json": body}) as url:
        with pytest.raises(EngineRefused, match=r"odd /openapi\.json"):
            await lmdeploy.LmdeployAdapter(url, "intern", ()).capabilities()


def test_lmdeploy_by_its_routes_and_its_command() -> None:
    routes = ["/sleep", "/wakeup", "/is_sleeping", "/health"]
    able = lmdeploy.read_capabilities(routes, ["lmdeploy", "serve", "--backend", "pytorch"])
    assert (able.unsupported, able.fragile) == (None, None)
    assert MODEL_WEIGHTS in able.plans[0].modes
    for words in (["--backend", "turbomind"], ["--backend=turbomind"]):
        assert "frees nothing" in (lmdeploy.read_capabilities(routes, words).unsupported or "")
    assert lmdeploy.read_capabilities(routes, ["--backend=pytorch"]).fragile is None
    assert lmdeploy.read_capabilities(routes, ["serve", "/models/pytorch"]).fragile is not None
    assert lmdeploy.read_capabilities(routes, ["--model-name", "pytorch"]).fragile is not None
    assert "TurboMind" in (lmdeploy.read_capabilities(routes, []).fragile or "")
    assert "/is_sleeping" in (lmdeploy.read_capabilities(routes[:2], []).unsupported or "")
