"""What an engine leaves behind when it dies: found and ended before it is started again, whatever it calls itself."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

from lull.agents.engine_process import ENGINE_MARK, EngineProcess
from lull.agents.processes import environ_value, identity, is_same
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.settings import EngineSettings
from tests.waiting import wait_until

# As setproctitle does (vLLM's EngineCore and workers call themselves so): the title is written over the environment.
WORKER = """
import ctypes, pathlib, sys, threading
fields = pathlib.Path("/proc/self/stat").read_text().rpartition(")")[2].split()
start, end = int(fields[47]), int(fields[48])
ctypes.memset(start, 32, end - start)
pathlib.Path(sys.argv[1]).write_text("ready")
threading.Event().wait()
"""
ENGINE = """
import os, subprocess, sys, threading
subprocess.Popen([sys.executable, "-c", sys.argv[1], sys.argv[2]])
threading.Event().wait()
"""


def engine(folder: Path, ready: Path) -> EngineProcess:
    fields = {
        "name": "alpha",
        "kind": "process",
        "models": ["alpha"],
        "url": "http://127.0.0.1:9",
        "device_indexes": [0],
        "command": [sys.executable, "-c", ENGINE, WORKER, str(ready)],
    }
    return EngineProcess(folder, f"leftovers-{os.getpid()}", EngineSettings.model_validate(fields))


async def test_a_worker_with_a_title_of_its_own_is_ended_also_by_the_next_agent(tmp_path: Path) -> None:
    ready = tmp_path / "ready"
    first = engine(tmp_path / "engine", ready)
    started = first.start(EnginePolicy())
    wait_until(ready.exists, 20, "the worker")
    (worker_pid,) = first.pids() - {started.pid}
    worker = identity(worker_pid)
    assert worker is not None
    assert environ_value(worker_pid, ENGINE_MARK) is None  # nothing in it says whose it is
    os.kill(started.pid, signal.SIGKILL)
    wait_until(lambda: not first.alive, 10, "the end of the engine")
    assert first.pids() == {worker_pid}  # its memory is still the engine's

    next_agent = engine(tmp_path / "engine", ready)
    assert not next_agent.adopt()
    assert next_agent.pids() == {worker_pid}
    await next_agent.stop(5)
    assert not is_same(worker)
    assert next_agent.pids() == set()
    await first.stop(5)
