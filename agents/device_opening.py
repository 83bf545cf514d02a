"""Which devices the agent's file means on this machine: host-memory devices are made, GPUs are found.

What a GPU was is kept in ``devices.json``. So an agent that starts while a GPU is lost, or the driver is, takes its
loans up all the same, with that device absent; and an index means the GPU that it meant first, whatever fell off the
bus since.
"""

from __future__ import annotations

import contextlib
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any, Final

import structlog
from pydantic import BaseModel, ConfigDict, Strict, TypeAdapter

from ..vmm.host_device import HostDevice
from .bounded_probe import bounded
from .device_settings import DeviceSettings
from .errors import ConfigError
from .node import Device
from .node_files import Bytes, Text, fitting, replace_json
from .probe_nvml import NvidiaDevice, Survey, host_bytes, survey
from .settings import AgentSettings

log = structlog.get_logger(__name__)

RESERVE_SHARE: Final = 0.10  # of a unified machine's memory, unless the file says more or less
RESERVE_SHARE_MIN: Final = 0.08
_SURVEY_SECONDS_MAX: Final = 30.0


class _Gpu(BaseModel):
    """A NvidiaDevice, as it was written."""

    model_config = ConfigDict(extra="forbid")

    uuid: Text
    name: Text
    capacity_bytes: Bytes
    unified: Annotated[bool, Strict()]


_SHAPES: Final[dict[str, TypeAdapter[Any]]] = {
    "devices": TypeAdapter(dict[Text, _Gpu]),
    "indexes": TypeAdapter(dict[Text, Text]),
}


def open_devices(settings: AgentSettings) -> list[Device]:
    """Raises ConfigError that names the device, and what there is instead."""
    wants_nvidia = any(declared.kind == "nvidia" for declared in settings.devices)
    found = _survey() if wants_nvidia else Survey({}, {}, {})
    record = _Record(Path(settings.data_dir) / "devices.json")
    devices: list[Device] = []
    for index, declared in enumerate(settings.devices):
        if declared.kind == "nvidia":
            device = _open_nvidia(index, declared, found, record)
        else:
            device = _open_host(index, declared)
        for other in devices:
            if other.device_id == device.device_id:
                raise ConfigError(f"devices.{index}: {device.device_id} is device {other.index} already")
        devices.append(device)
    if wants_nvidia:
        record.keep()
    return devices


def _survey() -> Survey:
    try:
        return bounded(survey, _SURVEY_SECONDS_MAX)
    except TimeoutError:
        sentence = f"NVML did not answer within {_SURVEY_SECONDS_MAX:g} s: the driver hangs; see dmesg for Xid"
        return Survey({}, {}, {}, sentence)


# ---- host memory ------------------------------------------------------------------------------------------------


def _open_host(index: int, declared: DeviceSettings) -> Device:
    assert declared.path is not None
    try:
        host = _host_device(declared)
    except (OSError, ValueError) as error:
        raise ConfigError(f"devices.{index}: {declared.path}: {error}") from error
    unified = declared.memory == "unified"
    reserve_bytes = _unified_reserve_bytes(index, declared) if unified else 0
    return Device(
        host.uuid, index, f"host_{host.kind}", host.capacity_bytes, str(host.path), unified, reserve_bytes=reserve_bytes
    )


def _host_device(declared: DeviceSettings) -> HostDevice:
    """One that is there already is opened without writing anything."""
    assert declared.path is not None
    assert declared.capacity_bytes is not None
    with contextlib.suppress(FileNotFoundError):
        host = HostDevice.open(declared.path)
        if (host.capacity_bytes, host.kind) == (declared.capacity_bytes, declared.memory):
            return host
    return HostDevice.create(declared.path, capacity_bytes=declared.capacity_bytes, kind=declared.memory)


def _unified_reserve_bytes(index: int, declared: DeviceSettings) -> int:
    """A host that is driven to its last page may hang without an OOM kill (NVIDIA/open-gpu-kernel-modules#1358)."""
    total_bytes = host_bytes()
    if declared.reserve_bytes is None:
        return int(total_bytes * RESERVE_SHARE)
    if declared.reserve_bytes < total_bytes * RESERVE_SHARE_MIN:
        raise ConfigError(
            f"devices.{index}.reserve_bytes: {declared.reserve_bytes} is less than {RESERVE_SHARE_MIN:.0%} of this"
            f" machine's unified memory; at least {int(total_bytes * RESERVE_SHARE_MIN) + 1} bytes, or leave it out for"
            f" {RESERVE_SHARE:.0%}"
        )
    return declared.reserve_bytes


# ---- GPUs -------------------------------------------------------------------------------------------------------


def _open_nvidia(index: int, declared: DeviceSettings, found: Survey, record: _Record) -> Device:
    uuid = _uuid_of(index, declared, found, record)
    slices = found.slices.get(uuid)
    if slices is not None:
        names = ", ".join(slices) or "none is made; nvidia-smi mig -cgi makes them"
        raise ConfigError(f"devices.{index}: {uuid} is in MIG mode; lend its slices by their UUIDs: {names}")
    device = found.devices.get(uuid) or record.device(uuid)
    if device is None:
        unknown = f"there is no {uuid} on this machine; {_present(found)}"
        raise ConfigError(f"devices.{index}.uuid: {found.failed or unknown}")
    if uuid in found.devices:
        record.add(device, declared.index)
    else:
        log.error("the GPU is not there; it is lent once it is back", device=uuid, why=found.failed or _present(found))
    if device.unified and declared.memory_service:
        raise ConfigError(f"devices.{index}.memory_service: {uuid} has unified memory: what is parked would stay in it")
    reserve_bytes = _unified_reserve_bytes(index, declared) if device.unified else declared.reserve_bytes or 0
    capacity_bytes = device.capacity_bytes - reserve_bytes
    if capacity_bytes <= 0:
        raise ConfigError(f"devices.{index}.reserve_bytes: {uuid} has {device.capacity_bytes} bytes in all")
    return Device(uuid, index, device.kind, capacity_bytes, "", device.unified, device.name, reserve_bytes)


def _uuid_of(index: int, declared: DeviceSettings, found: Survey, record: _Record) -> str:
    if declared.uuid is not None:
        return declared.uuid
    assert declared.index is not None
    now, before = found.indexes.get(declared.index), record.at_index(declared.index)
    if before is not None and before != now:
        # The order changes when one falls off the bus: whatever is lent now is the one that it was.
        sentence = f"index {declared.index} was {before} and is {now} now; {before} is meant. Name it by its uuid"
        log.warning(sentence, delete_to_change=str(record.path))
        return before
    if now is None:
        unknown = f"no GPU has index {declared.index}; {_present(found)}"
        raise ConfigError(f"devices.{index}.index: {found.failed or unknown}")
    return now


def _present(found: Survey) -> str:
    """What there is, as the operator may write it."""
    names = [f"{device.uuid} ({device.name})" for device in found.devices.values() if device.uuid not in found.slices]
    return f"there are {', '.join(names)}" if names else "NVML knows no GPU here"


class _Record:
    """The GPUs that this agent has ever opened, and the indexes by which they were named."""

    def __init__(self, path: Path) -> None:
        self.path = path
        value = fitting(path, _SHAPES)
        self._devices: dict[str, Any] = dict(value.get("devices", {}))
        self._indexes: dict[str, str] = dict(value.get("indexes", {}))
        self._known = (dict(self._devices), dict(self._indexes))

    def device(self, uuid: str) -> NvidiaDevice | None:
        value = self._devices.get(uuid)
        return None if value is None else NvidiaDevice(**value)

    def at_index(self, index: int) -> str | None:
        return self._indexes.get(str(index))

    def add(self, device: NvidiaDevice, index: int | None) -> None:
        self._devices[device.uuid] = asdict(device)
        if index is not None:
            self._indexes[str(index)] = device.uuid

    def keep(self) -> None:
        if self._known == (self._devices, self._indexes):
            return
        try:
            replace_json(self.path, {"devices": self._devices, "indexes": self._indexes})
        except OSError as error:
            log.error("which GPUs there are could not be kept", file=str(self.path), error=str(error))
