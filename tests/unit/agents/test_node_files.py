"""A small file is replaced whole or not at all, also on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lull.agents.node_files import read_json, replace_json
from tests.small_disk import small_disk


@pytest.mark.parametrize("left_bytes", [0, 4096])
def test_a_full_disk_leaves_the_old_file_whole(tmp_path: Path, left_bytes: int) -> None:
    """With a page left, the first part of a write is taken without an error."""
    with small_disk(tmp_path / "disk") as disk:
        path, room = disk.path / "facts.json", disk.path / "room"
        room.write_bytes(b"x" * left_bytes)
        replace_json(path, {"golden": "old"})
        disk.fill()
        room.unlink()
        with pytest.raises(OSError) as raised:
            replace_json(path, {"golden": "n" * 100_000})
        assert raised.value.errno == errno.ENOSPC
        assert read_json(path) == {"golden": "old"}
        assert not (disk.path / "facts.json.tmp").exists()
        disk.clear()
        replace_json(path, {"golden": "new"})
        assert read_json(path) == {"golden": "new"}
