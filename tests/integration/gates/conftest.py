from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import kept_nodes


@pytest.fixture
def sockets() -> Iterator[Path]:
    """A directory with a path short enough for Unix sockets."""
    with tempfile.TemporaryDirectory(prefix="lull-") as path:
        yield Path(path)


@pytest.fixture(scope="session", autouse=True)
def no_node_is_left() -> Iterator[None]:
    yield
    kept_nodes.end_all()
