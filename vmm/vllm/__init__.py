"""vLLM with its weights and KV cache in `lull.vmm` pools.

`cpu_worker` is a worker class for vLLM's CPU build, on a host-memory device. `plugin`, `sleep_backend` and `gpu_worker`
are a sleep back end for GPUs. Whatever imports vLLM here is imported by vLLM itself; nothing else needs it.
"""

from __future__ import annotations
