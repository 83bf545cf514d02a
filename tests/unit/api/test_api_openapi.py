from __future__ import annotations

import json
import re
from pathlib import Path

from lull.api.openapi import document_text

COMMITTED = Path(__file__).resolve().parents[3] / "docs" / "openapi.json"


def test_the_committed_document_is_the_apps() -> None:
    assert COMMITTED.read_text() == document_text(), "run: python -m lull.api.openapi > docs/openapi.json"


def test_the_document_is_whole() -> None:
    text = document_text()
    document = json.loads(text)
    assert document["openapi"].startswith("3.1")
    assert document["security"] == [{"token": []}]
    referred = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert referred == set(document["components"]["schemas"])
    operations = [operation for path in document["paths"].values() for operation in path.values()]
    assert len({operation["operationId"] for operation in operations}) == len(operations)
    assert all(operation["summary"] for operation in operations)
    problem = {"$ref": "#/components/schemas/ProblemView"}
    for operation in operations:
        assert operation["responses"]["default"]["content"]["application/problem+json"]["schema"] == problem
