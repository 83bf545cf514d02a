from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.attempt_runs import Attempts


@pytest.fixture
def attempts(tmp_path: Path) -> Iterator[Attempts]:
    made = Attempts(tmp_path / "attempts")
    yield made
    made.end()
