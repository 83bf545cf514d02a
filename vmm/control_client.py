"""The control routes from the other side, with the standard library alone. They are TensorRT-LLM's too.

Each call has a connection of its own and new headers, and follows no redirect: a signature is for one path, once. A
call that ends without an answer says so by an error of its own, since the park or wake may have happened all the same.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
from collections.abc import Callable, Iterable
from typing import Final, cast
from urllib.parse import urlsplit

from .control import RELEASE_PATH, RESUME_PATH, STATUS_PATH
from .errors import LullMemoryError
from .lifecycle import MemoryState
from .runtime import MemoryStatus
from .signing import keys_of, new_headers

_ANSWER_BYTES_MAX: Final = 1 << 20
_TEXT_CHARACTERS_MAX: Final = 500


class ControlError(LullMemoryError):
    """Base of what a control call can end with. ``status`` is the HTTP status, None where there was no answer."""

    def __init__(self, text: str, status: int | None = None) -> None:
        super().__init__(text)
        self.status = status


class EngineUnreachable(ControlError):
    """No connection: nothing was sent, so nothing has happened."""


class OutcomeUnknown(ControlError):
    """Sent, and no whole answer: it may have happened, or happen yet. Ask for the status; do not just repeat."""


class NotServed(ControlError):
    """That server has no such routes, or a redirect stands in the way: 3xx, 404, 405."""


class Unauthorized(ControlError):
    """The key is wrong, the clocks differ, or the server's store of nonces is full: 401. The text says which."""


class RequestInvalid(ControlError, ValueError):
    """Unknown tags, or a request that the server does not understand: 400, 413."""


class Conflict(ControlError):
    """The engine's state does not allow it now: 409."""


class OperationFailed(ControlError):
    """The engine tried and could not, or answered what is no answer."""


class ControlClient:
    """Thread-safe: it keeps nothing between calls."""

    def __init__(
        self,
        url: str,
        key: bytes,
        *,
        operation_seconds_max: float = 3600.0,
        status_seconds_max: float = 10.0,
        now: Callable[[], float] = time.time,
    ) -> None:
        """``url`` is http(s)://HOST:PORT, with the path under which the routes are mounted if any, or unix:/SOCKET.

        A park answers when it is done, after the longest request in flight: ``operation_seconds_max`` bounds the
        silence until then. ValueError for another kind of url or an empty key, TypeError for one that is not bytes.
        """
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "unix") or not (
            parts.path if parts.scheme == "unix" else parts.netloc
        ):
            raise ValueError(f"url is {url!r}; expected http://HOST:PORT, https://HOST:PORT or unix:/SOCKET")
        if parts.query or parts.fragment:
            raise ValueError(f"url is {url!r}; it must have neither a query nor a fragment")
        self._parts = parts
        self._root_path = "" if parts.scheme == "unix" else parts.path.rstrip("/")
        (self._key,) = keys_of((key,))
        if not key:
            raise ValueError("key is empty; control requests are signed with one")
        self._operation_seconds_max = operation_seconds_max
        self._status_seconds_max = status_seconds_max
        self._now = now

    def release(self, tags: Iterable[str] | None = None) -> None:
        """Returns when the tags are parked, all unless given. Raises ControlError."""
        self._call("POST", RELEASE_PATH, tags, self._operation_seconds_max)

    def resume(self, tags: Iterable[str] | None = None) -> None:
        """Returns when the tags are awake, all that are parked unless given. Raises ControlError."""
        self._call("POST", RESUME_PATH, tags, self._operation_seconds_max)

    def status(self) -> MemoryStatus:
        content = self._call("GET", STATUS_PATH, None, self._status_seconds_max)
        try:
            fields = cast("dict[str, object]", content)
            return MemoryStatus(MemoryState(str(fields["state"])), tuple(cast("list[str]", fields["parked_tags"])))
        except (KeyError, TypeError, ValueError) as error:
            raise OperationFailed(f"the status is no memory status: {_short(repr(content))}", 200) from error

    def _call(self, method: str, path: str, tags: Iterable[str] | None, seconds: float) -> object:
        body = b"" if tags is None else json.dumps({"tags": list(tags)}).encode()
        headers = new_headers(self._key, method, path, body, now=self._now())
        if body:
            headers["content-type"] = "application/json"
        headers["connection"] = "close"
        connection = self._connection(seconds)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise EngineUnreachable(f"{self._parts.geturl()} cannot be reached: {error}") from error
            try:
                connection.request(method, self._root_path + path, body or None, headers)
                response = connection.getresponse()
                content = response.read(_ANSWER_BYTES_MAX)
                if response.length and len(content) < _ANSWER_BYTES_MAX:
                    raise http.client.IncompleteRead(content, response.length)
            except (OSError, http.client.HTTPException) as error:
                raise OutcomeUnknown(f"{path} was sent and not answered ({error!r}); ask for the status") from error
        finally:
            connection.close()
        return _result(path, response.status, content)

    def _connection(self, seconds: float) -> http.client.HTTPConnection:
        if self._parts.scheme == "unix":
            return _UnixConnection(self._parts.path, seconds)
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        return kind(self._parts.netloc, timeout=seconds)


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str, seconds: float) -> None:
        super().__init__("localhost", timeout=seconds)
        self._path = path
        self._seconds = seconds

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self._seconds)
        self.sock.connect(self._path)


def _result(path: str, status: int, body: bytes) -> object:
    if status == http.client.OK:
        try:
            return cast("object", json.loads(body))
        except (ValueError, RecursionError) as error:
            raise OperationFailed(f"{path} answered 200 without JSON: {_short(repr(body))}", status) from error
    text = f"{path} answered {status}: {_error_text(body)}"
    if 300 <= status < 400 or status in (404, 405):
        raise NotServed(f"{text}; are the control routes enabled there?", status)
    kinds: dict[int, type[ControlError]] = {400: RequestInvalid, 401: Unauthorized, 409: Conflict, 413: RequestInvalid}
    raise kinds.get(status, OperationFailed)(text, status)


def _error_text(body: bytes) -> str:
    """``{"detail"}``, ``{"error": text}`` and ``{"error": {"message"}}`` are in use; else the body as it is."""
    try:
        content = cast("object", json.loads(body))
    except (ValueError, RecursionError):
        return _short(body.decode("utf-8", "replace"))
    if isinstance(content, dict):
        fields = cast("dict[str, object]", content)
        said = fields.get("error", fields.get("detail"))
        if isinstance(said, dict):
            said = cast("dict[str, object]", said).get("message")
        if isinstance(said, str):
            return _short(said)
    return _short(body.decode("utf-8", "replace"))


def _short(text: str) -> str:
    return text if len(text) <= _TEXT_CHARACTERS_MAX else text[:_TEXT_CHARACTERS_MAX] + "…"
