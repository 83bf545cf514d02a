"""A vLLM on the CPU as an engine of a box: which interpreter has it, and what agent.toml says of it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

PYTHON_NAME: Final = "LULL_VLLM_PYTHON"
WORKER_CLASS: Final = "lull.vmm.vllm.cpu_worker.LullCpuWorker"
START_SECONDS_MAX: Final = 900.0
_LOOK_SECONDS_MAX: Final = 60.0
_WRITE_SECONDS_MAX: Final = 600.0
_LOOK: Final = "import importlib.util as u, sys; sys.exit(not (u.find_spec('vllm') and u.find_spec('lull.vmm.vllm')))"
# bfloat16 ends by SIGILL on some virtual machines, so the model is float32; a demo binds no threads to processors.
# The first answer with log-probabilities, the canary's, would wait for a C++ compiler (vllm/v1/sample/ops/logprobs.py),
# a minute on a busy machine, and fail where there is none.
_ENVIRONMENT: Final = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "TORCH_COMPILE_DISABLE": "1",
}


class NoVllm(Exception):
    """The message says where it was looked for, and how it gets there."""


@dataclass(frozen=True, slots=True)
class VllmInstall:
    python: str

    def write_model(self, directory: Path, weights_bytes: int) -> None:
        """A random model. Raises NoVllm with what went wrong."""
        argv = [self.python, "-P", "-m", "lull.vmm.vllm.tiny_model", str(directory)]
        argv += ["--weights-mib", str(weights_bytes >> 20)]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=_WRITE_SECONDS_MAX, check=False)
        except (OSError, subprocess.TimeoutExpired) as error:
            raise NoVllm(f"{self.python} could not write a model: {error}") from error
        if done.returncode:
            raise NoVllm(f"{self.python} could not write a model: {done.stderr.strip()[-400:]}")

    def engine_keys(
        self, name: str, port: int, model: Path, device: Path, kv_cache_bytes: int, scratch: Path
    ) -> dict[str, Any]:
        """The keys of [[engines]] that make it a vLLM.

        ``scratch``: a directory for its sockets and its rendezvous file, which it leaves behind whenever it is killed.
        """
        command = [
            *(self.python, "-P", "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)),
            *("--served-model-name", name, "--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
            *("--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "8"),
            *("--kv-cache-memory-bytes", str(kv_cache_bytes), "--worker-cls", WORKER_CLASS),
        ]
        return {
            "kind": "vllm",
            "command": command,
            "env": {**_ENVIRONMENT, "LULL_HOST_DEVICE": str(device), "TMPDIR": str(scratch)},
            "health_seconds_max": START_SECONDS_MAX,
        }


def find_vllm(environment: Mapping[str, str] = os.environ) -> VllmInstall:
    """The first interpreter that has both vLLM and lull.vmm. Raises NoVllm."""
    cache = Path(environment.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    named = environment.get(PYTHON_NAME)
    places = [named] if named else [sys.executable, str(cache / "lull" / "vllm" / "bin" / "python")]
    for python in places:
        if _has_both(python):
            return VllmInstall(python)
    raise NoVllm(
        f"no vLLM was found in {' or '.join(places)}. `make test-vllm` in a checkout makes an environment that has it"
        f" (4 GB, 6 minutes). Or put it where you like and name its interpreter in {PYTHON_NAME}:"
        " pip install torch==2.13.0; pip install --no-deps -r requirements/vllm.txt; pip install --no-deps gpu-lull"
    )


def _has_both(python: str) -> bool:
    try:
        done = subprocess.run([python, "-P", "-c", _LOOK], capture_output=True, timeout=_LOOK_SECONDS_MAX, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return False
    return done.returncode == 0
