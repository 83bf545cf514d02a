"""What is judged of memory, limits, groups and disks; the probes are asked about this very machine."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from lull.agents.doctor import disk, host
from lull.agents.doctor.findings import Status
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.settings import EngineSettings

GIB = 1 << 30
MIB = 1 << 20


def _backup(nbytes: int, *, is_pinned: bool = False, is_measured: bool = True, name: str = "a") -> host.Backup:
    return host.Backup(name, nbytes, is_pinned, is_measured)


def test_a_policy_that_keeps_nothing_needs_no_host_memory() -> None:
    engine = EngineSettings.model_validate(
        {
            "name": "a",
            "kind": "ollama",
            "models": ["a"],
            "url": "http://127.0.0.1:1",
            "device_indexes": [0],
        }
    )
    assert host.backup_of(engine, None, GIB) is None
    pinned = engine.model_copy(
        update={"kind": "trtllm", "policy": EnginePolicy.model_validate({"restore_modes": {"model_weights": "PINNED"}})}
    )
    assert host.backup_of(pinned, None, GIB) == host.Backup("a", GIB, True, False)
    # vLLM pins all it keeps, in buffers rounded up.
    rounded = host.backup_of(pinned.model_copy(update={"kind": "vllm"}), 3 * GIB, GIB)
    assert rounded == host.Backup("a", 6 * GIB, True, True)


def test_host_memory_is_compared_above_the_reserve() -> None:
    def status(available: int, *wanted: host.Backup) -> list[Status]:
        return [one.status for one in host.judge_host_memory(available, 2 * GIB, wanted)]

    assert status(10 * GIB) == [Status.NOT_APPLICABLE]
    assert status(10 * GIB, _backup(8 * GIB)) == [Status.OK]
    assert status(10 * GIB, _backup(8 * GIB + 1)) == [Status.FAILED]
    assert status(10 * GIB, _backup(8 * GIB + 1, is_measured=False)) == [Status.WARNING]
    assert status(10 * GIB, _backup(5 * GIB), _backup(5 * GIB, name="b")) == [Status.OK, Status.OK, Status.WARNING]


def test_memory_that_is_pinned_has_to_be_lockable() -> None:
    pinned = [_backup(GIB, is_pinned=True), _backup(2 * GIB)]
    assert host.judge_memlock(None, pinned, "it").status is Status.OK
    assert host.judge_memlock(GIB, pinned, "it").status is Status.OK
    short = host.judge_memlock(GIB - 1, pinned, "it")
    assert (short.status, "LimitMEMLOCK" in short.way_out) == (Status.WARNING, True)
    assert host.judge_memlock(1, [_backup(GIB)], "it").status is Status.NOT_APPLICABLE


def test_limits_of_another_process_are_its_own() -> None:
    """As those of an agent that was started with less."""
    wait = [sys.executable, "-I", "-S", "-c", "input()"]
    with subprocess.Popen(
        wait, stdin=subprocess.PIPE, preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    ) as child:
        try:
            limit = host.limit_of("Max open files", child.pid)
        finally:
            child.kill()
    assert limit == 64
    assert host.judge_open_files(limit, "it").status is Status.WARNING
    assert host.judge_open_files(host.limit_of("Max open files", os.getpid()), "it").seen
    assert host.limit_of("Max open files", None) == resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    assert host.judge_open_files(65536, "it").status is Status.OK


@pytest.mark.parametrize(
    ("shmem", "anonymous", "wanted"),
    [
        ("advise", "madvise", [Status.OK, Status.OK]),
        ("never", "always", [Status.WARNING, Status.OK]),
        ("deny", "never", [Status.WARNING, Status.WARNING]),
        ("", "", [Status.WARNING, Status.WARNING]),
    ],
)
def test_huge_pages(shmem: str, anonymous: str, wanted: list[Status]) -> None:
    assert [one.status for one in host.judge_huge_pages(shmem, anonymous, has_host_device=True)] == wanted
    assert host.chosen("always within_size [advise] never") == "advise"
    without = host.judge_huge_pages(shmem, anonymous, has_host_device=False)
    assert without[0].status is Status.NOT_APPLICABLE


V1 = "35 31 0:32 / /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory"
V2 = "35 31 0:32 / /sys/fs/cgroup rw,relatime - cgroup2 cgroup2 rw"


def test_limits_of_both_layouts_of_control_groups(tmp_path: Path) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    (old / "memory" / "unit").mkdir(parents=True)
    (old / "memory" / "unit" / "memory.limit_in_bytes").write_text(f"{GIB}\n")
    (old / "memory" / "unit" / "memory.usage_in_bytes").write_text(f"{GIB // 4}\n")
    (new / "unit").mkdir(parents=True)
    (new / "unit" / "memory.max").write_text("max\n")
    (new / "unit" / "memory.current").write_text("5\n")

    assert host.look_at_groups(V1, "4:memory:/unit\n", old) == host.Groups("v1", GIB, GIB // 4)
    assert host.look_at_groups(V2, "0::/unit\n", new) == host.Groups("v2", None, 5)
    assert host.look_at_groups(f"{V1}\n{V2}", "4:memory:/gone\n", old) == host.Groups("hybrid")
    assert host.look_at_groups("1 1 0:1 / / rw - ext4 a rw", "", old) == host.Groups("none")

    assert host.judge_groups(host.Groups("v1", GIB, GIB // 4), GIB // 2).status is Status.OK
    short = host.judge_groups(host.Groups("v1", GIB, GIB // 4), GIB)
    assert (short.status, "768 MiB left" in short.seen) == (Status.WARNING, True)
    assert host.judge_groups(host.Groups("v2"), GIB).status is Status.OK
    assert host.judge_groups(host.Groups("none"), GIB).status is Status.WARNING


def test_rights() -> None:
    here = host.look_at_rights()
    assert here.pidfd_trouble == ""
    assert here.is_root == (os.geteuid() == 0)

    def statuses(rights: host.Rights, *engines: str) -> list[Status]:
        return [one.status for one in host.judge_rights(rights, checkpoints=engines)]

    user = host.Rights(False, 0, "", 0)
    assert statuses(user) == [Status.OK, Status.OK]
    assert statuses(user, "a") == [Status.OK, Status.WARNING]
    assert statuses(host.Rights(False, 1 << 19, "", 9), "a") == [Status.OK, Status.OK]
    assert statuses(host.Rights(False, 0, "", 9)) == [Status.OK, Status.WARNING]
    assert statuses(host.Rights(True, 0, "not implemented", 0)) == [Status.FAILED, Status.OK]


MOUNTS = """\
1 0 254:1 / / rw - ext4 /dev/vda rw
2 1 0:40 / /data rw - nfs4 there:/data rw
3 1 0:41 / /data/local\\040disk rw - xfs /dev/vdb rw
4 1 0:42 / /run rw - tmpfs tmpfs rw
5 1 0:43 / /layer rw - overlay overlay rw
"""


@pytest.mark.parametrize(
    ("path", "kind", "status"),
    [
        ("/home/a", "ext4", Status.OK),
        ("/data/a", "nfs4", Status.FAILED),
        ("/data/local disk/a", "xfs", Status.OK),
        ("/database", "ext4", Status.OK),
        ("/run/a", "tmpfs", Status.WARNING),
        ("/layer", "overlay", Status.WARNING),
    ],
)
def test_the_kind_of_disk(path: str, kind: str, status: Status) -> None:
    assert disk.filesystem_of(Path(path), MOUNTS) == kind
    assert disk.judge_filesystem(kind, Path(path)).status is status


def test_room_on_the_disk() -> None:
    def status(free: int, inodes: int = 10**6, *, has_inodes: bool = True) -> Status:
        return disk.judge_room(disk.Room(free, inodes, has_inodes), Path("/x"), 64 * MIB, 256 * MIB).status

    assert status(320 * MIB) is Status.OK
    assert status(320 * MIB - 1) is Status.WARNING
    assert status(64 * MIB - 1) is Status.FAILED
    assert status(GIB, 10) is Status.FAILED
    assert status(GIB, 0, has_inodes=False) is Status.OK


def test_a_flush_leaves_nothing_behind(tmp_path: Path) -> None:
    assert 0 <= disk.flush_seconds(tmp_path) < 30
    assert list(tmp_path.iterdir()) == []
    assert disk.judge_flush(0.002, tmp_path).status is Status.OK
    assert disk.judge_flush(0.5, tmp_path).status is Status.WARNING
