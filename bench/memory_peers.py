"""torch_memory_saver and vLLM's sleep mode beside our pool, on a GPU. Each in a process of its own, pinned and warm.

Where one cannot run, it says why: no figure is better than a made-up one.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any, Final

_SECONDS_MAX: Final = 300.0
_ANSWER_CHARACTERS_MAX: Final = 2000

_TIMED: Final = """
import json, sys, time
import torch
nbytes = int(sys.argv[1])
def timed(work):
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - begin
def report(park, resume):
    rows = [(timed(park), timed(resume)) for _ in range(3)]
    print(json.dumps({"first_park": rows[0][0], "later_park": min(r[0] for r in rows[1:]),
                      "resume": min(r[1] for r in rows)}))
"""
SCRIPTS: Final = {
    "torch_memory_saver": _TIMED
    + """
from torch_memory_saver import torch_memory_saver as saver
saver.hook_mode = "torch"
with saver.region(tag="weights", enable_cpu_backup=True):
    held = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
report(lambda: saver.pause("weights"), lambda: saver.resume("weights"))
""",
    "vllm": _TIMED
    + """
from vllm.device_allocator.cumem import CuMemAllocator
allocator = CuMemAllocator.get_instance()
with allocator.use_memory_pool(tag="weights"):
    held = torch.ones(nbytes, dtype=torch.uint8, device="cuda")
report(lambda: allocator.sleep(offload_tags="weights"), lambda: allocator.wake_up())
""",
}


LULL_SCRIPT: Final = """
import json, sys, time
from lull.vmm import CudaDriver, Pool, RestoreMode
nbytes = int(sys.argv[1])
pool = Pool(CudaDriver(CudaDriver.devices()[0]), restore_modes={"weights": RestoreMode.PINNED})
allocation = pool.allocate(nbytes, "weights")
pool.driver.set(allocation.address, 1, nbytes)
pool.warm_backups()
def timed(work):
    begin = time.perf_counter()
    work(["weights"])
    return time.perf_counter() - begin
rows = [(timed(pool.release), timed(pool.resume)) for _ in range(3)]
print(json.dumps({"first_park": rows[0][0], "later_park": min(r[0] for r in rows[1:]),
                  "resume": min(r[1] for r in rows)}))
pool.close()
"""


def peers(nbytes: int = 1 << 30) -> dict[str, dict[str, Any]]:
    measured = {name: _measure_peer(name, script, nbytes) for name, script in SCRIPTS.items()}
    return {"lull_on_cuda": _measure(LULL_SCRIPT, nbytes), **measured}


def _measure_peer(package: str, script: str, nbytes: int) -> dict[str, Any]:
    missing = [name for name in ("torch", package) if find_spec(name) is None]
    if missing:
        return {"not_run": f"{' and '.join(missing)} not installed"}
    if not _has_gpu():
        return {"not_run": "no CUDA device here"}
    return _measure(script, nbytes)


def _measure(script: str, nbytes: int) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", script, str(nbytes)],
            capture_output=True,
            text=True,
            timeout=_SECONDS_MAX,
            check=True,
        )
        return {"size_bytes": nbytes, "seconds": json.loads(done.stdout.splitlines()[-1])}
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().rpartition("\n")[2]
        return {"not_run": f"it failed: {last}"[:_ANSWER_CHARACTERS_MAX]}
    except (subprocess.TimeoutExpired, ValueError, IndexError) as error:
        return {"not_run": f"it gave no answer: {error}"[:_ANSWER_CHARACTERS_MAX]}


def _has_gpu() -> bool:
    import torch

    return torch.cuda.is_available()
