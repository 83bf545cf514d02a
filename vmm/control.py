"""The control routes of a Runtime as a bare ASGI application, in TensorRT-LLM's wire format.

Order per request: route, method, body within its bound, JSON, signature, schema, operation. Which shape an error has is
part of the format: 401 ``{"detail"}``, bad JSON or schema ``{"error": text}``, anything the runtime says
``{"error": {"message"}}``. Park and wake run in a thread and are not cancelled when the client goes away.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol, cast

from .errors import TransitionRefused
from .runtime import MemoryStatus
from .shielded import in_thread
from .signing import ControlAuthError, RequestVerifier, keys_of
from .tags import InvalidTag

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
AsgiApp = Callable[[Scope, Receive, Send], Awaitable[None]]

RELEASE_PATH: Final = "/release_memory"
RESUME_PATH: Final = "/resume_memory"
STATUS_PATH: Final = "/memory_status"
CONTROL_PATHS: Final = frozenset({RELEASE_PATH, RESUME_PATH, STATUS_PATH})

_METHODS: Final = {RELEASE_PATH: "POST", RESUME_PATH: "POST", STATUS_PATH: "GET"}
_LENGTH_DIGITS_MAX: Final = 18
_log = logging.getLogger(__name__)


class Controlled(Protocol):
    """What the routes need: a Runtime, or a RankedRuntime for an engine of several processes."""

    def status(self) -> MemoryStatus: ...
    async def release_async(self, tags: Sequence[str] | None = None) -> None: ...
    async def resume_async(self, tags: Sequence[str] | None = None) -> None: ...


@dataclass(frozen=True, slots=True)
class _Answer:
    status: int
    content: object
    headers: tuple[tuple[bytes, bytes], ...] = ()


class _Refused(Exception):
    """The request ends here, with this answer."""

    def __init__(self, status: int, content: object, *headers: tuple[bytes, bytes]) -> None:
        self.answer = _Answer(status, content, headers)


def control_app(
    runtime: Controlled,
    key: bytes | Sequence[bytes],
    *,
    now: Callable[[], float] = time.time,
    body_bytes_max: int = 65536,
) -> AsgiApp:
    """Mount it, or give it the requests whose path is one of CONTROL_PATHS. Keep it off the public port.

    TypeError for a key that is not bytes, ValueError for an empty one: nobody could sign with it."""
    if not all(hasattr(runtime, verb) for verb in ("status", "release_async", "resume_async")):
        raise TypeError(f"runtime is {runtime!r}; it must be a Runtime or a RankedRuntime")
    keys = keys_of(key)
    if not keys or not all(keys):
        raise ValueError("key is empty; control requests are signed with one")
    verifier = RequestVerifier(keys)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "http":
            try:
                answer = await _handle(runtime, verifier, now, body_bytes_max, scope, receive)
            except _Refused as refused:
                answer = refused.answer
            await _send(send, answer)
        else:
            await send({"type": "websocket.close", "code": 1000})

    return app


async def _handle(
    runtime: Controlled,
    verifier: RequestVerifier,
    now: Callable[[], float],
    body_bytes_max: int,
    scope: Scope,
    receive: Receive,
) -> _Answer:
    path = _route(scope)
    method = str(scope["method"])
    if method != _METHODS[path]:
        raise _Refused(405, {"detail": "Method Not Allowed"}, (b"allow", _METHODS[path].encode()))
    headers = _headers(scope)
    _refuse_announced(headers.get("content-length", ""), body_bytes_max)
    body = await _body(receive, body_bytes_max)
    content = _parse(body, headers) if method == "POST" else None
    try:
        verifier.verify(method, path, headers, body, now=now())
    except ControlAuthError as error:
        raise _Refused(401, {"detail": str(error)}) from error
    if path == STATUS_PATH:
        return await _status(runtime)
    tags = _tags(content)
    # A client that gives up does not leave the engine between two states: the operation goes on without it.
    return await _operate(runtime.release_async(tags) if path == RELEASE_PATH else runtime.resume_async(tags), path)


async def _operate(operation: Awaitable[None], path: str) -> _Answer:
    try:
        await operation
    except InvalidTag as error:
        return _failure(400, error)
    except TransitionRefused as error:
        return _failure(409, error)
    except Exception as error:  # noqa: BLE001  whatever else the runtime says is a 500 on the wire
        _log.exception("%s failed", path)
        return _failure(500, error)
    return _Answer(200, {"status": "success"})


async def _status(runtime: Controlled) -> _Answer:
    status = await in_thread("status", runtime.status)  # ranks are asked, which may take its time
    return _Answer(200, {"state": status.state.value, "parked_tags": list(status.parked_tags)})


def _failure(status: int, error: Exception) -> _Answer:
    return _Answer(status, {"error": {"message": str(error) or type(error).__name__}})


def _route(scope: Scope) -> str:
    """The registered path: without the root path under which we are mounted."""
    path, root_path = str(scope["path"]), str(scope.get("root_path", ""))
    if root_path and path.startswith(root_path + "/"):
        path = path.removeprefix(root_path)
    if path in CONTROL_PATHS:
        return path
    if path.removesuffix("/") in CONTROL_PATHS:
        raise _Refused(307, None, (b"location", (root_path + path.removesuffix("/")).encode()))
    raise _Refused(404, {"detail": "Not Found"})


def _headers(scope: Scope) -> dict[str, str]:
    """The first of each name counts."""
    headers: dict[str, str] = {}
    for name, value in cast("Sequence[tuple[bytes, bytes]]", scope["headers"]):
        headers.setdefault(name.decode("latin-1").lower(), value.decode("latin-1"))
    return headers


def _refuse_announced(content_length: str, bytes_max: int) -> None:
    """A body that will be too large is not waited for."""
    digits = content_length.strip().lstrip("0")
    if digits.isdecimal() and (len(digits) > _LENGTH_DIGITS_MAX or int(digits) > bytes_max):
        raise _too_large(bytes_max)


def _too_large(bytes_max: int) -> _Refused:
    return _Refused(413, {"error": f"the body is larger than {bytes_max} bytes"}, (b"connection", b"close"))


async def _body(receive: Receive, bytes_max: int) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            raise _Refused(400, {"error": "the client went away before the whole body was there"})
        body += cast("bytes", message.get("body", b""))
        if len(body) > bytes_max:
            raise _too_large(bytes_max)
        if not message.get("more_body", False):
            return bytes(body)


def _parse(body: bytes, headers: dict[str, str]) -> object:
    if not body:
        return None
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise _Refused(400, {"error": f"content-type is {kind!r}: a body must be application/json"})
    try:
        return cast("object", json.loads(body))
    except (ValueError, RecursionError) as error:
        raise _Refused(400, {"error": f"the body is not JSON: {error}"}) from error


def _tags(content: object) -> list[str] | None:
    if content is None:
        return None
    if not isinstance(content, dict):
        raise _Refused(400, {"error": 'the body must be an object such as {"tags": ["kv_cache"]}, null or nothing'})
    fields = cast("dict[str, object]", content)
    if unknown := sorted(fields.keys() - {"tags"}):
        raise _Refused(400, {"error": f"unknown field(s) {', '.join(unknown)}: only tags is allowed"})
    tags = fields.get("tags")
    if tags is None:
        return None
    if not isinstance(tags, list) or not all(isinstance(tag, str) for tag in cast("list[object]", tags)):
        raise _Refused(400, {"error": "tags must be a list of strings"})
    return cast("list[str]", tags)


async def _send(send: Send, answer: _Answer) -> None:
    body = b"" if answer.content is None else json.dumps(answer.content).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode()), *answer.headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
