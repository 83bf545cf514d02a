"""`lull bench gateway` with real processes, as short as it goes: what it measures is there, nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.bench import gateway
from lull.bench.gateway_peers import PEERS, Cores, NotRun


def test_the_gateway_beside_a_bare_proxy() -> None:
    said: list[str] = []
    document = gateway.run(0.4, 1, ["lull", "bare"], said.append)
    assert set(document["columns"]) == {"direct", "lull", "bare"}
    for name, column in document["columns"].items():
        assert column["errors"] == {}, column["said"]
        assert column["requests_per_second"] > 0
        assert column["chunks_per_second"] > 0
        assert column["p50_seconds_at_200_per_second"] > 0
        assert column["first_chunk_p50_seconds"] > 0
        assert (column["resident_bytes"] is None) == (name == "direct")
    assert {"requests_per_core_of_bare", "chunks_per_core_of_bare"} <= {check["name"] for check in document["targets"]}
    assert "1 of 1: small, lull" in said


@pytest.mark.parametrize("name", ["haproxy", "nginx", "litellm"])
def test_a_peer_that_is_not_installed_says_so(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lull.bench.gateway_peers.shutil.which", lambda *_, **__: None)
    with pytest.raises(NotRun, match=f"{name} is not installed"), PEERS[name](tmp_path, Cores.of_this_machine(), "x"):
        pass
