"""Calls of the CUDA driver: checked, typed, and with the device's primary context current. No tables, no policy.

The only file that imports cuda-python, and it does so at first use. cuda-python is untyped: what comes in here as Any
leaves as int, bytes or str.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Generator
from contextlib import contextmanager
from enum import Enum
from importlib import import_module
from typing import Any, Final
from uuid import UUID

from .driver import Access
from .errors import DeviceFailed, DriverError, LullMemoryError, OutOfDeviceMemory

FORKED: Final = "CUDA does not survive a fork; start the process (spawn) and make a driver there, or fork earlier"
OUT_OF_MEMORY: Final = 2
NOT_INITIALIZED: Final = 3
NO_DEVICE: Final = 100
OPERATING_SYSTEM: Final = 304
NOT_PERMITTED: Final = 800
NOT_SUPPORTED: Final = 801
# After these "the process must be terminated and relaunched", says the driver's documentation, or our memory is gone.
STICKY: Final = frozenset(
    {
        4,  # DEINITIALIZED
        214,  # ECC_UNCORRECTABLE
        220,  # NVLINK_UNCORRECTABLE
        226,  # CONTAINED
        700,  # ILLEGAL_ADDRESS
        702,  # LAUNCH_TIMEOUT
        709,  # CONTEXT_IS_DESTROYED
        710,  # ASSERT
        714,  # HARDWARE_STACK_ERROR
        715,  # ILLEGAL_INSTRUCTION
        716,  # MISALIGNED_ADDRESS
        717,  # INVALID_ADDRESS_SPACE
        718,  # INVALID_PC
        719,  # LAUNCH_FAILED
        721,  # TENSOR_MEMORY_LEAK
        810,  # MPS_CLIENT_TERMINATED
        911,  # EXTERNAL_DEVICE
    }
)
_STREAM_NON_BLOCKING: Final = 1
_EVENT_BLOCKING_SYNC: Final = 1
_EVENT_DISABLE_TIMING: Final = 2
_HOST_REGISTER_PORTABLE: Final = 1
_NAME_BYTES_MAX: Final = 128
_log = logging.getLogger(__name__)


class HandleType(Enum):
    """How a handle can be given to another process. The values are the driver's."""

    POSIX_FD = 1
    FABRIC = 8  # also between the nodes of one NVLink domain; by bytes instead of a descriptor
    PLAIN = 0  # not at all


class CudaError(DriverError):
    """A status that is neither out of memory nor sticky. ``code`` is the driver's CUresult."""

    def __init__(self, verb: str, reason: str, code: int) -> None:
        super().__init__(verb, reason)
        self.code = code


def binding() -> Any:
    """cuda-python's driver module, with the driver initialized. Raises DriverError where either is missing."""
    try:
        cuda: Any = import_module("cuda.bindings.driver")
    except ImportError as error:
        raise DriverError(
            "cuInit", f"cuda-python is not installed ({error}); pip install 'gpu-lull[torch]', or use a host device"
        ) from error
    code, _ = _called(cuda, "cuInit", "cuInit", 0)
    if code == NOT_INITIALIZED:
        raise DriverError("cuInit", FORKED)
    if code not in (0, NO_DEVICE):
        raise CudaError("cuInit", _reason(cuda, "cuInit", code), code)
    return cuda


def device_uuids() -> list[str]:
    """What this process may see (CUDA_VISIBLE_DEVICES), in the driver's order. Raises DriverError without a driver."""
    cuda = binding()
    code, count = _called(cuda, "devices", "cuDeviceGetCount")
    if code in (NO_DEVICE, NOT_INITIALIZED):  # cuInit has found none
        return []
    if code:
        raise CudaError("devices", _reason(cuda, "cuDeviceGetCount", code), code)
    return [_device_uuid(cuda, ordinal) for ordinal in range(int(count))]


def _device_uuid(cuda: Any, ordinal: int) -> str:
    code, device = _called(cuda, "devices", "cuDeviceGet", ordinal)
    uuid: Any = None
    name = b""
    if not code:
        code, uuid = _called(cuda, "devices", "cuDeviceGetUuid", device)
    if not code:
        code, name = _called(cuda, "devices", "cuDeviceGetName", _NAME_BYTES_MAX, device)
    if code:
        raise CudaError("devices", _reason(cuda, f"device {ordinal}", code), code)
    # The driver gives a slice's own uuid, but not the word for it; NVML and CUDA_VISIBLE_DEVICES do.
    kind = "MIG" if b" MIG " in bytes(name) else "GPU"
    return f"{kind}-{UUID(bytes=bytes(uuid.bytes))}"


def _called(cuda: Any, verb: str, function: str, *arguments: object) -> tuple[int, Any]:
    """Status and result. cuda-python raises where the driver, or a function in it, is missing."""
    try:
        status, *results = getattr(cuda, function)(*arguments)
    except (RuntimeError, AttributeError) as error:
        raise DriverError(
            verb,
            f"{function} cannot be called: {error}; is NVIDIA's driver installed (libcuda.so.1), and new enough?",
        ) from error
    return int(status), (results[0] if len(results) == 1 else tuple(results))


def _reason(cuda: Any, function: str, code: int) -> str:
    try:
        name = str(cuda.CUresult(code).name)
    except ValueError:  # newer than this cuda-python
        name = "an error that this cuda-python does not know"
    return f"{function} answered {name} ({code})"


class CudaCalls:
    """One process's calls for one device. Thread-safe. A verb is the caller's word, for the error."""

    def __init__(self, device_uuid: str) -> None:
        self._cuda = binding()
        self.device_uuid = device_uuid
        self.failed: str | None = None
        self._pid = os.getpid()
        self._lock = threading.Lock()
        self._context: Any = None  # retained at first need: allocating and exporting need none
        visible = device_uuids()
        if device_uuid not in visible:
            raise DriverError(
                "open", f"device {device_uuid} is not here; this process sees {', '.join(visible) or 'no device'}"
            )
        self._ordinal = visible.index(device_uuid)
        self._device = self._call("open", "cuDeviceGet", self._ordinal)
        self.capacity_bytes = 0
        self.capacity_bytes = int(self._call("open", "cuDeviceTotalMem", self._device))

    def attribute(self, name: str) -> int:
        """0 where this cuda-python does not know the attribute."""
        known = getattr(self._cuda.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}", None)
        return 0 if known is None else int(self._call("open", "cuDeviceGetAttribute", known, self._device))

    def granularity_bytes(self, handle_type: HandleType) -> int:
        option = self._cuda.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        prop = self._properties(handle_type, rdma=False)
        return int(self._call("granularity", "cuMemGetAllocationGranularity", prop, option))

    # -- memory: needs no context

    def create(self, nbytes: int, handle_type: HandleType, *, rdma: bool) -> int:
        prop = self._properties(handle_type, rdma=rdma)
        return int(self._call("create", "cuMemCreate", nbytes, prop, 0, nbytes=nbytes))

    def release(self, native: int) -> None:
        self._call("release", "cuMemRelease", native)

    def export_fd(self, native: int) -> int:
        fd = int(
            self._call("export_handle", "cuMemExportToShareableHandle", native, self._type(HandleType.POSIX_FD), 0)
        )
        os.set_inheritable(fd, False)
        return fd

    def import_fd(self, fd: int) -> int:
        fd_type = self._type(HandleType.POSIX_FD)
        return int(self._call("import_handle", "cuMemImportFromShareableHandle", fd, fd_type))

    # -- addresses

    def reserve(self, nbytes: int, alignment_bytes: int, wish: int = 0) -> int:
        """At ``wish`` if the driver likes it too."""
        with self.context("reserve"):
            return int(self._call("reserve", "cuMemAddressReserve", nbytes, alignment_bytes, wish, 0, nbytes=nbytes))

    def free_address(self, address: int, nbytes: int) -> None:
        with self.context("free_address"):
            self._call("free_address", "cuMemAddressFree", address, nbytes)

    def map(self, address: int, nbytes: int, native: int) -> None:
        with self.context("map"):
            self._call("map", "cuMemMap", address, nbytes, 0, native, 0, nbytes=nbytes)

    def set_access(self, address: int, nbytes: int, access: Access) -> None:
        flags = self._cuda.CUmemAccess_flags
        wanted = self._cuda.CUmemAccessDesc()
        self._locate(wanted.location)
        wanted.flags = (
            flags.CU_MEM_ACCESS_FLAGS_PROT_READ if access is Access.READ else flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        )
        with self.context("set_access"):
            self._call("set_access", "cuMemSetAccess", address, nbytes, [wanted], 1, nbytes=nbytes)

    def unmap(self, address: int, nbytes: int) -> None:
        with self.context("unmap"):
            self._call("unmap", "cuMemUnmap", address, nbytes)

    def free_bytes(self) -> int:
        with self.context("free_bytes"):
            free_bytes, _ = self._call("free_bytes", "cuMemGetInfo")
            return int(free_bytes)

    # -- copies

    def create_stream(self) -> Any:
        """Outside the order of the default stream, so that it overlaps with it and with others."""
        return self._call("open_lane", "cuStreamCreate", _STREAM_NON_BLOCKING)

    def create_event(self) -> Any:
        """Waiting for it blocks the thread instead of spinning: another copy may need the core."""
        return self._call("open_lane", "cuEventCreate", _EVENT_BLOCKING_SYNC | _EVENT_DISABLE_TIMING)

    def destroy_stream(self, stream: Any) -> None:
        self._call("close", "cuStreamDestroy", stream)

    def destroy_event(self, event: Any) -> None:
        self._call("close", "cuEventDestroy", event)

    def copy(self, destination: int, source: int, nbytes: int, stream: Any) -> None:
        self._call("copy", "cuMemcpyAsync", destination, source, nbytes, stream, nbytes=nbytes)

    def set(self, address: int, value: int, nbytes: int, stream: Any) -> None:
        self._call("set", "cuMemsetD8Async", address, value, nbytes, stream)

    def wait(self, stream: Any, event: Any) -> None:
        """Until everything of the stream has ended. cuda-python gives the GIL away while it waits."""
        self._call("synchronize", "cuEventRecord", event, stream)
        self._call("synchronize", "cuEventSynchronize", event)

    def synchronize(self) -> None:
        with self.context("synchronize"):
            self._call("synchronize", "cuCtxSynchronize")

    def register_host(self, address: int, nbytes: int) -> None:
        with self.context("pin_host"):
            self._call("pin_host", "cuMemHostRegister", address, nbytes, _HOST_REGISTER_PORTABLE, nbytes=nbytes)

    def unregister_host(self, address: int) -> None:
        with self.context("unpin_host"):
            self._call("unpin_host", "cuMemHostUnregister", address)

    # -- the context

    @contextmanager
    def context(self, verb: str) -> Generator[None]:
        """Makes the device's primary context current in this thread, and the caller's own again at the end: an engine's
        thread must not find itself on another device."""
        context = self._retained_context(verb)
        current = self._call(verb, "cuCtxGetCurrent")
        if int(current) == int(context):
            yield
            return
        self._call(verb, "cuCtxPushCurrent", context)
        try:
            yield
        finally:
            self._pop(verb)

    def release_context(self) -> None:
        with self._lock:
            if self._context is not None:
                self._call("close", "cuDevicePrimaryCtxRelease", self._device)
                self._context = None

    def require_usable(self, verb: str) -> None:
        if os.getpid() != self._pid:
            raise DriverError(verb, FORKED)
        if self.failed is not None:
            raise DeviceFailed(verb, self.failed)

    def _retained_context(self, verb: str) -> Any:
        self.require_usable(verb)
        with self._lock:
            if self._context is None:
                self._context = self._call(verb, "cuDevicePrimaryCtxRetain", self._device)
            return self._context

    def _pop(self, verb: str) -> None:
        """Never raises: what was called before it has happened, and its caller must be told so."""
        try:
            code, _ = _called(self._cuda, verb, "cuCtxPopCurrent")
        except DriverError as error:
            _log.error("device %s: the caller's context could not be restored: %s", self.device_uuid, error)
            return
        if code:
            reason = _reason(self._cuda, "cuCtxPopCurrent", code)
            _log.error("device %s: the caller's context could not be restored: %s", self.device_uuid, reason)
            self._note_failure(code, reason)

    # -- statuses

    def _call(self, verb: str, function: str, *arguments: object, nbytes: int = 0) -> Any:
        self.require_usable(verb)
        code, result = _called(self._cuda, verb, function, *arguments)
        if code == 0:
            return result
        if code == OUT_OF_MEMORY:
            raise OutOfDeviceMemory(nbytes, self._free_bytes_now(), self.capacity_bytes)
        reason = _reason(self._cuda, function, code)
        if self._note_failure(code, reason):
            raise DeviceFailed(verb, f"{reason}; only a new process can use device {self.device_uuid} again")
        raise CudaError(verb, reason, code)

    def _note_failure(self, code: int, reason: str) -> bool:
        if code in STICKY and self.failed is None:
            self.failed = f"{reason}; only a new process can use device {self.device_uuid} again"
        return code in STICKY

    def _free_bytes_now(self) -> int:
        """For a message. Makes no context for it, and reports 0 where the driver does not say."""
        if self._context is None:
            return 0
        code, current = _called(self._cuda, "free_bytes", "cuCtxGetCurrent")
        pushed = not code and int(current) != int(self._context)
        if pushed:
            code, _ = _called(self._cuda, "free_bytes", "cuCtxPushCurrent", self._context)
        if code:
            return 0
        code, numbers = _called(self._cuda, "free_bytes", "cuMemGetInfo")
        if pushed:
            self._pop("free_bytes")
        return 0 if code else int(numbers[0])

    # -- structures

    def _type(self, handle_type: HandleType) -> Any:
        return self._cuda.CUmemAllocationHandleType(handle_type.value)

    def _locate(self, location: Any) -> None:
        location.type = self._cuda.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        location.id = self._ordinal

    def _properties(self, handle_type: HandleType, *, rdma: bool) -> Any:
        prop = self._cuda.CUmemAllocationProp()
        prop.type = self._cuda.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        prop.requestedHandleTypes = self._type(handle_type)
        self._locate(prop.location)
        prop.allocFlags.gpuDirectRDMACapable = int(rdma)
        return prop


def is_refusal(error: LullMemoryError) -> bool:
    """Whether the driver forbids a thing as such, so that asking again is of no use."""
    return isinstance(error, CudaError) and error.code in (NOT_PERMITTED, NOT_SUPPORTED)
