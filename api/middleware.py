"""What wraps every request: its id, who sent it, how large its body may be, and the last barrier for errors.

Pure ASGI and one layer, because it runs before every handler. Nothing but ``OPEN_PATHS`` is answered without a
token, unknown paths and the OpenAPI document included.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import MutableMapping
from typing import Any, Final

import structlog
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .auth import Authenticator
from .problems import Problem

OPEN_PATHS: Final = frozenset({"/livez", "/readyz"})
REQUEST_ID: Final = b"x-request-id"
AGENT_PREFIX: Final = "/api/v1/agent/"
LOG_PREFIX: Final = "/api/v1/agent/logs/"

_REQUEST_ID_PATTERN: Final = re.compile(rb"[A-Za-z0-9._-]{1,64}")
_log = structlog.get_logger("lull.api")


class StreamCut(Exception):
    """A response that had begun cannot be completed: its connection is closed, so that the client can tell."""


class Envelope:
    """ASGI middleware; ``body_bytes_max`` rules users' bodies, ``agent_body_bytes_max`` the agents' JSON.

    Log bytes have no limit here: they are passed on as they come, and the agent caps each log.
    """

    def __init__(
        self, app: ASGIApp, *, authenticator: Authenticator, body_bytes_max: int, agent_body_bytes_max: int
    ) -> None:
        self._app = app
        self._authenticator = authenticator
        self._body_bytes_max = body_bytes_max
        self._agent_body_bytes_max = agent_body_bytes_max

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        headers = _headers_wanted(scope)
        request_id = _request_id(headers.get(REQUEST_ID))
        answer = _Answer(send, request_id)
        state: MutableMapping[str, Any] = scope.setdefault("state", {})
        state["request_id"] = request_id.decode()
        try:
            self._authenticate(scope, headers, state)
            await self._app(scope, self._limited(scope, headers, receive), answer.send)
        except Problem as problem:
            await self._refuse(problem, scope, receive, answer)
        except StreamCut as cut:
            _log.warning("response cut", path=scope["path"], request_id=state["request_id"], reason=str(cut))
        except Exception:  # noqa: BLE001  the last barrier: nobody above can answer the client
            _log.exception("request failed", path=scope["path"], request_id=state["request_id"])
            detail = f"the server's log says more under request {state['request_id']}"
            await self._refuse(Problem("internal_error", detail), scope, receive, answer)

    def _authenticate(
        self, scope: Scope, headers: MutableMapping[bytes, bytes], state: MutableMapping[str, Any]
    ) -> None:
        if scope["path"] in OPEN_PATHS:
            return
        principal = self._authenticator.principal_of(headers.get(b"authorization"))
        if principal is None:
            raise Problem(
                "unauthenticated",
                "send the header 'Authorization: Bearer TOKEN' with the token from the server's token file",
                headers={"WWW-Authenticate": "Bearer"},
            )
        state["principal"] = principal

    def _limited(self, scope: Scope, headers: MutableMapping[bytes, bytes], receive: Receive) -> Receive:
        path: str = scope["path"]
        if path.startswith(LOG_PREFIX):
            return receive
        limit = self._agent_body_bytes_max if path.startswith(AGENT_PREFIX) else self._body_bytes_max
        too_large = Problem(
            "body_too_large",
            f"the body may have at most {limit} bytes",
            headers={"Connection": "close"},
            extra={"body_bytes_max": limit},
        )
        declared = headers.get(b"content-length", b"0")
        if declared.isdigit() and int(declared) > limit:
            raise too_large
        taken = 0

        # Counted as they come: a chunked body declares no length, and a declared one may lie.
        async def receive_limited() -> Message:
            nonlocal taken
            message = await receive()
            if message["type"] == "http.request":
                taken += len(message.get("body", b""))
                if taken > limit:
                    raise too_large
            return message

        return receive_limited

    async def _refuse(self, problem: Problem, scope: Scope, receive: Receive, answer: _Answer) -> None:
        if answer.started:
            # uvicorn closes the connection of a response that was begun and not completed.
            return
        await problem.response()(scope, receive, answer.send)


class _Answer:
    """``send`` with the request's id in the headers; knows whether a response has begun."""

    __slots__ = ("_request_id", "_send", "started")

    def __init__(self, send: Send, request_id: bytes) -> None:
        self._send = send
        self._request_id = request_id
        self.started = False

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.started = True
            headers = [*message.get("headers", ()), (REQUEST_ID, self._request_id)]
            message = {**message, "headers": headers}
        await self._send(message)


def _headers_wanted(scope: Scope) -> dict[bytes, bytes]:
    wanted = (b"authorization", b"content-length", REQUEST_ID)
    return {name: value for name, value in scope["headers"] if name in wanted}


def _request_id(given: bytes | None) -> bytes:
    # A client's id is echoed and logged, so only harmless characters pass.
    if given is not None and _REQUEST_ID_PATTERN.fullmatch(given):
        return given
    return secrets.token_hex(16).encode()
