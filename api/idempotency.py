"""The header ``Idempotency-Key``: a request that is repeated under it does nothing a second time."""

from __future__ import annotations

import re
from typing import Any, Final

from fastapi import Request

from .problems import invalid_field

_KEY_PATTERN: Final = re.compile(r"[\x21-\x7e]{1,255}")
KEY_PARAMETER: Final[dict[str, Any]] = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": False,
    "schema": {"type": "string", "maxLength": 255},
    "description": "The same key with the same body within 24 h gets the same answer",
}


def idempotency_key(request: Request) -> str | None:
    key = request.headers.get("idempotency-key")
    if key is not None and not _KEY_PATTERN.fullmatch(key):
        raise invalid_field("Idempotency-Key", "use 1 to 255 printable ASCII characters without spaces")
    return key
