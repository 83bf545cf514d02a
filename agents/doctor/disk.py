"""The agent's data directory: there, its own, on a local disk that flushes, with room."""

from __future__ import annotations

import os
import stat
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..node_files import read_json
from ..processes import boot_id
from ..quarantine import quarantine_path, read_quarantine
from .findings import Finding, failed, in_mib, not_applicable, ok, warning
from .scene import Check, Scene, running_agent

_NETWORK: Final = frozenset(
    {"nfs", "nfs4", "cifs", "smb3", "smbfs", "9p", "ceph", "glusterfs", "lustre", "gpfs", "beegfs", "afs", "fuse.sshfs"}
)
_FLEETING: Final = frozenset({"tmpfs", "ramfs"})
_SLOW_FLUSH_SECONDS: Final = 0.1
_OTHERS: Final = stat.S_IRWXG | stat.S_IRWXO
_INODES_MIN: Final = 1000


def nearest_folder(path: Path) -> Path:
    """``path``, or the nearest of its parents that is there."""
    while not path.exists() and path != path.parent:
        path = path.parent
    return path


@dataclass(frozen=True, slots=True)
class DataDir:
    path: Path
    exists: bool
    is_folder: bool
    is_writable: bool  # or may be made
    mode: int
    owner_uid: int


def look_at_data_dir(path: Path) -> DataDir:
    there = nearest_folder(path)
    status = there.stat()
    may_write = os.access(there, os.W_OK | os.X_OK)
    return DataDir(path, path.exists(), there.is_dir(), may_write, stat.S_IMODE(status.st_mode), status.st_uid)


def judge_data_dir(folder: DataDir, own_uid: int) -> Finding:
    way = f"install -d -m 0700 -o {own_uid} {folder.path}"
    if not folder.is_folder:
        return failed(f"data_dir {folder.path} is no directory", "name another data_dir")
    if not folder.is_writable:
        return failed(f"data_dir {folder.path} cannot be {'written' if folder.exists else 'made'} by this user", way)
    if not folder.exists:
        return ok(f"data_dir {folder.path} is not there yet; the agent makes it")
    if folder.mode & _OTHERS:
        seen = f"data_dir {folder.path} has mode {folder.mode:04o}: other users can look into it"
        return warning(seen, f"chmod 0700 {folder.path}")
    return ok(f"data_dir {folder.path} is this user's")


def check_data_dir(scene: Scene) -> list[Finding]:
    return [judge_data_dir(look_at_data_dir(scene.known.data_dir), os.geteuid())]


def filesystem_of(path: Path, mountinfo: str) -> str:
    """The type of the file system that ``path`` lies on, by the longest mount point above it."""
    best, kind = -1, "unknown"
    words = str(path.resolve())
    for line in mountinfo.splitlines():
        head, _, tail = line.partition(" - ")
        point = head.split()[4].replace("\\040", " ")
        inside = words == point or words.startswith(point.rstrip("/") + "/")
        if inside and len(point) >= best:
            best, kind = len(point), tail.split()[0]
    return kind


def judge_filesystem(kind: str, path: Path) -> Finding:
    if kind in _NETWORK:
        seen = f"{path} lies on {kind}: the journal's locks and flushes cannot be relied on there"
        return failed(seen, "set data_dir to a directory on a local disk")
    if kind in _FLEETING:
        seen = f"{path} lies on {kind}: a reboot forgets loans, golden answers and the node's identity"
        return warning(seen, "set data_dir to a directory on a local disk")
    if kind == "overlay":
        seen = f"{path} lies in the container's own layer: it is gone with the container"
        return warning(seen, "mount a volume there")
    return ok(f"{path} lies on {kind}")


def check_filesystem(scene: Scene) -> list[Finding]:
    path = nearest_folder(scene.known.data_dir)
    mountinfo = os.fsdecode(Path("/proc/self/mountinfo").read_bytes())
    return [judge_filesystem(filesystem_of(path, mountinfo), path)]


def flush_seconds(folder: Path) -> float:
    """How long a small flush takes, of a file without a name: nothing is left behind. Raises OSError."""
    fd = os.open(folder, os.O_TMPFILE | os.O_WRONLY | os.O_CLOEXEC, 0o600)
    try:
        os.write(fd, b"lull" * 1024)
        began = time.monotonic()
        os.fdatasync(fd)
        return time.monotonic() - began
    finally:
        os.close(fd)


def judge_flush(took_seconds: float, path: Path) -> Finding:
    seen = f"a flush of 4 KiB in {path} took {took_seconds * 1000:.1f} ms"
    if took_seconds > _SLOW_FLUSH_SECONDS:
        return warning(f"{seen}; every step of a loan waits for some", "set data_dir to a quicker disk")
    return ok(seen)


def check_flush(scene: Scene) -> list[Finding]:
    folder = nearest_folder(scene.known.data_dir)
    try:
        return [judge_flush(flush_seconds(folder), folder)]
    except IsADirectoryError:
        return [not_applicable(f"the file system of {folder} has no nameless files, so nothing was written to try it")]
    except OSError as error:
        if error.strerror and error.errno == 95:  # EOPNOTSUPP
            return [not_applicable(f"the file system of {folder} has no nameless files; nothing was tried")]
        return [failed(f"a flush in {folder} failed: {error.strerror}", "mend or change the disk of data_dir")]


@dataclass(frozen=True, slots=True)
class Room:
    free_bytes: int
    free_inodes: int
    has_inodes: bool


def look_at_room(folder: Path) -> Room:
    disk = os.statvfs(folder)
    return Room(disk.f_bavail * disk.f_frsize, disk.f_favail, disk.f_files > 0)


def judge_room(room: Room, folder: Path, reserve_bytes: int, log_bytes: int) -> Finding:
    """``log_bytes``: the most that the log of one attempt takes."""
    seen = f"{in_mib(room.free_bytes)} are free in {folder}; journal_reserve_bytes is {in_mib(reserve_bytes)}"
    if room.free_bytes < reserve_bytes:
        return failed(f"{seen}: no new loan is accepted", f"free some of the disk of {folder}")
    if room.has_inodes and room.free_inodes < _INODES_MIN:
        return failed(f"{room.free_inodes} more files can be made in {folder}", f"free some of the disk of {folder}")
    if room.free_bytes < reserve_bytes + log_bytes:
        seen += f"; one attempt may write {in_mib(log_bytes)} of logs"
        return warning(seen, f"free some of the disk of {folder}")
    return ok(seen)


def check_room(scene: Scene) -> list[Finding]:
    settings = scene.known
    folder = nearest_folder(settings.data_dir)
    log_bytes = settings.log_head_bytes + settings.log_tail_bytes
    return [judge_room(look_at_room(folder), folder, settings.journal_reserve_bytes, log_bytes)]


@dataclass(frozen=True, slots=True)
class Kept:
    """What an agent left in the directory that keeps the next one from lending."""

    quarantined: dict[str, str]  # device to sentence
    is_copy: bool
    corrupt_journals: tuple[str, ...]


def look_at_kept(data_dir: Path) -> Kept:
    reasons = read_quarantine(data_dir, ["every device"])
    home = read_json(data_dir / "home.json")
    is_copy = bool(home) and home.get("boot_id") == boot_id() and home.get("inode") != data_dir.stat().st_ino
    corrupt = tuple(sorted(path.name for path in data_dir.glob("journal.sqlite.corrupt-*")))
    return Kept({device: reason.sentence for device, reason in reasons.items()}, is_copy, corrupt)


def judge_kept(kept: Kept, data_dir: Path) -> list[Finding]:
    found: list[Finding] = []
    for device, sentence in kept.quarantined.items():
        way = f"look for running jobs, delete {quarantine_path(data_dir)}, restart the agent"
        found.append(failed(f"quarantined: {sentence}", way, device))
    if kept.is_copy:
        way = "for a node of its own delete node.json and journal.sqlite* in it; else delete home.json"
        found.append(failed(f"{data_dir} is a copy of another agent's directory", way))
    if kept.corrupt_journals and not kept.quarantined:
        seen = f"journals that could not be read were set aside: {', '.join(kept.corrupt_journals)}"
        found.append(warning(seen, f"delete them in {data_dir} once nobody needs them"))
    return found or [ok("no device is quarantined")]


def check_kept(scene: Scene) -> list[Finding]:
    data_dir = scene.known.data_dir
    if not data_dir.exists():
        return [not_applicable(f"data_dir {data_dir} is not there yet")]
    return judge_kept(look_at_kept(data_dir), data_dir)


def check_agent(scene: Scene) -> list[Finding]:
    agent = running_agent(scene.known)
    if agent is not None:
        return [ok(f"it runs (pid {agent.pid})")]
    way = f"lull agent --config {scene.config}"
    return [warning(f"no agent runs in {scene.known.data_dir}: nothing is lent or brought back", way)]


CHECKS = (
    Check("agent", "node", "The agent runs.", check_agent, needs=("data_dir",)),
    Check(
        "data_dir", "disk", "The data directory is there, writable and private.", check_data_dir, needs=("data_dir",)
    ),
    Check("filesystem", "disk", "The data directory is on a local disk.", check_filesystem, needs=("data_dir",)),
    Check("flush", "disk", "A flush in the data directory works and is quick.", check_flush, needs=("data_dir",)),
    Check("disk_room", "disk", "The disk has room for the journal and for logs.", check_room, needs=("data_dir",)),
    Check(
        "quarantine", "disk", "No device is quarantined, and the directory is no copy.", check_kept, needs=("data_dir",)
    ),
)
