"""`lull up` of a second box takes the context over, and says so."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.cli.context import Target, read_config
from lull.cli.up import CONTEXT_NAME, point_context


def test_a_context_that_is_taken_over_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "config.toml"
    first, second = Target("http://127.0.0.1:1", tmp_path / "one"), Target("http://127.0.0.1:2", tmp_path / "two")
    point_context(path, first)
    point_context(path, first)
    assert capsys.readouterr().err == ""
    point_context(path, second)
    assert f"--server http://127.0.0.1:1 --token-file {tmp_path / 'one'} now" in capsys.readouterr().err
    assert read_config(path)["contexts"][CONTEXT_NAME]["server"] == second.server
