"""A torch module in a pool of the service: loaded by one engine, mapped by another."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.errors import StaleLayout
from lull.vmm.service.pool import ServicePool
from lull.vmm.service.torch_weights import share_module
from tests.memory_clients import TAG
from tests.memory_services import MIB, MemoryService, host_service

World = tuple[MemoryService, HostDevice]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with host_service(tmp_path_factory.mktemp("module"), capacity_bytes=16 * MIB) as found:
        yield found


class Tied(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x)).relu())


def without_contents(width: int = 16) -> Tied:
    with torch.device("meta"):
        module = Tied(width)
    module.to_empty(device="cpu")
    module.last.weight = module.first.weight  # to_empty unties
    return module


def mean_of(module: Tied) -> torch.Tensor:
    assert module.norm.running_mean is not None
    return module.norm.running_mean


def test_a_module_is_loaded_once_and_mapped_by_others(world: World) -> None:
    service, device = world
    torch.manual_seed(3)
    loaded, x = Tied(), torch.randn(4, 16)
    mean_of(loaded).add_(1.0)
    right = loaded.eval()(x)
    with torch.no_grad():
        writer = ServicePool(HostDriver(device), service.socket, "module")
        weight = loaded.first.weight
        share_module(loaded, writer)
        assert loaded.first.weight is weight
        assert loaded.last.weight is weight
        low = writer.allocations()[0].address
        assert low <= weight.data_ptr() < low + writer.allocations()[0].nbytes
        assert torch.equal(loaded(x), right)

        other = without_contents().eval()
        reader = ServicePool(HostDriver(device), service.socket, "module")
        assert not reader.writer
        share_module(other, reader)
        assert torch.equal(other(x), right)
        assert other.last.weight.data_ptr() == other.first.weight.data_ptr(), "ties stay ties"
        mean_of(other).add_(1.0)  # a buffer is the engine's own
        assert not torch.equal(other(x), right)
        mean_of(other).sub_(1.0)

        writer.release([TAG])
        reader.release([TAG])
        assert service.pool("module")["state"] == "parked"
        reader.resume([TAG])
        assert torch.equal(other(x), right)
        writer.resume([TAG])
        assert torch.equal(loaded(x), right)

        with pytest.raises(StaleLayout, match="parameter:first"):
            share_module(without_contents(8), reader)
    reader.close()
    writer.close()


def test_a_module_that_has_no_memory_yet_is_refused_with_the_way_out(world: World) -> None:
    service, device = world
    with torch.device("meta"):
        module = Tied()
    pool = ServicePool(HostDriver(device), service.socket, "meta")
    with pytest.raises(ValueError, match=r'to_empty\(device="cpu"\)'):
        share_module(module, pool)
    pool.close()
