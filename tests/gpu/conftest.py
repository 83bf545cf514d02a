"""These tests want a GPU for themselves. `python tests/gpu/run.py` says so to them, and to the driver contract."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver_rigs import REAL_GPU_ENVIRONMENT_NAME, Rig, rig_of

REASON = "needs an NVIDIA GPU; on a machine that has one, run: python tests/gpu/run.py"


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if os.environ.get(REAL_GPU_ENVIRONMENT_NAME):
        return
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.skip(reason=REASON))


@pytest.fixture
def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    with rig_of("gpu", tmp_path, monkeypatch) as rig:
        yield rig
