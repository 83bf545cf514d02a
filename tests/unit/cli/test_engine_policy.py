from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from lull.cli.documents import read_yaml_mapping
from lull.cli.engine_policy import apply_change, policy_lines
from lull.cli.exits import CliError


@pytest.mark.parametrize(
    ("change", "policy"),
    [
        ("when=always", {"when": "always"}),
        ("settle_samples=5", {"settle_samples": 5}),
        ("park_seconds_max=4h", {"park_seconds_max": 14400.0}),
        ("restore_modes.kv_cache=NONE", {"restore_modes": {"kv_cache": "NONE"}}),
        ("canary=off", {"canary": "off"}),
        ("canary.tokens=4", {"canary": {"tokens": 4}}),
        ("canary.prompt=a=b", {"canary": {"prompt": "a=b"}}),
        ("canary.prompt=[1]", {"canary": {"prompt": "[1]"}}),
        ("settle_samples=NaN", {"settle_samples": "NaN"}),  # the server refuses it by name; JSON could not carry it
        ("settle_samples=1e999", {"settle_samples": "1e999"}),
        ("settle_samples=-Infinity", {"settle_samples": "-Infinity"}),
    ],
)
def test_changes(change: str, policy: dict[str, Any]) -> None:
    changed: dict[str, Any] = {}
    apply_change(changed, change)
    assert changed == policy


def test_a_change_leaves_the_rest_alone() -> None:
    policy: dict[str, Any] = {"when": "manual", "canary": {"tokens": 8, "prompt": "x"}}
    apply_change(policy, "canary.tokens=4")
    assert policy == {"when": "manual", "canary": {"tokens": 4, "prompt": "x"}}


@pytest.mark.parametrize("change", ["when", "=x", "park_seconds_max=long"])
def test_bad_changes(change: str) -> None:
    with pytest.raises(CliError):
        apply_change({}, change)


def test_a_policy_is_shown_as_it_can_be_set() -> None:
    row = {"version": 2, "version_in_force": 1, "locked": False, "policy": {"when": "always", "canary": {"tokens": 8}}}
    assert policy_lines(row) == ["# version 2 (in force: 1), may be set", "when = always", "canary.tokens = 8"]


@pytest.mark.parametrize(
    ("text", "key"),
    [("settle_samples: .nan\n", "settle_samples"), ("canary: {logprob_tolerance: [0, .inf]}", "tolerance[1]")],
)
def test_a_file_s_number_that_json_cannot_carry_is_named(tmp_path: Path, text: str, key: str) -> None:
    file = tmp_path / "policy.yaml"
    file.write_text(text)
    with pytest.raises(CliError, match=re.escape(f"{key}: has to be a finite number")):
        read_yaml_mapping(file, "policy fields")
