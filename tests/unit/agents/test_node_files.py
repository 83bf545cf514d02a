"""A small file is replaced whole or not at all, also on a disk that is full."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest

from lull.agents.disk_reserve import RESERVE_NAME, DiskReserve
from lull.agents.journal import Journal
from lull.agents.node_files import NodeFile, read_json, replace_json
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


def test_a_full_disk_gives_its_reserve_for_a_small_file(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        reserve = DiskReserve(disk.path / RESERVE_NAME, 0)
        assert reserve.hold()
        engine = disk.path / "engines" / "alpha"
        engine.mkdir(parents=True)
        disk.fill()
        replace_json(engine / "facts.json", {"golden": "new"})
        assert read_json(engine / "facts.json") == {"golden": "new"}
        assert not reserve.path.exists()
        assert not reserve.hold(), "there is no room for it yet"


def test_an_id_that_cannot_be_kept_is_not_given(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as disk:
        file = NodeFile(disk.path / "node.json", lambda: "x" * 8000, Journal(tmp_path / "journal.sqlite"))
        disk.fill()
        with pytest.raises(OSError):
            file.id_of("node")
        disk.clear()
        journal = Journal(tmp_path / "journal.sqlite")
        assert NodeFile(disk.path / "node.json", lambda: "new", journal).id_of("node") == "new"
