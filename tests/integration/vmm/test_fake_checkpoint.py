"""The stand-in of the driver's checkpoint calls answers as its fixture says, between real processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.agent_node import free_port
from tests.engines.spawned import HERE, MIB, ROOT
from tests.fake_cuda.fixtures import reset_fake_cuda
from tests.fake_cuda.library import FakeCuda, load
from tests.waiting import wait_until

FACTS = json.loads((HERE / "replies" / "cuda_checkpoint.json").read_text())
STATES = {name: fact["value"] for name, fact in FACTS["states"].items()}


def code_of(situation: str) -> int:
    return int(FACTS["replies"][situation]["code"])


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A device of 8 MiB."""
    fake = load()
    reset_fake_cuda(fake, monkeypatch, tmp_path, granules=128)
    yield fake
    fake.reset()


@contextmanager
def cuda_server(root: Path) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """4 MiB of weights and 2 MiB of KV cache."""
    port = free_port()
    argv = [sys.executable, str(HERE / "cuda_server.py"), "--port", str(port), "--device", str(root)]
    with subprocess.Popen(argv, env={**os.environ, "PYTHONPATH": str(ROOT)}) as child:
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert child.poll() is None
            try:
                return httpx.get(f"{url}/health", timeout=5, trust_env=False).status_code == 200
            except httpx.TransportError:
                return False

        try:
            wait_until(answers, 30, "the engine listens")
            yield child, url
        finally:
            child.kill()


def called(name: str, *words: Any) -> tuple[int, Any]:
    cuda: Any = import_module("cuda.bindings.driver")
    code, *values = getattr(cuda, name)(*words)
    return int(code), int(values[0]) if values and values[0] is not None else None


def answer(url: str, seconds: float = 20) -> str:
    body = {"prompt": "a", "max_tokens": 4}
    return str(httpx.post(f"{url}/v1/completions", json=body, timeout=seconds, trust_env=False).json()["choices"])


def free_mib(device: int = 0) -> float:
    cuda: Any = import_module("cuda.bindings.driver")
    _, context = cuda.cuDevicePrimaryCtxRetain(device)
    cuda.cuCtxSetCurrent(context)
    _, free, _ = cuda.cuMemGetInfo()
    return float(free / MIB)


def test_a_checkpoint_and_a_restore(fake: FakeCuda, tmp_path: Path) -> None:
    called("cuInit", 0)
    with cuda_server(tmp_path) as (child, url):
        golden, pid = answer(url), child.pid
        assert free_mib() == 2
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["RUNNING"])
        assert called("cuCheckpointProcessCheckpoint", pid, None)[0] == code_of("wrong state")
        assert called("cuCheckpointProcessRestore", pid, None)[0] == code_of("wrong state")
        assert called("cuCheckpointProcessUnlock", pid, None)[0] == code_of("wrong state")
        assert called("cuCheckpointProcessLock", pid, None) == (0, None)
        assert called("cuCheckpointProcessLock", pid, None)[0] == code_of("wrong state")
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["LOCKED"])
        with pytest.raises(httpx.ReadTimeout):
            answer(url, 0.3)
        assert called("cuCheckpointProcessCheckpoint", pid, None) == (0, None)
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["CHECKPOINTED"])
        assert free_mib() == 8
        assert called("cuCheckpointProcessGetRestoreThreadId", pid)[1] in {
            int(task) for task in os.listdir(f"/proc/{pid}/task")
        }
        assert called("cuCheckpointProcessRestore", pid, None) == (0, None)
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["LOCKED"])
        assert free_mib() == 2
        assert called("cuCheckpointProcessUnlock", pid, None) == (0, None)
        assert answer(url) == golden


@pytest.mark.long
def test_what_cannot_be_done(fake: FakeCuda, tmp_path: Path) -> None:
    cuda: Any = import_module("cuda.bindings.driver")
    called("cuInit", 0)
    with cuda_server(tmp_path) as (child, _):
        pid = child.pid
        with subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE) as other:
            assert called("cuCheckpointProcessGetState", other.pid)[0] == code_of("process without a context")
            other.kill()
        assert called("cuCheckpointProcessGetState", other.pid)[0] == code_of("no such process")

        (tmp_path / "fake-cuda-0" / "checkpoint_faults").write_text(f"busy {pid}\n")
        args = cuda.CUcheckpointLockArgs()
        args.timeoutMs = 20
        assert called("cuCheckpointProcessLock", pid, args)[0] == code_of("lock, time-out")
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["RUNNING"])
        (tmp_path / "fake-cuda-0" / "checkpoint_faults").write_text("")

        called("cuCheckpointProcessLock", pid, None)
        called("cuCheckpointProcessCheckpoint", pid, None)
        taken = subprocess.Popen(
            [sys.executable, str(HERE / "cuda_server.py"), *("--port", "0", "--device", str(tmp_path), "--rank")],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        with taken:
            assert taken.stdout is not None
            taken.stdout.readline()
            assert free_mib() == 2
            assert called("cuCheckpointProcessRestore", pid, None)[0] == code_of("restore, out of memory")
            taken.kill()
        wait_until(lambda: free_mib() == 8, 10, "the other's memory is free")
        assert called("cuCheckpointProcessGetState", pid) == (0, STATES["FAILED"])
        assert called("cuCheckpointProcessRestore", pid, None)[0] == code_of("restore, after that")


@pytest.mark.long
def test_a_checkpoint_that_fails(fake: FakeCuda, tmp_path: Path) -> None:
    called("cuInit", 0)
    with cuda_server(tmp_path) as (child, _):
        (tmp_path / "fake-cuda-0" / "checkpoint_faults").write_text("checkpoint_fails *\n")
        called("cuCheckpointProcessLock", child.pid, None)
        assert called("cuCheckpointProcessCheckpoint", child.pid, None)[0] == code_of("checkpoint, failed")
        assert called("cuCheckpointProcessGetState", child.pid) == (0, STATES["FAILED"])
        assert called("cuCheckpointProcessUnlock", child.pid, None)[0] == code_of("wrong state")
