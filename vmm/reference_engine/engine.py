"""How an engine becomes parkable. This is the whole of it:

1. open the device and make a pool on it, with what shall become of each tag over a park;
2. put the big tensors into the pool under their tags, once, and keep using them as they are;
3. make a runtime, and do all work on those tensors within its `step`;
4. serve `control_app(runtime, key)` (the server does).

After a wake the tensors are where they were: nothing is rebuilt, no pointer changes.

With a memory service the weights are a second pool, which outlives this process: whoever comes first fills and commits
it, all others map it read-only.
"""

from __future__ import annotations

import ctypes
import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..blocks import Allocation
from ..cuda_driver import CudaDriver
from ..driver import Driver
from ..host_driver import HostDriver
from ..pool import Pool
from ..pool_like import PoolLike
from ..runtime import Runtime
from ..service.errors import StaleLayout
from ..service.pool import Piece, ServicePool
from .faults import FaultyRuntime
from .kv_offload import DiskTier, HostTier, KvOffload
from .model import FLOAT_BYTES, Model, Shape
from .settings import KV_CACHE_TAG, WEIGHTS_TAG, CudaDevice, EngineSettings
from .staged import StagedModel


@dataclass(frozen=True, slots=True)
class Engine:
    model: Model
    pool: Pool
    runtime: Runtime
    weights_came: str = "loaded"  # or "attached"
    weights_seconds: float = 0.0  # that this took
    shared: ServicePool | None = None
    offload: KvOffload | None = None

    def allocations(self) -> tuple[Allocation, ...]:
        return (*self.pool.allocations(), *(() if self.shared is None else self.shared.allocations()))

    def bytes_by_tag(self) -> dict[str, int]:
        return {**self.pool.bytes_by_tag(), **({} if self.shared is None else self.shared.bytes_by_tag())}


def build_engine(settings: EngineSettings) -> Engine:
    """Raises ValueError for sizes that make no model or block, OutOfDeviceMemory and OutOfHostMemory for no room."""
    engine = _build(settings)
    offload = _offload(settings, engine.model)
    if offload is None:
        return engine
    engine.model.offload = offload
    engine.runtime.on_release(lambda _tags: offload.empty_host(), tags={KV_CACHE_TAG})
    return replace(engine, offload=offload)


def _offload(settings: EngineSettings, model: Model) -> KvOffload | None:
    host_bytes, directory = settings.kv_offload_host_bytes, settings.kv_offload_dir
    if not host_bytes and directory is None:
        return None
    weights_name = f"{model.shape.weight_floats}-{settings.seed}"
    disk = None
    if directory is not None:
        # A directory for each set of weights: no other block than its own is of any use to it.
        disk = DiskTier(directory / weights_name, settings.kv_offload_dir_bytes_max, model.block_bytes)
    host = HostTier(host_bytes, model.block_bytes) if host_bytes else None
    return KvOffload(weights_name, host, disk)


def _build(settings: EngineSettings) -> Engine:
    torch.set_num_threads(settings.threads)  # the last bits of a sum depend on it
    shape = Shape.for_bytes(settings.weights_bytes)
    driver: Driver
    if isinstance(settings.device, CudaDevice):
        driver = CudaDriver(settings.device.uuid)
    else:
        driver = HostDriver(settings.device)
    pool = Pool(
        driver,
        restore_modes=settings.restore_modes,
        immutable_tags=frozenset({WEIGHTS_TAG}) if settings.immutable else frozenset(),
    )
    # One allocation a tag: many small ones would each be rounded up to the device's granularity.
    kv_cache = pool.allocate(settings.kv_cache_bytes // FLOAT_BYTES * FLOAT_BYTES, KV_CACHE_TAG)
    began = time.monotonic()
    if settings.memory_service is not None:
        return _build_on_service(settings, shape, driver, pool, kv_cache, began)
    model = _model(shape, driver, pool.allocate(shape.weight_bytes, WEIGHTS_TAG).address, kv_cache)
    model.fill_weights(settings.seed)
    seconds = time.monotonic() - began
    pool.warm_backups()  # of PINNED tags: a park must not be the first to ask for that memory
    runtime = FaultyRuntime([pool], settings.faults, WEIGHTS_TAG) if settings.faults else Runtime(pool)
    return Engine(model, pool, runtime, weights_seconds=seconds)


def _build_on_service(
    settings: EngineSettings, shape: Shape, driver: Driver, pool: Pool, kv_cache: Allocation, began: float
) -> Engine:
    """The weights belong to the service. Raises StaleLayout if other weights lie under their name."""
    assert settings.memory_service is not None, "the caller has looked"
    shared = ServicePool(
        driver,
        settings.memory_service,
        f"reference/{shape.weight_floats}/{settings.seed}",  # all that the weights depend on
        tag=WEIGHTS_TAG,
        mode=settings.restore_modes[WEIGHTS_TAG],
        keep_backup=settings.immutable,
    )
    described = {"dtype": "float32", "count": shape.weight_floats, "seed": settings.seed}
    came = "loaded" if shared.writer else "attached"
    if shared.writer:
        shared.build({WEIGHTS_TAG: Piece(shape.weight_bytes, described)})
    region = shared.regions().get(WEIGHTS_TAG)
    if region is None or region.value != described or region.nbytes != shape.weight_bytes:
        raise StaleLayout(f"pool {shared.name} of the memory service does not hold {described}")
    model = _model(shape, driver, region.address, kv_cache)
    if shared.writer:
        model.fill_weights(settings.seed)
        shared.commit()  # from here on a write would be fatal, here as in every other engine
    seconds = time.monotonic() - began
    pool.warm_backups()
    pools: list[PoolLike] = [pool, shared]
    runtime = FaultyRuntime(pools, settings.faults, WEIGHTS_TAG) if settings.faults else Runtime(pools)
    return Engine(model, pool, runtime, came, seconds, shared)


def _model(shape: Shape, driver: Driver, weights_address: int, kv_cache: Allocation) -> Model:
    if not isinstance(driver, HostDriver):
        return StagedModel(shape, driver, weights_address, kv_cache.address, kv_cache.nbytes)
    return Model(shape, _floats(weights_address, shape.weight_bytes), _floats(kv_cache.address, kv_cache.nbytes))


def _floats(address: int, nbytes: int) -> Tensor:
    return torch.frombuffer((ctypes.c_uint8 * nbytes).from_address(address), dtype=torch.float32)
