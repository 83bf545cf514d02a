"""NVIDIA devices as NVML tells them: memory, and who holds it. The only file that imports nvidia-ml-py.

NVML is NVIDIA's word about what the driver gave to whom; engines and jobs have no part in it. A GPU whose answer is an
error is absent with a reason. Calls may hang with the driver, so they are made in a thread of their own and waited for
with a bound (``bounded_probe``).
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from ..vmm.host_memory import available_bytes
from .probe import DeviceFacts, unified_facts
from .protocol.words import Reason

LOST: Final = "DeviceLost"  # the GPU itself: whatever ran on it is over
UNREADABLE: Final = "DeviceUnreadable"  # it may run on; nobody can say what is on it
INITIALIZE_AGAIN_SECONDS: Final = 30.0

_NOT_SUPPORTED: Final = 3
_LOST_CODES: Final = frozenset({6, 15, 16, 28})  # NOT_FOUND (by UUID), GPU_IS_LOST, RESET_REQUIRED, GPU_NOT_FOUND
_NO_FUNCTION: Final = 13  # FUNCTION_NOT_FOUND: an older driver
_UNTOLD: Final = frozenset({_NOT_SUPPORTED, _NO_FUNCTION})
_NOT_OUR_STRUCT: Final = 25  # ARGUMENT_VERSION_MISMATCH
_ADVICE: Final[Mapping[int, str]] = {
    3: "without it nobody can say what is on the GPU, so it is not lent",
    4: "the agent may not read it: run it as a user of the group that owns /dev/nvidia*",
    6: "it fell off the bus or its slices were made anew: see dmesg for Xid, and nvidia-smi -L for what is there",
    9: "NVIDIA's driver is not loaded: modprobe nvidia, and see dmesg",
    12: "libnvidia-ml.so.1 is not there: install NVIDIA's driver; in a container, run it with NVIDIA's runtime and"
    " NVIDIA_DRIVER_CAPABILITIES=compute,utility",
    13: "the driver is too old for this: R470 or newer is needed",
    15: "it fell off the bus: see dmesg for Xid, then reset it (nvidia-smi --gpu-reset) or reboot",
    16: "it needs a reset (nvidia-smi --gpu-reset) or a reboot; see dmesg for Xid",
    18: "the driver was updated while an older one is loaded: reboot, or unload and load its kernel modules",
    999: "in a container this follows a reload of systemd that took away its devices: restart the container",
}


@dataclass(frozen=True, slots=True)
class NvidiaDevice:
    """A GPU or a slice, as it is now. ``unified``: NVML tells no memory of it."""

    uuid: str
    name: str
    capacity_bytes: int  # less what the driver keeps for itself
    unified: bool

    @property
    def kind(self) -> str:
        if self.uuid.startswith("MIG-"):
            return "mig"
        return "cuda_unified" if self.unified else "cuda"


class NvmlFailed(Exception):
    """NVML said no. ``reason`` is for the operator."""

    def __init__(self, about: str, code: int, text: str) -> None:
        advice = _ADVICE.get(code)
        sentence = f"{about}: NVML answers {text!r}" + ("" if advice is None else f"; {advice}")
        super().__init__(sentence)
        self.code = code
        self.reason = Reason(code=LOST if code in _LOST_CODES else UNREADABLE, sentence=sentence)


class Nvml:
    """One process's use of NVML. Not thread-safe: one thread calls it."""

    def __init__(self, available: Callable[[], int] = available_bytes) -> None:
        """``available``: bytes that the host can give, where that is the GPU's memory. Raises NvmlFailed where there is
        no driver, no library, or no nvidia-ml-py."""
        self._available = available
        try:
            self._nvml: Any = import_module("pynvml")
        except ImportError as error:
            raise NvmlFailed("nvidia-ml-py", 12, f"{error}; pip install 'gpu-lull[agent]'") from error
        self._handles: dict[str, Any] = {}
        self._call("NVML", "nvmlInit")

    def close(self) -> None:
        self._handles.clear()
        self._call("NVML", "nvmlShutdown")

    def gpus(self) -> list[tuple[int, str]]:
        """Index and UUID of each, whatever CUDA_VISIBLE_DEVICES says. One that does not answer is left out."""
        found: list[tuple[int, str]] = []
        for index in range(self._call("NVML", "nvmlDeviceGetCount")):
            with contextlib.suppress(NvmlFailed):
                handle = self._call(f"GPU {index}", "nvmlDeviceGetHandleByIndex", index)
                found.append((index, _text(self._call(f"GPU {index}", "nvmlDeviceGetUUID", handle))))
        return found

    def slices(self, uuid: str) -> list[str]:
        """The MIG slices of a GPU; empty if it is not cut."""
        gpu = self._handle(uuid)
        try:
            mode, _ = self._call(uuid, "nvmlDeviceGetMigMode", gpu)
        except NvmlFailed as failed:
            if failed.code in _UNTOLD:
                return []
            raise
        found: list[str] = []
        for index in range(self._call(uuid, "nvmlDeviceGetMaxMigDeviceCount", gpu) if mode else 0):
            try:
                one = self._call(uuid, "nvmlDeviceGetMigDeviceHandleByIndex", gpu, index)
            except NvmlFailed as failed:
                if failed.code in (2, 6):  # no slice has this number
                    continue
                raise
            found.append(_text(self._call(uuid, "nvmlDeviceGetUUID", one)))
        return found

    def is_cut(self, uuid: str) -> bool:
        """In MIG mode a GPU itself can be given to nobody."""
        try:
            return bool(self._call(uuid, "nvmlDeviceGetMigMode", self._handle(uuid))[0])
        except NvmlFailed as failed:
            if failed.code in (2, *_UNTOLD):  # 2: asked of a slice
                return False
            raise

    def device(self, uuid: str) -> NvidiaDevice:
        name = _text(self._call(uuid, "nvmlDeviceGetName", self._handle(uuid)))
        memory = self._memory(uuid)
        capacity_bytes = host_bytes() if memory is None else memory[0]
        return NvidiaDevice(uuid, name, capacity_bytes, unified=memory is None)

    def facts(self, uuid: str, capacity_bytes: int, reserve_bytes: int) -> DeviceFacts:
        """``capacity_bytes`` is what may be lent: less the driver's part, and less ``reserve_bytes``."""
        memory = self._memory(uuid)
        told, untold, bystanders = self._processes(uuid)
        if memory is None:
            held = {**told, **{pid: resident_bytes(pid) for pid in untold}}
            return unified_facts(DeviceFacts(capacity_bytes, 0, held, bystanders), reserve_bytes, self._available)
        total_bytes, free_bytes = memory
        used_bytes = capacity_bytes - min(capacity_bytes, max(0, free_bytes - reserve_bytes))
        # Of bytes that are told of no process, each that holds some is taken to have an equal part.
        rest_bytes = max(0, total_bytes - free_bytes - sum(told.values()))
        parts = {pid: rest_bytes // len(untold) for pid in untold}
        return DeviceFacts(capacity_bytes, used_bytes, {**told, **parts}, bystanders)

    # -- inside

    def _handle(self, uuid: str) -> Any:
        if uuid not in self._handles:
            self._handles[uuid] = self._call(uuid, "nvmlDeviceGetHandleByUUID", uuid)
        return self._handles[uuid]

    def _memory(self, uuid: str) -> tuple[int, int] | None:
        """(bytes without the driver's own, free bytes), or None where NVML has no such number."""
        handle = self._handle(uuid)
        try:
            memory = self._call(uuid, "nvmlDeviceGetMemoryInfo", handle, self._nvml.nvmlMemory_v2)
        except NvmlFailed as failed:
            if failed.code not in (*_UNTOLD, _NOT_OUR_STRUCT):
                raise
        else:
            return int(memory.total) - int(memory.reserved), int(memory.free)
        try:
            memory = self._call(uuid, "nvmlDeviceGetMemoryInfo", handle)
        except NvmlFailed as failed:
            if failed.code == _NOT_SUPPORTED:
                return None
            raise
        return int(memory.total), int(memory.free)

    def _processes(self, uuid: str) -> tuple[dict[int, int], set[int], frozenset[int]]:
        """Bytes by pid, the pids whose bytes are not told, and those that only draw."""
        handle = self._handle(uuid)
        told: dict[int, int] = {}
        pids: dict[str, set[int]] = {}
        for kind in ("Compute", "MPSCompute", "Graphics"):
            pids[kind] = set()
            try:
                found = self._listed(uuid, f"nvmlDeviceGet{kind}RunningProcesses", handle)
            except NvmlFailed as failed:
                if failed.code in _UNTOLD and kind != "Compute":
                    continue  # without this list nobody can say whose memory is whose: not lent then
                raise
            for one in found:
                pids[kind].add(int(one.pid))
                if one.usedGpuMemory is not None:
                    told[int(one.pid)] = max(told.get(int(one.pid), 0), int(one.usedGpuMemory))
        computing = pids["Compute"] | pids["MPSCompute"]
        untold = (computing | pids["Graphics"]) - told.keys()
        bystanders = (pids["Graphics"] - computing) | {pid for pid in pids["Compute"] if _is_mps_server(pid)}
        return told, untold, frozenset(bystanders)

    def _listed(self, uuid: str, function: str, handle: Any) -> list[Any]:
        try:
            return list(self._call(uuid, function, handle))
        except NvmlFailed as failed:
            if failed.code != _NO_FUNCTION:
                raise
        return list(self._call(uuid, f"{function}_v2", handle))  # a driver before R510

    def _call(self, about: str, function: str, *arguments: object) -> Any:
        try:
            return getattr(self._nvml, function)(*arguments)
        except self._nvml.NVMLLibraryMismatchError as error:  # how nvidia-ml-py says that the driver is older
            raise NvmlFailed(about, _NO_FUNCTION, f"it has no {function}") from error
        except self._nvml.NVMLError as error:
            if error.value not in (*_UNTOLD, _NOT_OUR_STRUCT):
                self._handles.clear()  # a handle may be what is wrong: the next look takes new ones
            raise NvmlFailed(about, int(error.value), str(error)) from error


@dataclass(frozen=True, slots=True)
class Survey:
    """The GPUs of the machine, or why they are not known."""

    devices: dict[str, NvidiaDevice]
    indexes: dict[int, str]
    slices: dict[str, list[str]]  # of GPUs in MIG mode
    failed: str | None = None


def survey() -> Survey:
    """Asks NVML about every GPU, and every slice. May hang with the driver."""
    found = Survey({}, {}, {})
    try:
        nvml = Nvml()
        for index, gpu in nvml.gpus():
            found.indexes[index] = gpu
            with contextlib.suppress(NvmlFailed):  # what does not answer is not there
                if nvml.is_cut(gpu):
                    found.slices[gpu] = nvml.slices(gpu)
                for uuid in [gpu, *found.slices.get(gpu, [])]:
                    found.devices[uuid] = nvml.device(uuid)
        nvml.close()
    except NvmlFailed as failed:
        return Survey({}, {}, {}, str(failed))
    return found


class NvmlProbe:
    """Reads the devices given by UUID as (capacity, reserve) in bytes, one after the other. One thread uses it."""

    def __init__(
        self,
        devices: Mapping[str, tuple[int, int]],
        open_nvml: Callable[[], Nvml] = Nvml,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._devices = dict(devices)
        self._open = open_nvml
        self._now = now
        self._nvml: Nvml | None = None
        self._opened_at = -INITIALIZE_AGAIN_SECONDS
        self._failed: NvmlFailed | None = None

    @property
    def device_ids(self) -> list[str]:
        return list(self._devices)

    def read(self) -> Iterator[tuple[str, DeviceFacts | Reason]]:
        """Each device with what was seen, or with why it could not be."""
        self._open_if_due()
        if self._nvml is not None:
            self._failed = None
        for uuid, (capacity_bytes, reserve_bytes) in self._devices.items():
            if self._nvml is None:
                assert self._failed is not None
                yield uuid, self._failed.reason
                continue
            try:
                yield uuid, self._nvml.facts(uuid, capacity_bytes, reserve_bytes)
            except NvmlFailed as failed:
                self._failed = failed
                yield uuid, failed.reason

    def _open_if_due(self) -> None:
        """NVML lists the GPUs once, when it is opened: one that was reset is seen again only by a new opening."""
        if self._nvml is not None and self._failed is None:
            return
        if self._now() - self._opened_at < INITIALIZE_AGAIN_SECONDS:
            return
        self._opened_at = self._now()
        try:
            if self._nvml is not None:
                nvml, self._nvml = self._nvml, None
                nvml.close()
            self._nvml, self._failed = self._open(), None
        except NvmlFailed as failed:
            self._failed = failed


def host_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def resident_bytes(pid: int) -> int:
    """The process's share of the host's memory; 0 once it is gone."""
    try:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 0


def _is_mps_server(pid: int) -> bool:
    """It holds a context for its clients, who are listed themselves."""
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip() == b"nvidia-cuda-mps-server"[:15]
    except OSError:
        return False


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
