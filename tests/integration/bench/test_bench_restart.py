"""`lull bench restart` on weights of 4 MiB: every start is one, and says where its weights came from."""

from __future__ import annotations

import pytest

from lull.bench import restart
from lull.vmm import host_memory
from lull.vmm.errors import OutOfHostMemory


@pytest.mark.long
def test_each_start_says_how_its_weights_came() -> None:
    said: list[str] = []
    document = restart.run(4 << 20, said.append)
    starts = document["starts"]
    assert [start["weights"] for start in starts] == ["loaded", "loaded", "loaded", "attached", "attached"]
    assert all(0 < start["weights_seconds"] < start["ready_seconds"] for start in starts)
    assert said == [start["start"] for start in starts]


def test_a_run_that_does_not_fit_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 30)
    with pytest.raises(OutOfHostMemory):
        restart.run(4 << 20, lambda sentence: None)
