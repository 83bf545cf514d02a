"""How an engine becomes parkable. This is the whole of it:

1. open the device and make a pool on it, with what shall become of each tag over a park;
2. put the big tensors into the pool under their tags, once, and keep using them as they are;
3. make a runtime, and do all work on those tensors within its `step`;
4. serve `control_app(runtime, key)` (the server does).

After a wake the tensors are where they were: nothing is rebuilt, no pointer changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..host_driver import HostDriver
from ..pool import Pool
from ..runtime import Runtime
from ..torch_scope import host_tensor
from .faults import FaultyRuntime
from .model import FLOAT_BYTES, Model, Shape
from .settings import KV_CACHE_TAG, WEIGHTS_TAG, EngineSettings


@dataclass(frozen=True, slots=True)
class Engine:
    model: Model
    pool: Pool
    runtime: Runtime


def build_engine(settings: EngineSettings) -> Engine:
    """Raises ValueError for sizes that make no model, OutOfDeviceMemory and OutOfHostMemory for lack of room."""
    torch.set_num_threads(settings.threads)  # the last bits of a sum depend on it
    shape = Shape.for_bytes(settings.weights_bytes)
    pool = Pool(
        HostDriver(settings.device),
        restore_modes=settings.restore_modes,
        immutable_tags=frozenset({WEIGHTS_TAG}) if settings.immutable else frozenset(),
    )
    # One allocation a tag: many small ones would each be rounded up to the device's granularity.
    weights = _floats(pool, shape.weight_floats, WEIGHTS_TAG)
    kv_cache = _floats(pool, settings.kv_cache_bytes // FLOAT_BYTES, KV_CACHE_TAG)
    model = Model(shape, weights, kv_cache)
    model.fill_weights(settings.seed)
    pool.warm_backups()  # of PINNED tags: a park must not be the first to ask for that memory
    runtime = FaultyRuntime(pool, settings.faults, WEIGHTS_TAG) if settings.faults else Runtime(pool)
    return Engine(model, pool, runtime)


def _floats(pool: Pool, count: int, tag: str) -> Tensor:
    return host_tensor(pool, (count,), torch.float32, tag)
