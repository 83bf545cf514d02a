"""KV offloading of the reference engine: what a park does to its tiers, and what they serve after the wake."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest

from lull.vmm import host_memory
from lull.vmm.errors import OutOfHostMemory
from lull.vmm.reference_engine.kv_offload import DiskTier, HostTier
from lull.vmm.reference_engine.settings import CudaDevice
from tests.reference_engines import MIB, LocalEngine, engine_process, local_engine, small_settings

PROMPT = "Lull lends what sleeps, and wakes it in time. " * 5  # 230 tokens: three whole blocks before the last
BLOCKS_TOKENS = 192


async def asked(engine: LocalEngine, prompt: str = PROMPT) -> tuple[Any, int]:
    """The answer, and how many tokens of the prompt were not computed."""
    reply = (await engine.complete(prompt=prompt)).json()
    return reply["choices"], reply["usage"]["prompt_tokens_details"]["cached_tokens"]


async def test_the_host_tier_serves_until_a_park_empties_it_and_its_memory_stays_held(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, kv_offload_host_bytes=4 * MIB)) as engine:
        tier = engine.engine.offload
        assert tier is not None
        assert tier.host is not None
        right, computed = await asked(engine)
        assert computed == 0
        assert await asked(engine) == (right, BLOCKS_TOKENS)
        await engine.park()
        assert len(tier.host) == 0
        assert tier.host.held_bytes == 4 * MIB
        await engine.wake()
        assert await asked(engine) == (right, 0), "it is computed anew, to the last bit"
        assert (await asked(engine))[1] == BLOCKS_TOKENS


async def test_the_disk_tier_keeps_its_blocks_over_a_park_and_over_the_engine(tmp_path: Path) -> None:
    settings = small_settings(tmp_path, kv_offload_dir=tmp_path / "kv", kv_offload_host_bytes=4 * MIB)
    async with local_engine(settings) as engine:
        right, _ = await asked(engine)
        await engine.park()
        await engine.wake()
        assert await asked(engine) == (right, BLOCKS_TOKENS)
        await engine.park("kv_cache")
        await engine.wake()
        assert await asked(engine) == (right, BLOCKS_TOKENS)
    async with local_engine(small_settings(tmp_path, kv_offload_dir=tmp_path / "kv")) as engine:
        assert await asked(engine) == (right, BLOCKS_TOKENS)
    async with local_engine(small_settings(tmp_path, kv_offload_dir=tmp_path / "kv", seed=1)) as engine:
        other, computed = await asked(engine)
        assert computed == 0, "blocks of other weights are of no use"
        assert other != right


async def test_prompts_share_what_they_begin_with(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, kv_offload_host_bytes=4 * MIB)) as engine:
        await asked(engine)
        assert (await asked(engine, PROMPT[:130] + "x" * 100))[1] == 128
        assert (await asked(engine, "x" + PROMPT))[1] == 0
        assert (await asked(engine, "short"))[1] == 0


async def test_a_block_that_is_torn_is_computed_again(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path, kv_offload_dir=tmp_path / "kv")) as engine:
        right, _ = await asked(engine)
        files = sorted((tmp_path / "kv").rglob("*.kv"))
        assert len(files) == 3
        for file, spoilt in zip(files, (b"", files[1].read_bytes()[:-1], b"\0" * files[2].stat().st_size), strict=True):
            file.write_bytes(spoilt)
        assert await asked(engine) == (right, 0)
        assert await asked(engine) == (right, BLOCKS_TOKENS)


async def test_an_engine_without_tiers_says_nothing_of_them(tmp_path: Path) -> None:
    async with local_engine(small_settings(tmp_path)) as engine:
        assert "prompt_tokens_details" not in (await engine.complete()).json()["usage"]


def test_the_disk_tier_holds_no_more_than_it_may(tmp_path: Path) -> None:
    names = [hashlib.sha256(bytes([number])).hexdigest() for number in range(4)]
    tier = DiskTier(tmp_path, 2 * (32 + 100), 100)
    for name in names[:2]:
        tier.put(name, bytes(100))
    assert tier.get(names[0]) == bytes(100)
    tier.put(names[2], bytes(100))
    assert [tier.get(name) is not None for name in names[:3]] == [True, False, True]
    (tmp_path / f"{names[3]}.draft").write_bytes(b"of a process that died")
    again = DiskTier(tmp_path, 32 + 100, 100)
    assert len(again) == len(list(tmp_path.iterdir())) == 1


def test_a_disk_that_takes_nothing_costs_blocks_and_no_answer(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = DiskTier(tmp_path / "kv", MIB, 100)
    name = "0" * 64

    def full(self: Path, content: bytes) -> int:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "write_bytes", full)
        for _ in range(2):
            tier.put(name, bytes(100))
    assert tier.get(name) is None
    assert caplog.text.count("takes nothing") == 1
    tier.put(name, bytes(100))
    assert tier.get(name) == bytes(100)


def test_sizes_that_hold_no_block_and_memory_that_is_not_there_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ValueError, match="--kv-offload-host is 99 bytes"):
        HostTier(99, 100)
    with pytest.raises(ValueError, match="--kv-offload-dir-size is 100 bytes"):
        DiskTier(tmp_path / "kv", 100, 100)
    monkeypatch.setattr(host_memory, "available_bytes", lambda: MIB)
    with pytest.raises(OutOfHostMemory, match="--kv-offload-host"):
        HostTier(4 * MIB, 100)


def anonymous_mib() -> float:
    """Private memory of this process, as every ledger of host memory sees it."""
    [line] = [one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("RssAnon")]
    return int(line.split()[1]) / 1024


def test_the_host_tiers_memory_is_held_from_the_start_and_still_when_it_is_empty() -> None:
    before_mib = anonymous_mib()
    tier = HostTier(64 * MIB, MIB)
    assert anonymous_mib() - before_mib > 60
    tier.put("0" * 64, bytes(MIB))
    tier.empty()
    assert tier.get("0" * 64) is None
    assert anonymous_mib() - before_mib > 60
    tier.close()
    assert anonymous_mib() - before_mib < 30


def test_the_host_tier_replaces_what_was_not_used_for_longest() -> None:
    tier = HostTier(2 * 100, 100)
    for name in ("a", "b"):
        tier.put(name, name.encode() * 100)
    assert tier.get("a") == b"a" * 100
    tier.put("c", b"c" * 100)
    assert [tier.get(name) is not None for name in "abc"] == [True, False, True]
    tier.close()


def test_tiers_are_of_the_host_device_and_their_sizes_make_sense(tmp_path: Path) -> None:
    changes: tuple[tuple[dict[str, Any], str], ...] = (
        ({"kv_offload_host_bytes": -1}, "--kv-offload-host"),
        ({"kv_offload_dir_bytes_max": 0}, "--kv-offload-dir-size"),
        ({"kv_offload_host_bytes": MIB, "device": CudaDevice("GPU-0")}, "for a host-memory device"),
    )
    for change, says in changes:
        with pytest.raises(ValueError, match=says):
            small_settings(tmp_path, **change)


async def test_the_command_line_says_it_all(tmp_path: Path) -> None:
    flags = ("--kv-offload-host", "4MiB", "--kv-offload-dir", str(tmp_path / "kv"), "--kv-offload-dir-size", "2MiB")
    with engine_process(tmp_path, *flags) as process:
        process.wait_listening()
        assert process.said["kv_offload_host_bytes"] == 4 * MIB
        async with process.client() as client:
            await client.complete(prompt=PROMPT)
            await client.park()
            await client.wake()
            usage = (await client.complete(prompt=PROMPT)).json()["usage"]
            assert usage["prompt_tokens_details"] == {"cached_tokens": BLOCKS_TOKENS}
