"""docs/memory.md does what it says."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.doc_examples import example


def test_the_engine_of_the_page_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example("memory.md"), "docs/memory.md", "exec"), names)
    assert names["before"] == 7
