"""Whatever stands in the gateway's file of routes, a gateway starts from it: with its routes, or with none and the file
set aside."""

from __future__ import annotations

import asyncio
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lull.agents.gateway.routes import RouteTable
from lull.agents.gateway.settings import Limits
from tests.odd_json import changed_somewhere, odd_bytes

GOOD: dict[str, Any] = {
    "version": 1,
    "routes": [
        {
            "engine_id": f"e{number}",
            "spec": {"name": f"n{number}", "models": ["m", f"m{number}"], "upstream": f"http://127.0.0.1:{number}"},
            "created_at": 1_700_000_000,
            "terms": {"gate": "hold", "hold_requests_max": 9, "hold_seconds_max": 5.0, "retry_after_seconds": None},
        }
        for number in (1, 2)
    ],
}


def load(directory: Path) -> RouteTable:
    table = RouteTable(directory, Limits(), reuse_connections=True)
    table.load()
    return table


def with_upstream(text: str) -> bytes:
    spec = {**GOOD["routes"][0]["spec"], "upstream": text}
    return json.dumps({"routes": [{**GOOD["routes"][0], "spec": spec}]}).encode()


@settings(max_examples=80, deadline=None)
@given(raw=odd_bytes(GOOD) | st.builds(with_upstream, st.text(max_size=9).map(lambda text: f"http://{text}:80")))
@example(raw=json.dumps(GOOD).encode())
@example(raw=json.dumps({"routes": GOOD["routes"][:1] * 2}).encode())
@example(raw=with_upstream("http://\xdf:80"))
def test_a_gateway_starts_from_any_file(raw: bytes) -> None:
    with tempfile.TemporaryDirectory(prefix="lull-") as name:
        directory = Path(name)
        (directory / "routes.json").write_bytes(raw)
        table = load(directory)
        routes = list(table)
        assert (directory / "routes.damaged").exists() == (not (directory / "routes.json").exists())
        if (directory / "routes.damaged").exists():
            assert not routes
            assert (directory / "routes.damaged").read_bytes() == raw
        for route in routes:
            assert not route.admission.is_open
            assert route.head_start("/v1/completions", "").startswith(b"POST /v1/completions HTTP/1.1\r\nHost: ")
            json.dumps(asdict(route.view()), allow_nan=False)
        for model, _ in table.models():
            ticket = table.find(model).arrive(0.0, lambda: None)
            ticket.gate.expire(ticket, 1e9)
            assert ticket.state == "refused"
        asyncio.run(table.save())
        again = load(directory)
        assert [route.engine_id for route in again] == [route.engine_id for route in routes]


@settings(max_examples=50, deadline=None)
@given(document=changed_somewhere(GOOD))
def test_terms_are_within_the_bounds_of_a_close(document: Any) -> None:
    with tempfile.TemporaryDirectory(prefix="lull-") as name:
        (Path(name) / "routes.json").write_text(json.dumps(document))
        for route in load(Path(name)):
            terms = route.admission.terms
            assert 0 < terms.hold_seconds_max <= 7 * 24 * 3600
            assert 0 <= terms.hold_requests_max <= 100_000


def test_a_file_larger_than_any_that_was_written_is_set_aside(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with open(tmp_path / "routes.json", "wb") as file:
        file.truncate(1 << 31)
    assert list(load(tmp_path)) == []
    assert "it has more than" in caplog.text


def test_one_that_cannot_be_set_aside_either_keeps_no_gateway_from_starting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "routes.json").write_text("{")
    (tmp_path / "routes.damaged").mkdir()
    assert list(load(tmp_path)) == []
    assert "nor set aside" in caplog.text
