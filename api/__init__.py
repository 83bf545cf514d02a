"""``lull.api.Client`` speaks to a server. The name is imported on first use: it needs httpx, the package does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .client import Client, ClientError, ProblemError, ServerUnreachable, WaitTimeout

__all__ = ["Client", "ClientError", "ProblemError", "ServerUnreachable", "WaitTimeout"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from . import client

        return getattr(client, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
