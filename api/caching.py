"""ETags of what people read again and again: a client that shows its tag is answered 304 while nothing has changed."""

from __future__ import annotations

import hashlib
from typing import Any, Final

from fastapi import Request
from fastapi.responses import Response

from . import schemas

NOT_MODIFIED: Final[dict[int | str, dict[str, Any]]] = {
    304: {"description": "Nothing has changed since the ETag in If-None-Match"}
}
# Filled in at the moment of reading: it says when the same is looked at again, not that anything is different.
_OF_JOB: Final = {"reasons": {"__all__": {"next_check"}}}
_NOT_COMPARED: Final[dict[type[schemas.View], Any]] = {
    schemas.Job: _OF_JOB,
    schemas.JobPage: {"items": {"__all__": _OF_JOB}},
}


def answer(request: Request, view: schemas.View) -> Response:
    """The view with its ETag, or 304. The tag is a weak one: equal in meaning, not in every byte."""
    body = view.model_dump_json()
    left_out = _NOT_COMPARED.get(type(view))
    compared = body if left_out is None else view.model_dump_json(exclude=left_out)
    tag = hashlib.sha256(compared.encode("utf-8", "surrogatepass")).hexdigest()[:32]
    headers = {"ETag": f'W/"{tag}"', "Cache-Control": "private, no-cache"}
    if _names(request.headers.get("if-none-match"), tag):
        return Response(status_code=304, headers=headers)
    return Response(body.encode(), 200, headers, "application/json")


def _names(if_none_match: str | None, tag: str) -> bool:
    if if_none_match is None:
        return False
    given = [each.strip().removeprefix("W/").strip('"') for each in if_none_match.split(",")]
    return "*" in given or tag in given
