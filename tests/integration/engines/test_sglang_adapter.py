"""The SGLang adapter against a server that dies of every call in the wrong state, as SGLang does."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.agents.engines import sglang
from lull.agents.engines.base import Observation
from lull.agents.engines.ledger import Ledger
from lull.agents.engines.sglang import SglangAdapter
from lull.agents.errors import EngineAuthRefused, EngineRefused, EngineTimedOut, EngineUnreachable
from lull.agents.protocol.capabilities import refusal
from lull.agents.protocol.policy import CanaryPolicy, EnginePolicy
from lull.agents.protocol.wire import EngineState
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.engines.spawned import Spawned, spawned
from tests.waiting import wait_until, wait_until_async

KEPT = ("--enable-memory-saver", "--enable-weights-cpu-backup")
POLICY = EnginePolicy()
RELOADED = EnginePolicy(restore_modes={"model_weights": RestoreMode.NONE, "kv_cache": RestoreMode.NONE})
CANARY = CanaryPolicy(deadline_seconds=5)
CALL_SECONDS = 5.0
RELEASE = "POST /release_memory_occupation"


def adapter_of(engine: Spawned, **keys: Path) -> SglangAdapter:
    """A new one every time, as after a restart of the agent: all it knows is in the ledger."""
    ledger = Ledger(engine.root / "ledger.json", lambda: engine.incarnation)
    return SglangAdapter(engine.url, "small", ledger, engine, **keys)


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Spawned]:
    with spawned(tmp_path, "sglang_server.py", *KEPT, health="/ready") as started:
        yield started


async def text(engine: Spawned) -> str:
    return (await adapter_of(engine).answer(CANARY)).text


async def settled(engine: Spawned, *states: EngineState) -> Observation:
    async def look() -> Observation | None:
        seen = await adapter_of(engine).observe()
        return seen if seen.state in states else None

    seen = await wait_until_async(look, 10, f"one of {states}")
    assert seen is not None
    return seen


@pytest.mark.parametrize(
    ("ranks", "registers", "left_mib"), [("1", None, 0), ("2", "0", 0), ("2", None, 2)], ids=["one", "two", "hangs"]
)
async def test_graphs_go_with_the_weights_where_the_server_saves_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ranks: str, registers: str | None, left_mib: int
) -> None:
    """Between ranks only with NCCL_GRAPH_REGISTER=0: a graph would hang after the wake (torch_memory_saver#88)."""
    monkeypatch.setenv("SGLANG_MEMORY_SAVER_CUDA_GRAPH", "1")
    if registers is not None:
        monkeypatch.setenv("NCCL_GRAPH_REGISTER", registers)
    with spawned(tmp_path, "sglang_server.py", *KEPT, "--graphs", "--tp-size", ranks, health="/ready") as engine:
        golden = await text(engine)
        await adapter_of(engine).park(POLICY, CALL_SECONDS)
        assert engine.held_mib() == left_mib
        await adapter_of(engine).resume(POLICY, CALL_SECONDS)
        await adapter_of(engine).after_resume(POLICY, CALL_SECONDS)
        assert (engine.held_mib(), await text(engine)) == (8, golden)
        assert engine.calls().count(RELEASE) == 1


async def test_parks_with_one_release_and_wakes_with_the_same_answer(engine: Spawned) -> None:
    golden = await text(engine)
    await adapter_of(engine).park(POLICY, CALL_SECONDS)
    assert engine.held_mib() == 2  # the CUDA graphs stay
    seen = await adapter_of(engine).observe()
    assert (seen.state, set(seen.parked_tags)) == (EngineState.PARKED, {"model_weights", "kv_cache"})
    await adapter_of(engine).resume(POLICY, CALL_SECONDS)
    assert (await adapter_of(engine).observe()).state is EngineState.RUNNING
    await adapter_of(engine).after_resume(POLICY, CALL_SECONDS)
    assert (engine.held_mib(), await text(engine)) == (8, golden)
    posts = [call.removeprefix("POST /") for call in engine.calls() if call.startswith("POST")]
    assert posts == [
        "v1/completions",
        *("pause_generation", "flush_cache", "release_memory_occupation"),
        *("resume_memory_occupation", "resume_memory_occupation"),
        *("flush_cache", "continue_generation", "v1/completions"),
    ]
    assert "GET /health" not in engine.calls()  # it generates


async def test_weights_without_backup_come_from_disk_before_the_kv_cache(tmp_path: Path) -> None:
    with spawned(tmp_path, "sglang_server.py", "--enable-memory-saver", health="/ready") as engine:
        golden = await text(engine)
        able = await adapter_of(engine).capabilities()
        assert "restore_modes = " in (refusal(able, POLICY) or "")
        assert refusal(able, RELOADED) is None
        await adapter_of(engine).park(RELOADED, CALL_SECONDS)
        await adapter_of(engine).resume(RELOADED, CALL_SECONDS)
        await adapter_of(engine).after_resume(RELOADED, CALL_SECONDS)
        assert await text(engine) == golden
        calls = engine.calls()
        resumes = [at for at, call in enumerate(calls) if call == "POST /resume_memory_occupation"]
        assert resumes[0] < calls.index("POST /update_weights_from_disk") < resumes[1]


async def test_a_draft_without_a_backup_is_loaded_again(tmp_path: Path) -> None:
    """Lost silently otherwise: the answers stay right and the accept length falls (sgl-project/sglang#31674)."""
    with spawned(tmp_path, "sglang_server.py", *KEPT, "--speculative-algorithm", "EAGLE", health="/ready") as engine:
        golden = await text(engine)
        assert (await adapter_of(engine).capabilities()).fragile is not None
        await adapter_of(engine).park(POLICY, CALL_SECONDS)
        await adapter_of(engine).resume(POLICY, CALL_SECONDS)
        await adapter_of(engine).after_resume(POLICY, CALL_SECONDS)
        assert engine.calls().count("POST /update_weights_from_disk") == 1
        assert await text(engine) == golden


async def test_a_reload_that_fails_keeps_the_engine_from_going_on(tmp_path: Path) -> None:
    with spawned(tmp_path, "sglang_server.py", "--enable-memory-saver", health="/ready") as engine:
        await adapter_of(engine).park(RELOADED, CALL_SECONDS)
        engine.set_faults("reload_fails")
        with pytest.raises(EngineRefused, match="Failed to get weights"):
            await adapter_of(engine).resume(RELOADED, CALL_SECONDS)
        # The weights' memory is back, the KV cache's is not: what is released is known, and asked for again alone.
        assert (await adapter_of(engine).observe()).parked_tags == ("kv_cache",)
        engine.set_faults()
        await adapter_of(engine).resume(RELOADED, CALL_SECONDS)
        await adapter_of(engine).after_resume(RELOADED, CALL_SECONDS)
        assert (await adapter_of(engine).observe()).state is EngineState.RUNNING


async def test_without_the_memory_saver_it_is_unsupported(tmp_path: Path) -> None:
    with spawned(tmp_path, "sglang_server.py", health="/ready") as engine:
        able = await adapter_of(engine).capabilities()
        assert "--enable-memory-saver" in (able.unsupported or "")


async def test_a_second_park_is_refused_here_and_never_sent(engine: Spawned) -> None:
    await adapter_of(engine).park(POLICY, CALL_SECONDS)
    with pytest.raises(EngineRefused, match="before"):
        await adapter_of(engine).park(POLICY, CALL_SECONDS)
    assert engine.calls().count(RELEASE) == 1
    assert engine.incarnation is not None


async def test_an_engine_that_does_not_get_idle_is_not_asked_to_release(engine: Spawned) -> None:
    engine.set_faults("never_idle")
    with pytest.raises(EngineRefused, match="requests still run"):
        await adapter_of(engine).park(POLICY, 0.6)
    assert RELEASE not in engine.calls()
    assert (await adapter_of(engine).observe()).state is EngineState.RUNNING
    engine.set_faults()
    assert await text(engine)  # it was let go on


async def test_a_lost_answer_to_the_release_is_read_from_the_bytes(engine: Spawned) -> None:
    engine.set_faults("release_answer_lost")
    with pytest.raises(EngineTimedOut):
        await adapter_of(engine).park(POLICY, 0.3)
    assert (await settled(engine, EngineState.PARKED)).detail.startswith("by its bytes")
    engine.set_faults()
    await adapter_of(engine).resume(POLICY, CALL_SECONDS)
    await adapter_of(engine).after_resume(POLICY, CALL_SECONDS)
    assert (engine.calls().count(RELEASE), engine.held_mib()) == (1, 8)


async def test_a_release_that_was_never_sent_counts_as_not_done_after_a_while(
    engine: Spawned, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The agent ended between its ledger and the call."""
    monkeypatch.setattr(sglang, "_STILL_SECONDS", 0.1)
    await adapter_of(engine)._control("/pause_generation", {"mode": "abort"}, CALL_SECONDS)
    held = await engine.held_bytes()
    Ledger(engine.root / "ledger.json", lambda: engine.incarnation).write(
        state="releasing", tags=["weights", "kv_cache"], bytes=held, reload=None
    )
    one = adapter_of(engine)
    assert (await one.observe()).state is EngineState.PARKING

    async def running() -> bool:
        return (await one.observe()).state is EngineState.RUNNING

    await wait_until_async(running, 5, "it counts as not done")
    assert await text(engine)


async def test_while_the_scheduler_hangs_nothing_is_known(engine: Spawned, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sglang, "_STATUS_SECONDS", 0.2)
    engine.set_faults("release_hangs")
    with pytest.raises(EngineTimedOut):
        await adapter_of(engine).park(POLICY, 0.3)
    assert (await adapter_of(engine).observe()).state is EngineState.PARKING


async def test_a_lost_answer_to_a_resume_is_read_from_the_bytes(engine: Spawned) -> None:
    await adapter_of(engine).park(POLICY, CALL_SECONDS)
    engine.set_faults("resume_answer_lost")
    with pytest.raises(EngineTimedOut):
        await adapter_of(engine).resume(POLICY, 0.3)
    engine.set_faults()
    assert (await settled(engine, EngineState.PARKED)).parked_tags == ("kv_cache",)
    await adapter_of(engine).resume(POLICY, CALL_SECONDS)  # a resume of the weights again would end the server
    await adapter_of(engine).after_resume(POLICY, CALL_SECONDS)
    assert (await adapter_of(engine).observe()).state is EngineState.RUNNING


async def test_a_wrong_admin_key_changes_nothing(tmp_path: Path) -> None:
    right, wrong = tmp_path / "right", tmp_path / "wrong"
    right.write_text("admin\n")
    wrong.write_text("user\n")
    flags = (*KEPT, "--admin-api-key", "admin", "--api-key", "user")
    with spawned(tmp_path, "sglang_server.py", *flags, health="/ready") as engine:
        with pytest.raises(EngineAuthRefused):
            await adapter_of(engine, admin_key_file=wrong, api_key_file=wrong).park(POLICY, CALL_SECONDS)
        assert RELEASE not in engine.calls()
        one = adapter_of(engine, admin_key_file=right, api_key_file=wrong)
        assert (await one.observe()).state is EngineState.RUNNING
        await one.park(POLICY, CALL_SECONDS)
        assert (await one.observe()).state is EngineState.PARKED


async def test_a_resume_without_room_ends_the_server_and_the_ledger_with_it(engine: Spawned) -> None:
    """Why no wake is sent before there is room; what is left is a process that is gone."""
    await adapter_of(engine).park(POLICY, CALL_SECONDS)
    pool = Pool(HostDriver(engine.device))
    pool.allocate(12 << 20, "job")
    with pytest.raises((EngineTimedOut, EngineUnreachable)):
        await adapter_of(engine).resume(POLICY, CALL_SECONDS)
    assert engine.wait_gone() == 1
    assert (await adapter_of(engine).observe()).state is EngineState.UNREACHABLE
    pool.close()


async def test_the_ledger_of_another_process_counts_for_nothing(engine: Spawned) -> None:
    Ledger(engine.root / "ledger.json", lambda: "boot:1:1").write(state="released", tags=["weights"])
    assert (await adapter_of(engine).observe()).state is EngineState.RUNNING


async def test_a_pause_that_is_not_ours_is_not_taken_for_running(engine: Spawned) -> None:
    pause = ("/pause_generation", {"mode": "abort"}, CALL_SECONDS)
    await adapter_of(engine)._control(*pause)
    seen = await adapter_of(engine).observe()
    assert (seen.state, seen.is_held) == (EngineState.UNREACHABLE, False)  # as one that starts
    await adapter_of(engine)._control("/continue_generation", {}, CALL_SECONDS)
    assert (await adapter_of(engine).observe()).state is EngineState.RUNNING
    await adapter_of(engine)._control(*pause)
    seen = await adapter_of(engine).observe()
    assert (seen.state, seen.is_held, "continue_generation" in seen.detail) == (EngineState.UNREACHABLE, True, True)


@pytest.mark.parametrize("state", ["releasing", "resuming"])
async def test_one_that_ends_while_its_bytes_are_looked_at_is_unreachable(engine: Spawned, state: str) -> None:
    written = {"tags": ["weights", "kv_cache"], "calling": ["weights"], "bytes": {"0": 1}}
    Ledger(engine.root / "ledger.json", lambda: engine.incarnation).write(state=state, **written)
    ended = False

    class Ends:
        process = None

        @property
        def incarnation(self) -> str | None:
            return None if ended else engine.incarnation

        def pids(self) -> set[int]:
            return set()

        async def held_bytes(self) -> dict[str, int]:
            nonlocal ended
            ended = True
            return {}

    outside = Ends()
    ledger = Ledger(engine.root / "ledger.json", lambda: outside.incarnation)
    seen = await SglangAdapter(engine.url, "small", ledger, outside).observe()
    assert (seen.state, "ended while" in seen.detail) == (EngineState.UNREACHABLE, True)


async def test_a_late_free_shows_in_the_bytes_only(engine: Spawned) -> None:
    engine.set_faults("late_free")
    await adapter_of(engine).park(POLICY, CALL_SECONDS)
    assert (await adapter_of(engine).observe()).state is EngineState.PARKED
    wait_until(lambda: engine.held_mib() == 2, 5, "the memory free")
