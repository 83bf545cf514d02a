"""One HTTP call to an engine on this machine: a connection of its own, a bound on the whole, three kinds of failure."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, cast

import httpx

from ..bounded_body import AnswerTooLarge, read_whole
from ..errors import EngineAuthRefused, EngineRefused, EngineTimedOut, EngineUnreachable
from ..key_files import KeyUnusable, read_header_key
from ..loopback import loopback_client

_CONNECT_SECONDS: Final = 5.0  # one try
_CONNECT_SECONDS_MIN: Final = 0.05
_CONNECT_SHARE: Final = 0.9  # of the call's time: what is left after it would not suffice for an answer
_CONNECTED: Final = "connection.connect_tcp.complete"  # an event of httpcore's
_ANSWER_BYTES_MAX: Final = 4 << 20  # /openapi.json and /metrics are the largest
_TEXT_MAX: Final = 500
_LOCAL_WANTS: Final = frozenset({errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL})


async def call(
    method: str, url: str, seconds_max: float, *, body: Any = None, headers: dict[str, str] | None = None
) -> httpx.Response:
    """Sends ``body`` as JSON, if it is not None; bytes are sent as they are, since they may be signed.

    Never repeats what was sent, never follows a redirect. A connection that takes long is tried again: nothing was
    sent, and on this machine it is this process that was slow, or an engine that takes none. Refused ones are not.
    ``seconds_max`` bounds all of it, and the answer has a bound in bytes. Raises EngineUnreachable where nothing was
    sent, EngineTimedOut where the call was sent and was not answered whole: what it did is unknown then.
    """
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    sent = {"accept-encoding": "identity", **(headers or {})}
    if body is not None:
        sent["content-type"] = "application/json"
    loop = asyncio.get_running_loop()
    connect_by, is_connected = loop.time() + seconds_max * _CONNECT_SHARE, False

    async def note(event: str, _: object) -> None:
        nonlocal is_connected
        is_connected |= event == _CONNECTED

    try:
        # httpx bounds each read, not the whole: an engine that trickles its answer would hold us for ever.
        async with asyncio.timeout(seconds_max), loopback_client(httpx.Timeout(None)) as client:
            while True:
                connect_seconds = min(_CONNECT_SECONDS, max(connect_by - loop.time(), _CONNECT_SECONDS_MIN))
                limits, more = httpx.Timeout(None, connect=connect_seconds), {"trace": note}
                try:
                    async with client.stream(
                        method, url, content=raw, headers=sent, timeout=limits, extensions=more
                    ) as response:
                        return _kept(response, await read_whole(response, _ANSWER_BYTES_MAX))
                except httpx.ConnectTimeout:
                    if loop.time() >= connect_by:
                        raise
    except httpx.ConnectError as error:
        raise EngineUnreachable(f"{url}: {error}") from error
    except httpx.LocalProtocolError as error:  # this request cannot be put on the wire: nothing was sent
        raise EngineUnreachable(f"{method} {url}: {error}") from error
    except httpx.ConnectTimeout as error:
        raise EngineUnreachable(f"{url}: no connection within {seconds_max * _CONNECT_SHARE:.3g} s") from error
    except TimeoutError as error:
        if not is_connected:
            raise EngineUnreachable(f"{url}: no connection within {seconds_max:.3g} s") from error
        raise EngineTimedOut(f"{method} {url}: not answered whole within {seconds_max} s") from error
    except OSError as error:  # of this process's own
        raise (EngineTimedOut if is_connected else EngineUnreachable)(f"{method} {url}: {error}") from error
    except AnswerTooLarge as error:
        raise EngineTimedOut(f"{method} {url}: not read whole: {error}") from error
    except httpx.HTTPError as error:
        raise EngineTimedOut(f"{method} {url}: {type(error).__name__} {error}") from error


def _kept(response: httpx.Response, body: bytes) -> httpx.Response:
    """The answer without what its headers say of the body: it is not decoded, and its text is UTF-8 or is odd."""
    told = {"date": response.headers["date"]} if "date" in response.headers else {}
    return httpx.Response(response.status_code, headers=told, content=body)


def accepted(reply: httpx.Response) -> httpx.Response:
    """The reply if its status is 200; raises EngineAuthRefused for 401 and 403, EngineRefused for any other."""
    if reply.status_code == 200:
        return reply
    if reply.status_code in (401, 403):
        raise EngineAuthRefused(f"HTTP {reply.status_code}: {error_text(reply)}")
    raise EngineRefused(reply.status_code, error_text(reply))


def json_object(reply: httpx.Response) -> dict[str, Any]:
    """The body as a JSON object; EngineRefused for anything else."""
    try:
        value = reply.json()
    except (ValueError, RecursionError) as error:
        raise EngineRefused(reply.status_code, f"not JSON: {reply.text[:_TEXT_MAX]}") from error
    if not isinstance(value, dict):
        raise EngineRefused(reply.status_code, f"not a JSON object: {reply.text[:_TEXT_MAX]}")
    return cast("dict[str, Any]", value)


def error_text(reply: httpx.Response) -> str:
    """The words of {"message": s}, {"detail": s}, {"error": s} or {"error": {"message": s}}; else the body itself."""
    try:
        body: Any = reply.json()
    except (ValueError, RecursionError):
        return reply.text[:_TEXT_MAX]
    for name in ("error", "detail", "message"):
        if isinstance(body, dict) and name in body:
            body = cast("dict[str, Any]", body)[name]
    return str(cast("object", body))[:_TEXT_MAX]


def objects(value: Any) -> list[dict[str, Any]]:
    """The objects of a JSON list; none of anything else."""
    if not isinstance(value, list):
        return []
    entries = cast("Sequence[Any]", value)
    return [cast("dict[str, Any]", entry) for entry in entries if isinstance(entry, dict)]


def bearer(key_file: Path | None) -> dict[str, str]:
    """The header of a key that is read again at every call, so it can be rotated. Raises EngineAuthRefused."""
    if key_file is None:
        return {}
    try:
        return {"authorization": f"Bearer {read_header_key(key_file)}"}
    except KeyUnusable as error:
        raise EngineAuthRefused(f"the key {key_file} {error}") from error


def is_our_fault(error: BaseException | None) -> bool:
    """True if our key, our own request, or a want of this process (descriptors, ports, memory) is behind it."""
    if isinstance(error, EngineAuthRefused):
        return True
    while error is not None:
        if isinstance(error, httpx.LocalProtocolError) or (isinstance(error, OSError) and error.errno in _LOCAL_WANTS):
            return True
        error = error.__cause__ or error.__context__
    return False
