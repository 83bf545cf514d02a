"""Host-memory devices: their directories, their sizes, and who holds memory of them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ...vmm.host_device import HostDevice
from ..probe import HostMemoryProbe, mem_available_bytes
from ..settings import AgentSettings
from .findings import Finding, failed, in_mib, not_applicable, ok, warning
from .nvidia import is_ours, judge_holders, name_of
from .scene import Check, Scene, engine_pids


def opened(settings: AgentSettings) -> dict[int, HostDevice | str | None]:
    """The host-memory devices by their number: None where there is none yet, the trouble where it cannot be opened."""
    found: dict[int, HostDevice | str | None] = {}
    for number, declared in enumerate(settings.devices):
        if declared.kind != "host" or declared.path is None:
            continue
        try:
            found[number] = HostDevice.open(declared.path)
        except FileNotFoundError:
            found[number] = None
        except (OSError, ValueError) as error:
            found[number] = str(error)
    return found


def judge_device(
    number: int, path: Path, device: HostDevice | str | None, wanted_bytes: int, room_bytes: int
) -> Finding:
    """``room_bytes``: host memory that is available, with what the device holds already."""
    subject = f"devices.{number}"
    if isinstance(device, str):
        return failed(f"{path}: {device}", "name another path, or remove what is there", subject)
    if device is not None and device.capacity_bytes != wanted_bytes:
        seen = f"{path} was made with {in_mib(device.capacity_bytes)}, and capacity_bytes is {in_mib(wanted_bytes)}"
        return failed(seen, "end what uses it and remove the directory; the agent makes it anew", subject)
    if wanted_bytes > room_bytes:
        seen = f"its capacity is {in_mib(wanted_bytes)} and {in_mib(room_bytes)} of host memory are to be had"
        return warning(seen, "make capacity_bytes smaller: processes on it would be killed for their memory", subject)
    return ok(f"{path} {'is there' if device is not None else 'is made by the agent'}, {in_mib(wanted_bytes)}", subject)


def check_host_devices(scene: Scene) -> list[Finding]:
    settings = scene.known
    devices = opened(settings)
    if not devices:
        return [not_applicable("the file names no host-memory device")]
    used = _holders(devices)
    room = mem_available_bytes(settings.meminfo_file) + sum(sum(held.values()) for held in used.values())
    found: list[Finding] = []
    for number, device in devices.items():
        declared = settings.devices[number]
        assert declared.path is not None
        found.append(judge_device(number, declared.path, device, declared.capacity_bytes or 0, room))
    engines = {pid for engine in settings.engines for pid in engine_pids(settings, engine)}
    for number, held in used.items():
        foreign = {pid: nbytes for pid, nbytes in held.items() if not is_ours(pid, engines)}
        if foreign:
            found.append(judge_holders(f"devices.{number}", foreign, {pid: name_of(pid) for pid in foreign}))
    return found


def _holders(devices: Mapping[int, HostDevice | str | None]) -> dict[int, dict[int, int]]:
    """Bytes by pid of each device that is there."""
    there = {number: device for number, device in devices.items() if isinstance(device, HostDevice)}
    looked = HostMemoryProbe({device.uuid: device.capacity_bytes for device in there.values()}).look()
    return {number: dict(looked[device.uuid].bytes_by_pid) for number, device in there.items()}


CHECKS = (Check("host_devices", "host", "Host-memory devices can be opened and fit into memory.", check_host_devices),)
