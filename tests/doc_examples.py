"""The examples of docs/, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def example(name: str, language: str = "python", containing: str = "") -> str:
    """The first block of a page that is in this language and has this text in it."""
    blocks = re.findall(rf"^```{language}\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    return next(str(block) for block in blocks if containing in block)
