"""The Driver of an NVIDIA device, through CUDA's virtual memory management.

Tables of what is reserved, mapped and held make misuse an error before the driver sees it. Changes are entered first
and taken back if the driver refuses, so no lock is held over a driver call. create, release, export_handle and
import_handle need no CUDA context; everything else retains the device's primary context at first use and leaves the
calling thread's current context as it was.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final
from uuid import uuid4

from .cuda_calls import OPERATING_SYSTEM, CudaCalls, CudaError, HandleType, device_uuids, is_refusal
from .driver import Access, Handle
from .errors import DriverError, LullMemoryError, OutOfDeviceMemory

_IDLE_LANES_MAX: Final = 8
_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Physical:
    handle: Handle
    native: int | None  # None while it is being imported
    type: HandleType = HandleType.POSIX_FD


@dataclass(slots=True)
class _Range:
    """A reserved range. Mappings are whole handles, anywhere inside it."""

    nbytes: int
    mapped: dict[int, int] = field(default_factory=dict[int, int])  # address -> bytes


class CudaDriver:
    """One process's use of one device."""

    def __init__(self, device_uuid: str, *, fabric: bool = False) -> None:
        """``device_uuid`` as in nvidia-smi ("GPU-..."). Handles can be exported as descriptors; with ``fabric`` as
        fabric handles where the machine has the fabric. What the device refuses is not asked for again:
        `handle_type` says what handles are. Raises DriverError where there is no such device, no driver, or no
        cuda-python."""
        self._calls = CudaCalls(device_uuid)
        if not self._calls.attribute("VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED"):
            raise DriverError("open", f"device {device_uuid} has no virtual memory management; it cannot be parked")
        self._unified = bool(self._calls.attribute("INTEGRATED"))
        self._rdma = bool(self._calls.attribute("GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED"))
        self._handle_types = _handle_types(self._calls, fabric)
        self._granularity_bytes = self._calls.granularity_bytes(self._handle_types[0])
        self._lock = threading.Lock()  # guards the tables below; never held over a driver call
        self._ranges: dict[int, _Range] = {}
        self._held: dict[str, _Physical] = {}
        self._idle_lanes: list[CudaLane] = []

    @staticmethod
    def devices() -> list[str]:
        """The uuids of the devices that this process sees. Raises DriverError without a driver or cuda-python."""
        return device_uuids()

    @property
    def device_uuid(self) -> str:
        return self._calls.device_uuid

    @property
    def unified(self) -> bool:
        return self._unified

    @property
    def prefers_pinned(self) -> bool:
        return not self.unified  # copies of pageable memory pass through the driver's own buffers: slower by far

    @property
    def capacity_bytes(self) -> int:
        return self._calls.capacity_bytes

    @property
    def failed(self) -> str | None:
        return self._calls.failed

    @property
    def handle_type(self) -> HandleType:
        """What the next create makes."""
        return self._handle_types[0]

    def granularity(self) -> int:
        return self._granularity_bytes

    def free_bytes(self) -> int:
        return self._calls.free_bytes()

    # -- addresses

    def reserve(self, nbytes: int) -> int:
        self._require_whole("reserve", nbytes)
        address = self._calls.reserve(nbytes, self._granularity_bytes)
        with self._lock:
            self._ranges[address] = _Range(nbytes)
        return address

    def reserve_at(self, address: int, nbytes: int) -> bool:
        """See `PlacingDriver`."""
        self._require_whole("reserve", nbytes)
        start = self._calls.reserve(nbytes, self._granularity_bytes, address)
        if start != address:
            self._calls.free_address(start, nbytes)
            return False
        with self._lock:
            self._ranges[address] = _Range(nbytes)
        return True

    def free_address(self, address: int, nbytes: int) -> None:
        with self._lock:
            reserved = self._ranges.get(address)
            if reserved is None or reserved.nbytes != nbytes:
                raise DriverError("free_address", f"{address:#x} with {nbytes} bytes is not a reserved range")
            if reserved.mapped:
                raise DriverError("free_address", f"{address:#x} is still mapped; unmap it first")
            del self._ranges[address]
        with self._putting_back(self._ranges, address, reserved):
            self._calls.free_address(address, nbytes)

    # -- memory

    def create(self, nbytes: int) -> Handle:
        self._require_whole("create", nbytes)
        native, handle_type = self._created(nbytes)
        handle = Handle(uuid4().hex, nbytes)
        with self._lock:
            self._held[handle.key] = _Physical(handle, native, handle_type)
        return handle

    def release(self, handle: Handle) -> None:
        """What is mapped stays usable until it is unmapped, and its bytes stay taken."""
        with self._lock:
            physical = self._require_held("release", handle)
            del self._held[handle.key]
        with self._putting_back(self._held, handle.key, physical):
            self._calls.release(self._native(physical))

    def export_handle(self, handle: Handle) -> int:
        """Raises DriverError where handles cannot be exported as descriptors (`handle_type`)."""
        with self._lock:
            physical = self._require_held("export_handle", handle)
            native = self._native(physical)
        if physical.type is not HandleType.POSIX_FD:
            raise DriverError("export_handle", f"{handle.key} is a {physical.type.name} handle; it has no descriptor")
        return self._calls.export_fd(native)

    def import_handle(self, fd: int, exported: Handle | None = None) -> Handle:
        if exported is None:
            raise DriverError("import_handle", "a CUDA descriptor tells no key and no size; pass the exporter's Handle")
        self._require_whole("import_handle", exported.nbytes)
        physical = _Physical(exported, None)
        with self._lock:
            if exported.key in self._held:
                raise DriverError("import_handle", f"{exported.key} is held by this process already")
            self._held[exported.key] = physical
        try:
            native = self._calls.import_fd(fd)
        except BaseException:
            with self._lock:
                del self._held[exported.key]
            raise
        with self._lock:
            physical.native = native
        return exported

    # -- mappings

    def map(self, address: int, nbytes: int, handle: Handle) -> None:
        with self._lock:
            native = self._native(self._require_held("map", handle))
            if handle.nbytes != nbytes:
                raise DriverError("map", f"the handle has {handle.nbytes} bytes, the range {nbytes}")
            reserved = self._require_room("map", address, nbytes)
            reserved.mapped[address] = nbytes
        try:
            self._calls.map(address, nbytes, native)
        except BaseException:
            with self._lock:
                del reserved.mapped[address]
            raise

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        with self._lock:
            self._require_mapped("set_access", address, nbytes)
        self._calls.set_access(address, nbytes, access)

    def unmap(self, address: int, nbytes: int) -> None:
        with self._lock:
            reserved = self._require_mapped("unmap", address, nbytes)
            del reserved.mapped[address]
        with self._putting_back(reserved.mapped, address, nbytes):
            self._calls.unmap(address, nbytes)

    def adopt(self, address: int, nbytes: int, native: int) -> Handle:
        """Enters memory that other code of this process reserved, created and mapped: its range, and its
        CUmemGenericAllocationHandle. From then on it is ours to unmap, release and free, until `disown`."""
        handle = Handle(uuid4().hex, nbytes)
        with self._lock:
            if self._range_around(address, nbytes) is not None:
                raise DriverError("adopt", f"{address:#x} is in a range that is known already")
            self._ranges[address] = _Range(nbytes, {address: nbytes})
            self._held[handle.key] = _Physical(handle, native)
        return handle

    def disown(self, address: int, nbytes: int, handle: Handle | None) -> None:
        """Forgets an adopted range, mapped or not, and its handle if it still has one. Calls no driver."""
        with self._lock:
            reserved = self._ranges.get(address)
            if reserved is None or reserved.nbytes != nbytes:
                raise DriverError("disown", f"{address:#x} with {nbytes} bytes is not a reserved range")
            if handle is not None:
                self._require_held("disown", handle)
                del self._held[handle.key]
            del self._ranges[address]

    def native_handle(self, handle: Handle) -> int:
        """The CUmemGenericAllocationHandle, for other code of this process."""
        with self._lock:
            return self._native(self._require_held("native_handle", handle))

    # -- copies

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        with self._borrowed_lane() as lane:
            lane.copy(destination, source, nbytes)
            lane.synchronize()

    def set(self, address: int, value: int, nbytes: int) -> None:
        with self._borrowed_lane() as lane:
            lane.set(address, value, nbytes)
            lane.synchronize()

    def synchronize(self) -> None:
        self._calls.synchronize()

    def open_lane(self) -> CudaLane:
        return CudaLane(self._calls)

    def pin_host(self, address: int, nbytes: int) -> bool:
        try:
            self._calls.register_host(address, nbytes)
        except (CudaError, OutOfDeviceMemory) as error:
            # Out of memory is the driver's word for a memlock limit, too.
            if isinstance(error, CudaError) and error.code != OPERATING_SYSTEM and not is_refusal(error):
                raise
            _log.info("device %s: %d bytes of host memory stay pageable: %s", self.device_uuid, nbytes, error)
            return False
        return True

    def unpin_host(self, address: int, nbytes: int) -> None:
        self._calls.unregister_host(address)

    def close(self) -> None:
        """Gives the context back. Raises DriverError while anything is reserved or held; it can be asked again."""
        with self._lock:
            if self._ranges or self._held:
                raise DriverError("close", f"{len(self._ranges)} ranges and {len(self._held)} handles are still in use")
        while self._idle_lanes:
            self._idle_lanes[-1].close()
            self._idle_lanes.pop()
        self._calls.release_context()

    # -- inside

    def _created(self, nbytes: int) -> tuple[int, HandleType]:
        """An attribute may promise what this process is not allowed: a fabric needs its channel (IMEX), RDMA its
        kernel module. So what is refused is given up one by one, and not asked for again."""
        while True:
            handle_type, rdma = self._handle_types[0], self._rdma
            try:
                return self._calls.create(nbytes, handle_type, rdma=rdma), handle_type
            except CudaError as error:
                if not is_refusal(error) or (handle_type is HandleType.PLAIN and not rdma):
                    raise
                given_up = "RDMA" if rdma else f"{handle_type.name} handles"
                _log.warning("device %s gives no memory for %s: %s", self.device_uuid, given_up, error)
            with self._lock:
                if rdma:
                    self._rdma = False
                elif self._handle_types[0] is handle_type:
                    self._handle_types = self._handle_types[1:]

    @contextmanager
    def _borrowed_lane(self) -> Generator[CudaLane]:
        """A lane per thread that copies now, kept for the next. One in which something went wrong is not used again."""
        with self._lock:
            lane = self._idle_lanes.pop() if self._idle_lanes else None
        lane = lane or CudaLane(self._calls)
        try:
            yield lane
        except BaseException as error:
            lane.abandon(error)
            raise
        with self._lock:
            keep = len(self._idle_lanes) < _IDLE_LANES_MAX
            if keep:
                self._idle_lanes.append(lane)
        if not keep:
            lane.close()

    @contextmanager
    def _putting_back(self, table: dict[Any, Any], key: object, value: object) -> Generator[None]:
        """What was taken out before the driver was asked is there again if it refuses."""
        try:
            yield
        except BaseException:
            with self._lock:
                table[key] = value
            raise

    def _require_whole(self, verb: str, nbytes: int) -> None:
        if nbytes <= 0 or nbytes % self._granularity_bytes:
            raise DriverError(verb, f"{nbytes} bytes are no multiple of {self._granularity_bytes}")

    def _range_around(self, address: int, nbytes: int) -> _Range | None:
        exact = self._ranges.get(address)
        if exact is not None and exact.nbytes >= nbytes:
            return exact
        for start, reserved in self._ranges.items():
            if start <= address and address + nbytes <= start + reserved.nbytes:
                return reserved
        return None

    def _require_room(self, verb: str, address: int, nbytes: int) -> _Range:
        self._require_whole(verb, nbytes)
        reserved = self._range_around(address, nbytes)
        if reserved is None:
            raise DriverError(verb, f"{address:#x} with {nbytes} bytes is not in a reserved range")
        if any(at < address + nbytes and address < at + size for at, size in reserved.mapped.items()):
            raise DriverError(verb, f"{address:#x} is mapped already; unmap it first")
        return reserved

    def _require_mapped(self, verb: str, address: int, nbytes: int) -> _Range:
        reserved = self._range_around(address, nbytes)
        if reserved is None or reserved.mapped.get(address) != nbytes:
            raise DriverError(verb, f"nothing of {nbytes} bytes is mapped at {address:#x}")
        return reserved

    def _require_held(self, verb: str, handle: Handle) -> _Physical:
        physical = self._held.get(handle.key)
        if physical is None or physical.native is None:
            raise DriverError(verb, f"handle {handle.key} is not held by this process")
        return physical

    @staticmethod
    def _native(physical: _Physical) -> int:
        assert physical.native is not None, "_require_held has looked"
        return physical.native


class CudaLane:
    """A stream of its own, and the event by which its end is awaited."""

    def __init__(self, calls: CudaCalls) -> None:
        self._calls = calls
        self._open = True
        self._event: Any = None
        with calls.context("open_lane"):
            self._stream = calls.create_stream()
            try:
                self._event = calls.create_event()
            except BaseException as error:
                self.abandon(error)
                raise

    def copy(self, destination: int, source: int, nbytes: int) -> None:
        self._require_open("copy")
        with self._calls.context("copy"):
            self._calls.copy(destination, source, nbytes, self._stream)

    def set(self, address: int, value: int, nbytes: int) -> None:
        self._require_open("set")
        with self._calls.context("set"):
            self._calls.set(address, value, nbytes, self._stream)

    def synchronize(self) -> None:
        self._require_open("synchronize")
        with self._calls.context("synchronize"):
            self._calls.wait(self._stream, self._event)

    def close(self) -> None:
        """If it raises, it can be asked again. A failed device has nothing to wait for and takes nothing back."""
        if not self._open:
            return
        if self._calls.failed is None:
            with self._calls.context("close"):
                if self._event is not None:
                    self._calls.wait(self._stream, self._event)
                    self._calls.destroy_event(self._event)
                    self._event = None
                self._calls.destroy_stream(self._stream)
        self._open = False

    def abandon(self, error: BaseException) -> None:
        """Closes behind an error, which is the one to be raised."""
        try:
            self.close()
        except LullMemoryError as second:
            error.add_note(f"and its lane could not be closed: {second}")

    def _require_open(self, verb: str) -> None:
        if not self._open:
            raise DriverError(verb, "the lane is closed; open another")


def _handle_types(calls: CudaCalls, fabric: bool) -> tuple[HandleType, ...]:
    """What to ask for, best first. A descriptor serves processes of one node; a fabric reaches further."""
    descriptor = calls.attribute("HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED")
    wanted = [HandleType.POSIX_FD] if descriptor else []
    if calls.attribute("HANDLE_TYPE_FABRIC_SUPPORTED"):
        wanted.insert(0 if fabric else len(wanted), HandleType.FABRIC)
    return (*wanted, HandleType.PLAIN)
