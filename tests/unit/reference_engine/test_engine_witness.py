from __future__ import annotations

from pathlib import Path

import pytest

from lull.vmm.reference_engine.witness import Witness, WitnessCounts, read_witness


def test_requests_canaries_and_refusals_are_counted_apart(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "witness")
    witness.arrived("1", canary=False, state="running").ended(served=True)
    witness.arrived("2", canary=False, state="parked").ended(served=False)
    witness.arrived("3", canary=True, state="running").ended(served=True)
    witness.arrived("4", canary=True, state="waking").ended(served=False)
    witness.close()
    assert read_witness(tmp_path / "witness") == WitnessCounts(requests=2, canaries=2, while_not_running=2, served=1)


def test_a_request_is_written_once_and_only_when_it_has_ended(tmp_path: Path) -> None:
    witness = Witness(tmp_path / "witness")
    line = witness.arrived("1", canary=False, state="running")
    assert read_witness(tmp_path / "witness").requests == 0
    line.ended(served=True)
    line.ended(served=False)
    witness.close()
    assert read_witness(tmp_path / "witness") == WitnessCounts(requests=1, canaries=0, while_not_running=0, served=1)


def test_a_restarted_engine_goes_on_and_a_torn_line_does_not_count(tmp_path: Path) -> None:
    for _ in range(2):
        witness = Witness(tmp_path / "witness")
        witness.arrived("1", canary=False, state="running").ended(served=True)
        witness.close()
    with (tmp_path / "witness").open("ab") as file:
        file.write(b'{"kind": "requ')
    assert read_witness(tmp_path / "witness").requests == 2


def test_without_a_file_nothing_is_written(tmp_path: Path) -> None:
    witness = Witness(None)
    witness.arrived("1", canary=False, state="running").ended(served=True)
    witness.close()
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_cannot_be_written_is_known_at_once(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        Witness(tmp_path / "no-such-directory" / "witness")
