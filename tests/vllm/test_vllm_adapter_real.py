"""Our adapter and a real vLLM with our worker class: what it is asked, what its memory does, what it answers."""

from __future__ import annotations

import asyncio
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.protocol.policy import CanaryPolicy, EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.vmm.host_driver import GRANULARITY_BYTES, HostDriver
from lull.vmm.tags import RestoreMode
from tests.engines.real_vllm import KV_MIB, NAME, WEIGHTS_MIB, adapter_of, vllm_python
from tests.engines.spawned import MIB, Spawned
from tests.waiting import wait_until_async

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(1200)]

KEPT = EnginePolicy()
LOST = EnginePolicy(restore_modes={"model_weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE})
KV_ONLY = EnginePolicy(restore_modes={"kv_cache": RestoreMode.NONE})
CANARY = CanaryPolicy(deadline_seconds=60)
CALL_SECONDS = 120.0
LONG: dict[str, Any] = {"model": NAME, "prompt": "Lull lends", "max_tokens": 400, "temperature": 0, "ignore_eos": True}


def post(vllm: Spawned, path: str, **more: Any) -> httpx.Response:
    return httpx.post(vllm.url + path, timeout=CALL_SECONDS, trust_env=False, **more)


async def until_running(vllm: Spawned, client: httpx.AsyncClient) -> None:
    async def running() -> bool:
        text = (await client.get(vllm.url + "/metrics")).text
        return any(line.startswith("vllm:num_requests_running") and line.endswith(" 1.0") for line in text.splitlines())

    await wait_until_async(running, 60, "the request runs")


async def test_the_worker_class_is_all_that_it_needs(vllm: Spawned) -> None:
    can = await adapter_of(vllm, vllm={"reload": "reload_weights"}).capabilities()
    assert can.version is not None
    assert can.version.startswith("0.32")
    assert (can.unsupported, can.fragile) == (None, None)
    assert [plan.name for plan in can.plans] == ["level 1", "level 2", "KV cache only"]
    assert not any("--enable-sleep-mode" in note for note in can.notes)


@pytest.mark.parametrize("policy", [KEPT, LOST, KV_ONLY], ids=["level 1", "level 2", "KV cache only"])
async def test_a_park_frees_the_device_and_a_wake_answers_alike(vllm: Spawned, policy: EnginePolicy) -> None:
    adapter = adapter_of(vllm, vllm={"reload": "reload_weights"})
    golden, held_mib = await adapter.answer(CANARY), vllm.held_mib()
    assert held_mib > WEIGHTS_MIB + KV_MIB
    for _ in range(2):
        await adapter.park(policy, CALL_SECONDS)
        left_mib = vllm.held_mib()
        assert left_mib <= (held_mib - KV_MIB if policy is KV_ONLY else 0)
        assert (await adapter.observe()).state is EngineState.PARKED
        assert await adapter.healthy(), "/health knows nothing of sleep"
        await adapter.resume(policy, CALL_SECONDS)
        await adapter.after_resume(policy, CALL_SECONDS)
        assert (await adapter.observe()).state is EngineState.RUNNING
        assert vllm.held_mib() == held_mib
        answer = await adapter.answer(CANARY)
        assert answer == golden, "text, token ids and log-probabilities, exactly"


def test_a_wake_by_tags_comes_in_parts(vllm: Spawned) -> None:
    whole_mib = vllm.held_mib()
    assert post(vllm, "/sleep?level=1").json() == {"status": "sleeping", "level": 1}
    assert vllm.held_mib() == 0
    assert post(vllm, "/wake_up?tags=weights").json()["status"] == "sleeping"
    assert WEIGHTS_MIB <= vllm.held_mib() == whole_mib - KV_MIB
    assert httpx.get(vllm.url + "/is_sleeping", trust_env=False).json() == {"is_sleeping": True}
    assert post(vllm, "/wake_up?tags=kv_cache").json()["status"] == "awake"
    assert vllm.held_mib() == whole_mib


def test_what_it_refuses_changes_nothing(vllm: Spawned) -> None:
    held_mib = vllm.held_mib()
    assert post(vllm, "/sleep?level=3").status_code == 400
    reply = post(vllm, "/release_kv_cache_memory")
    assert reply.status_code == 500
    assert "requires a completed pause" in reply.text
    assert vllm.held_mib() == held_mib


async def test_a_wake_without_room_is_refused_whole_and_asked_again(vllm: Spawned) -> None:
    """A GPU's vLLM would stay with its weights mapped and its cache not (vllm-project/vllm#34600)."""
    adapter = adapter_of(vllm)
    golden = await adapter.answer(CANARY)
    await adapter.park(KEPT, CALL_SECONDS)
    driver = HostDriver(vllm.device)
    others = driver.create((vllm.device.free_bytes() - WEIGHTS_MIB * MIB) // GRANULARITY_BYTES * GRANULARITY_BYTES)
    reply = post(vllm, "/wake_up")
    assert reply.status_code == 500
    assert vllm.held_mib() == 0, "nothing of it came back"
    assert (await adapter.observe()).state is EngineState.PARKED
    driver.release(others)
    await adapter.resume(KEPT, CALL_SECONDS)
    await adapter.after_resume(KEPT, CALL_SECONDS)
    assert await adapter.answer(CANARY) == golden


async def test_mode_abort_answers_200_with_truncated_text_and_mode_wait_drains(vllm: Spawned) -> None:
    async with httpx.AsyncClient(timeout=CALL_SECONDS, trust_env=False) as client:
        for mode in ("abort", "wait"):
            asked = asyncio.create_task(client.post(vllm.url + "/v1/completions", json=LONG))
            await until_running(vllm, client)
            assert (await client.post(f"{vllm.url}/sleep?level=1&mode={mode}")).status_code == 200
            answer = await asyncio.wait_for(asked, CALL_SECONDS)
            assert answer.status_code == 200
            tokens, reason = answer.json()["usage"]["completion_tokens"], answer.json()["choices"][0]["finish_reason"]
            assert (tokens < 400, reason) == ((True, "abort") if mode == "abort" else (False, "length"))
            assert vllm.held_mib() == 0
            assert (await client.post(vllm.url + "/wake_up")).status_code == 200


async def test_a_request_to_a_sleeping_engine_waits_in_silence_and_is_answered(vllm: Spawned) -> None:
    async with httpx.AsyncClient(timeout=CALL_SECONDS, trust_env=False) as client:
        await client.post(vllm.url + "/sleep?level=1")
        asked = asyncio.create_task(client.post(vllm.url + "/v1/completions", json={**LONG, "max_tokens": 8}))
        assert (await client.get(vllm.url + "/health")).status_code == 200
        assert not asked.done()
        await client.post(vllm.url + "/wake_up")
        assert (await asyncio.wait_for(asked, CALL_SECONDS)).json()["usage"]["completion_tokens"] == 8


async def test_requests_that_came_past_the_gate_refuse_the_park(vllm: Spawned) -> None:
    adapter = adapter_of(vllm)
    async with httpx.AsyncClient(timeout=CALL_SECONDS, trust_env=False) as client:
        asked = asyncio.create_task(client.post(vllm.url + "/v1/completions", json=LONG))
        await until_running(vllm, client)
        with pytest.raises(Exception, match="did not come through its gate"):
            await adapter.park(KEPT, 0.4)
        assert (await adapter.observe()).state is EngineState.RUNNING
        assert (await asyncio.wait_for(asked, CALL_SECONDS)).json()["usage"]["completion_tokens"] == 400


def test_the_sleep_back_end_is_known_to_the_real_factory(tmp_path: Path) -> None:
    """Its interface is in 0.32; the CPU build refuses --enable-sleep-mode, so no worker of it makes one."""
    script = (
        "from types import SimpleNamespace\n"
        "from vllm.plugins import load_general_plugins\n"
        "from vllm.device_allocator.sleep_mode_backend import SleepModeBackend, SleepModeBackendFactory\n"
        "from lull.vmm.vllm.device_pool import NoPool\n"
        "load_general_plugins()\n"
        "assert issubclass(SleepModeBackendFactory.get_backend_class('lull'), SleepModeBackend)\n"
        "try:\n"
        "    SleepModeBackendFactory.create_backend(SimpleNamespace(sleep_mode_backend='lull'))\n"
        "except NoPool as error:\n"
        "    print('refused:', error)\n"
    )
    done = subprocess.run(
        [vllm_python(), "-P", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused: --sleep-mode-backend lull parks what its worker class has allocated" in done.stdout
