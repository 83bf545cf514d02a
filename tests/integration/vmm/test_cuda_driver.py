"""What only a CUDA driver has: contexts, streams, sticky errors, kinds of handles. On the fake driver."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from importlib import import_module
from types import SimpleNamespace

import pytest

from lull.vmm.cuda_calls import HandleType
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.driver import Access
from lull.vmm.errors import DeviceFailed, DriverError, OutOfDeviceMemory
from tests.driver_rigs import Mapped
from tests.fake_cuda.fixtures import NewFakeCuda
from tests.fake_cuda.library import GRANULE_BYTES, FakeCuda

ILLEGAL_ADDRESS = 700
NOT_PERMITTED = 800
WAIT_SECONDS_MAX = 30


@pytest.fixture
def driver(fake_cuda: FakeCuda) -> CudaDriver:
    return CudaDriver(CudaDriver.devices()[0])


def mapped(driver: CudaDriver, granules: int = 1) -> Mapped:
    nbytes = granules * GRANULE_BYTES
    memory = Mapped(driver, driver.reserve(nbytes), nbytes, driver.create(nbytes))
    driver.map(memory.address, nbytes, memory.handle)
    driver.set_access(memory.address, nbytes, Access.READ_WRITE)
    return memory


def binding() -> SimpleNamespace:
    """cuda-python, for what an engine does beside us."""
    cuda = import_module("cuda.bindings.driver")
    return SimpleNamespace(
        current=lambda: int(cuda.cuCtxGetCurrent()[1]),
        retain=lambda ordinal: cuda.cuDevicePrimaryCtxRetain(ordinal)[1],
        set_current=lambda context: cuda.cuCtxSetCurrent(context),
    )


def test_devices_are_found_by_the_uuid_that_nvidia_smi_shows(new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(devices=2)
    uuids = CudaDriver.devices()
    assert uuids == [f"GPU-66616b65-2d67-7075-0000-00000000000{ordinal}" for ordinal in range(2)]
    drivers = [CudaDriver(uuid) for uuid in uuids]
    assert [driver.device_uuid for driver in drivers] == uuids
    handle = drivers[1].create(GRANULE_BYTES)
    assert [driver.capacity_bytes - driver.free_bytes() for driver in drivers] == [0, GRANULE_BYTES]
    drivers[1].release(handle)
    with pytest.raises(DriverError, match=f"this process sees {uuids[0]}, {uuids[1]}"):
        CudaDriver("GPU-00000000-0000-0000-0000-000000000000")


def test_a_machine_without_a_device_has_an_empty_list(new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(devices=0)
    assert CudaDriver.devices() == []
    with pytest.raises(DriverError, match="this process sees no device"):
        CudaDriver("GPU-0")


def test_a_machine_without_a_driver_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(flags: int) -> object:
        raise RuntimeError("libcuda.so.1 was not found")

    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", SimpleNamespace(cuInit=missing))
    with pytest.raises(DriverError, match=r"libcuda.so.1 was not found; is NVIDIA's driver installed"):
        CudaDriver.devices()
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    with pytest.raises(DriverError, match="cuda-python is not installed"):
        CudaDriver.devices()


def test_a_driver_that_does_not_start_is_an_error(fake_cuda: FakeCuda) -> None:
    code = "from lull.vmm.cuda_driver import CudaDriver; CudaDriver.devices()"
    environment = {**os.environ, "FAKE_CUDA_FAIL": "cuInit:1:803"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert "DriverError" in ended.stderr or "CudaError" in ended.stderr
    assert "cuInit answered CUDA_ERROR_SYSTEM_DRIVER_MISMATCH (803)" in ended.stderr


def test_the_library_needs_no_cuda_until_it_is_used() -> None:
    code = "import lull.vmm, lull.vmm.cuda_driver, sys; assert 'cuda.bindings.driver' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_owning_memory_for_others_needs_no_context(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    handle = driver.create(2 * GRANULE_BYTES)
    fd = driver.export_handle(handle)
    driver.release(handle)
    imported = driver.import_handle(fd, handle)
    os.close(fd)
    with pytest.raises(OutOfDeviceMemory):
        driver.create(driver.capacity_bytes)
    driver.release(imported)
    assert fake_cuda.live("contexts") == 0
    assert driver.free_bytes() == driver.capacity_bytes
    assert fake_cuda.live("contexts") == 1
    driver.close()
    assert fake_cuda.live("contexts") == 0


def test_the_thread_keeps_the_context_that_it_had(new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(devices=2)
    engine = binding()
    drivers = [CudaDriver(uuid) for uuid in CudaDriver.devices()]
    assert engine.current() == 0
    memory = mapped(drivers[1])
    assert engine.current() == 0
    own = engine.retain(0)
    engine.set_current(own)
    try:
        drivers[1].set(memory.address, 3, memory.nbytes)
        assert memory.read(2) == b"\x03\x03"
        with pytest.raises(DriverError):
            drivers[1].unpin_host(memory.address, memory.nbytes)
        assert engine.current() == int(own)
        mapped(drivers[0])
        assert engine.current() == int(own)
    finally:
        engine.set_current(0)


def test_a_lane_copies_while_its_thread_and_others_go_on(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    memory = mapped(driver)
    lane = driver.open_lane()
    back = ctypes.create_string_buffer(4)
    ended = threading.Event()

    def wait() -> None:
        lane.synchronize()
        ended.set()

    waiting = threading.Thread(target=wait)
    with fake_cuda.held_streams():
        lane.set(memory.address, 5, 4)
        lane.copy(ctypes.addressof(back), memory.address, 4)
        # If the wait held the GIL, this thread could never let the streams go.
        waiting.start()
        assert not ended.wait(0.05)
        assert back.raw == b"\0\0\0\0"
    assert ended.wait(WAIT_SECONDS_MAX)
    waiting.join()
    assert back.raw == b"\x05" * 4
    lane.close()
    assert fake_cuda.live("streams") == fake_cuda.live("events") == 0


def test_what_went_wrong_in_a_lane_is_told_when_it_is_awaited(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    memory = mapped(driver)
    lane = driver.open_lane()
    fake_cuda.fail("stream:copy", 214)
    lane.copy(memory.address, memory.address, 1)
    with pytest.raises(DeviceFailed, match=r"CUDA_ERROR_ECC_UNCORRECTABLE \(214\); only a new process"):
        lane.synchronize()
    assert driver.failed is not None
    lane.close()
    for call in (driver.free_bytes, driver.synchronize, lambda: driver.release(memory.handle), driver.open_lane):
        with pytest.raises(DeviceFailed, match="ECC_UNCORRECTABLE"):
            call()


def test_a_copy_to_parked_memory_loses_the_device_and_not_the_process(driver: CudaDriver) -> None:
    memory = mapped(driver)
    memory.unmap_and_release()
    with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS"):
        memory.write(b"lost")
    assert driver.failed is not None


def test_memory_unmapped_under_a_copy_loses_the_device(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    """That the fake catches a missing synchronisation."""
    memory = mapped(driver)
    lane = driver.open_lane()
    with fake_cuda.held_streams():
        lane.set(memory.address, 1, memory.nbytes)
        memory.unmap_and_release()
    with pytest.raises(DeviceFailed, match="ILLEGAL_ADDRESS"):
        lane.synchronize()


def test_a_lane_that_cannot_be_made_leaves_nothing(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    fake_cuda.fail("cuEventCreate", 2)
    with pytest.raises(OutOfDeviceMemory):
        driver.open_lane()
    assert fake_cuda.live("streams") == fake_cuda.live("events") == 0


def test_a_lane_that_does_not_close_can_be_asked_again(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    lane = driver.open_lane()
    for function in ("cuEventSynchronize", "cuEventDestroy", "cuStreamDestroy"):
        fake_cuda.fail(function, 1)
        with pytest.raises(DriverError):
            lane.close()
    lane.close()
    assert fake_cuda.live("streams") == fake_cuda.live("events") == 0


@pytest.mark.parametrize(
    ("export", "fabric", "handle_type"),
    [
        ("fd", False, HandleType.POSIX_FD),
        ("fd", True, HandleType.POSIX_FD),
        ("fd,fabric", False, HandleType.POSIX_FD),
        ("fd,fabric", True, HandleType.FABRIC),
        ("fabric", False, HandleType.FABRIC),
        ("none", True, HandleType.PLAIN),
    ],
)
def test_handles_are_what_the_device_can_do(
    new_fake_cuda: NewFakeCuda, export: str, fabric: bool, handle_type: HandleType
) -> None:
    new_fake_cuda(export=export)
    driver = CudaDriver(CudaDriver.devices()[0], fabric=fabric)
    handle = driver.create(GRANULE_BYTES)
    assert driver.handle_type is handle_type
    if handle_type is HandleType.POSIX_FD:
        os.close(driver.export_handle(handle))
    else:
        with pytest.raises(DriverError, match=f"is a {handle_type.name} handle"):
            driver.export_handle(handle)


def test_handles_that_are_forbidden_in_spite_of_the_attribute_are_not_asked_for_again(
    new_fake_cuda: NewFakeCuda,
) -> None:
    fake = new_fake_cuda(export="fd,fabric")
    driver = CudaDriver(CudaDriver.devices()[0], fabric=True)
    fake.fail("cuMemCreate", NOT_PERMITTED)
    for _ in range(2):
        driver.create(GRANULE_BYTES)
    assert driver.handle_type is HandleType.POSIX_FD
    assert fake.calls("cuMemCreate") == 3


@pytest.mark.parametrize(("rdma", "creates"), [("promised,given", 2), ("promised", 3), ("none", 2)])
def test_memory_is_for_rdma_where_that_is_allowed(
    new_fake_cuda: NewFakeCuda, monkeypatch: pytest.MonkeyPatch, rdma: str, creates: int
) -> None:
    fake = new_fake_cuda()
    monkeypatch.setenv("FAKE_CUDA_RDMA", rdma)
    driver = CudaDriver(CudaDriver.devices()[0])
    for _ in range(2):
        driver.create(GRANULE_BYTES)
    assert fake.calls("cuMemCreate") == creates
    assert driver.handle_type is HandleType.POSIX_FD  # which is no fault of the handles


def test_integrated_memory_is_unified(new_fake_cuda: NewFakeCuda) -> None:
    new_fake_cuda(integrated=True)
    assert CudaDriver(CudaDriver.devices()[0]).unified
    new_fake_cuda()
    assert not CudaDriver(CudaDriver.devices()[0]).unified


def test_host_memory_that_may_not_be_pinned_is_no_error(new_fake_cuda: NewFakeCuda) -> None:
    fake = new_fake_cuda(pin=False)
    driver = CudaDriver(CudaDriver.devices()[0])
    page = ctypes.create_string_buffer(4096)
    address = ctypes.addressof(page)
    assert driver.pin_host(address, 4096) is False
    new_fake_cuda()
    driver = CudaDriver(CudaDriver.devices()[0])
    fake.fail("cuMemHostRegister", 2)  # the driver's word for a memlock limit
    assert driver.pin_host(address, 4096) is False
    assert driver.pin_host(address, 4096) is True
    with pytest.raises(DriverError, match="ALREADY_REGISTERED"):
        driver.pin_host(address, 4096)
    driver.unpin_host(address, 4096)
    assert fake.live("registrations") == 0


def test_an_import_needs_the_exporters_handle(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    handle = driver.create(GRANULE_BYTES)
    fd = driver.export_handle(handle)
    with pytest.raises(DriverError, match="pass the exporter's Handle"):
        driver.import_handle(fd)
    driver.release(handle)
    fake_cuda.fail("cuMemImportFromShareableHandle", 1)
    with pytest.raises(DriverError):
        driver.import_handle(fd, handle)
    assert driver.import_handle(fd, handle) == handle
    os.close(fd)


def test_memory_that_others_made_is_taken_over_and_given_back(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    theirs = mapped(driver)
    native = driver.native_handle(theirs.handle)
    driver.disown(theirs.address, theirs.nbytes, theirs.handle)
    with pytest.raises(DriverError):
        driver.unmap(theirs.address, theirs.nbytes)
    handle = driver.adopt(theirs.address, theirs.nbytes, native)
    with pytest.raises(DriverError, match="known already"):
        driver.adopt(theirs.address, theirs.nbytes, native)
    Mapped(driver, theirs.address, theirs.nbytes, handle).give_back()
    driver.close()
    assert set(fake_cuda.everything_live().values()) == {0}


def test_the_context_is_kept_while_anything_is_in_use(driver: CudaDriver, fake_cuda: FakeCuda) -> None:
    memory = mapped(driver)
    memory.write(b"x")
    with pytest.raises(DriverError, match="1 ranges and 1 handles"):
        driver.close()
    memory.give_back()
    driver.close()
    assert set(fake_cuda.everything_live().values()) == {0}
    assert fake_cuda.live("contexts") == 0


def test_a_driver_that_a_forked_child_makes_says_why_it_cannot(driver: CudaDriver) -> None:
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            CudaDriver(driver.device_uuid)
        except DriverError as error:
            os.write(writing, str(error).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        assert "CUDA does not survive a fork" in pipe.read()
    os.waitpid(pid, 0)
