from __future__ import annotations

from typing import Any

from lull.cli.engine import engine_lines

ROW: dict[str, Any] = {
    "name": "qwen",
    "id": "1",
    "kind": "vllm",
    "supervised": False,
    "models": ["qwen"],
    "state": "running",
    "gate": "open",
    "verified": True,
    "device_ids": ["0"],
    "node_id": "box",
    "policy_version": 1,
    "policy_version_in_force": 1,
}


def _lines(capabilities: dict[str, Any] | None) -> dict[str, str]:
    lines = engine_lines({**ROW, "capabilities": capabilities})
    return {key: value.strip() for key, _, value in (line.partition(":") for line in lines)}


def test_what_an_engine_can_do_is_shown_with_its_reasons() -> None:
    plans = [{"name": "level 1", "modes": {"model_weights": ["CPU", "PINNED"], "kv_cache": ["NONE"]}}]
    shown = _lines({"version": "0.22.1", "plans": plans, "fragile": "a wake that fails", "notes": ["start it alone"]})
    assert shown["version"] == "0.22.1"
    assert shown["parks by"] == "level 1 (model_weights CPU/PINNED, kv_cache NONE)"
    assert (shown["fragile"], shown["notes"]) == ("a wake that fails", "start it alone")


def test_one_that_cannot_be_parked_says_why_and_offers_nothing() -> None:
    plans = [{"name": "level 1", "modes": {"model_weights": ["CPU"]}}]
    shown = _lines({"unsupported": "set VLLM_SERVER_DEV_MODE=1", "plans": plans})
    assert shown["cannot"] == "set VLLM_SERVER_DEV_MODE=1"
    assert "parks by" not in shown


def test_one_that_was_not_asked_yet_shows_nothing_of_it() -> None:
    assert not {"version", "parks by", "cannot", "fragile"} & set(_lines(None))
