"""Errors as clients get them: problem+json (RFC 9457) that also holds the ``error`` object OpenAI clients look for."""

from __future__ import annotations

import json
from http import HTTPStatus
from typing import Any

from aiohttp import web


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

    def response(self) -> web.Response:
        response = web.Response(
            status=self.status,
            body=json.dumps(self.document()).encode(),
            content_type="application/problem+json",
        )
        if self.retry_after_seconds is not None:
            response.headers["Retry-After"] = str(self.retry_after_seconds)
        if self.allow is not None:
            response.headers["Allow"] = self.allow
        if self.close:
            response.force_close()
        return response

    def event(self) -> bytes:
        """For a stream that has already begun."""
        return b"data: " + json.dumps({"error": self.document()["error"]}).encode() + b"\n\n"
