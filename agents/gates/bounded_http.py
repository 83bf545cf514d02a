"""One HTTP exchange with a gate that is somebody else's: bounded in time and bytes, no redirects, no proxies."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import httpx

from ..bounded_body import AnswerTooLarge, read_whole
from ..loopback import NO_TLS
from .base import GateUnreachable

_WORDS_MAX = 300


@dataclass(frozen=True, slots=True)
class Reply:
    status: int
    body: bytes

    def json_object(self) -> dict[str, Any] | None:
        """None for anything that is no JSON object."""
        try:
            value: object = json.loads(self.body)
        except (ValueError, RecursionError):
            return None
        return cast("dict[str, Any]", value) if isinstance(value, dict) else None

    def words(self) -> str:
        """What it says, as far as it says so in JSON: of anything else nothing is shown."""
        said = self.json_object() or {}
        for name in ("message", "detail", "error"):
            if isinstance(said.get(name), str):
                return str(said[name])[:_WORDS_MAX]
        return "no words"


@dataclass(frozen=True, slots=True)
class Tls:
    """Files are read at every call, so that they can be rotated."""

    ca_file: Path | None = None
    certificate_file: Path | None = None
    key_file: Path | None = None

    def context(self) -> ssl.SSLContext:
        context = ssl.create_default_context(cafile=None if self.ca_file is None else str(self.ca_file))
        if self.certificate_file is not None:
            context.load_cert_chain(self.certificate_file, self.key_file)
        return context


async def exchange(
    method: str,
    url: str,
    seconds_max: float,
    bytes_max: int,
    tls: Tls,
    *,
    params: Mapping[str, str] | None = None,
    headers: Mapping[str, str] | None = None,
    body: bytes | None = None,
    server_name: str | None = None,
) -> Reply:
    """Raises GateUnreachable without a whole answer: whether the call was done is unknown then.

    ``server_name``: whose certificate it has to be, where ``url`` has an address instead of a name.
    """
    named = {} if server_name is None else {"sni_hostname": server_name}
    sent = {"accept-encoding": "identity", **(headers or {})}
    try:
        async with asyncio.timeout(seconds_max):
            verify = await asyncio.to_thread(tls.context) if url.startswith("https:") else NO_TLS
            transport = httpx.AsyncHTTPTransport(verify=verify)
            async with (
                httpx.AsyncClient(transport=transport, timeout=None, follow_redirects=False) as client,  # noqa: S113
                client.stream(method, url, params=params, headers=sent, content=body, extensions=named) as response,
            ):
                return Reply(response.status_code, await read_whole(response, bytes_max))
    except TimeoutError as error:
        raise GateUnreachable(f"{method} {url}: no whole answer within {seconds_max:g} s") from error
    except (httpx.HTTPError, OSError, AnswerTooLarge) as error:
        raise GateUnreachable(f"{method} {url}: {str(error)[:_WORDS_MAX] or type(error).__name__}") from error
