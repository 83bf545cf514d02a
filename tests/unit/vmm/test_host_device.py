from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from lull.vmm import host_device
from lull.vmm.errors import LedgerBusy, OutOfDeviceMemory
from lull.vmm.host_device import Charge, HostDevice, process_key
from lull.vmm.host_driver import HostDriver
from lull.vmm.host_ledger import boot_id


def own_charge(key: str, nbytes: int, owner: str | None = None) -> Charge:
    me = process_key(os.getpid())
    assert me is not None
    return Charge(key, me.pid, me.start_ticks, nbytes, owner)


def test_create_is_idempotent_and_keeps_the_uuid(tmp_path: Path) -> None:
    first = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    again = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    assert again.uuid == first.uuid == HostDevice.open(tmp_path / "d").uuid
    assert (again.kind, again.capacity_bytes) == ("discrete", 100)
    assert [path.name for path in (tmp_path / "d").iterdir()] == ["device.json"]
    assert (tmp_path / "d").stat().st_mode & 0o777 == 0o700


def test_makers_at_the_same_time_agree(tmp_path: Path) -> None:
    uuids: list[str] = []
    start = threading.Barrier(6)

    def make() -> None:
        start.wait(10)
        uuids.append(HostDevice.create(tmp_path / "d", capacity_bytes=100).uuid)

    threads = [threading.Thread(target=make) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(10)
    assert len(uuids) == 6
    assert len(set(uuids)) == 1


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"capacity_bytes": 200}, "remove the directory or ask for the same"),
        ({"capacity_bytes": 100, "kind": "unified"}, "remove the directory or ask for the same"),
        ({"capacity_bytes": 100, "uuid": "HOST-other"}, "remove the directory or ask for the same"),
        ({"capacity_bytes": 0}, "capacity_bytes is 0"),
        ({"capacity_bytes": 100, "kind": "odd"}, "kind is 'odd'"),
        ({"capacity_bytes": 100, "uuid": "a:b"}, "uuid is 'a:b'"),
    ],
)
def test_another_device_in_its_place_is_refused(tmp_path: Path, arguments: dict[str, object], text: str) -> None:
    HostDevice.create(tmp_path / "d", capacity_bytes=100, uuid="HOST-1")
    with pytest.raises(ValueError, match=text):
        HostDevice.create(tmp_path / "d", **arguments)  # type: ignore[arg-type]


def test_open_says_what_is_wrong(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="is not a host device"):
        HostDevice.open(tmp_path)
    (tmp_path / "device.json").write_text('{"uuid": "x"}')
    with pytest.raises(ValueError, match="does not describe a host device: 'kind'"):
        HostDevice.open(tmp_path)


def test_from_environment_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / name for name in "ba"]
    devices = [HostDevice.create(path, capacity_bytes=100) for path in paths]
    monkeypatch.setenv("LULL_HOST_DEVICE", ":".join(map(str, paths)))
    assert [device.uuid for device in HostDevice.from_environment()] == [device.uuid for device in devices]
    monkeypatch.delenv("LULL_HOST_DEVICE")
    assert HostDevice.from_environment() == []


def test_charges_beyond_the_capacity_are_refused_whole(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    device.charge(own_charge("a", 60), None)
    with pytest.raises(OutOfDeviceMemory) as caught:
        device.charge(own_charge("b", 41), None)
    assert (caught.value.requested_bytes, caught.value.free_bytes, caught.value.capacity_bytes) == (41, 40, 100)
    assert device.free_bytes() == 40
    device.charge(own_charge("b", 40), None)
    assert device.free_bytes() == 0
    assert device.used_bytes_by_process() == {process_key(os.getpid()): 100}


def test_one_key_is_charged_once(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    row = own_charge("a", 60)
    device.charge(row, None)
    device.charge(row, None)
    assert device.free_bytes() == 40
    device.discharge({"a"}, row.process)
    assert device.free_bytes() == 100


def test_an_owner_has_its_own_limit(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    device.charge(own_charge("engine", 10), None)
    device.charge(own_charge("a", 30, "job-1"), 50)
    with pytest.raises(OutOfDeviceMemory, match="the limit of job-1") as caught:
        device.charge(own_charge("b", 21, "job-1"), 50)
    assert caught.value.free_bytes == 20
    device.charge(own_charge("a", 30, "job-1"), 50)
    device.charge(own_charge("c", 21, "job-2"), 50)
    assert device.free_bytes() == 39


def test_rows_of_the_dead_and_of_reused_pids_count_for_nothing(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    me = process_key(os.getpid())
    assert me is not None
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    try:
        its = process_key(child.pid)
        assert its is not None
        device.charge(Charge("a", its.pid, its.start_ticks, 30, None), None)
        device.charge(Charge("b", me.pid, me.start_ticks - 1, 40, None), None)
        assert device.used_bytes_by_process() == {its: 30}
    finally:
        child.kill()
        # Not yet waited for: a zombie holds nothing either.
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert device.used_bytes_by_process() == {}
        child.communicate()
    assert device.free_bytes() == 100


def test_a_ledger_of_another_boot_is_empty(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    device.charge(own_charge("a", 60), None)
    ledger = tmp_path / "d" / "ledger"
    ledger.write_bytes(ledger.read_bytes().replace(boot_id().encode(), b"0" * len(boot_id())))
    assert device.free_bytes() == 100
    device.charge(own_charge("b", 70), None)
    assert HostDevice.open(tmp_path / "d").free_bytes() == 30


def test_reading_needs_no_lock_and_writing_does_not_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    monkeypatch.setattr(host_device, "_LOCK_SECONDS_MAX", 0.05)
    with device._locked(1):
        assert device.free_bytes() == 100
        with pytest.raises(LedgerBusy, match=r"ledger\.lock was locked for 0\.05 s"):
            device.charge(own_charge("a", 60), None)
    device.charge(own_charge("a", 60), None)


def test_a_unified_device_has_no_more_than_the_host(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=1 << 60, kind="unified")
    assert device.free_bytes() < 1 << 50


def test_process_key_of_nobody() -> None:
    assert process_key((1 << 22) + 1) is None


@pytest.mark.parametrize("capacity_bytes", [0, -1, 1.5, "9", True, 1 << 70])
def test_a_capacity_is_a_whole_number_of_bytes(tmp_path: Path, capacity_bytes: Any) -> None:
    with pytest.raises(ValueError, match=r"capacity_bytes is .* must be a whole number"):
        HostDevice.create(tmp_path / "d", capacity_bytes=capacity_bytes)
    assert not (tmp_path / "d").exists()


def test_the_path_of_a_device_may_be_text(tmp_path: Path) -> None:
    text: Any = str(tmp_path / "d")
    made = HostDevice.create(text, capacity_bytes=100)
    assert HostDevice.open(text).uuid == made.uuid
    nothing: Any = None
    for call in (HostDevice.open, lambda path: HostDevice.create(path, capacity_bytes=100)):
        with pytest.raises(TypeError, match="path is None"):
            call(nothing)


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("page_threads", -3),
        ("page_threads", 0),
        ("owner_bytes_max", -1),
        ("owner_bytes_max", 1.5),
        ("granularity_bytes", 0),
        ("granularity_bytes", "4096"),
    ],
)
def test_a_driver_names_the_setting_that_is_wrong(tmp_path: Path, setting: str, value: Any) -> None:
    device = HostDevice.create(tmp_path / "d", capacity_bytes=100)
    settings: dict[str, Any] = {setting: value}
    with pytest.raises(ValueError, match=f"{setting} is"):
        HostDriver(device, **settings)


def test_a_driver_needs_a_device() -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match="device is None"):
        HostDriver(nothing)
