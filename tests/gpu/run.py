"""All GPU tests by one command, without a network, in under 8 minutes: `python tests/gpu/run.py`.

Needs Python 3.11, pytest, cuda-python, and an NVIDIA GPU that nobody else uses; the torch cases need a torch with CUDA
and a C compiler, the NVML cases nvidia-ml-py, those of the agent's probe also pydantic. The product is taken from this
checkout unless it is installed. Ends in a table. Exit code 0: everything passed; 1: something failed; 3: nothing could
be run, and why.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
SECONDS_MAX = 450.0  # of everything, so that the table comes before anybody's limit of 8 minutes
TEST_SECONDS_MAX = 90
# Each in a process of its own: an error that is sticky ends there.
GROUPS = {
    "driver": ("tests/contract/vmm", 200.0),
    "nvml": ("tests/gpu/test_gpu_nvml.py", 90.0),
    "probe": ("tests/gpu/test_gpu_probe.py", 60.0),
    "torch": ("tests/gpu/test_gpu_torch.py", 150.0),
    "speed": ("tests/gpu/test_gpu_speed.py", 120.0),
}
NEEDED_BY_GROUP = {"nvml": ("pynvml",), "probe": ("pynvml", "pydantic"), "torch": ("torch",)}


@dataclass
class Row:
    group: str
    case: str
    outcome: str
    seconds: float = 0.0
    figures: dict[str, str] = field(default_factory=dict)
    reason: str = ""


def environment() -> dict[str, str]:
    paths = [str(ROOT)]
    if importlib.util.find_spec("lull") is None:
        paths.append(str(ROOT / "typings"))  # its links lead to the product's folders
    if "PYTHONPATH" in os.environ:
        paths.append(os.environ["PYTHONPATH"])
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "LULL_TEST_GPU": "1", "PYTHONUNBUFFERED": "1"}


def missing() -> str | None:
    """Why nothing can be run here."""
    for module, package in (("pytest", "pytest"), ("cuda.bindings", "cuda-python")):
        try:
            found = importlib.util.find_spec(module)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return f"{package} is not installed in {sys.executable}: pip install {package}"
    code = "from lull.vmm.cuda_driver import CudaDriver; print(','.join(CudaDriver.devices()))"
    asked = subprocess.run(
        [sys.executable, "-c", code], env=environment(), capture_output=True, text=True, timeout=120, check=False
    )
    if asked.returncode:
        return asked.stderr.strip().splitlines()[-1]
    return None if asked.stdout.strip() else "the CUDA driver sees no device (CUDA_VISIBLE_DEVICES?)"


def build_torch_part() -> str | None:
    """The compiled part of the torch scope, if this Python has none yet. Says why it could not be built."""
    target = ROOT / "vmm" / f"_torch_allocator{sysconfig.get_config_var('EXT_SUFFIX')}"
    source = ROOT / "vmm" / "_torch_allocator.c"
    if target.exists() and target.stat().st_mtime >= source.stat().st_mtime:
        return None
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None:
        return "no C compiler for vmm/_torch_allocator.c; install gcc"
    command = [compiler, "-O2", "-fPIC", "-shared", "-pthread", "-o", str(target), str(source), "-ldl"]
    built = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    return built.stderr.strip() or None if built.returncode else None


def run_group(name: str, seconds_max: float, folder: Path, selected: str | None) -> list[Row]:
    path, _ = GROUPS[name]
    for module in NEEDED_BY_GROUP.get(name, ()):
        if importlib.util.find_spec(module) is None:
            return [Row(name, path, "not run", reason=f"{module} is not installed")]
    if name == "torch" and (reason := build_torch_part()) is not None:
        return [Row(name, path, "failed", reason=reason)]
    report = folder / f"{name}.xml"
    command = [sys.executable, "-m", "pytest", "-v", "-c", str(ROOT / "tests" / "gpu" / "bare.ini")]
    # Above the contract's folder lie fixtures of databases, which a bare machine cannot import.
    command += [f"--confcutdir={ROOT / 'tests' / 'contract' / 'vmm'}", f"--junitxml={report}", str(ROOT / path)]
    command += ["-k", selected] if selected else []
    if importlib.util.find_spec("pytest_timeout") is not None:
        command += [f"--timeout={TEST_SECONDS_MAX}"]
    begin = time.monotonic()
    try:
        subprocess.run(command, env=environment(), cwd=ROOT, timeout=seconds_max, check=False)
    except subprocess.TimeoutExpired:
        return [Row(name, path, "failed", time.monotonic() - begin, reason=f"not done within {seconds_max:.0f} s")]
    if not report.exists():
        return [Row(name, path, "failed", time.monotonic() - begin, reason="pytest ended without a report; see above")]
    return rows_of(name, report)


def rows_of(group: str, report: Path) -> list[Row]:
    rows: list[Row] = []
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        row = Row(group, case.get("name", "?"), "passed", float(case.get("time", "0")))
        for child in case:
            if child.tag in ("failure", "error"):
                row.outcome, row.reason = "failed", child.get("message", "")
            elif child.tag == "skipped":
                row.outcome, row.reason = "skipped", child.get("message", "")
            elif child.tag == "properties":
                row.figures = {item.get("name", "?"): item.get("value", "") for item in child}
        rows.append(row)
    return rows or [Row(group, report.stem, "failed", reason="no test was found")]


def print_table(rows: list[Row]) -> None:
    width = max(len(row.case) for row in rows)
    print(f"\n{'group':<8}{'case':<{width + 2}}{'outcome':<9}{'s':>6}")
    for row in rows:
        note = "; ".join(f"{name}: {value}" for name, value in row.figures.items())
        if row.outcome != "passed" and row.reason:
            note = row.reason.splitlines()[0][:160]
        print(f"{row.group:<8}{row.case:<{width + 2}}{row.outcome:<9}{row.seconds:>6.1f}  {note}".rstrip())
    outcomes = ("passed", "failed", "skipped", "not run")
    counts = {outcome: sum(row.outcome == outcome for row in rows) for outcome in outcomes}
    print(", ".join(f"{count} {outcome}" for outcome, count in counts.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("groups", nargs="*", help=f"of {', '.join(GROUPS)}; all unless given")
    parser.add_argument("--json", type=Path, help="also write the table there")
    parser.add_argument("-k", dest="selected", help="only tests whose names match, as pytest's -k")
    arguments = parser.parse_args()
    unknown = [name for name in arguments.groups if name not in GROUPS]
    if unknown:
        parser.error(f"unknown group {unknown[0]}; there are {', '.join(GROUPS)}")
    if (reason := missing()) is not None:
        print(f"no GPU test was run: {reason}")
        return 3
    deadline = time.monotonic() + SECONDS_MAX
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        for name in arguments.groups or GROUPS:
            left_seconds = deadline - time.monotonic()
            if left_seconds <= 5:
                rows.append(Row(name, GROUPS[name][0], "failed", reason=f"no time was left of {SECONDS_MAX:.0f} s"))
                continue
            rows += run_group(name, min(GROUPS[name][1], left_seconds), Path(folder), arguments.selected)
    print_table(rows)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1), encoding="utf-8")
    return 0 if all(row.outcome == "passed" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
