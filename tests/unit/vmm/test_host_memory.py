from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from lull.vmm import host_memory


def rooms(tmp_path: Path, membership: str, files: dict[str, str]) -> list[int]:
    (tmp_path / "cgroup").write_bytes(os.fsencode(membership))
    for name, content in files.items():
        path = tmp_path / "sys" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    return list(host_memory.cgroup_rooms_bytes(tmp_path / "cgroup", tmp_path / "sys"))


def test_a_parent_group_limits_too(tmp_path: Path) -> None:
    found = rooms(
        tmp_path,
        "0::/outer/inner\n",
        {
            "outer/inner/memory.max": "max",
            "outer/inner/memory.current": "10",
            "outer/memory.max": "1000",
            "outer/memory.current": "900",
            "outer/memory.stat": "anon 5\ninactive_file 50\n",
        },
    )
    assert found == [150]


def test_names_that_are_no_text_are_names(tmp_path: Path) -> None:
    group = os.fsdecode(b"job\xff")
    found = rooms(tmp_path, f"0::/{group}\n", {f"{group}/memory.max": "100", f"{group}/memory.current": "40"})
    assert found == [60]
    own = Path("/proc/self/comm")
    before = own.read_bytes()
    own.write_bytes(b"job \xff")
    try:
        assert (host_memory.lockable_bytes() or 0) >= 0
    finally:
        own.write_bytes(before)


def test_version_1_and_hybrid_layouts(tmp_path: Path) -> None:
    found = rooms(
        tmp_path,
        "4:memory:/job\n3:cpu:/job\n0::/job\n",
        {
            "memory/job/memory.limit_in_bytes": "500",
            "memory/job/memory.usage_in_bytes": "600",
            "memory/memory.limit_in_bytes": "9223372036854771712",  # what the kernel writes for no limit
            "memory/memory.usage_in_bytes": "600",
            "unified/job/memory.max": "700",
            "unified/job/memory.current": "100",
        },
    )
    assert sorted(found) == [0, 600]


def test_nothing_visible_limits_nothing(tmp_path: Path) -> None:
    assert rooms(tmp_path, "0::/../gone\n", {}) == []
    assert list(host_memory.cgroup_rooms_bytes(tmp_path / "none", tmp_path)) == []


def test_available_bytes_is_no_more_than_the_machine_has() -> None:
    total_kib = next(
        int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if line.startswith("MemTotal:")
    )
    assert 0 < host_memory.available_bytes() <= total_kib * 1024


@pytest.mark.parametrize(
    "call",
    [
        lambda: host_memory.map_pages(1, 4096, 3, host_memory.RESERVED | host_memory.MAP_FIXED),
        lambda: host_memory.unmap_pages(1, 4096),
        lambda: host_memory.protect_pages(1, 4096, 3),
    ],
    ids=["mmap", "munmap", "mprotect"],
)
def test_a_failed_call_says_which(call: Callable[[], object]) -> None:
    with pytest.raises(OSError, match=r"mmap|munmap|mprotect"):
        call()
