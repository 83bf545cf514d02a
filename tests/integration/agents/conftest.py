"""Engines that the tests here share are ended with the session."""

from __future__ import annotations

import types
from collections.abc import Iterator

import pytest

from lull.agents import tasks
from tests import kept_nodes


@pytest.fixture(scope="session", autouse=True)
def no_node_is_left() -> Iterator[None]:
    yield
    kept_nodes.end_all()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes with which faults of our own would have ended the agent, which is this process here."""
    seen: list[int] = []
    monkeypatch.setattr(tasks, "os", types.SimpleNamespace(_exit=seen.append))
    return seen
