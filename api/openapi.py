"""The committed OpenAPI document: ``python -m lull.api.openapi > docs/openapi.json`` writes it anew."""

from __future__ import annotations

import json
import sys

from ..scheduler.store import Store
from .app import create_app
from .auth import Authenticator, new_token


def document_text() -> str:
    """As committed. Needs no database: the store is never started."""
    app = create_app(Store("sqlite:///unused.db"), Authenticator.of(new_token()))
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False, sort_keys=False) + "\n"


if __name__ == "__main__":
    sys.stdout.write(document_text())
