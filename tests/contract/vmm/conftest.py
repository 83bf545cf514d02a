"""A driver joins the contract by a line in tests/driver_rigs.py. Everything here also runs on a bare GPU machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.driver import Driver
from tests.driver_rigs import Rig, rig_makers, rig_of


@pytest.fixture(params=sorted(rig_makers()))
def rig(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Rig]:
    """A device that nobody else uses."""
    with rig_of(str(request.param), tmp_path, monkeypatch) as rig:
        yield rig


@pytest.fixture
def driver(rig: Rig) -> Driver:
    return rig.driver
