"""Errors as clients get them: problem+json (RFC 9457) that also holds the ``error`` object OpenAI clients look for."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any, Final

CONTENT_TYPE: Final = "application/problem+json"


class Problem(Exception):
    """Ends a request with this answer. ``close``: the connection is not used again."""

    def __init__(
        self,
        status: int,
        code: str,
        detail: str,
        *,
        retry_after_seconds: int | None = None,
        allow: str | None = None,
        close: bool = False,
    ) -> None:
        super().__init__(detail)
        self.status = status
        self.code = code
        self.detail = detail
        self.retry_after_seconds = retry_after_seconds
        self.allow = allow
        self.close = close

    def document(self) -> dict[str, Any]:
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return {
            "type": "about:blank",
            "title": HTTPStatus(self.status).phrase,
            "status": self.status,
            "detail": self.detail,
            "code": self.code,
            "error": {"message": self.detail, "type": kind, "code": self.code, "param": None},
        }

    def headers(self) -> dict[str, str]:
        headers: dict[str, str] = {}
        if self.retry_after_seconds is not None:
            headers["Retry-After"] = str(self.retry_after_seconds)
        if self.allow is not None:
            headers["Allow"] = self.allow
        return headers

    def event(self) -> bytes:
        """For a stream that has already begun."""
        return b"data: " + json.dumps({"error": self.document()["error"]}).encode() + b"\n\n"


def plain_answer(
    status: int, content_type: str, body: bytes, headers: dict[str, str], *, close: bool, without_body: bool = False
) -> bytes:
    """A whole answer of the gateway's own. ``without_body``: as HEAD is answered."""
    lines = [
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}",
        f"Content-Type: {content_type}",
        f"Content-Length: {len(body)}",
        *(f"{name}: {value}" for name, value in headers.items()),
        *(["Connection: close"] if close else []),
        "\r\n",
    ]
    return "\r\n".join(lines).encode("latin-1") + (b"" if without_body else body)
