"""A torch module whose parameters live in a pool of the memory service, on the host device.

The engine that writes the pool gives it its loaded module; every other one gives a module without contents, and has its
parameters mapped read-only and its buffers filled. Buffers stay outside of the pool, since modules write to them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from ..host_driver import HostDriver
from ..torch_routing import Buffer, exchange
from .errors import StaleLayout
from .pool import Piece, Region, ServicePool


@dataclass(frozen=True, slots=True)
class _Held:
    storage: torch.UntypedStorage
    described: dict[str, Any]  # of the first tensor in it


def share_module(module: torch.nn.Module, pool: ServicePool) -> None:
    """Commits the pool if this engine writes it. Afterwards a write to a parameter is fatal, here as everywhere.

    A module without contents costs nothing: build it on the meta device, then ``module.to_empty(device="cpu")``, and
    tie again what that has untied. Parameters, their views and ties stay the objects they are. Raises StaleLayout if
    the pool holds another module.
    """
    if not isinstance(pool.driver, HostDriver):
        raise ValueError(f"device {pool.driver.device_uuid} is not a host device; make tensors of pool.regions() there")
    parameters = _storages("parameter", module.named_parameters())
    buffers = _storages("buffer", module.named_buffers())
    writing = pool.writer
    if writing:
        everything = {**parameters, **buffers}
        regions = pool.build({key: Piece(held.storage.nbytes(), held.described) for key, held in everything.items()})
        for key, held in everything.items():
            ctypes.memmove(regions[key].address, held.storage.data_ptr(), held.storage.nbytes())
        pool.commit()
    regions = pool.regions()
    _require_same(regions, {**parameters, **buffers}, pool.name)
    for key, held in parameters.items():
        exchange(held.storage, _over(regions[key]), copy=False)
    if not writing:
        for key, held in buffers.items():
            ctypes.memmove(held.storage.data_ptr(), regions[key].address, held.storage.nbytes())


def _storages(kind: str, named: Iterable[tuple[str, torch.Tensor]]) -> dict[str, _Held]:
    """Each storage once, under the name of the first tensor in it."""
    found: dict[int, tuple[str, _Held]] = {}
    for name, tensor in named:
        if tensor.device.type != "cpu":
            raise ValueError(f'{name} is on {tensor.device}; move it first, a meta tensor by to_empty(device="cpu")')
        storage = tensor.untyped_storage()
        if storage.nbytes():
            described = {
                "dtype": str(tensor.dtype).removeprefix("torch."),
                "shape": list(tensor.shape),
                "stride": list(tensor.stride()),
                "offset": tensor.storage_offset(),
            }
            found.setdefault(storage.data_ptr(), (f"{kind}:{name}", _Held(storage, described)))
    return dict(found.values())


def _require_same(regions: dict[str, Region], everything: dict[str, _Held], pool: str) -> None:
    there = {key: (region.nbytes, region.value) for key, region in regions.items()}
    ours = {key: (held.storage.nbytes(), held.described) for key, held in everything.items()}
    if there != ours:
        differing = sorted(key for key in there.keys() | ours.keys() if there.get(key) != ours.get(key))
        raise StaleLayout(f"pool {pool} holds another module: {', '.join(differing[:5])} differ")


def _over(region: Region) -> Buffer:
    return (ctypes.c_uint8 * region.nbytes).from_address(region.address)
