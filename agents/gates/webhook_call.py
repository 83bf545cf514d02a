"""One signed call to an operator's webhook.

    POST url
    Content-Type: application/json
    Lull-Signature: t=1760000000,id=0f8c…,v1=<hex>

v1 is HMAC-SHA256 with the secret over the bytes `v1.{t}.{id}.` and then the body as it was sent. The receiver computes
it anew, compares in constant time, refuses a time more than 300 s from its own clock and an id that it has seen. The
answer repeats the id: an answer that somebody kept from another call is none.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import ipaddress
import json
import socket
import time
import uuid
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import urlsplit, urlunsplit

from ..key_files import KeyUnusable, read_key
from .addresses import IPAddress, refusal
from .base import GateRefused, GateUnreachable
from .bounded_http import Reply, Tls, exchange
from .sections import WebhookSection

SIGNATURE_HEADER: Final = "Lull-Signature"
WINDOW_SECONDS: Final = 300
_ANSWER_BYTES_MAX: Final = 64 << 10
_SECRET_BYTES_MIN: Final = 16
_PORTS: Final = {"https": 443, "http": 80}

Resolve = Callable[[str, int], Awaitable[Sequence[str]]]


def signature(secret: bytes, at: int, call_id: str, body: bytes) -> str:
    """The value of the header."""
    signed = hmac.new(secret, f"v1.{at}.{call_id}.".encode() + body, hashlib.sha256)
    return f"t={at},id={call_id},v1={signed.hexdigest()}"


def read_secret(path: Path) -> bytes:
    """Raises KeyUnusable."""
    secret = read_key(path)
    if len(secret) < _SECRET_BYTES_MIN:
        raise KeyUnusable(f"is shorter than {_SECRET_BYTES_MIN} bytes")
    return secret


async def resolve(host: str, port: int) -> list[str]:
    found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


class WebhookCaller:
    """``resolve``: the addresses of a name."""

    def __init__(self, section: WebhookSection, resolve: Resolve = resolve) -> None:
        self._section = section
        self._resolve = resolve
        self._allowed = [ipaddress.ip_network(one) for one in section.allow]
        self._url = urlsplit(section.url)

    async def call(self, verb: str, about: Mapping[str, Any]) -> dict[str, Any]:
        """The answer to ``verb``. GateUnreachable without one that is ours; GateRefused for 4xx and a wrong address."""
        call_id, at = uuid.uuid4().hex, int(time.time())
        body = json.dumps({"id": call_id, "at": at, "verb": verb, **about}).encode()
        headers = {
            "content-type": "application/json",
            "host": self._url.netloc,
            SIGNATURE_HEADER: signature(self._secret(), at, call_id, body),
        }
        deadline = asyncio.get_running_loop().time() + self._section.call_seconds_max
        address = await self._checked_address()
        reply = await self._send(address, headers, body, deadline - asyncio.get_running_loop().time())
        return self._answer(reply, call_id)

    def _secret(self) -> bytes:
        try:
            return read_secret(self._section.secret_file)
        except KeyUnusable as error:
            raise GateRefused(f"webhook.secret_file {self._section.secret_file} {error}") from error

    async def _checked_address(self) -> IPAddress:
        """The one that is connected to. Every address of the name is checked: a name with a bad one is not trusted."""
        host, port = self._url.hostname or "", self._url.port or _PORTS[self._url.scheme]
        try:
            async with asyncio.timeout(self._section.call_seconds_max):
                texts = await self._resolve(host, port)
        except (OSError, UnicodeError, TimeoutError) as error:
            raise GateUnreachable(f"webhook: {host} cannot be resolved: {error or 'no answer'}") from error
        addresses = [ipaddress.ip_address(text.partition("%")[0]) for text in texts]
        for address in addresses:
            refused = refusal(address, self._allowed)
            if refused is not None:
                raise GateRefused(f"webhook.allow: {host} is not called: {refused}")
        if not addresses:
            raise GateUnreachable(f"webhook: {host} has no address")
        return addresses[0]

    async def _send(self, address: IPAddress, headers: dict[str, str], body: bytes, seconds_max: float) -> Reply:
        host = f"[{address}]" if address.version == 6 else str(address)
        port = self._url.port or _PORTS[self._url.scheme]
        url = urlunsplit((self._url.scheme, f"{host}:{port}", self._url.path or "/", self._url.query, ""))
        return await exchange(
            "POST",
            url,
            max(0.001, seconds_max),
            _ANSWER_BYTES_MAX,
            Tls(self._section.ca_file),
            headers=headers,
            body=body,
            server_name=self._url.hostname,
        )

    def _answer(self, reply: Reply, call_id: str) -> dict[str, Any]:
        where = f"webhook {self._url.netloc}"
        if 400 <= reply.status < 500 and reply.status not in (408, 425, 429):
            raise GateRefused(f"{where}: HTTP {reply.status}: {reply.words()}")
        if reply.status != 200:
            raise GateUnreachable(f"{where}: HTTP {reply.status}")
        answer = reply.json_object()
        if answer is None:
            raise GateUnreachable(f"{where}: the answer is no JSON object")
        if answer.get("id") != call_id:
            raise GateUnreachable(f"{where}: the answer does not repeat the id of the call")
        return answer
