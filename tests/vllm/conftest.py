from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.vllm.tiny_model import write_model
from tests.engines.real_vllm import WEIGHTS_MIB, real_vllm
from tests.engines.spawned import MIB, Spawned


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("model")
    write_model(directory, WEIGHTS_MIB * MIB)
    return directory


@pytest.fixture(scope="session")
def vllm(tmp_path_factory: pytest.TempPathFactory, model: Path) -> Iterator[Spawned]:
    """One server for all tests that leave it awake; it takes a minute to start."""
    with real_vllm(tmp_path_factory.mktemp("vllm"), model) as engine:
        yield engine
