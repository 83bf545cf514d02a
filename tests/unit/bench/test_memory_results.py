"""Ratios and targets of `lull bench memory`, from samples that are made up."""

from __future__ import annotations

from typing import Any

import pytest

from lull.bench import memory_attach, memory_peers
from lull.bench.memory import MODES, Case, Sample, result_of
from lull.vmm import host_memory

FLOORS = {"memcpy_warm": 1.0, "memcpy_fresh": 3.0, "memcpy_fresh_private": 2.0, "unmap_release": 0.5}
GOOD = {"first_park": 1.5, "second_park": 0.55, "resume": 3.0}
CASE = Case(1 << 30, 2, huge=True)


def samples(*ours: dict[str, float], copied_bytes: int = 0) -> list[Sample]:
    return [Sample(mode, {**FLOORS, **parts}, copied_bytes, 1 << 30) for parts in ours for mode in MODES]


def missed(result: dict[str, Any]) -> list[str]:
    return [check["name"] for check in result["targets"] if not check["met"]]


def test_what_is_as_quick_as_the_machine_meets_every_target() -> None:
    result = result_of(CASE, samples(GOOD))
    assert missed(result) == []
    assert result["ratios"]["PINNED"] == {"first_park": 1.0, "resume": 1.0, "second_park": pytest.approx(1.1)}
    assert result["huge_pages_granted_bytes"] == 1 << 30
    assert result["floor_seconds"] == FLOORS


@pytest.mark.parametrize(
    ("part", "seconds", "names"),
    [
        ("first_park", 1.7, ["first park, warm backup, to memcpy and release"]),
        ("resume", 3.4, [f"resume {mode}, to memcpy into fresh pages" for mode in MODES]),
        ("second_park", 0.61, [f"second park {mode}, immutable, to unmap and release" for mode in MODES]),
    ],
)
def test_each_target_can_be_missed(part: str, seconds: float, names: list[str]) -> None:
    assert missed(result_of(CASE, samples({**GOOD, part: seconds}))) == names


@pytest.mark.parametrize(
    ("nbytes", "repetitions", "judged"), [(1 << 30, 3, True), (1 << 30, 2, False), (1 << 29, 3, False)]
)
def test_times_are_judged_where_there_is_enough_of_them(nbytes: int, repetitions: int, judged: bool) -> None:
    result = result_of(Case(nbytes, 2, huge=True), samples(*[GOOD] * repetitions))
    *timed, copied = result["targets"]
    assert {check["judged"] for check in timed} == {judged}
    assert copied["judged"]  # a count is exact at any size


def test_a_byte_that_is_copied_again_is_a_miss() -> None:
    assert missed(result_of(CASE, samples(GOOD, copied_bytes=1))) == ["bytes copied by a second park"]


def test_seconds_are_medians_and_targets_go_by_the_best() -> None:
    disturbed = {name: 10 * value for name, value in GOOD.items()}
    result = result_of(CASE, samples(GOOD, disturbed, disturbed))
    assert result["lull_seconds"]["CPU"]["resume"] == 30.0
    assert result["ratios"]["CPU"]["resume"] == 1.0
    assert result["ratios_of_medians"]["CPU"]["resume"] == pytest.approx(0.1)
    assert missed(result) == []


def test_what_is_not_here_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_peers, "find_spec", lambda name: None)
    monkeypatch.setattr(memory_peers, "LULL_SCRIPT", "raise SystemExit('no driver')")
    assert memory_peers.peers() == {
        "lull_on_cuda": {"not_run": "it failed: no driver"},
        "torch_memory_saver": {"not_run": "torch and torch_memory_saver not installed"},
        "vllm": {"not_run": "torch and vllm not installed"},
    }
    monkeypatch.setattr(memory_peers, "find_spec", lambda name: object())
    monkeypatch.setattr(memory_peers, "_has_gpu", lambda: False)
    assert memory_peers.peers()["vllm"] == {"not_run": "no CUDA device here"}
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 1 << 20)
    assert "not_run" in memory_attach.measure(1 << 30, 1, lambda _: None)


def test_a_peer_that_fails_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_peers, "find_spec", lambda name: object())
    monkeypatch.setattr(memory_peers, "_has_gpu", lambda: True)
    scripts = {"vllm": "raise SystemExit('no kernel')", "torch_memory_saver": "print('{\"first_park\": 1.5}')"}
    monkeypatch.setattr(memory_peers, "SCRIPTS", scripts)
    monkeypatch.setattr(memory_peers, "LULL_SCRIPT", "print('{}')")
    peers = memory_peers.peers(4096)
    assert peers["vllm"] == {"not_run": "it failed: no kernel"}
    assert peers["torch_memory_saver"] == {"size_bytes": 4096, "seconds": {"first_park": 1.5}}
