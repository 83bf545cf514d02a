"""`lull bench gateway` with real processes, as short as it goes: what it measures is there, nothing is made up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.bench import gateway
from lull.bench.gateway_peers import PEERS, Cores, NotRun


def _all_is_measured(document: dict[str, Any]) -> None:
    for name, column in document["columns"].items():
        assert column["errors"] == {}, column["said"]
        assert column["requests_per_second"] > 0
        assert column["chunks_per_second"] > 0
        if name != "haproxy_with_lull":
            assert column["p50_seconds_at_200_per_second"] > 0
            assert column["first_chunk_p50_seconds"] > 0
        assert (column["resident_bytes"] is None) == (name == "direct")


def test_the_gateway_beside_a_direct_connection() -> None:
    said: list[str] = []
    document = gateway.run(0.25, 1, ["lull"], said.append)
    assert set(document["columns"]) == {"direct", "lull"}
    _all_is_measured(document)
    assert "1 of 1: small, lull" in said


@pytest.mark.long
def test_the_gateway_beside_others() -> None:
    document = gateway.run(0.5, 1, ["lull", "bare", "haproxy"], lambda _: None)
    assert set(document["columns"]) == {"direct", "lull", "bare", "haproxy", "haproxy_with_lull"}
    _all_is_measured(document)
    assert {check["name"] for check in document["targets"]} == {
        *("requests_per_core_of_bare", "chunks_per_core_of_bare", "requests_per_second", "chunks_per_second"),
        *("added_p50_seconds", "resident_bytes", "requests_per_core_through_haproxy_of_haproxy"),
    }


@pytest.mark.parametrize("name", ["haproxy", "nginx", "litellm"])
def test_a_peer_that_is_not_installed_says_so(name: str, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("lull.bench.gateway_peers.shutil.which", lambda *_, **__: None)
    with pytest.raises(NotRun, match=f"{name} is not installed"), PEERS[name](tmp_path, Cores.of_this_machine(), "x"):
        pass
