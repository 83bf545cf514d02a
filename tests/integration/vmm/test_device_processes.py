"""The host device between real processes: what the kernel says, beside what the ledger says."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from lull.vmm.driver import Access
from lull.vmm.errors import DriverError, OutOfDeviceMemory
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from tests.device_children import StartChild
from tests.memory import GRANULE_BYTES, mapped_memfds, memfd_bytes
from tests.waiting import wait_until


def shared_resident_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("RssShmem:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no RssShmem")


@pytest.fixture
def driver(device: HostDevice) -> HostDriver:
    return HostDriver(device, granularity_bytes=GRANULE_BYTES)


def test_pages_go_back_to_the_system_and_come_back_to_their_place(device: HostDevice, start_child: StartChild) -> None:
    child = start_child("""
import hashlib
runtime = Runtime(pool)
model = pool.allocate(16 * GRANULE_BYTES, "model")
cache = pool.allocate(8 * GRANULE_BYTES, "kv_cache")
ctypes.memmove(model.address, os.urandom(model.nbytes), model.nbytes)
ctypes.memset(cache.address, 1, cache.nbytes)
before = (model.address, hashlib.sha256(ctypes.string_at(model.address, model.nbytes)).digest())
for _ in range(2):
    say("running"); wait_for_parent()
    runtime.release(["model", "kv_cache"])
    say("parked"); wait_for_parent()
    runtime.resume()
say(before == (model.address, hashlib.sha256(ctypes.string_at(model.address, model.nbytes)).digest()))
wait_for_parent()
""")
    for _ in range(2):
        assert child.heard() == "running"
        assert memfd_bytes(child.pid, device.uuid) == 24 * GRANULE_BYTES
        assert mapped_memfds(child.pid, device.uuid) == 2
        assert device.free_bytes() == 40 * GRANULE_BYTES
        child.go_on()
        assert child.heard() == "parked"
        assert memfd_bytes(child.pid, device.uuid) == 0
        assert mapped_memfds(child.pid, device.uuid) == 0
        assert shared_resident_bytes(child.pid) == 0
        assert device.free_bytes() == device.capacity_bytes
        child.go_on()
    assert child.heard() == "True"
    assert shared_resident_bytes(child.pid) >= 16 * GRANULE_BYTES
    child.go_on()
    assert child.ended() == 0


def test_the_capacity_is_shared_and_a_killed_holder_frees_its_part(
    device: HostDevice, driver: HostDriver, start_child: StartChild
) -> None:
    child = start_child('driver.create(48 * GRANULE_BYTES); say("held"); wait_for_parent()')
    assert child.heard() == "held"
    assert device.free_bytes() == 16 * GRANULE_BYTES
    with pytest.raises(OutOfDeviceMemory) as caught:
        driver.create(17 * GRANULE_BYTES)
    assert caught.value.free_bytes == 16 * GRANULE_BYTES
    assert {process.pid for process in device.used_bytes_by_process()} == {child.pid}
    child.kill()
    assert device.free_bytes() == device.capacity_bytes
    driver.release(driver.create(device.capacity_bytes))


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("read of a parked address", 'pool.release(["model"]); say("go"); ctypes.string_at(model.address, 1)'),
        ("write to a parked address", 'pool.release(["model"]); say("go"); ctypes.memset(model.address, 1, 1)'),
        ("read of a freed address", 'pool.free(model); say("go"); ctypes.string_at(model.address, 1)'),
        (
            "write to immutable memory after its wake",
            'pool.release(["model"]); pool.resume(["model"]); ctypes.string_at(model.address, 1); say("go"); '
            "ctypes.memset(model.address, 1, 1)",
        ),
        (
            "use of device memory in a forked child",
            'pid = os.fork(); say("go") if pid else 0; ctypes.string_at(model.address, 1) if not pid else 0; '
            "os.kill(os.getpid(), os.WTERMSIG(os.waitpid(pid, 0)[1]))",
        ),
    ],
)
def test_touching_what_is_not_there_is_fatal(start_child: StartChild, name: str, code: str) -> None:
    child = start_child(f'pool = Pool(driver, immutable_tags={{"model"}}); model = pool.allocate(10, "model"); {code}')
    assert child.heard() == "go"
    assert child.ended() == -signal.SIGSEGV, name


def test_an_import_is_the_same_memory_and_charged_once(
    device: HostDevice, driver: HostDriver, start_child: StartChild
) -> None:
    handle = driver.create(4 * GRANULE_BYTES)
    address = driver.reserve(handle.nbytes)
    exported = driver.export_handle(handle)
    child = start_child(
        f"""
handle = driver.import_handle({exported}); os.close({exported})
address = driver.reserve(handle.nbytes)
driver.map(address, handle.nbytes, handle)
driver.set_access(address, handle.nbytes, Access.READ)
say(handle.key); wait_for_parent()
say(ctypes.string_at(address, 5).decode()); wait_for_parent()
ctypes.memset(address, 1, 1)
""",
        fds=(exported,),
    )
    os.close(exported)
    assert child.heard() == handle.key
    assert device.free_bytes() == 60 * GRANULE_BYTES
    used = {process.pid: nbytes for process, nbytes in device.used_bytes_by_process().items()}
    assert used == {os.getpid(): 4 * GRANULE_BYTES, child.pid: 4 * GRANULE_BYTES}
    driver.map(address, handle.nbytes, handle)
    driver.set_access(address, handle.nbytes, Access.READ_WRITE)
    ctypes.memmove(address, b"hello", 5)
    child.go_on()
    assert child.heard() == "hello"
    driver.unmap(address, handle.nbytes)
    driver.release(handle)
    # The reader keeps the memory, and it stays charged.
    assert device.free_bytes() == 60 * GRANULE_BYTES
    assert memfd_bytes(child.pid, device.uuid) == 4 * GRANULE_BYTES
    child.go_on()
    assert child.ended() == -signal.SIGSEGV  # it may only read
    assert device.free_bytes() == device.capacity_bytes


def test_only_memory_of_the_device_is_imported(tmp_path: Path, driver: HostDriver) -> None:
    other = HostDevice.create(tmp_path / "other", capacity_bytes=GRANULE_BYTES)
    other_driver = HostDriver(other, granularity_bytes=GRANULE_BYTES)
    exported = other_driver.export_handle(other_driver.create(GRANULE_BYTES))
    read_end, write_end = os.pipe()
    for fd in (exported, read_end):
        with pytest.raises(DriverError, match=f"is not memory of device {driver.device_uuid}"):
            driver.import_handle(fd)
    for fd in (exported, read_end, write_end):
        os.close(fd)


def test_a_forked_child_holds_nothing_and_is_told_so(device: HostDevice, start_child: StartChild) -> None:
    child = start_child("""
pool.allocate(4 * GRANULE_BYTES, "model")
pid = os.fork()
if pid == 0:
    held = [fd for fd in os.listdir("/proc/self/fd") if "memfd" in str(Path("/proc/self/fd", fd).resolve())]
    mapped = sum("memfd:lull" in line for line in open("/proc/self/maps"))
    try:
        driver.create(GRANULE_BYTES)
    except DriverError as error:
        say((held, mapped, str(error)))
    os._exit(0)
os.waitpid(pid, 0)
pool.release(["model"])
pool.resume(["model"])
say("parent")
""")
    assert child.heard() == str(([], 0, "create: the driver belongs to the process before the fork; make a new one"))
    assert child.heard() == "parent"
    assert child.ended() == 0


def test_the_processes_of_an_attempt_share_its_limit(device: HostDevice, start_child: StartChild) -> None:
    limit = {"LULL_ATTEMPT": "attempt-1", "LULL_HBM_BYTES": str(20 * GRANULE_BYTES)}
    first = start_child('driver.create(12 * GRANULE_BYTES); say("held"); wait_for_parent()', environment=limit)
    assert first.heard() == "held"
    code = """
for granules in (9, 8):
    try:
        driver.create(granules * GRANULE_BYTES); say("held")
    except OutOfDeviceMemory as error:
        say(error)
wait_for_parent()
"""
    second = start_child(code, environment=limit)
    assert "the limit of attempt-1" in second.heard()
    assert second.heard() == "held"
    other = start_child(code, environment={**limit, "LULL_ATTEMPT": "attempt-2"})
    assert [other.heard(), other.heard()] == ["held", "held"]
    for child in (first, second, other):
        child.go_on()
        assert child.ended() == 0


def test_a_limit_that_is_no_number_is_refused(device: HostDevice, start_child: StartChild) -> None:
    program = "from lull.vmm import HostDevice, HostDriver; HostDriver(HostDevice.from_environment()[0])"
    environment = {**os.environ, "LULL_HOST_DEVICE": str(device.path), "LULL_HBM_BYTES": "20GiB"}
    ended = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=30)
    assert "LULL_HBM_BYTES is '20GiB'; it must be a number of bytes" in ended.stderr


def test_many_processes_never_hold_more_than_there_is(device: HostDevice, start_child: StartChild) -> None:
    code = """
import random
refused = 0
random.seed(os.getpid())
for _ in range(20):
    held = []
    for _ in range(3):
        try:
            held.append(driver.create(random.randint(1, 24) * GRANULE_BYTES))
        except OutOfDeviceMemory:
            refused += 1
    for handle in held:
        driver.release(handle)
say(refused)
"""
    children = [start_child(code) for _ in range(4)]

    def all_ended() -> bool:
        assert sum({row.key: row.nbytes for row in device.charges()}.values()) <= device.capacity_bytes
        return all(child.process.poll() is not None for child in children)

    wait_until(all_ended, 60, "the end of all children")
    assert [child.ended() for child in children] == [0] * 4
    assert device.free_bytes() == device.capacity_bytes


def test_the_library_imports_nothing_of_others() -> None:
    program = """
import sys
before = set(sys.modules)
from lull.vmm import Pool, HostDriver, Runtime, control_app, sign
foreign = {name.partition(".")[0] for name in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"lull"}
print(sorted(name for name in foreign if not name.startswith("_")))
"""
    answer = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=30, check=True)
    assert answer.stdout == "[]\n"
