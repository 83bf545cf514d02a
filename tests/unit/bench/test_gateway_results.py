"""What `lull bench gateway` makes of its figures."""

from __future__ import annotations

from typing import Any

import pytest

from lull.bench.gateway import results
from lull.bench.gateway_engine import END, body
from lull.bench.gateway_load import MODES, request


def figure(**more: Any) -> dict[str, Any]:
    return {
        "requests_per_second": 20_000.0,
        "cpu_seconds_per_request": 40e-6,
        "p50_seconds_at_200_per_second": 0.0004,
        "chunks_per_second": 90_000.0,
        "cpu_seconds_per_chunk": 8e-6,
        "first_chunk_p50_seconds": 0.001,
        "first_chunk_p99_seconds": 0.002,
        "resident_bytes": 50_000_000,
        **more,
    }


def judged(figures: dict[str, dict[str, Any]], **not_run: str) -> dict[str, Any]:
    return results({"direct": figure(), **figures}, not_run, load=[0.0, 0.0, 0.0], cores_apart=True)


def verdicts(document: dict[str, Any]) -> dict[str, bool]:
    return {check["name"]: check["met"] for check in document["targets"]}


def test_what_is_added_is_the_difference_to_direct() -> None:
    column = judged({"lull": figure(p50_seconds_at_200_per_second=0.0006)})["columns"]["lull"]
    assert column["added_p50_seconds_at_200_per_second"] == pytest.approx(0.0002)
    assert column["added_first_chunk_p50_seconds"] == 0


def test_a_column_that_did_not_run_is_compared_with_nothing() -> None:
    document = judged({"lull": figure()}, bare="not installed", haproxy="not installed")
    assert document["columns"]["bare"] == {"not_run": "not installed"}
    assert set(verdicts(document)) == {
        *("requests_per_second", "chunks_per_second", "added_p50_seconds", "resident_bytes")
    }
    assert document["targets_met"]


@pytest.mark.parametrize(
    ("worse", "missed"),
    [
        ({"cpu_seconds_per_request": 51e-6}, "requests_per_core_of_bare"),
        ({"cpu_seconds_per_chunk": 11e-6}, "chunks_per_core_of_bare"),
        ({"requests_per_second": 4999.0}, "requests_per_second"),
        ({"chunks_per_second": 79_999.0}, "chunks_per_second"),
        ({"p50_seconds_at_200_per_second": 0.0015}, "added_p50_seconds"),
        ({"resident_bytes": 61_000_000}, "resident_bytes"),
    ],
)
def test_each_target_can_be_missed(worse: dict[str, Any], missed: str) -> None:
    met = judged({"lull": figure(), "bare": figure()})
    assert met["targets_met"]
    document = judged({"lull": figure(**worse), "bare": figure()})
    assert [name for name, is_met in verdicts(document).items() if not is_met] == [missed]
    assert not document["targets_met"]


def test_haproxy_in_front_of_us_is_judged_beside_haproxy_alone() -> None:
    columns = {"haproxy": figure(), "haproxy_with_lull": figure(cpu_seconds_per_request=45e-6)}
    assert verdicts(judged(columns)) == {"requests_per_core_through_haproxy_of_haproxy": False}


@pytest.mark.parametrize("mode", MODES)
def test_requests_end_with_the_mark_and_tell_their_length(mode: Any) -> None:
    head, _, text = request(mode, "127.0.0.1:1").partition(b"\r\n\r\n")
    assert text.endswith(END)
    assert b"Content-Length: %d" % len(text) in head
    assert text in {body("small"), body("fast"), body("paced")}
