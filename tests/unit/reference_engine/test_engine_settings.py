from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.vmm.host_device import HostDevice
from lull.vmm.reference_engine.faults import Fault, parse_faults
from lull.vmm.reference_engine.settings import open_device, parse_bytes, parse_restore_modes, read_control_key
from lull.vmm.tags import RestoreMode
from tests.reference_engines import small_settings


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("1GiB", 1 << 30), ("1.5 MiB", 3 << 19), ("4096", 4096), ("7B", 7), (" 2KiB ", 2048), ("1TiB", 1 << 40)],
)
def test_sizes_are_read_with_binary_units(text: str, nbytes: int) -> None:
    assert parse_bytes(text, "--weights") == nbytes


@pytest.mark.parametrize("text", ["", "GiB", "1GB", "-1MiB", "1e9", "1,5GiB", "1 MiB 2", "½GiB"])
def test_a_bad_size_names_the_option(text: str) -> None:
    with pytest.raises(ValueError, match="--weights"):
        parse_bytes(text, "--weights")


def test_restore_modes_start_from_the_defaults() -> None:
    assert parse_restore_modes([]) == {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
    modes = parse_restore_modes(["model_weights=PINNED", "kv_cache=MEMSET"])
    assert modes == {"model_weights": RestoreMode.PINNED, "kv_cache": RestoreMode.MEMSET}


@pytest.mark.parametrize("text", ["weights=CPU", "kv_cache", "kv_cache=", "kv_cache=cpu", "=CPU"])
def test_a_bad_restore_mode_names_the_option(text: str) -> None:
    with pytest.raises(ValueError, match="--restore-mode"):
        parse_restore_modes([text])


def test_faults_may_be_counted() -> None:
    assert parse_faults(["hang-park", "die-parked=2"]) == {Fault.HANG_PARK: None, Fault.DIE_PARKED: 2}


@pytest.mark.parametrize("text", ["explode", "hang-park=", "hang-park=0", "hang-park=x", ""])
def test_a_bad_fault_names_the_option(text: str) -> None:
    with pytest.raises(ValueError, match="--fault"):
        parse_faults([text])


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": ""}, "--name"),
        ({"port": 65536}, "--port"),
        ({"kv_cache_bytes": 0}, "--kv-cache"),
        ({"seed": -1}, "--seed"),
        ({"threads": 0}, "--threads"),
        ({"token_delay_seconds": float("nan")}, "--token-delay"),
        ({"restore_modes": parse_restore_modes(["model_weights=NONE"])}, "would lose the weights"),
        ({"restore_modes": parse_restore_modes(["model_weights=MEMSET"])}, "would lose the weights"),
    ],
)
def test_bad_settings_name_the_option(tmp_path: Path, change: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        small_settings(tmp_path, **change)


def test_the_key_comes_from_the_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LULL_ENGINE_CONTROL_KEY", "from-environment")
    (tmp_path / "key").write_text("from-file\n")
    (tmp_path / "empty").write_text(" \n")
    assert read_control_key(tmp_path / "key") == b"from-file"
    assert read_control_key(None) == b"from-environment"
    with pytest.raises(ValueError, match="empty holds no key"):
        read_control_key(tmp_path / "empty")
    monkeypatch.delenv("LULL_ENGINE_CONTROL_KEY")
    with pytest.raises(ValueError, match="LULL_ENGINE_CONTROL_KEY holds no key"):
        read_control_key(None)


def test_the_device_comes_from_the_option_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, other = (HostDevice.create(tmp_path / name, capacity_bytes=1 << 20) for name in ("one", "other"))
    monkeypatch.setenv("LULL_HOST_DEVICE", str(other.path))
    assert open_device(one.path).uuid == one.uuid
    assert open_device(None).uuid == other.uuid
    for several in ("", f"{one.path}:{other.path}"):
        monkeypatch.setenv("LULL_HOST_DEVICE", several)
        with pytest.raises(ValueError, match="--device"):
            open_device(None)
