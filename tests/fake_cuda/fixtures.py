"""The fake CUDA driver for a test: devices that nobody else uses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.fake_cuda.library import FakeCuda, environment, load


class NewFakeCuda(Protocol):
    def __call__(
        self,
        *,
        granules: int = 32,
        devices: int = 1,
        strict: bool = False,
        integrated: bool = False,
        export: str = "fd",
        pin: bool = True,
        context_granules: int = 0,
        slices: int = 0,
    ) -> FakeCuda: ...


@pytest.fixture
def new_fake_cuda(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[NewFakeCuda]:
    """Devices with the settings of `environment`, as if this process had just begun. Children share them."""
    fake = load()

    def make(**settings: object) -> FakeCuda:
        reset_fake_cuda(fake, monkeypatch, tmp_path, **settings)
        return fake

    yield make
    fake.reset()


@pytest.fixture
def fake_cuda(new_fake_cuda: NewFakeCuda) -> FakeCuda:
    """One device of 32 granules whose addresses the host may touch."""
    return new_fake_cuda()


def reset_fake_cuda(fake: FakeCuda, monkeypatch: pytest.MonkeyPatch, folder: Path, **settings: object) -> None:
    """LD_LIBRARY_PATH is set for children; here it has no effect."""
    state = folder / f"fake-cuda-{len(list(folder.glob('fake-cuda-*')))}"
    state.mkdir()
    for name, value in environment(state, **settings).items():  # type: ignore[arg-type]
        monkeypatch.setenv(name, value)
    fake.reset()
