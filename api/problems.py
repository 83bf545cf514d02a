"""Every error a client can see: RFC 9457 ``application/problem+json`` with a stable ``code``.

``Problem`` is raised by handlers; ``PROBLEMS`` is the whole list of codes, each with its status and title.
A detail says what is wrong and what to do about it. Nothing here echoes a header or another machine's answer.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final

from starlette.responses import Response

MEDIA_TYPE: Final = "application/problem+json"

PROBLEMS: Final[Mapping[str, tuple[int, str]]] = MappingProxyType(
    {
        "invalid_request": (422, "The request is not valid"),
        "malformed_json": (400, "The body is not JSON"),
        "unauthenticated": (401, "Authentication is needed"),
        "not_found": (404, "Not found"),
        "method_not_allowed": (405, "The method is not allowed here"),
        "job_ended": (409, "The job has already ended"),
        "no_attempt_yet": (409, "The job has not been started yet"),
        "policy_locked": (409, "The policy is locked by the agent's configuration"),
        "stale_agent": (409, "A newer agent process has registered for this node"),
        "duplicate_identity": (409, "Another agent has this node's identity"),
        "conflict": (409, "The request does not fit the current state"),
        "log_expired": (410, "The log is no longer kept"),
        "relay_gone": (410, "Nobody reads this log any more"),
        "version_mismatch": (412, "The object has changed since it was read"),
        "body_too_large": (413, "The body is too large"),
        "unsupported_media_type": (415, "The body must be JSON"),
        "idempotency_mismatch": (422, "The Idempotency-Key was used with another body"),
        "unsatisfiable": (422, "No known device can ever run this job"),
        "policy_not_honoured": (422, "The engine cannot honour this policy"),
        "queue_full": (429, "The queue is full"),
        "rate_limited": (429, "Too many requests"),
        "too_many_streams": (429, "Too many open streams"),
        "internal_error": (500, "Internal error"),
        "database_unavailable": (503, "The database does not answer"),
        "shutting_down": (503, "The server is shutting down"),
        "agent_silent": (504, "The node's agent does not answer"),
        "storage_full": (507, "The storage is full"),
    }
)


class Problem(Exception):
    """An answer that is an error. ``extra`` members appear beside ``code`` in the document."""

    def __init__(
        self,
        code: str,
        detail: str,
        *,
        headers: Mapping[str, str] | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.code = code
        self.status, self.title = PROBLEMS[code]
        self.detail = detail
        self.headers = dict(headers or {})
        self.extra = dict(extra or {})

    def document(self) -> dict[str, Any]:
        return {
            "type": f"urn:lull:problem:{self.code}",
            "title": self.title,
            "status": self.status,
            "code": self.code,
            "detail": self.detail,
            **self.extra,
        }

    def response(self) -> Response:
        body = json.dumps(self.document(), ensure_ascii=False, default=str).encode()
        return Response(body, self.status, self.headers, MEDIA_TYPE)


# The way out, by pydantic's error type. ``{ctx}`` members are pydantic's own.
_WAYS_OUT: Final[Mapping[str, str]] = MappingProxyType(
    {
        "missing": "add it",
        "json_invalid": "send one JSON object",
        "int_parsing": "give a whole number",
        "int_type": "give a whole number, not text",
        "int_from_float": "give a whole number",
        "float_parsing": "give a number",
        "float_type": "give a number, not text",
        "string_type": "give text",
        "list_type": "give a list",
        "dict_type": "give an object",
        "model_type": "give an object",
        "bool_parsing": "use 0, 1, true or false",
        "datetime_from_date_parsing": "use ISO 8601, for example 2026-01-31T12:00:00Z",
        "datetime_parsing": "use ISO 8601, for example 2026-01-31T12:00:00Z",
    }
)


def invalid_request(
    errors: Sequence[Mapping[str, Any]], *, known: Iterable[str] = (), where: str | None = None
) -> Problem:
    """A 422 that names each field and the way out, from pydantic's errors. ``known`` are the fields that exist."""
    fields = sorted(known)
    listed = [_field_error(error, fields, where) for error in errors[:20]]
    detail = "; ".join(f"{entry['field']}: {entry['message']}" for entry in listed)
    return Problem("invalid_request", detail, extra={"errors": listed})


def invalid_field(field: str, message: str, *, code: str = "invalid_request", **extra: Any) -> Problem:
    """A 422 about one field."""
    errors = [{"field": field, "message": message}]
    return Problem(code, f"{field}: {message}", extra={"errors": errors, **extra})


def _field_error(error: Mapping[str, Any], known: Sequence[str], where: str | None) -> dict[str, Any]:
    location = [str(part) for part in error.get("loc", ())]
    if where is None and location[:1] in (["query"], ["path"], ["header"], ["body"]):
        location = location[1:]
    field = ".".join(location) or where or "body"
    kind = str(error.get("type", ""))
    message = str(error.get("msg", "is not valid")).removeprefix("Value error, ")
    if kind == "extra_forbidden":
        message = "unknown field" + _suggestion(location[-1], known if len(location) == 1 else ())
    elif kind == "missing":
        message = "is required; add it"
    elif kind in _WAYS_OUT:
        message = f"{_lower_first(message)}; {_WAYS_OUT[kind]}"
    elif kind != "value_error":
        message = _lower_first(message)
    return {"field": field, "message": message}


def _suggestion(name: str, known: Sequence[str]) -> str:
    if not known:
        return "; leave it out"
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; leave it out (known: {', '.join(known)})"


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]
