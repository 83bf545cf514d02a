"""A real vLLM server on the CPU with our worker class, started as its owner would; for tests marked ``vllm``."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from lull.agents.engines.ledger import Ledger
from lull.agents.engines.vllm import VllmAdapter
from lull.agents.settings import EngineSettings
from lull.vmm.host_device import HostDevice
from tests.agent_node import free_port
from tests.engines.spawned import MIB, Spawned
from tests.waiting import wait_until

WORKER_CLASS = "lull.vmm.vllm.cpu_worker.LullCpuWorker"
WEIGHTS_MIB = 16
KV_MIB = 64
CAPACITY_MIB = 112
START_SECONDS_MAX = 900.0
NAME = "small"
# bfloat16 ends by SIGILL on some virtual machines; threads are bound by nobody, as the tests share two processors;
# no answer may need a C++ compiler.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "CXX": "no-compiler",
}


def vllm_python() -> str:
    """The interpreter in whose environment vLLM is."""
    python = os.environ.get("LULL_VLLM_PYTHON")
    assert python, "LULL_VLLM_PYTHON is not set; run these by: make test-vllm"
    return python


def vllm_command(model: Path, port: int, *flags: str, name: str = NAME) -> list[str]:
    return [
        *(vllm_python(), "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
        *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
        *("--kv-cache-memory-bytes", str(KV_MIB * MIB), "--worker-cls", WORKER_CLASS, *flags),
    ]


@contextmanager
def real_vllm(root: Path, model: Path, *flags: str, devices: int = 1) -> Iterator[Spawned]:
    """Healthy; ended at the end, with its children. ``device`` is the first of its devices."""
    made = [HostDevice.create(root / f"device{n}", capacity_bytes=CAPACITY_MIB * MIB) for n in range(devices)]
    port = free_port()
    environment = {**os.environ, **ENVIRONMENT, "LULL_HOST_DEVICE": ":".join(str(device.path) for device in made)}
    with (root / "vllm.log").open("wb") as log:
        child = subprocess.Popen(
            vllm_command(model, port, *flags), stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
        engine = Spawned(child, made[0], port, root)
        try:
            wait_until(lambda: _healthy(engine), START_SECONDS_MAX, "vLLM healthy")
            yield engine
        finally:
            child.terminate()
            try:
                child.wait(30)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait(10)


def _healthy(engine: Spawned) -> bool:
    log = engine.root / "vllm.log"
    assert engine.child.poll() is None, f"vLLM ended with {engine.child.returncode}:\n{log.read_text()[-4000:]}"
    try:
        return httpx.get(engine.url + "/health", timeout=5, trust_env=False).status_code == 200
    except httpx.TransportError:
        return False


def adapter_of(engine: Spawned, ledger: str = "ledger.json", **fields: Any) -> VllmAdapter:
    """As the agent makes one for an attached engine: its flags are read from its process."""
    values = {"name": NAME, "kind": "vllm", "models": [NAME], "url": engine.url, "device_indexes": [0], **fields}
    settings = EngineSettings.model_validate(values)
    return VllmAdapter(settings, Ledger(engine.root / ledger, lambda: engine.incarnation), engine)
