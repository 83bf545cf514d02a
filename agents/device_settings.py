"""The `[[devices]]` of one agent's file: host memory, and NVIDIA GPUs or slices of them. Pure.

Checks that need the machine itself (which GPUs are there, how much memory it has) are in ``opening``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Final, Literal

from pydantic import Field, model_validator

from ..vmm.tags import KEEPS_CONTENTS
from .protocol.config_file import FilePath
from .protocol.policy import EnginePolicy
from .protocol.sizes import Bytes
from .protocol.written import Written

# As nvidia-smi -L prints them; MIG-GPU-UUID/3/0 is how drivers before R470 name a slice.
CudaUuid = Annotated[str, Field(pattern=r"^(GPU|MIG)-[0-9A-Za-z/-]{4,90}$")]

_OF_HOST: Final = ("path", "capacity_bytes", "memory")
_OF_NVIDIA: Final = ("uuid", "index")


class DeviceSettings(Written):
    """``host``: a directory that every process on the node opens by its path. ``nvidia``: a GPU, or a MIG slice."""

    kind: Literal["host", "nvidia"] = "host"
    path: FilePath | None = None
    capacity_bytes: Bytes | None = None
    # "unified": its pages are the host's own memory, so it is judged by MemAvailable and backups free nothing.
    memory: Literal["discrete", "unified"] = "discrete"
    uuid: CudaUuid | None = None
    index: Annotated[int, Field(ge=0, le=255)] | None = None  # NVML's; only a uuid means the same GPU for ever
    # Bytes that are never lent. Of a GPU: 0 unless set. Of unified memory: kept available for the host, 8 % at least.
    reserve_bytes: Bytes | None = None
    # A process of its own that owns the memory of engines which attach to it: it outlives them.
    memory_service: bool = False

    @model_validator(mode="after")
    def _check(self) -> DeviceSettings:
        strange = _OF_NVIDIA if self.kind == "host" else _OF_HOST
        for field in strange:
            if field in self.model_fields_set:
                raise ValueError(f"{field}: only for kind {'nvidia' if self.kind == 'host' else 'host'!r}")
        if self.kind == "host":
            self._check_host()
        elif (self.uuid is None) == (self.index is None):
            raise ValueError(
                "uuid: name the GPU by its uuid (nvidia-smi -L prints it), or by its index, one of the two"
            )
        return self

    def _check_host(self) -> None:
        if self.path is None:
            raise ValueError("path: missing; a host-memory device needs the folder that it is opened by")
        if self.capacity_bytes is None:
            raise ValueError("capacity_bytes: missing; say how much memory the device has, for example 2GiB")
        if self.memory == "discrete" and self.reserve_bytes is not None:
            raise ValueError(
                "reserve_bytes: only with memory = 'unified' or for kind 'nvidia'; make the device smaller"
            )
        if self.memory == "unified" and self.memory_service:
            raise ValueError("memory_service: what it parks would stay in the same memory; not with memory = 'unified'")


def devices_fault(devices: Sequence[DeviceSettings]) -> str | None:
    """What is wrong with the devices together, with the place at its head; None if nothing is."""
    seen: dict[tuple[str, object], int] = {}
    for number, device in enumerate(devices):
        for field in ("path", "uuid", "index"):
            value = getattr(device, field)
            if value is not None and (first := seen.setdefault((field, value), number)) != number:
                return f"devices.{number}.{field}: {value} is device {first} already; list each device once"
    return None


def engine_devices_fault(
    number: int,
    device_indexes: Sequence[int],
    policy: EnginePolicy,
    env: dict[str, str],
    devices: Sequence[DeviceSettings],
) -> str | None:
    """What is wrong with the devices of engine ``number``, all of which exist; None if nothing is."""
    own = [devices[index] for index in device_indexes]
    if len({device.kind for device in own}) > 1:
        return f"engines.{number}.device_indexes: an engine lives on GPUs or on host memory, not on both"
    if own[0].kind == "nvidia" and "CUDA_VISIBLE_DEVICES" in env:
        return (
            f"engines.{number}.env: CUDA_VISIBLE_DEVICES is set from device_indexes, by UUID; remove it here,"
            " or the engine could sit on a GPU that is lent"
        )
    keeps = [tag for tag, mode in policy.restore_modes.items() if mode in KEEPS_CONTENTS]
    if keeps and any(device.memory == "unified" for device in own):
        wanted = f"{keeps[0]} = {str(policy.restore_modes[keeps[0]])!r}"
        return (
            f"engines.{number}.policy.restore_modes: {wanted} frees nothing on unified memory, where a backup takes"
            " what the device gives: use NONE for caches, and for weights an engine that loads them again"
        )
    return None
