"""The fake CUDA driver for a test: devices that nobody else uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fake_cuda.library import FakeCuda, environment, load


@pytest.fixture
def fake_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """One device of 32 granules whose addresses the host may touch. For others: `reset_fake_cuda`."""
    fake = load()
    reset_fake_cuda(fake, monkeypatch, tmp_path)
    yield fake
    fake.reset()


def reset_fake_cuda(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: object) -> None:
    """New devices with the settings of `environment`. LD_LIBRARY_PATH is set for children; here it has no effect."""
    state = folder / f"fake-cuda-{len(list(folder.glob('fake-cuda-*')))}"
    state.mkdir()
    for name, value in environment(state, **settings).items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    fake.reset()
