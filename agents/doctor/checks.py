"""The list of checks, in the order in which they are told."""

from __future__ import annotations

from typing import Final

from . import configuration, disk, engines, host, server, traffic
from .scene import Check

CHECKS: Final[tuple[Check, ...]] = (
    *configuration.CHECKS,
    *disk.CHECKS,
    *host.CHECKS,
    *server.CHECKS,
    *traffic.CHECKS,
    *engines.CHECKS,
)
