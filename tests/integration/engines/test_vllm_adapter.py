"""The vLLM adapter against servers that differ by version as vLLM does, and lie as it does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.engines import vllm as vllm_module
from lull.agents.engines.base import Observation
from lull.agents.errors import EngineAuthRefused, EngineRefused, EngineTimedOut
from lull.agents.protocol.capabilities import refusal
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from tests.engines.spawned import MIB, Spawned
from tests.engines.vllm_rig import CALL_SECONDS, CANARY, KEPT, KV_ONLY, LOST, RELOAD, adapter_of, vllm
from tests.waiting import wait_until, wait_until_async

FRAGILE = {"vllm": {"allow_fragile": True}}
RELOADS = {"vllm": RELOAD}


async def state(engine: Spawned, **fields: Any) -> EngineState:
    return (await adapter_of(engine, **fields).observe()).state


async def answer(engine: Spawned, **fields: Any) -> Any:
    return await adapter_of(engine, **fields).answer(CANARY)


async def cycle(engine: Spawned, policy: EnginePolicy, **fields: Any) -> Observation:
    """Parked by one adapter, woken by another; returns what a third saw in between."""
    await adapter_of(engine, **fields).park(policy, CALL_SECONDS)
    seen = await adapter_of(engine, **fields).observe()
    await adapter_of(engine, **fields).resume(policy, CALL_SECONDS)
    assert await state(engine, **fields) is EngineState.RUNNING
    await adapter_of(engine, **fields).after_resume(policy, CALL_SECONDS)
    assert adapter_of(engine)._ledger.read() == {}
    return seen


def posts(engine: Spawned) -> list[str]:
    raw = [call for call in engine.raw_calls() if call["method"] == "POST" and not call["path"].startswith("/v1")]
    return [f"{call['path']}?{call['query']}" if call["query"] else str(call["path"]) for call in raw]


# ---- levels -----------------------------------------------------------------------------------------------------


# A server costs half a second: the versions at whose borders behaviour changes, and in the long tests the others.
VERSIONS = ["0.14.1", "0.33.0"]
MORE_VERSIONS = ["0.7.3", "0.8.5", "0.17.0", "0.22.1", "0.25.0", "0.31.0", "0.32.0"]


@pytest.mark.parametrize(
    "version", [*VERSIONS, *(pytest.param(version, marks=pytest.mark.long) for version in MORE_VERSIONS)]
)
async def test_level_1_keeps_the_weights_in_every_version(tmp_path: Path, version: str) -> None:
    with vllm(tmp_path, version) as engine:
        golden = await answer(engine)
        await adapter_of(engine, **FRAGILE).park(KEPT, CALL_SECONDS)
        seen = await adapter_of(engine, **FRAGILE).observe()
        assert (seen.state, set(seen.parked_tags)) == (EngineState.PARKED, {"model_weights", "kv_cache"})
        wait_until(lambda: engine.held_mib() == 0, 5, "all memory free")  # 0.7.3 may answer before
        await adapter_of(engine, **FRAGILE).resume(KEPT, CALL_SECONDS)
        await adapter_of(engine, **FRAGILE).after_resume(KEPT, CALL_SECONDS)
        assert await state(engine) is EngineState.RUNNING
        assert (engine.held_mib(), await answer(engine)) == (6, golden)
        early = ["/reset_prefix_cache"] if version in ("0.7.3", "0.8.5", "0.14.1") else []
        query = "level=1" if early else "level=1&mode=wait"
        assert posts(engine) == [*early, f"/sleep?{query}", "/wake_up", "/reset_prefix_cache"]


@pytest.mark.parametrize(
    ("version", "wakes"),
    [
        ("0.22.1", ["/wake_up", "/collective_rpc"]),
        ("0.32.0", ["/wake_up?tags=weights", "/collective_rpc", "/wake_up?tags=kv_cache"]),
    ],
)
async def test_level_2_loads_the_weights_again_and_stages_the_wake_where_that_is_safe(
    tmp_path: Path, version: str, wakes: list[str]
) -> None:
    with vllm(tmp_path, version) as engine:
        golden = await answer(engine)
        await cycle(engine, LOST, **RELOADS)
        assert await answer(engine) == golden
        assert posts(engine) == ["/sleep?level=2&mode=wait", *wakes, "/reset_prefix_cache"]


async def test_the_kv_cache_alone(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.31.0") as engine:
        golden = await answer(engine)
        await adapter_of(engine).park(KV_ONLY, CALL_SECONDS)
        seen = await adapter_of(engine).observe()
        assert (seen.state, seen.parked_tags, engine.held_mib()) == (EngineState.PARKED, ("kv_cache",), 4)
        await adapter_of(engine).resume(KV_ONLY, CALL_SECONDS)
        await adapter_of(engine).after_resume(KV_ONLY, CALL_SECONDS)
        assert (engine.held_mib(), await answer(engine)) == (6, golden)
        sent = ["/sleep?level=0&mode=keep", "/release_kv_cache_memory", "/wake_up?tags=kv_cache&tags=scheduling"]
        assert posts(engine) == [*sent, "/reset_prefix_cache"]


async def test_the_kv_cache_alone_where_requests_may_be_aborted(tmp_path: Path) -> None:
    """Frozen ones would go on before the prefix cache is emptied."""
    forced = KV_ONLY.model_copy(update={"on_drain_deadline": "abort_requests"})
    with vllm(tmp_path, "0.33.0") as engine, running_request(engine) as said:
        await adapter_of(engine).park(forced, CALL_SECONDS)
        await wait_until_async(lambda: said, 5, "the answer")
        assert said[0]["finish_reason"] == "abort"
        assert (posts(engine)[0], engine.held_mib()) == ("/sleep?level=0&mode=abort", 4)
        await adapter_of(engine).resume(forced, CALL_SECONDS)
        await adapter_of(engine).after_resume(forced, CALL_SECONDS)
        assert engine.held_mib() == 6


@pytest.mark.long
async def test_the_kv_cache_alone_where_sleep_stops_nothing_is_refused(tmp_path: Path) -> None:
    """`mode` is not sent where it is not taken (vllm-project/vllm#53082), and the release then asks for a pause."""
    with vllm(tmp_path, "0.33.0", "--no-mode") as engine:
        with pytest.raises(EngineRefused, match="only while the scheduler is paused"):
            await adapter_of(engine).park(KV_ONLY, CALL_SECONDS)
        assert posts(engine) == ["/sleep?level=0", "/release_kv_cache_memory", "/wake_up"]
        assert await state(engine) is EngineState.RUNNING


@pytest.mark.long
async def test_a_kv_cache_that_is_not_released_leaves_the_engine_running(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0", sleep_mode=False) as engine:
        with pytest.raises(EngineRefused, match="only while the scheduler is paused"):
            await adapter_of(engine).park(KV_ONLY, CALL_SECONDS)
        assert await state(engine) is EngineState.RUNNING
        await answer(engine)


@pytest.mark.long
async def test_the_stale_prefix_cache_of_old_versions_is_emptied(tmp_path: Path) -> None:
    """Without the reset the answer would come from blocks that are gone (vllm-project/vllm#17103)."""
    with vllm(tmp_path, "0.14.1") as engine:
        golden = await answer(engine)
        httpx.post(f"{engine.url}/sleep", timeout=5)
        httpx.post(f"{engine.url}/wake_up", timeout=5)
        assert await answer(engine) != golden
        await cycle(engine, KEPT, **FRAGILE)
        assert await answer(engine) == golden


@pytest.mark.long
async def test_a_prefix_cache_that_is_not_emptied_is_no_wake(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        await adapter_of(engine).resume(KEPT, CALL_SECONDS)
        engine.set_faults("cache_not_reset")
        with pytest.raises(EngineRefused, match="prefix cache"):
            await adapter_of(engine).after_resume(KEPT, CALL_SECONDS)


@pytest.mark.long
async def test_a_worker_in_our_pools_parks_without_sleep_mode(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0", "--pool-worker", sleep_mode=False) as engine:
        assert (await adapter_of(engine).capabilities()).unsupported is None
        golden = await answer(engine)
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        assert engine.held_mib() == 0
        await adapter_of(engine).resume(KEPT, CALL_SECONDS)
        assert await answer(engine) == golden


# ---- requests ---------------------------------------------------------------------------------------------------


@contextmanager
def running_request(engine: Spawned) -> Iterator[list[dict[str, Any]]]:
    """A request that runs until it is aborted or the fault is taken away; then its choice is in the list."""
    engine.set_faults("long_answers")
    said: list[dict[str, Any]] = []

    def ask() -> None:
        body = {"model": "small", "prompt": "long", "max_tokens": 4}
        with contextlib.suppress(httpx.TransportError):
            said.append(httpx.post(f"{engine.url}/v1/completions", json=body, timeout=30).json()["choices"][0])

    client = threading.Thread(target=ask)
    client.start()
    metrics = f"{engine.url}/metrics"
    wait_until(lambda: 'model_name="small"} 1.0' in httpx.get(metrics).text, 5, "the request runs")
    try:
        yield said
    finally:
        engine.set_faults()
        client.join(10)


async def test_a_request_past_the_gate_is_not_cut_off_unless_the_policy_says_so(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine, running_request(engine) as said:
        with pytest.raises(EngineRefused, match="1 requests run in the engine that did not come through its gate"):
            await adapter_of(engine).park(KEPT, 0.2)
        assert await state(engine) is EngineState.RUNNING
        assert posts(engine) == []
        forced = EnginePolicy(on_drain_deadline="abort_requests")
        await adapter_of(engine).park(forced, CALL_SECONDS)
        await wait_until_async(lambda: said, 5, "the answer")
        assert (said[0]["text"], said[0]["finish_reason"]) == ("", "abort")  # answered 200, cut off
        assert posts(engine) == ["/sleep?level=1&mode=abort"]
        assert engine.held_mib() == 0


@pytest.mark.parametrize(("version", "flags"), [("0.14.1", ()), ("0.33.0", ("--no-mode",))])
async def test_requests_are_not_slept_under_where_nothing_can_abort_them(
    tmp_path: Path, version: str, flags: tuple[str, ...]
) -> None:
    """Before 0.17, and with vllm-project/vllm#53082, /sleep has no `mode`: it would end the engine."""
    forced = EnginePolicy(on_drain_deadline="abort_requests")
    with vllm(tmp_path, version, *flags) as engine, running_request(engine) as said:
        with pytest.raises(EngineRefused, match="1 requests run in the engine"):
            await adapter_of(engine, **FRAGILE).park(forced, 0.2)
        assert await state(engine) is EngineState.RUNNING
        assert posts(engine) == []
        engine.set_faults()
        await wait_until_async(lambda: said, 5, "the answer")
        assert said[0]["finish_reason"] == "length"
        await adapter_of(engine, **FRAGILE).park(forced, CALL_SECONDS)
        assert posts(engine)[-1] == "/sleep?level=1"
        assert engine.held_mib() == 0


NAN = 'vllm:num_requests_running{a="}"} NaN\nvllm:num_requests_waiting 0.0'
# With --disable-log-stats there are names at most.
NO_COUNT = "# TYPE vllm:num_requests_running gauge\nprocess_open_fds 12.0\n"


async def test_a_park_that_may_abort_needs_a_count_where_nothing_can_abort(tmp_path: Path) -> None:
    forced = EnginePolicy(on_drain_deadline="abort_requests")
    with vllm(tmp_path, "0.33.0", "--no-mode", "--metrics", NO_COUNT) as engine:
        with pytest.raises(EngineRefused, match=r"does not tell how many run.*abort_loan"):
            await adapter_of(engine).park(forced, CALL_SECONDS)
        assert posts(engine) == []
        await adapter_of(engine).park(KEPT, CALL_SECONDS)  # its gate has drained
        assert engine.held_mib() == 0


@pytest.mark.parametrize("sample", ['vllm:num_requests_running{a="b"} +Inf', "vllm:num_requests_waiting 1e999", NAN])
async def test_a_count_that_is_no_number_is_no_zero(tmp_path: Path, sample: str) -> None:
    with vllm(tmp_path, "0.33.0", "--metrics", f"{sample}\n") as engine:
        with pytest.raises(EngineRefused, match="are no numbers"):
            await adapter_of(engine).park(KEPT, CALL_SECONDS)
        assert posts(engine) == []


# ---- lies and deaths --------------------------------------------------------------------------------------------


async def test_a_sleep_that_fails_is_never_asked_for_again(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        engine.set_faults("sleep_500_freed")
        with pytest.raises(EngineRefused, match="500"):
            await adapter_of(engine).park(KEPT, CALL_SECONDS)
        seen = await adapter_of(engine).observe()
        assert seen.state is EngineState.FAILED  # it believes that it is awake, over memory that is gone
        assert "its /sleep failed" in seen.detail


async def test_a_sleep_without_an_answer_is_looked_at_and_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_module, "STATUS_SECONDS", 0.2)
    with vllm(tmp_path, "0.33.0") as engine:
        engine.set_faults("sleep_hangs")
        with pytest.raises(EngineTimedOut):
            await adapter_of(engine).park(KEPT, 1)
        assert await state(engine) is EngineState.UNREACHABLE  # /is_sleeping hangs too, /health is 200 (#45519)
        assert await adapter_of(engine).healthy()
        engine.set_faults()
        assert await state(engine) is EngineState.PARKING
        assert len(posts(engine)) == 1


@pytest.mark.long
async def test_a_core_that_dies_of_sleep_is_failed_though_the_answer_was_200(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        engine.set_faults("core_dies_on_sleep")
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        assert await state(engine) is EngineState.FAILED
        assert not await adapter_of(engine).healthy()


@pytest.mark.parametrize(("version", "then"), [("0.22.1", EngineState.FAILED), ("0.33.0", EngineState.PARKED)])
async def test_a_wake_without_room_is_asked_again_only_where_that_is_safe(
    tmp_path: Path, version: str, then: EngineState
) -> None:
    with vllm(tmp_path, version) as engine:
        golden = await answer(engine)
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        neighbour = Pool(HostDriver(engine.device))
        taken = neighbour.allocate(11 * MIB, "weights")
        with pytest.raises(EngineRefused, match="out of memory"):
            await adapter_of(engine).resume(KEPT, CALL_SECONDS)
        assert engine.held_mib() == 4  # the weights stay mapped (#34600)
        assert await state(engine) is then
        neighbour.free(taken)
        neighbour.close()
        if then is EngineState.PARKED:
            await adapter_of(engine).resume(KEPT, CALL_SECONDS)
            assert (engine.held_mib(), await answer(engine)) == (6, golden)
        else:
            with pytest.raises(EngineRefused, match="not asked for again"):
                await adapter_of(engine).resume(KEPT, CALL_SECONDS)
            assert posts(engine).count("/wake_up") == 1


@pytest.mark.long
async def test_an_engine_that_does_not_wake_with_room_is_failed_in_the_end(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        engine.set_faults("half_wake")
        for _ in range(3):
            assert await state(engine) is EngineState.PARKED
            with pytest.raises(EngineRefused):
                await adapter_of(engine).resume(KEPT, CALL_SECONDS)
        assert await state(engine) is EngineState.FAILED


@pytest.mark.long
async def test_a_wake_without_an_answer_is_waking_until_it_says_otherwise(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_module, "STATUS_SECONDS", 0.2)
    with vllm(tmp_path, "0.33.0") as engine:
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        engine.set_faults("wake_hangs")
        with pytest.raises(EngineTimedOut):
            await adapter_of(engine).resume(KEPT, 0.3)
        engine.set_faults()
        assert await state(engine) is EngineState.WAKING


@pytest.mark.long
async def test_a_reload_that_fails_is_a_failed_engine(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        await adapter_of(engine, **RELOADS).park(LOST, CALL_SECONDS)
        engine.set_faults("reload_fails")
        with pytest.raises(EngineRefused):
            await adapter_of(engine, **RELOADS).resume(LOST, CALL_SECONDS)
        assert await state(engine) is EngineState.FAILED


DONE = [["tags=weights"]]
MORE_DONE = [[], ["tags=weights", "reload"], ["tags=weights", "reload", ""]]


@pytest.mark.parametrize("done", [*DONE, *(pytest.param(done, marks=pytest.mark.long) for done in MORE_DONE)])
async def test_an_agent_that_dies_in_the_middle_of_the_reload_recipe_finishes_it(
    tmp_path: Path, done: list[str]
) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        golden = await answer(engine)
        await adapter_of(engine, **RELOADS).park(LOST, CALL_SECONDS)
        adapter_of(engine)._ledger.write(wake="sent")  # and then, before the agent died:
        for step in done:
            if step == "reload":
                httpx.post(f"{engine.url}/collective_rpc", json={"method": "reload_weights"}, timeout=5)
            else:
                httpx.post(f"{engine.url}/wake_up?{step}", timeout=5)
        if await state(engine, **RELOADS) is EngineState.PARKED:
            await adapter_of(engine, **RELOADS).resume(LOST, CALL_SECONDS)
        assert await state(engine, **RELOADS) is EngineState.RUNNING
        await adapter_of(engine, **RELOADS).after_resume(LOST, CALL_SECONDS)
        assert (engine.held_mib(), await answer(engine)) == (6, golden)


@pytest.mark.long
async def test_the_level_that_it_tells_itself_is_not_believed(tmp_path: Path) -> None:
    """sleep(2) on an engine that sleeps at level 1 answers level 2, with the weights still in host memory."""
    with vllm(tmp_path, "0.33.0") as engine:
        golden = await answer(engine)
        await adapter_of(engine).park(KEPT, CALL_SECONDS)
        reply = httpx.post(f"{engine.url}/sleep?level=2", timeout=5).json()
        assert reply == {"status": "sleeping", "level": 2}
        await adapter_of(engine).resume(LOST, CALL_SECONDS)
        assert "/collective_rpc" not in posts(engine)
        assert await answer(engine) == golden


@pytest.mark.long
async def test_an_engine_that_somebody_else_put_to_sleep_is_parked_and_can_be_woken(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        golden = await answer(engine)
        httpx.post(f"{engine.url}/sleep?level=1", timeout=5)
        seen = await adapter_of(engine).observe()
        assert (seen.state, set(seen.parked_tags)) == (EngineState.PARKED, {"model_weights", "kv_cache"})
        await adapter_of(engine).resume(KEPT, CALL_SECONDS)
        assert await answer(engine) == golden


@pytest.mark.long
async def test_ranks_that_disagree_are_a_failed_engine(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0") as engine:
        engine.set_faults("ranks_disagree")
        assert await state(engine) is EngineState.FAILED


@pytest.mark.long
async def test_what_the_operator_must_never_send_is_never_sent(tmp_path: Path) -> None:
    """/resume on a sleeping engine is accepted, and the next request ends it: so the adapter has no such call."""
    with vllm(tmp_path, "0.33.0") as engine:
        await cycle(engine, KEPT)
        assert "/resume" not in posts(engine)
        httpx.post(f"{engine.url}/sleep?level=1", timeout=5)
        assert httpx.post(f"{engine.url}/resume", timeout=5).status_code == 200
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{engine.url}/v1/completions", json={"model": "small", "prompt": "x"}, timeout=5)
        assert engine.wait_gone() == 1


# ---- what it can do ---------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_without_development_mode_it_serves_and_cannot_be_parked(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0", dev_mode=False) as engine:
        capabilities = await adapter_of(engine).capabilities()
        said = refusal(capabilities, KEPT)
        assert said is not None
        assert "start it with VLLM_SERVER_DEV_MODE=1" in said
        assert await state(engine) is EngineState.RUNNING
        with pytest.raises(EngineRefused, match="404"):
            await adapter_of(engine).park(KEPT, CALL_SECONDS)
        assert await state(engine) is EngineState.RUNNING


@pytest.mark.long
async def test_a_version_that_requests_kill_asleep_is_refused_unless_it_is_allowed(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.14.1") as engine:
        said = refusal(await adapter_of(engine).capabilities(), KEPT)
        assert said is not None
        assert "vLLM 0.14.1 cannot be parked" in said
        assert "#15483" in said
        allowed = await adapter_of(engine, **FRAGILE).capabilities()
        assert (refusal(allowed, KEPT), allowed.fragile is not None) == (None, True)
        await adapter_of(engine, **FRAGILE).park(KEPT, CALL_SECONDS)
        with pytest.raises(httpx.TransportError):
            httpx.post(f"{engine.url}/v1/completions", json={"model": "small", "prompt": "x"}, timeout=5)
        assert engine.wait_gone() == 1


@pytest.mark.long
async def test_an_attached_engines_flags_are_read_from_its_process(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.33.0", "--enable-lora") as engine:
        said = refusal(await adapter_of(engine, **RELOADS).capabilities(), LOST)
        assert said is not None
        assert (
            'the nearest policy that it can honour: restore_modes = { model_weights = "CPU", kv_cache = "NONE" }'
            in said
        )


async def test_the_canary_is_asked_of_every_adapter_as_one_may_be_lost(tmp_path: Path) -> None:
    loras = {"vllm": {"loras": ["french"]}}
    with vllm(tmp_path, "0.27.1", "--enable-lora", "--lora", "french") as engine:
        golden = await answer(engine, **loras)
        assert len(golden.text.splitlines()) == 2
        assert golden.token_ids is not None
        assert golden.token_logprobs is not None
        assert len(golden.token_ids) == len(golden.token_logprobs) == 2 * CANARY.tokens
        engine.set_faults("lora_dropped")
        await cycle(engine, KEPT, **loras)
        wrong = await answer(engine, **loras)
        assert wrong.text.splitlines()[0] == golden.text.splitlines()[0]  # the model alone would have passed
        assert wrong != golden


@pytest.mark.long
async def test_the_api_key_is_for_the_canary_alone(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("right\n")
    with vllm(tmp_path, "0.33.0", "--api-key", "right") as engine:
        await answer(engine, api_key_file=key)
        with pytest.raises(EngineAuthRefused, match="401"):
            await answer(engine)
        await cycle(engine, KEPT)  # control is not guarded by it


# ---- vllm-metal -------------------------------------------------------------------------------------------------


@pytest.mark.long
async def test_vllm_metal_frees_its_kv_cache(tmp_path: Path) -> None:
    with vllm(tmp_path, "0.20.0", "--metal", "--metal-sleep") as engine:
        metal = {"kind": "vllm-metal"}
        assert refusal(await adapter_of(engine, **metal).capabilities(), KV_ONLY) is None
        golden = await answer(engine, **metal)
        adapter = adapter_of(engine, **metal)
        await adapter.park(KV_ONLY, CALL_SECONDS)
        seen = await adapter_of(engine, **metal).observe()
        assert (seen.state, seen.parked_tags, engine.held_mib()) == (EngineState.PARKED, ("kv_cache",), 4)
        await adapter.resume(KV_ONLY, CALL_SECONDS)
        await adapter.after_resume(KV_ONLY, CALL_SECONDS)
        assert (engine.held_mib(), await answer(engine, **metal)) == (6, golden)


async def test_vllm_metal_that_ignores_sleep_is_unsupported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lull.agents.engines.vllm_metal._FALL_SECONDS_MAX", 0.2)
    with vllm(tmp_path, "0.20.0", "--metal") as engine:
        adapter = adapter_of(engine, kind="vllm-metal")
        with pytest.raises(EngineRefused, match="this version has no sleep"):
            await adapter.park(KV_ONLY, CALL_SECONDS)
        assert (await adapter.observe()).state is EngineState.RUNNING
        said = refusal(await adapter.capabilities(), KV_ONLY)
        assert said is not None
        assert "has no sleep" in said
