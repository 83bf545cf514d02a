"""The examples of docs/, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def example(name: str, language: str = "python") -> str:
    """The first block of a page that is in this language."""
    (first, *_) = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    return str(first)
