"""NVIDIA GPUs: driver and NVML, the GPUs that the file names, their modes, and who is on them."""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from ..bounded_probe import bounded
from ..device_settings import DeviceSettings
from ..probe_nvml import Nvml, NvmlFailed
from ..processes import command_line, environ_value
from ..settings import AgentSettings
from .findings import Finding, failed, in_mib, not_applicable, ok, warning
from .scene import Check, Scene, engine_pids

_NVML_SECONDS: Final = 10.0
_CHECKPOINT_CUDA_MIN: Final = 12080  # CUDA 12.8, driver R570
_MODULE: Final = Path("/proc/driver/nvidia/version")
_COMPUTE_MODES: Final = {1: "EXCLUSIVE_THREAD", 2: "PROHIBITED", 3: "EXCLUSIVE_PROCESS"}
_DEVICE_FILE: Final = re.compile(r"/dev/nvidia(\d+)")


class _Asked(Nvml):
    """What NVML tells beyond what the agent asks of it."""

    def version(self) -> tuple[str, int]:
        """The driver's, and that of the newest CUDA that it runs, as 1000 * major + 10 * minor."""
        driver = self._call("NVML", "nvmlSystemGetDriverVersion")
        text = driver.decode() if isinstance(driver, bytes) else str(driver)
        return text, int(self._call("NVML", "nvmlSystemGetCudaDriverVersion_v2"))

    def mode(self, uuid: str, function: str) -> int | None:
        """None where it is not told, of a MIG slice for example."""
        try:
            return int(self._call(uuid, function, self._handle(uuid)))
        except NvmlFailed:
            return None

    def pids(self, uuid: str) -> tuple[dict[int, int], frozenset[int]]:
        """Bytes by pid, and those that only draw."""
        told, untold, bystanders = self._processes(uuid)
        return {**dict.fromkeys(untold, 0), **told}, bystanders


@dataclass(frozen=True, slots=True)
class Gpu:
    """``compute_mode`` and ``is_persistent``: None where NVML does not tell."""

    uuid: str
    index: int | None
    is_cut: bool = False
    compute_mode: int | None = None
    is_persistent: bool | None = None
    holders: Mapping[int, int] = field(default_factory=dict[int, int])
    trouble: str = ""


@dataclass(frozen=True, slots=True)
class Machine:
    """``trouble``: why NVML tells nothing. ``module``: the version of the driver that the kernel has loaded."""

    module: str
    driver: str = ""
    cuda: int = 0
    gpus: Mapping[str, Gpu] = field(default_factory=dict[str, Gpu])
    trouble: str = ""


def look_at_machine() -> Machine:
    """May take as long as the driver likes; ``bounded``."""
    module = ""
    with contextlib.suppress(OSError):
        found = re.search(r"\s(\d+\.\d+(?:\.\d+)?)\s", _MODULE.read_text())
        module = found.group(1) if found else "unknown"
    try:
        nvml = bounded(_Asked, _NVML_SECONDS)
        return bounded(lambda: _asked(nvml, module), _NVML_SECONDS)
    except NvmlFailed as error:
        return Machine(module, trouble=str(error))
    except TimeoutError:
        return Machine(module, trouble=f"NVML did not answer within {_NVML_SECONDS:g} s: the driver hangs; see dmesg")


def _asked(nvml: _Asked, module: str) -> Machine:
    driver, cuda = nvml.version()
    gpus: dict[str, Gpu] = {}
    for index, uuid in nvml.gpus():
        gpus[uuid] = _gpu(nvml, uuid, index)
        with contextlib.suppress(NvmlFailed):
            for one in nvml.slices(uuid) if gpus[uuid].is_cut else ():
                gpus[one] = _gpu(nvml, one, None)
    nvml.close()
    return Machine(module, driver, cuda, gpus)


def _gpu(nvml: _Asked, uuid: str, index: int | None) -> Gpu:
    try:
        is_cut = index is not None and nvml.is_cut(uuid)
        told, bystanders = nvml.pids(uuid)
        nvml.device(uuid)  # it answers for its memory
    except NvmlFailed as error:
        return Gpu(uuid, index, trouble=str(error))
    persistent = nvml.mode(uuid, "nvmlDeviceGetPersistenceMode")
    return Gpu(
        uuid,
        index,
        is_cut,
        nvml.mode(uuid, "nvmlDeviceGetComputeMode"),
        None if persistent is None else bool(persistent),
        {pid: held for pid, held in told.items() if pid not in bystanders},
    )


def judge_driver(machine: Machine, *, wanted: bool, checkpoints: bool) -> Finding:
    """``wanted``: the file names an NVIDIA device; ``checkpoints``: an engine of kind cuda-checkpoint."""
    if not machine.module and not wanted and machine.trouble:
        return not_applicable("no NVIDIA driver is loaded, and no [[devices]] wants one")
    if machine.trouble:
        return failed(machine.trouble, "mend the driver; nvidia-smi has to work first")
    text = f"{machine.cuda // 1000}.{machine.cuda % 1000 // 10}"
    seen = f"driver {machine.driver}, for CUDA up to {text}"
    if machine.module and machine.module != machine.driver:
        seen += f"; the kernel has loaded {machine.module}"
        return failed(seen, "reboot, or unload and load the kernel modules of the driver")
    if checkpoints and machine.cuda < _CHECKPOINT_CUDA_MIN:
        return failed(f"{seen}; checkpoints need CUDA 12.8", "install driver R570 or newer")
    return ok(seen)


def judge_gpu(number: int, declared: DeviceSettings, machine: Machine, *, checkpoints: bool) -> list[Finding]:
    """Device ``number`` of the file."""
    subject = f"devices.{number}"
    gpu = gpu_of(declared, machine)
    if gpu is None:
        there = ", ".join(f"{one.index}: {uuid}" for uuid, one in machine.gpus.items() if one.index is not None)
        wanted = declared.uuid or f"index {declared.index}"
        seen = f"there is no {wanted}; there are {there or 'none'}"
        return [failed(seen, "correct uuid; `nvidia-smi -L` prints them; dmesg tells of one that fell off", subject)]
    if gpu.trouble:
        return [failed(gpu.trouble, "see dmesg for Xid, and nvidia-smi", subject)]
    found: list[Finding] = []
    if gpu.is_cut:
        slices = ", ".join(uuid for uuid in machine.gpus if uuid.startswith("MIG-")) or "none"
        seen = f"{gpu.uuid} is in MIG mode: nobody can be given the whole of it. Its slices: {slices}"
        found.append(failed(seen, "name a slice by its uuid, or nvidia-smi -mig 0", subject))
    if gpu.compute_mode == 2:
        seen = f"{gpu.uuid} is in compute mode PROHIBITED: nothing can run on it"
        found.append(failed(seen, f"nvidia-smi -i {gpu.uuid} -c DEFAULT", subject))
    elif gpu.compute_mode:
        mode = _COMPUTE_MODES.get(gpu.compute_mode, str(gpu.compute_mode))
        seen = f"{gpu.uuid} is in compute mode {mode}: while an engine keeps its context, a job gets none"
        found.append(warning(seen, f"nvidia-smi -i {gpu.uuid} -c DEFAULT", subject))
    if gpu.is_persistent is False:
        seen = f"{gpu.uuid} is not in persistence mode: the driver is set up anew whenever nobody uses it"
        if checkpoints:
            seen += ", and a restore needs it to be there"
        found.append(warning(seen, "systemctl enable --now nvidia-persistenced, or nvidia-smi -pm 1", subject))
    return found or [ok(f"{gpu.uuid} answers and may be used by all", subject)]


def gpu_of(declared: DeviceSettings, machine: Machine) -> Gpu | None:
    if declared.uuid is not None:
        return machine.gpus.get(declared.uuid)
    return next((gpu for gpu in machine.gpus.values() if gpu.index == declared.index), None)


def is_ours(pid: int, engines: set[int]) -> bool:
    """An engine's, a job's, or a memory service's."""
    if pid in engines or environ_value(pid, "LULL_ATTEMPT") or environ_value(pid, "LULL_ENGINE"):
        return True
    words = command_line(pid)[:6]
    return "memory-service" in words or any("lull.vmm.service" in word for word in words)


def judge_holders(subject: str, foreign: Mapping[int, int], names: Mapping[int, str]) -> Finding:
    if not foreign:
        return ok("only engines and jobs of this node are on it", subject)
    who = ", ".join(f"{pid} ({names.get(pid) or '?'}, {in_mib(held)})" for pid, held in sorted(foreign.items()))
    return warning(f"foreign processes are on it: {who}; it is not lent while they are", "end them", subject)


def judge_unlisted(holders: Mapping[int, str]) -> Finding | None:
    """Processes that have a GPU's device file open and that NVML does not list: after a crash they hold its memory."""
    if not holders:
        return None
    who = ", ".join(f"{pid} ({name or '?'})" for pid, name in sorted(holders.items()))
    seen = f"NVML does not list them, and they have a GPU open: {who}"
    return warning(seen, "if the GPU has less memory free than it should, end them", "/dev/nvidia*")


def device_file_holders() -> dict[int, str]:
    """Name by pid of who has a GPU's device file open, as far as that can be seen."""
    found: dict[int, str] = {}
    for name in os.listdir("/proc"):
        if not name.isdecimal():
            continue
        try:
            links = [os.readlink(f"/proc/{name}/fd/{fd}") for fd in os.listdir(f"/proc/{name}/fd")]
        except OSError:
            continue  # it ended, or closed one meanwhile, or is not ours to look at
        if any(_DEVICE_FILE.fullmatch(link) for link in links):
            found[int(name)] = name_of(int(name))
    return found


def name_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text(errors="replace").strip()
    except OSError:
        return ""


def _wanted(settings: AgentSettings) -> dict[int, DeviceSettings]:
    return {number: one for number, one in enumerate(settings.devices) if one.kind == "nvidia"}


def _checkpoints(settings: AgentSettings) -> bool:
    return any(engine.kind == "cuda-checkpoint" for engine in settings.engines)


def _looked(scene: Scene) -> Machine:
    return scene.once("nvidia", look_at_machine)


def check_driver(scene: Scene) -> list[Finding]:
    settings = scene.settings
    wanted = settings is not None and bool(_wanted(settings))
    checkpoints = settings is not None and _checkpoints(settings)
    return [judge_driver(_looked(scene), wanted=wanted, checkpoints=checkpoints)]


def check_gpus(scene: Scene) -> list[Finding]:
    wanted = _wanted(scene.known)
    if not wanted:
        return [not_applicable("the file names no NVIDIA device")]
    machine, checkpoints = _looked(scene), _checkpoints(scene.known)
    if machine.trouble:
        return [not_applicable("NVML tells nothing")]
    return [
        finding
        for number, declared in wanted.items()
        for finding in judge_gpu(number, declared, machine, checkpoints=checkpoints)
    ]


def check_gpu_processes(scene: Scene) -> list[Finding]:
    wanted = _wanted(scene.known)
    if not wanted:
        return [not_applicable("the file names no NVIDIA device")]
    machine = _looked(scene)
    if machine.trouble:
        return [not_applicable("NVML tells nothing")]
    engines = {pid for engine in scene.known.engines for pid in engine_pids(scene.known, engine)}
    found: list[Finding] = []
    for number, declared in wanted.items():
        gpu = gpu_of(declared, machine)
        if gpu is not None and not gpu.trouble:
            foreign = {pid: held for pid, held in gpu.holders.items() if not is_ours(pid, engines)}
            found.append(judge_holders(f"devices.{number}", foreign, {pid: name_of(pid) for pid in foreign}))
    listed = {pid for gpu in machine.gpus.values() for pid in gpu.holders}
    hidden = {
        pid: name
        for pid, name in device_file_holders().items()
        if pid not in listed and pid != os.getpid() and not is_ours(pid, engines) and not _is_of_the_driver(name)
    }
    unlisted = judge_unlisted(hidden)
    return [*found, *([] if unlisted is None else [unlisted])] or [not_applicable("no GPU answers")]


def _is_of_the_driver(name: str) -> bool:
    return name.startswith(("nvidia-", "nv-", "dcgm", "nv_", "lull"))


def judge_access(trouble: Mapping[str, str]) -> Finding:
    if trouble:
        path, why = next(iter(trouble.items()))
        return failed(f"{path}: {why}", f"usermod -a -G $(stat -c %G {path}) $(id -un), then log in again")
    return ok("the GPUs' device files can be used")


def check_access(scene: Scene) -> list[Finding]:
    files = sorted(Path("/dev").glob("nvidia*"))
    if not files:
        return [not_applicable("there is no /dev/nvidia*")]
    trouble = {
        str(file): "this user may not read and write it"
        for file in files
        if file.is_char_device() and not os.access(file, os.R_OK | os.W_OK)
    }
    return [judge_access(trouble)]


CHECKS = (
    Check("nvidia_driver", "gpus", "NVIDIA's driver is loaded, and NVML can be read.", check_driver, False, 25.0),
    Check("gpus", "gpus", "The GPUs that the file names are there, in modes that fit.", check_gpus, seconds_max=25.0),
    Check("gpu_processes", "gpus", "No foreign process is on a GPU.", check_gpu_processes, seconds_max=25.0),
    Check("gpu_access", "gpus", "This user may use the GPUs' device files.", check_access, False),
)
