"""Engines that the tests here share are ended with the session."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests import kept_nodes


@pytest.fixture(scope="session", autouse=True)
def no_node_is_left() -> Iterator[None]:
    yield
    kept_nodes.end_all()
