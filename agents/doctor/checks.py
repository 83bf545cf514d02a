"""The list of checks, in the order in which they are told."""

from __future__ import annotations

from typing import Final

from . import configuration, disk, engine_flags, engines, gates, host, host_devices, nvidia, server, traffic
from .scene import Check

CHECKS: Final[tuple[Check, ...]] = (
    *configuration.CHECKS,
    *disk.CHECKS,
    *host.CHECKS,
    *host_devices.CHECKS,
    *nvidia.CHECKS,
    *server.CHECKS,
    *traffic.CHECKS,
    *gates.CHECKS,
    *engines.CHECKS,
    *engine_flags.CHECKS,
)
