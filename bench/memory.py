"""Park and wake of the host device beside what the machine itself takes for the same bytes, in one run.

Each repetition measures floors and pool one after the other, so that what disturbs the machine disturbs both. Seconds
are medians; targets are judged by the best of all repetitions on both sides, since a disturbance only ever adds. What
is too small or too seldom done to tell a pool from a disturbance is measured and not judged.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ..vmm import host_memory
from ..vmm.backup import UNTOUCHED_BYTES
from ..vmm.errors import OutOfHostMemory
from ..vmm.host_device import HostDevice
from ..vmm.host_driver import HostDriver
from ..vmm.host_memory import HUGE_BYTES
from ..vmm.pool import Pool
from ..vmm.tags import RestoreMode
from . import memory_attach
from .memory_attach import is_judged
from .memory_costs import ALLOCATIONS, Seconds, many_allocations, timed
from .memory_floors import (
    copy_seconds,
    fresh_copy_seconds,
    fresh_private_copy_seconds,
    give_back_seconds,
    system_facts,
    warm_buffer,
)
from .memory_peers import peers

TAG: Final = "model_weights"
MODES: Final = (RestoreMode.PINNED, RestoreMode.CPU)
FIRST_PARK_RATIO_MIN: Final = 0.9
RESUME_RATIO_MIN: Final = 0.9
SECOND_PARK_RATIO_MAX: Final = 1.2

_LARGE_BYTES: Final = 1 << 30  # of what is smaller times are shown and not judged
_FLOORS: Final = ("memcpy_warm", "memcpy_fresh", "memcpy_fresh_private", "unmap_release")
_PARTS: Final = ("first_park", "second_park", "resume")


@dataclass(frozen=True, slots=True)
class Case:
    """``huge``: huge pages are asked for; whether they are granted is measured."""

    nbytes: int
    threads: int
    huge: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One repetition: seconds by part, the floors among them; and what was copied and granted."""

    mode: RestoreMode
    seconds: Mapping[str, float]
    second_park_copied_bytes: int
    huge_bytes: int


def run(
    sizes_bytes: Sequence[int],
    attach_bytes: int,
    repetitions: int,
    threads: Sequence[int],
    say: Callable[[str], None],
) -> dict[str, Any]:
    """Needs about four times the largest size of host memory; raises OutOfHostMemory where it is not there."""
    results: list[dict[str, Any]] = []
    for nbytes in [-(-size // HUGE_BYTES) * HUGE_BYTES for size in sizes_bytes]:
        needed_bytes, available_bytes = 4 * nbytes + UNTOUCHED_BYTES, host_memory.available_bytes()
        if needed_bytes > available_bytes:
            raise OutOfHostMemory(needed_bytes, available_bytes, f"a run with {nbytes} bytes")
        for huge in (True, False):
            for count in threads:
                case = Case(nbytes, count, huge)
                say(f"{nbytes >> 20} MiB, {'huge' if huge else 'ordinary'} pages, {count} thread(s)")
                results.append(result_of(case, _samples(case, repetitions)))
    attach = memory_attach.measure(attach_bytes, repetitions, say)
    checks = [check for result in [*results, attach] for check in result.get("targets", ())]
    return {
        "bench": "memory",
        "system": system_facts(),
        "repetitions": repetitions,
        "cases": results,
        "attach": attach,
        "allocations": many_allocations(say, ALLOCATIONS if max(sizes_bytes) >= _LARGE_BYTES else ALLOCATIONS // 10),
        "targets_met": all(check["met"] for check in checks if check["judged"]),
        "peers": peers(),
    }


def _samples(case: Case, repetitions: int) -> list[Sample]:
    with warm_buffer(case.nbytes, huge=case.huge) as source, warm_buffer(case.nbytes, huge=case.huge) as target:
        copy_seconds(target, source, case.nbytes, case.threads)  # the first is never like the others
        return [_sample(case, mode, source, target) for _ in range(repetitions) for mode in MODES]


def _sample(case: Case, mode: RestoreMode, source: int, target: int) -> Sample:
    give_back, huge_bytes = give_back_seconds(source, case.nbytes, huge=case.huge)
    floors = {
        "memcpy_warm": copy_seconds(target, source, case.nbytes, case.threads),
        "memcpy_fresh": fresh_copy_seconds(source, case.nbytes, case.threads, huge=case.huge),
        "memcpy_fresh_private": fresh_private_copy_seconds(source, case.nbytes, case.threads),
        "unmap_release": give_back,
    }
    parts, copied_bytes = _lull(case, mode, source)
    return Sample(mode, {**floors, **parts}, copied_bytes, huge_bytes)


def _lull(case: Case, mode: RestoreMode, source: int) -> tuple[dict[str, float], int]:
    """A new pool: first park, wake and second park of an immutable tag."""
    with tempfile.TemporaryDirectory(prefix="lull-bench-") as directory:
        device = HostDevice.create(Path(directory) / "device", capacity_bytes=2 * case.nbytes)
        driver = HostDriver(device, huge_pages=case.huge, page_threads=case.threads)
        pool = Pool(driver, immutable_tags={TAG}, copy_threads=case.threads)
        try:
            allocation = pool.allocate(case.nbytes, TAG, mode)
            driver.copy(allocation.address, source, case.nbytes)
            pool.warm_backups()  # of PINNED; a CPU backup is made by the park
            parts: dict[str, float] = {"first_park": timed(lambda: pool.release([TAG]))}
            parts["resume"] = timed(lambda: pool.resume([TAG]))
            parts["second_park"] = timed(lambda: pool.release([TAG]))
            copied_bytes = pool.statistics()[TAG].last_park_copied_bytes
        finally:
            pool.close()
    return parts, copied_bytes


def result_of(case: Case, samples: Sequence[Sample]) -> dict[str, Any]:
    """Medians, ratios, and what becomes of the targets."""
    by_mode = {mode: [one for one in samples if one.mode is mode] for mode in MODES}
    ratios = {mode: _ratios(mode, by_mode[mode], min) for mode in MODES}
    return {
        "size_bytes": case.nbytes,
        "threads": case.threads,
        "pages": "huge" if case.huge else "ordinary",
        "huge_pages_granted_bytes": min(one.huge_bytes for one in samples),
        "floor_seconds": _all(_FLOORS, samples, statistics.median),
        "costs": {"floors": _costs(_FLOORS, samples), **{m.value: _costs(_PARTS, by_mode[m]) for m in MODES}},
        "lull_seconds": {mode.value: _all(_PARTS, by_mode[mode], statistics.median) for mode in MODES},
        "ratios": {mode.value: ratios[mode] for mode in MODES},
        "ratios_of_medians": {mode.value: _ratios(mode, by_mode[mode], statistics.median) for mode in MODES},
        "targets": _targets(
            ratios,
            max(one.second_park_copied_bytes for one in samples),
            judged=is_judged(case.nbytes, min(map(len, by_mode.values()))),
        ),
    }


def _all(
    names: Sequence[str], samples: Sequence[Sample], choose: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    return {name: choose([one.seconds[name] for one in samples]) for name in names}


def _costs(names: Sequence[str], samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
    """Medians of processor seconds and page faults, of all threads."""
    costs: dict[str, dict[str, float]] = {}
    for name in names:
        seen = [seconds for one in samples if isinstance(seconds := one.seconds[name], Seconds)]
        if seen:
            costs[name] = {
                "cpu_seconds": statistics.median(one.cpu_seconds for one in seen),
                "page_faults": statistics.median(one.page_faults for one in seen),
            }
    return costs


def _ratios(
    mode: RestoreMode, samples: Sequence[Sample], choose: Callable[[Sequence[float]], float]
) -> dict[str, float]:
    """The floor by ours where bytes are copied: 1 is as quick as the machine. Ours by the floor for the second park."""
    seconds = _all([*_FLOORS, *_PARTS], samples, choose)
    copy = seconds["memcpy_warm" if mode is RestoreMode.PINNED else "memcpy_fresh_private"]
    return {
        "first_park": (copy + seconds["unmap_release"]) / seconds["first_park"],
        "resume": seconds["memcpy_fresh"] / seconds["resume"],
        "second_park": seconds["second_park"] / seconds["unmap_release"],
    }


def _targets(
    ratios: Mapping[RestoreMode, Mapping[str, float]], copied_bytes: int, *, judged: bool
) -> list[dict[str, Any]]:
    pinned = ratios[RestoreMode.PINNED]
    timed = [
        _check("first park, warm backup, to memcpy and release", pinned["first_park"], least=FIRST_PARK_RATIO_MIN),
        *(
            _check(f"resume {mode}, to memcpy into fresh pages", ratios[mode]["resume"], least=RESUME_RATIO_MIN)
            for mode in MODES
        ),
        *(
            _check(
                f"second park {mode}, immutable, to unmap and release",
                ratios[mode]["second_park"],
                most=SECOND_PARK_RATIO_MAX,
            )
            for mode in MODES
        ),
    ]
    copied = _check("bytes copied by a second park", copied_bytes, most=0)
    return [*({**check, "judged": judged} for check in timed), {**copied, "judged": True}]


def _check(name: str, value: float, *, least: float | None = None, most: float | None = None) -> dict[str, Any]:
    met = (least is None or value >= least) and (most is None or value <= most)
    bound = {"at_least": least} if least is not None else {"at_most": most}
    return {"name": name, "value": value, **bound, "met": met}
