"""One look at all devices of a node, host memory and GPUs, and what follows from a device that cannot be read.

Such a device is quarantined as long as that lasts, with an alert: it is never lent. If the GPU itself is lost, so is
whatever ran on it, and ``on_lost`` is told.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Final, Literal, Protocol

from .bounded_probe import BoundedProbe
from .probe import Facts, HostMemoryProbe
from .probe_nvml import LOST, UNREADABLE, Nvml, NvmlProbe
from .protocol.words import Reason

ABSENT_CODES: Final = frozenset({LOST, UNREADABLE})


class ProbedDevice(Protocol):
    @property
    def device_id(self) -> str: ...
    @property
    def capacity_bytes(self) -> int: ...
    @property
    def reserve_bytes(self) -> int: ...
    @property
    def is_cuda(self) -> bool: ...
    @property
    def unified(self) -> bool: ...


class NodeProbe:
    """``seconds_max``: how long NVML may take. ``available``: bytes that the host can give. Thread-safe."""

    def __init__(self, devices: Sequence[ProbedDevice], seconds_max: float, available: Callable[[], int]) -> None:
        host = [device for device in devices if not device.is_cuda]
        cuda = {device.device_id: (device.capacity_bytes, device.reserve_bytes) for device in devices if device.is_cuda}
        capacities = {device.device_id: device.capacity_bytes for device in host}
        reserves = {device.device_id: device.reserve_bytes for device in host if device.unified}
        self._host_ids = list(capacities)
        self._host = HostMemoryProbe(capacities, reserves, available) if host else None
        self._nvml = (
            BoundedProbe(NvmlProbe(cuda, partial(Nvml, available)).read, list(cuda), seconds_max) if cuda else None
        )

    def look(self) -> Facts:
        """Blocks: some milliseconds, at most ``seconds_max`` where the driver hangs."""
        facts = Facts({}) if self._nvml is None else self._nvml.look()
        if self._host is not None:
            try:
                facts.update(self._host.look())
            except (OSError, ValueError) as error:
                facts.absent.update({device_id: _unreadable(device_id, error) for device_id in self._host_ids})
        return facts


def _unreadable(device_id: str, error: Exception) -> Reason:
    sentence = f"{device_id}: /proc cannot be read ({error}), so nobody can say who holds what of this device"
    return Reason(code=UNREADABLE, sentence=sentence)


class Absences:
    """Which devices cannot be read now. Changes ``quarantined``, and leaves what others have put there."""

    def __init__(
        self,
        quarantined: dict[str, Reason],
        alert: Callable[[Literal["info", "critical"], str, str, Mapping[str, str]], None],
    ) -> None:
        """``alert(severity, code, sentence, data)``."""
        self._quarantined = quarantined
        self._alert = alert
        self.on_lost: Callable[[str, Reason], None] = lambda device_id, reason: None
        self._absent: dict[str, Reason] = {}

    def lost(self, device_id: str) -> Reason | None:
        """Why the GPU is lost; None while it is not, or nobody knows."""
        reason = self._absent.get(device_id)
        return reason if reason is not None and reason.code == LOST else None

    def see(self, facts: Facts) -> None:
        for device_id, reason in facts.absent.items():
            before = self._absent.get(device_id)
            self._absent[device_id] = reason
            if self._quarantined.get(device_id) in (None, before):
                self._quarantined[device_id] = reason
            if before is None or before.code != reason.code:
                code = "device_lost" if reason.code == LOST else "device_unreadable"
                self._alert("critical", code, reason.sentence, {"device_id": device_id})
                if reason.code == LOST:
                    self.on_lost(device_id, reason)
        for device_id in [device_id for device_id in self._absent if device_id in facts]:
            reason = self._absent.pop(device_id)
            if self._quarantined.get(device_id) == reason:
                del self._quarantined[device_id]
            self._alert("info", "device_back", f"{device_id} can be read again", {"device_id": device_id})
