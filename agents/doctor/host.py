"""What the machine allows: memory to lock, memory for backups, huge pages, control groups, processes, descriptors."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ...vmm.tags import KEEPS_CONTENTS, RestoreMode
from ..node_files import read_json
from ..probe import mem_available_bytes
from ..settings import AgentSettings, EngineSettings
from .findings import Finding, failed, in_mib, not_applicable, ok, warning
from .scene import Check, Scene, engine_folder, running_agent

_PINNED_ROUNDING: Final = 2.0  # vLLM's pinned buffers are rounded up to a power of two (vllm#56410)
_NOFILE_MIN: Final = 4096
_SYS_PTRACE: Final = 19


@dataclass(frozen=True, slots=True)
class Backup:
    """The most that an engine's policy may put into host memory at a park."""

    engine: str
    nbytes: int
    is_pinned: bool
    is_measured: bool  # by what it held when it last ran; else by the capacity of its devices


def backup_of(engine: EngineSettings, footprint_bytes: int | None, capacity_bytes: int) -> Backup | None:
    modes = engine.policy.restore_modes.values()
    if not any(mode in KEEPS_CONTENTS for mode in modes):
        return None
    is_pinned = any(mode is RestoreMode.PINNED for mode in modes) or engine.kind == "vllm"
    nbytes = capacity_bytes if footprint_bytes is None else footprint_bytes
    factor = _PINNED_ROUNDING if engine.kind == "vllm" else 1.0
    return Backup(engine.name, int(nbytes * factor), is_pinned, footprint_bytes is not None)


def backups(settings: AgentSettings) -> list[Backup]:
    found: list[Backup] = []
    for engine in settings.engines:
        footprint: dict[str, int] = read_json(engine_folder(settings, engine) / "facts.json").get("footprint") or {}
        # Of a GPU that was not measured yet, what it has is not asked: it is a warning at most.
        capacity = sum(settings.devices[index].capacity_bytes or 0 for index in engine.device_indexes)
        if (one := backup_of(engine, sum(footprint.values()) if footprint else None, capacity)) is not None:
            found.append(one)
    return found


def judge_host_memory(available_bytes: int, reserve_bytes: int, wanted: Sequence[Backup]) -> list[Finding]:
    """Each engine by itself: what is parked at once is the scheduler's affair, and a loan reserves before it parks."""
    if not wanted:
        return [not_applicable(f"no policy keeps contents in host memory; {in_mib(available_bytes)} are available")]
    have, found = max(0, available_bytes - reserve_bytes), list[Finding]()
    for one in wanted:
        how = "as measured" if one.is_measured else "at most, since it has not run yet"
        if not one.nbytes:
            found.append(not_applicable("what it holds on its GPU is not measured yet", one.engine))
            continue
        seen = f"its backup takes {in_mib(one.nbytes)} ({how}); {in_mib(have)} are available above the reserve"
        if one.nbytes <= have:
            found.append(ok(seen, one.engine))
        else:
            way = "set restore_modes to NONE for what can be loaded again, or give the machine more memory"
            found.append((failed if one.is_measured else warning)(seen, way, one.engine))
    total = sum(one.nbytes for one in wanted)
    if len(wanted) > 1 and total > have and all(one.nbytes <= have for one in wanted):
        seen = f"together the backups take {in_mib(total)} and {in_mib(have)} are available: not all park at once"
        found.append(warning(seen, "lend them one after the other, or use NONE for some", "all engines"))
    return found


def check_host_memory(scene: Scene) -> list[Finding]:
    settings = scene.known
    return judge_host_memory(mem_available_bytes(settings.meminfo_file), settings.host_reserve_bytes, backups(settings))


def judge_memlock(limit_bytes: int | None, wanted: Sequence[Backup], whose: str) -> Finding:
    """``limit_bytes``: None where there is no limit."""
    pinned = [one for one in wanted if one.is_pinned]
    if limit_bytes is None:
        return ok(f"{whose} may lock as much memory as there is")
    if not pinned:
        return not_applicable(f"no policy pins host memory; {whose} may lock {in_mib(limit_bytes)}")
    most = max(pinned, key=lambda one: one.nbytes)
    seen = f"{whose} may lock {in_mib(limit_bytes)}, and engine {most.engine} pins up to {in_mib(most.nbytes)}"
    if most.nbytes <= limit_bytes:
        return ok(seen)
    return warning(seen, "LimitMEMLOCK=infinity in the unit, or `ulimit -l unlimited`: engines inherit it")


def limit_of(name: str, pid: int | None) -> int | None:
    """The soft limit of a process (None: this one) in bytes or pieces; None for unlimited."""
    own = {"Max locked memory": resource.RLIMIT_MEMLOCK, "Max open files": resource.RLIMIT_NOFILE}[name]
    if pid is not None:
        for line in Path(f"/proc/{pid}/limits").read_text().splitlines():
            if line.startswith(name):
                soft = line[len(name) :].split()[0]
                return None if soft == "unlimited" else int(soft)
    soft_limit = resource.getrlimit(own)[0]
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


def check_memlock(scene: Scene) -> list[Finding]:
    agent = running_agent(scene.known)
    limit = limit_of("Max locked memory", None if agent is None else agent.pid)
    whose = "this shell" if agent is None else f"the agent (pid {agent.pid})"
    return [judge_memlock(limit, backups(scene.known), whose)]


def judge_open_files(limit: int | None, whose: str) -> Finding:
    if limit is None or limit >= _NOFILE_MIN:
        return ok(f"{whose} may open {'any number of' if limit is None else limit} files")
    seen = f"{whose} may open {limit} files; a gateway takes two for each request in flight"
    return warning(seen, f"LimitNOFILE=65536 in the unit, or `ulimit -n 65536` (at least {_NOFILE_MIN})")


def check_open_files(scene: Scene) -> list[Finding]:
    agent = None if scene.settings is None else running_agent(scene.settings)
    whose = "this shell" if agent is None else f"the agent (pid {agent.pid})"
    return [judge_open_files(limit_of("Max open files", None if agent is None else agent.pid), whose)]


def chosen(text: str) -> str:
    """The word in brackets of a file like ``always [madvise] never``."""
    return text.partition("[")[2].partition("]")[0]


def judge_huge_pages(shmem: str, anonymous: str, *, has_host_device: bool) -> list[Finding]:
    """``shmem``: of memfds, so of host-memory devices; ``anonymous``: of backups. Empty: the kernel has none."""
    base = "/sys/kernel/mm/transparent_hugepage"
    found: list[Finding] = []
    if not has_host_device:
        found.append(not_applicable("no host-memory device", "shmem_enabled"))
    elif shmem in ("always", "within_size", "advise", "force"):
        found.append(ok(f"shmem_enabled is {shmem}", "shmem_enabled"))
    else:
        seen = f"shmem_enabled is {shmem or 'not there'}: waking a host-memory device costs three to five times as much"
        found.append(warning(seen, f"echo advise > {base}/shmem_enabled", "shmem_enabled"))
    if anonymous in ("always", "madvise"):
        found.append(ok(f"enabled is {anonymous}", "enabled"))
    else:
        seen = f"enabled is {anonymous or 'not there'}: backups are copied by 4 KiB pages"
        found.append(warning(seen, f"echo madvise > {base}/enabled", "enabled"))
    return found


def check_huge_pages(scene: Scene) -> list[Finding]:
    base = Path("/sys/kernel/mm/transparent_hugepage")
    words = [chosen(file.read_text()) if file.exists() else "" for file in (base / "shmem_enabled", base / "enabled")]
    has_host = any(device.kind == "host" for device in scene.known.devices)
    return judge_huge_pages(*words, has_host_device=has_host)


@dataclass(frozen=True, slots=True)
class Groups:
    """``limit_bytes``, ``used_bytes``: of the memory group that this process is in; None without a limit."""

    layout: str  # "v2", "v1", "hybrid", "none"
    limit_bytes: int | None = None
    used_bytes: int = 0


def look_at_groups(mountinfo: str, own: str, root: Path = Path("/sys/fs/cgroup")) -> Groups:
    """``mountinfo`` and ``own``: the texts of /proc/self/mountinfo and /proc/self/cgroup."""
    kinds = {line.partition(" - ")[2].split()[0] for line in mountinfo.splitlines() if " - cgroup" in line}
    if not kinds:
        return Groups("none")
    layout = "hybrid" if len(kinds) == 2 else "v2" if "cgroup2" in kinds else "v1"
    paths = {line.split(":", 2)[1]: line.split(":", 2)[2] for line in own.splitlines() if line.count(":") >= 2}
    tries: list[tuple[Path, str, str]] = []
    if layout == "v2":
        folder = root / paths.get("", "/").lstrip("/")
        tries = [(folder, "memory.max", "memory.current"), (root, "memory.max", "memory.current")]
    else:
        names = ("memory.limit_in_bytes", "memory.usage_in_bytes")
        folder = root / "memory" / paths.get("memory", "/").lstrip("/")
        tries = [(folder, *names), (root / "memory", *names)]
    for folder, limit, used in tries:
        try:
            text = (folder / limit).read_text().strip()
            current = int((folder / used).read_text())
        except (OSError, ValueError):
            continue
        # v1 writes "no limit" as a number near 2^63.
        limit_bytes = None if text == "max" or int(text) >= 1 << 60 else int(text)
        return Groups(layout, limit_bytes, current)
    return Groups(layout)


def judge_groups(groups: Groups, available_bytes: int) -> Finding:
    """``available_bytes``: what the agent believes to be available."""
    if groups.layout == "none":
        return warning(
            "no control group is mounted", "mount /sys/fs/cgroup: limits of this machine cannot be read without"
        )
    left = None if groups.limit_bytes is None else max(0, groups.limit_bytes - groups.used_bytes)
    seen = f"layout {groups.layout}; " + (
        "no memory limit"
        if groups.limit_bytes is None or left is None
        else f"memory limit {in_mib(groups.limit_bytes)}, {in_mib(left)} left"
    )
    if left is not None and left < available_bytes:
        seen += f", while {in_mib(available_bytes)} count as available: a backup may be killed for its memory"
        return warning(seen, "raise the limit, or set host_reserve_bytes to what the limit forbids")
    return ok(seen)


def check_cgroup(scene: Scene) -> list[Finding]:
    mountinfo, own = (os.fsdecode(Path(f"/proc/self/{name}").read_bytes()) for name in ("mountinfo", "cgroup"))
    groups = look_at_groups(mountinfo, own)
    return [judge_groups(groups, mem_available_bytes())]


@dataclass(frozen=True, slots=True)
class Rights:
    is_root: bool
    capabilities: int  # effective, as a mask
    pidfd_trouble: str
    hidden_processes: int  # of others, of which /proc shows nothing


def look_at_rights() -> Rights:
    trouble = ""
    try:
        os.close(os.pidfd_open(os.getpid()))
    except (OSError, AttributeError) as error:
        trouble = str(error)
    mask = 0
    for line in Path("/proc/self/status").read_text(errors="replace").splitlines():
        if line.startswith("CapEff:"):
            mask = int(line.split()[1], 16)
    hidden = 0
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                os.readlink(f"/proc/{name}/ns/mnt")
            except PermissionError:
                hidden += 1
            except OSError:
                continue  # it ended meanwhile
    return Rights(os.geteuid() == 0, mask, trouble, hidden)


def judge_rights(rights: Rights, *, checkpoints: Sequence[str]) -> list[Finding]:
    """``checkpoints``: engines of kind cuda-checkpoint."""
    found: list[Finding] = []
    if rights.pidfd_trouble:
        seen = f"pidfd_open: {rights.pidfd_trouble}"
        found.append(failed(seen, "a kernel from 5.3 on is needed, and a container profile that allows it", "pidfd"))
    else:
        found.append(ok("processes can be held by pidfd", "pidfd"))
    may_trace = rights.is_root or bool(rights.capabilities >> _SYS_PTRACE & 1)
    if may_trace:
        found.append(ok("other users' processes can be looked at", "ptrace"))
    elif checkpoints:
        seen = f"no CAP_SYS_PTRACE: {', '.join(checkpoints)} can be checkpointed only if it runs as this user"
        found.append(warning(seen, "AmbientCapabilities=CAP_SYS_PTRACE in the unit, or run it as this user", "ptrace"))
    elif rights.hidden_processes:
        seen = f"{rights.hidden_processes} processes of other users cannot be looked at: what they hold is not seen"
        found.append(warning(seen, "AmbientCapabilities=CAP_SYS_PTRACE in the agent's unit", "ptrace"))
    else:
        found.append(ok("every process here is this user's", "ptrace"))
    return found


def check_rights(scene: Scene) -> list[Finding]:
    engines = () if scene.settings is None else scene.settings.engines
    names = [engine.name for engine in engines if str(engine.kind) == "cuda-checkpoint"]
    return judge_rights(look_at_rights(), checkpoints=names)


CHECKS = (
    Check("host_memory", "host", "Available host memory covers the backups of the policies.", check_host_memory),
    Check("memlock", "host", "As much memory may be locked as policies pin.", check_memlock),
    Check("open_files", "host", "Enough files may be open at once.", check_open_files, False),
    Check("huge_pages", "host", "Huge pages are allowed for host-memory devices and backups.", check_huge_pages),
    Check("cgroup", "host", "The control-group layout is known and its memory limit leaves room.", check_cgroup, False),
    Check("rights", "host", "Processes can be held by pidfd and looked at.", check_rights, False),
)
