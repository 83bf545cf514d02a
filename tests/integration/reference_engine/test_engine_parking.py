"""The application without its process: park and wake over signed requests, and every fault that does not kill."""

from __future__ import annotations

import asyncio
from pathlib import Path

import httpx
import pytest

from lull.vmm.lifecycle import MemoryState
from lull.vmm.reference_engine.settings import parse_restore_modes
from tests.reference_engines import CANARY, MIB, LocalEngine, local_engine, small_settings
from tests.waiting import wait_until_async

PARKED_MESSAGE = "Cannot enqueue requests while executor admission is parked"


async def wait_in_flight(engine: LocalEngine, count: int) -> None:
    await wait_until_async(lambda: engine.engine.runtime.in_flight == count, 20, f"{count} requests in flight")


@pytest.mark.parametrize(
    ("mode", "immutable"), [("CPU", False), ("PINNED", False), ("CPU", True)], ids=["cpu", "pinned", "immutable"]
)
async def test_answers_and_addresses_are_the_same_after_parks(tmp_path: Path, mode: str, immutable: bool) -> None:
    modes = parse_restore_modes([f"model_weights={mode}"])
    async with local_engine(small_settings(tmp_path, restore_modes=modes, immutable=immutable)) as engine:
        right = await engine.answer()
        addresses = (await engine.http.get("/lull/addresses")).json()
        for _ in range(2):
            assert engine.device_bytes() == 4 * MIB
            assert (await engine.park()).json() == {"status": "success"}
            assert engine.device_bytes() == 0
            assert (await engine.http.get("/lull/addresses")).json() == addresses
            assert (await engine.wake()).json() == {"status": "success"}
            assert await engine.answer() == right
        assert (await engine.http.get("/lull/addresses")).json() == addresses


async def test_the_kv_cache_alone_may_be_parked_and_is_not_missed(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        right = await engine.answer()
        assert (await engine.park("kv_cache")).status_code == 200
        assert engine.device_bytes() == 2 * MIB
        assert (await engine.signed("GET", "/memory_status")).json() == {"state": "parked", "parked_tags": ["kv_cache"]}
        assert (await engine.complete()).status_code == 400
        await engine.wake()
        assert await engine.answer() == right


async def test_what_comes_while_parked_is_refused_and_witnessed(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        await engine.answer()
        await engine.park()
        for path in ("/v1/completions", "/v1/chat/completions"):
            for stream in (False, True):
                body = {**CANARY, "logprobs": None, "messages": [{"role": "user", "content": "x"}], "stream": stream}
                reply = await engine.http.post(path, json=body)
                assert reply.status_code == 400
                assert reply.json() == {"error": {"message": PARKED_MESSAGE}}
        canary = await engine.http.post("/v1/completions", json=CANARY, headers={"x-lull-canary": "1"})
        assert canary.status_code == 400
        assert (await engine.http.get("/health")).status_code == 200
        assert (await engine.http.get("/v1/models")).json()["data"][0]["id"] == "small"
        await engine.wake()
        await engine.http.post("/v1/completions", json=CANARY, headers={"x-lull-canary": "1"})
        counts = engine.witness()
        assert (counts.requests, counts.canaries, counts.while_not_running, counts.served) == (5, 2, 5, 1)


async def test_a_park_waits_for_what_was_admitted_and_refuses_what_comes_later(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, token_delay_seconds=0.2)) as engine:
        right = await engine.answer(max_tokens=3)
        admitted = [asyncio.create_task(engine.answer(max_tokens=3)) for _ in range(2)]
        await wait_in_flight(engine, 2)
        park = asyncio.create_task(engine.park())
        await wait_until_async(lambda: engine.engine.runtime.status().state == "parking", 20, "the park beginning")
        late = await engine.complete()
        assert late.status_code == 400
        assert late.json()["error"]["message"].endswith("is parking")
        assert (await park).status_code == 200
        assert [await answer for answer in admitted] == [right, right]
        assert engine.device_bytes() == 0


async def test_bad_requests_have_openais_errors_and_are_witnessed(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        refused = await engine.complete(prompt=7)
        assert refused.status_code == 400
        assert refused.json()["error"].keys() == {"message", "type", "param", "code"}
        assert refused.json()["error"]["param"] == "prompt"
        assert (await engine.complete(model="other")).status_code == 404
        big = await engine.http.post("/v1/completions", content=b"x" * (MIB + 1))
        assert big.status_code == 413
        assert (await engine.http.get("/v1/completions")).status_code == 405
        assert (await engine.http.post("/v1/embeddings")).json()["error"]["message"] == "Not Found"
        counts = engine.witness()
        assert (counts.requests, counts.served) == (3, 0)


async def test_control_needs_the_key(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        assert (await engine.http.post("/release_memory")).status_code == 401
        assert await engine.state() == "running"


async def test_addresses_are_shown_to_this_machine_only(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        transport = httpx.ASGITransport(engine.http._transport.app, client=("192.0.2.1", 1))  # type: ignore[attr-defined]
        async with httpx.AsyncClient(transport=transport, base_url="http://engine") as stranger:
            assert (await stranger.get("/lull/addresses")).status_code == 404
            assert (await stranger.get("/health")).status_code == 200


async def test_keep_memory_says_parked_and_keeps_it(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, faults=["keep-memory=1"])) as engine:
        right = await engine.answer()
        assert (await engine.park()).status_code == 200
        assert await engine.state() == "parked"
        assert engine.device_bytes() == 4 * MIB
        await engine.wake()
        assert await engine.answer() == right
        await engine.park()
        assert engine.device_bytes() == 0  # once only


@pytest.mark.parametrize("fault", ["lose-weights", "overwrite-block", "wrong-after-wake"])
async def test_a_wrong_answer_after_the_wake(tmp_path: Path, fault: str) -> None:
    async with local_engine(small_settings(tmp_path, faults=[fault])) as engine:
        right = await engine.answer()
        await engine.park()
        assert engine.device_bytes() == 0
        assert (await engine.wake()).status_code == 200
        assert await engine.state() == "running"
        wrong = await engine.answer()
        assert wrong["token_ids"] != right["token_ids"]
        assert all(32 <= token <= 126 for token in wrong["token_ids"])
        assert await engine.answer() == wrong  # it lies the same way each time


async def test_a_fault_that_is_due_once_is_over_after_the_first_park(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, faults=["wrong-after-wake=1"])) as engine:
        right = await engine.answer()
        await engine.park()
        await engine.park()  # again: no park of its own
        await engine.wake()
        assert await engine.answer() != right
        await engine.park()
        await engine.wake()
        assert await engine.answer() == right


async def test_refuse_park_answers_409_and_changes_nothing(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, faults=["refuse-park=1"])) as engine:
        refused = await engine.park()
        assert refused.status_code == 409
        assert "admission transition" in refused.json()["error"]["message"]
        assert await engine.state() == "running"
        await engine.answer()
        assert (await engine.park()).status_code == 200


@pytest.mark.parametrize(("fault", "state"), [("hang-park", MemoryState.PARKING), ("hang-wake", MemoryState.WAKING)])
async def test_a_hang_stays_between_two_states(tmp_path: Path, fault: str, state: MemoryState) -> None:
    async with local_engine(small_settings(tmp_path, faults=[fault])) as engine:
        runtime = engine.engine.runtime
        if state is MemoryState.WAKING:
            await engine.park()
        call = asyncio.create_task(engine.park() if state is MemoryState.PARKING else engine.wake())
        await wait_until_async(lambda: runtime.status().state is state, 20, f"the engine {state}")
        refused = await engine.complete()
        assert refused.status_code == 400
        assert (await engine.wake()).status_code == 409
        assert await engine.state() == state
        assert not call.done()
        runtime.stop()  # type: ignore[attr-defined]  # so that the process can end
        assert (await call).status_code == 409
