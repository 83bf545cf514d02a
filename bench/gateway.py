"""Our gateway beside a direct connection, a bare proxy on its library, HAProxy, nginx and LiteLLM, in one run.

The proxy that is measured has a CPU of its own where there are two; clients and back end share the others. The columns
take turns within each repetition, so what else the machine does meets all of them. Medians of the repetitions count;
only figures of one run are compared.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import psutil

from .gateway_load import MODES, Mode
from .gateway_peers import PEERS, Column, Cores, NotRun, haproxy, module, on_cores

CONNECTIONS: Final[Mapping[Mode, int]] = {"small": 64, "paced": 16, "fast": 64, "first": 64}
RPS_OF_BARE_MIN: Final = 0.8
REQUESTS_PER_SECOND_MIN: Final = 5000.0
CHUNKS_PER_SECOND_MIN: Final = 80_000.0
ADDED_P50_SECONDS_MAX: Final = 0.001
RESIDENT_BYTES_MAX: Final = 60_000_000
BACKUP_OF_HAPROXY_MIN: Final = 0.9
_LOAD_SECONDS_EXTRA: Final = 30.0
_MODES_OF_BACKUP: Final[tuple[Mode, ...]] = ("small", "fast")


def run(seconds: float, repetitions: int, names: Sequence[str] | None, say: Callable[[str], None]) -> dict[str, Any]:
    """``names``: of ``PEERS``; all of them by default. ``seconds`` is for one measurement of one column."""
    cores = Cores.of_this_machine()
    not_run: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="lull-bench-") as text, contextlib.ExitStack() as stack:
        directory = Path(text)
        _, port = stack.enter_context(module("lull.bench.gateway_engine", [], cores.rest, directory / "engine.log"))
        engine = f"127.0.0.1:{port}"
        columns = {"direct": Column("direct", engine, None)}
        for name in names or PEERS:
            say(f"starting {name}")
            try:
                columns[name] = stack.enter_context(PEERS[name](directory, cores, engine))
            except NotRun as error:
                not_run[name] = str(error)
        if "haproxy" in columns and "lull" in columns:
            backup = columns["lull"].address
            columns["haproxy_with_lull"] = stack.enter_context(haproxy(directory, cores, engine, backup))
        measured = _measure_all(columns, cores, seconds, repetitions, say)
        figures = {name: _figures(column, measured[name]) for name, column in columns.items()}
    return results(figures, not_run, load=os.getloadavg(), cores_apart=cores.apart)


def _measure_all(
    columns: Mapping[str, Column], cores: Cores, seconds: float, repetitions: int, say: Callable[[str], None]
) -> dict[str, dict[Mode, list[dict[str, Any]]]]:
    measured: dict[str, dict[Mode, list[dict[str, Any]]]] = {name: {mode: [] for mode in MODES} for name in columns}
    for repetition in range(repetitions):
        for mode in MODES:
            for name, column in columns.items():
                if name == "haproxy_with_lull" and mode not in _MODES_OF_BACKUP:
                    continue
                say(f"{repetition + 1} of {repetitions}: {mode}, {name}")
                measured[name][mode].append(measure(column, cores, mode, seconds))
    return measured


def cpu_seconds(pid: int) -> float:
    """Of a process and its children."""
    total = 0.0
    for process in [psutil.Process(pid), *psutil.Process(pid).children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            times = process.cpu_times()
            total += times.user + times.system
    return total


def resident_bytes(pid: int) -> int:
    process = psutil.Process(pid)
    return sum(int(one.memory_info().rss) for one in [process, *process.children(recursive=True)])


def measure(column: Column, cores: Cores, mode: Mode, seconds: float) -> dict[str, Any]:
    """One run of clients against one column; with the CPU that the proxy took while they counted."""
    words = [mode, column.address, str(CONNECTIONS[mode]), str(seconds)]
    with on_cores(cores.rest):
        load = subprocess.Popen(
            [sys.executable, "-P", "-m", "lull.bench.gateway_load", *words], stdout=subprocess.PIPE, text=True
        )
    cpu: list[float] = []
    result: dict[str, Any] = {}
    assert load.stdout is not None
    try:
        for line in load.stdout:
            if line.startswith("{"):
                result = json.loads(line)
            elif column.pid is not None:
                cpu.append(cpu_seconds(column.pid))
        if load.wait(seconds + _LOAD_SECONDS_EXTRA) != 0:
            raise NotRun(f"the clients of {column.name} ended with {load.returncode}")
    finally:
        if load.poll() is None:
            load.kill()
            load.wait()
        load.stdout.close()
    result["cpu_seconds"] = cpu[1] - cpu[0] if len(cpu) == 2 else None
    return result


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _figures(column: Column, measured: Mapping[Mode, Sequence[Mapping[str, Any]]]) -> dict[str, Any]:
    def per_second(mode: Mode) -> float | None:
        return _median([one["done"] / one["seconds"] for one in measured[mode]])

    def cpu_each(mode: Mode) -> float | None:
        return _median(
            [
                one["cpu_seconds"] / one["done"]
                for one in measured[mode]
                if one["cpu_seconds"] is not None and one["done"]
            ]
        )

    errors = {mode: sum(one["errors"] for one in runs) for mode, runs in measured.items()}
    return {
        "requests_per_second": per_second("small"),
        "cpu_seconds_per_request": cpu_each("small"),
        "p50_seconds_at_200_per_second": _median([one["p50_seconds"] for one in measured["paced"]]),
        "chunks_per_second": per_second("fast"),
        "cpu_seconds_per_chunk": cpu_each("fast"),
        "first_chunk_p50_seconds": _median([one["p50_seconds"] for one in measured["first"]]),
        "first_chunk_p99_seconds": _median([one["p99_seconds"] for one in measured["first"]]),
        "resident_bytes": None if column.pid is None else resident_bytes(column.pid),
        "errors": {mode: count for mode, count in errors.items() if count},
        "said": next((one["said"] for runs in measured.values() for one in runs if one["said"]), ""),
    }


_ADDED: Final = {
    "added_p50_seconds_at_200_per_second": "p50_seconds_at_200_per_second",
    "added_first_chunk_p50_seconds": "first_chunk_p50_seconds",
    "added_first_chunk_p99_seconds": "first_chunk_p99_seconds",
}


def results(
    figures: Mapping[str, dict[str, Any]], not_run: Mapping[str, str], *, load: Sequence[float], cores_apart: bool
) -> dict[str, Any]:
    """The document; a check is made only of columns that ran."""
    columns: dict[str, dict[str, Any]] = {}
    for name, figure in figures.items():
        added = (
            {key: _less(figure[of], figures["direct"][of]) for key, of in _ADDED.items()} if name != "direct" else {}
        )
        columns[name] = {**figure, **added}
    columns |= {name: {"not_run": why} for name, why in not_run.items()}
    targets = _targets(columns)
    return {
        "bench": "gateway",
        "columns": columns,
        "targets": targets,
        "targets_met": all(check["met"] for check in targets),
        "proxy_has_a_core_of_its_own": cores_apart,
        "load_average": list(load),
    }


def _less(value: float | None, base: float | None) -> float | None:
    return None if value is None or base is None else value - base


def _targets(columns: Mapping[str, Mapping[str, Any]]) -> list[dict[str, Any]]:
    def figure(name: str, key: str) -> float | None:
        value: float | None = columns.get(name, {}).get(key)
        return value

    def ratio(key: str, name: str, base: str) -> float | None:
        value, floor = figure(name, key), figure(base, key)
        return value / floor if value is not None and floor else None

    # Per core: by the CPU that each took for one, which clients that are slower than the proxy do not change.
    checks: list[dict[str, Any]] = [
        _check("requests_per_core_of_bare", ratio("cpu_seconds_per_request", "bare", "lull"), at_least=RPS_OF_BARE_MIN),
        _check("chunks_per_core_of_bare", ratio("cpu_seconds_per_chunk", "bare", "lull"), at_least=RPS_OF_BARE_MIN),
        _check("requests_per_second", figure("lull", "requests_per_second"), at_least=REQUESTS_PER_SECOND_MIN),
        _check("chunks_per_second", figure("lull", "chunks_per_second"), at_least=CHUNKS_PER_SECOND_MIN),
        _check(
            "added_p50_seconds", figure("lull", "added_p50_seconds_at_200_per_second"), at_most=ADDED_P50_SECONDS_MAX
        ),
        _check("resident_bytes", figure("lull", "resident_bytes"), at_most=RESIDENT_BYTES_MAX),
        _check(
            "requests_per_core_through_haproxy_of_haproxy",
            ratio("cpu_seconds_per_request", "haproxy", "haproxy_with_lull"),
            at_least=BACKUP_OF_HAPROXY_MIN,
        ),
    ]
    return [check for check in checks if check["value"] is not None]


def _check(
    name: str, value: float | None, *, at_least: float | None = None, at_most: float | None = None
) -> dict[str, Any]:
    met = value is not None and (at_least is None or value >= at_least) and (at_most is None or value <= at_most)
    bounds = {key: bound for key, bound in (("at_least", at_least), ("at_most", at_most)) if bound is not None}
    return {"name": name, "value": value, "met": met, **bounds}
