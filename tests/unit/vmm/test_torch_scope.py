from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lull.vmm import torch_scope
from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.errors import UnsupportedMode
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from tests.fake_cuda.library import FakeCuda
from tests.memory import GRANULE_BYTES


def inside(pool: Pool, tensor: torch.Tensor) -> bool:
    address = tensor.data_ptr()
    return any(a.address <= address and address + tensor.nbytes <= a.address + a.nbytes for a in pool.allocations())


def tied_module() -> torch.nn.Sequential:
    generator = torch.Generator().manual_seed(1)
    module = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.BatchNorm1d(48), torch.nn.Linear(48, 48))
    for parameter in module.parameters():
        parameter.data.normal_(generator=generator)
    module[2].weight = module[0].weight
    module.eval()
    return module


def test_a_tensor_of_its_own(pool: Pool) -> None:
    tensor = torch_scope.host_tensor(pool, (4, 8), torch.bfloat16, "kv_cache", RestoreMode.CPU)
    assert (tensor.shape, tensor.dtype, inside(pool, tensor)) == ((4, 8), torch.bfloat16, True)
    assert not tensor.any()
    tensor.fill_(1.5)
    pool.release(["kv_cache"])
    pool.resume(["kv_cache"])
    assert torch.equal(tensor, torch.full((4, 8), 1.5, dtype=torch.bfloat16))


def test_a_bad_mode_is_refused_before_the_first_tensor(pool: Pool) -> None:
    bad: Any = "FOO"
    with pytest.raises(UnsupportedMode, match="restore mode is 'FOO'"), pool.torch_scope("x", bad):
        pass
    with pytest.raises(UnsupportedMode, match="restore mode is 'FOO'"):
        torch_scope.host_tensor(pool, (0,), torch.float32, "x", bad)


def test_what_is_no_module_and_no_optimizer_is_named(pool: Pool) -> None:
    nothing: Any = None
    with pytest.raises(TypeError, match=r"module is None; it must be a torch\.nn\.Module"):
        torch_scope.move_module(nothing, pool, "model")
    with pytest.raises(TypeError, match=r"optimizer is None; it must be a torch\.optim\.Optimizer"):
        torch_scope.move_optimizer(nothing, pool, "optimizer")


def test_an_empty_tensor_takes_nothing(pool: Pool) -> None:
    assert torch_scope.host_tensor(pool, (0, 8), torch.float32, "kv_cache").shape == (0, 8)
    assert pool.allocations() == ()


def test_a_module_moves_with_its_identities(pool: Pool) -> None:
    module: Any = tied_module()
    given = torch.randn(5, 48)
    expected = module(given)
    parameters, view = dict(module.named_parameters()), module.get_parameter("0.weight")[3]
    allocation = torch_scope.move_module(module, pool, "model_weights")
    assert allocation is not None
    assert (allocation.tag, allocation.mode) == ("model_weights", RestoreMode.CPU)
    assert all(parameters[name] is parameter for name, parameter in module.named_parameters())
    assert module[2].weight is module[0].weight
    assert all(inside(pool, tensor) for tensor in (*module.parameters(), *module.buffers(), view))
    addresses = [tensor.data_ptr() for tensor in module.parameters()]
    assert all(address % 64 == 0 for address in addresses)
    assert torch.equal(module(given), expected)
    for _ in range(2):
        pool.release(["model_weights"])
        pool.resume(["model_weights"])
        assert [tensor.data_ptr() for tensor in module.parameters()] == addresses
        assert torch.equal(module(given), expected)


def test_tied_storage_is_moved_once(pool: Pool) -> None:
    module: Any = tied_module()
    allocation = torch_scope.move_module(module, pool, "model_weights")
    assert allocation is not None
    assert allocation.nbytes < 2 * 48 * 48 * 4


def test_a_copy_is_outside(pool: Pool) -> None:
    module: Any = tied_module()
    torch_scope.move_module(module, pool, "model_weights")
    assert not inside(pool, copy.deepcopy(module).get_parameter("0.weight"))


def test_nothing_to_move(pool: Pool) -> None:
    assert torch_scope.move_module(torch.nn.ReLU(), pool, "model_weights") is None


def test_only_host_tensors_move(pool: Pool) -> None:
    with pytest.raises(ValueError, match=r"0\.weight is on meta"):
        torch_scope.move_module(torch.nn.Sequential(torch.nn.Linear(2, 2, device="meta")), pool, "model_weights")


def test_only_a_host_pool_takes_host_tensors(fake_cuda: FakeCuda) -> None:
    pool = Pool(CudaDriver(CudaDriver.devices()[0]))
    for move in (
        lambda: torch_scope.move_module(torch.nn.Linear(2, 2), pool, "model_weights"),
        lambda: torch_scope.host_tensor(pool, (2,), torch.float32, "model_weights"),
    ):
        with pytest.raises(ValueError, match=r"make tensors there inside pool\.torch_scope"):
            move()


def test_a_module_that_does_not_fit_stays_where_it_is(pool: Pool, driver: HostDriver) -> None:
    borrowed = driver.create(driver.capacity_bytes)
    module: Any = tied_module()
    expected = module(torch.ones(1, 48))
    with pytest.raises(RuntimeError, match="out of device memory"):
        torch_scope.move_module(module, pool, "model_weights")
    assert torch.equal(module(torch.ones(1, 48)), expected)
    driver.release(borrowed)
    assert driver.free_bytes() % GRANULE_BYTES == 0
