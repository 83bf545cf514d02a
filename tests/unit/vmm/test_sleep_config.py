from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from lull.vmm.errors import DrainTimeout, UnsupportedMode
from lull.vmm.host_driver import HostDriver
from lull.vmm.sleep_config import InvalidSleepConfig, SleepConfig
from lull.vmm.tags import RestoreMode
from tests.memory import GRANULE_BYTES, small_driver, write


def test_a_declaration_becomes_a_pool_and_a_runtime(driver: HostDriver) -> None:
    config = SleepConfig(
        restore_modes={"kv_cache": "cpu", "sampler": RestoreMode.MEMSET},
        prefer_pinned=True,
        immutable_tags=["model"],
        drain_seconds_max=0,
    )
    pool = config.make_pool(driver)
    modes = {tag: pool.allocate(1, tag).mode for tag in ("kv_cache", "sampler", "model")}
    assert modes == {"kv_cache": RestoreMode.CPU, "sampler": RestoreMode.MEMSET, "model": RestoreMode.PINNED}
    runtime = config.make_runtime(pool)
    with runtime.step(), pytest.raises(DrainTimeout):
        runtime.release()
    runtime.release(["model"])
    runtime.resume()
    assert pool.is_sealed(pool.allocations("model")[0])
    pool.close()


def test_from_a_document() -> None:
    document = {
        "restore_modes": {"model": "PINNED"},
        "immutable_tags": ["model"],
        "verify_immutable": True,
        "release_host_after_wake": False,
        "require_locked": True,
        "prefer_pinned": None,
        "copy_threads": 4,
        "drain_seconds_max": 30,
    }
    config = SleepConfig.from_mapping(document)
    assert config == SleepConfig(
        restore_modes={"model": RestoreMode.PINNED},
        immutable_tags={"model"},
        verify_immutable=True,
        require_locked=True,
        copy_threads=4,
        drain_seconds_max=30,
    )
    assert SleepConfig.from_mapping({}) == SleepConfig()


@pytest.mark.parametrize(
    ("document", "text"),
    [
        ({"restore_mode": {}}, r"unknown field\(s\) restore_mode; expected some of restore_modes"),
        ({"restore_modes": {"kv_cache": "GPU"}}, "restore_modes.kv_cache is 'GPU'; expected one of CPU, PINNED"),
        ({"restore_modes": ["kv_cache"]}, "restore_modes is .* must be a mapping from tag to mode"),
        ({"restore_modes": {"kv_cache": None}}, "restore_modes is .* must be a mapping from tag to mode"),
        ({"restore_modes": {"KV": "CPU"}}, "restore_modes names 'KV'; a tag has lower-case"),
        ({"restore_modes": {"_no_capture_init_kv_cache": "CPU"}}, "used while an engine starts only"),
        ({"immutable_tags": "model"}, "immutable_tags is 'model'; it must be a list"),
        ({"immutable_tags": [1]}, "immutable_tags is .* must be a list"),
        ({"immutable_tags": ["kv_cache"]}, "kv_cache, whose mode NONE keeps no contents"),
        ({"immutable_tags": ["a"], "restore_modes": {"a": "MEMSET"}}, "a, whose mode MEMSET keeps no contents"),
        ({"copy_threads": 0}, "copy_threads is 0"),
        ({"copy_threads": True}, "copy_threads is True; it must be a whole number"),
        ({"drain_seconds_max": -1}, "drain_seconds_max is -1"),
        ({"drain_seconds_max": float("nan")}, "drain_seconds_max is nan"),
        ({"verify_immutable": 1}, "verify_immutable is 1; it must be true or false"),
        ({"prefer_pinned": "yes"}, "prefer_pinned is 'yes'; it must be true, false or nothing"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(document: dict[str, object], text: str) -> None:
    with pytest.raises(InvalidSleepConfig, match=text):
        SleepConfig.from_mapping(document)


def test_a_device_may_not_honour_it(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedMode, match="restore mode PINNED of tag model"):
        SleepConfig(restore_modes={"model": "PINNED"}).make_pool(small_driver(tmp_path / "unified", kind="unified"))


def test_a_kv_cache_can_be_kept(driver: HostDriver) -> None:
    pool = SleepConfig(restore_modes={"kv_cache": "PINNED"}).make_pool(driver)
    cache = pool.allocate(GRANULE_BYTES, "kv_cache")
    write(cache, b"a warm prefix")
    pool.release(["kv_cache"])
    pool.resume(["kv_cache"])
    assert bytes(pool.backup_views("kv_cache")[0][:13]) == b"a warm prefix"
    pool.close()


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"restore_modes": None}, "restore_modes is None; it must be a mapping"),
        ({"restore_modes": {"a": 5}}, "restore_modes is .* must be a mapping"),
        ({"immutable_tags": "w"}, "immutable_tags is 'w'; it must be a list"),
        ({"copy_threads": "2"}, "copy_threads is '2'; it must be a whole number"),
        ({"drain_seconds_max": "9"}, "drain_seconds_max is '9'; it must be a number"),
    ],
)
def test_fields_are_checked_however_it_is_made(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(InvalidSleepConfig, match=text):
        SleepConfig(**fields)


def test_a_document_is_a_mapping() -> None:
    with pytest.raises(InvalidSleepConfig, match=r"the document is \[\]; it must be a mapping"):
        SleepConfig.from_mapping(cast("Any", []))
