"""HTTP to what is on this very machine: plain, one connection a call, no proxy of the environment in between."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

import httpx

# Never used for a handshake. Without it httpx reads every CA certificate for each client: some 20 ms a call.
NO_TLS: Final = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


def loopback_client(timeout: httpx.Timeout, *, socket: Path | None = None, base_url: str = "") -> httpx.AsyncClient:
    """A client for one call, over TCP or over the Unix socket at ``socket``."""
    transport = httpx.AsyncHTTPTransport(verify=NO_TLS, uds=None if socket is None else str(socket))
    return httpx.AsyncClient(transport=transport, timeout=timeout, base_url=base_url, follow_redirects=False)
