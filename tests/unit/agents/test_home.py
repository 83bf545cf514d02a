"""A data directory that was copied is told from its original."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from lull.agents.errors import ConfigError
from lull.agents.opening import open_home


def test_a_copy_on_the_running_machine_is_refused_and_the_error_says_the_way_out(tmp_path: Path) -> None:
    original, copy = tmp_path / "agent", tmp_path / "copy"
    original.mkdir()
    home = open_home(original, "boot")
    assert open_home(original, "boot") == home
    shutil.copytree(original, copy)
    with pytest.raises(ConfigError, match=r"is a copy.*node\.json") as refused:
        open_home(copy, "boot")
    assert str(copy / "home.json") in str(refused.value)
    (copy / "home.json").unlink()
    assert open_home(copy, "boot") != home
    assert open_home(copy, "boot") != home


def test_after_a_boot_nothing_is_left_to_take_over(tmp_path: Path) -> None:
    original, restored = tmp_path / "agent", tmp_path / "restored"
    original.mkdir()
    open_home(original, "boot")
    shutil.copytree(original, restored)
    assert open_home(restored, "later")
