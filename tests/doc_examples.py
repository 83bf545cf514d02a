"""The examples of docs/, as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

DOCS = Path(__file__).parent.parent / "docs"


def example(name: str) -> str:
    """The first Python block of a page."""
    (first, *_) = re.findall(r"^```python\n(.*?)^```$", (DOCS / name).read_text(), re.MULTILINE | re.DOTALL)
    return str(first)
