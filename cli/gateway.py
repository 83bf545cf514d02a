"""`lull gateway`."""

from __future__ import annotations

from ..agents.gateway.command import gateway

__all__ = ["gateway"]
