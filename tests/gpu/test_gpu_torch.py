"""Torch's CUDA tensors in a pool, on a real GPU: nothing but their memory goes away over a loan."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest

from lull.vmm.cuda_driver import CudaDriver
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import Runtime
from lull.vmm.tags import RestoreMode
from tests.driver_rigs import GIB

if TYPE_CHECKING:
    import torch  # where there is no GPU, importing it to skip every test would be a waste

pytestmark = pytest.mark.gpu
WIDTH = 4096
LAYERS = 8  # of WIDTH x WIDTH floats: half a GiB
MODEL_BYTES = LAYERS * WIDTH * WIDTH * 4


@pytest.fixture(autouse=True, scope="module")
def _cuda_in_this_torch() -> None:
    import torch

    assert torch.cuda.is_available(), f"torch {torch.__version__} of this Python has no CUDA, or sees no device"


@pytest.fixture
def pool() -> Iterator[Pool]:
    import torch

    device = torch.cuda.get_device_properties(0)
    driver = CudaDriver(next(uuid for uuid in CudaDriver.devices() if str(device.uuid) in uuid))
    pool = Pool(driver)
    yield pool
    gc.collect()
    torch.cuda.synchronize()


def model_in(pool: Pool) -> torch.nn.Module:
    import torch

    torch.manual_seed(7)
    with pool.torch_scope("model_weights"):
        layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False, device="cuda") for _ in range(LAYERS)]
        return torch.nn.Sequential(*layers)


def free_bytes() -> int:
    import torch

    torch.cuda.synchronize()
    return int(torch.cuda.mem_get_info()[0])


def test_a_module_is_the_same_after_a_loan(pool: Pool) -> None:
    import torch

    model = model_in(pool)
    inputs = torch.randn(16, WIDTH, device="cuda")
    with torch.inference_mode():
        expected = model(inputs).clone()
    parameters = {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()}
    runtime = Runtime(pool)
    for _ in range(2):
        awake_bytes = free_bytes()
        runtime.release()
        assert free_bytes() - awake_bytes >= MODEL_BYTES
        # What the loan is for: somebody else's tensors, also after torch has given back what it keeps.
        torch.cuda.empty_cache()
        torch.full((GIB // 4,), 3.0, device="cuda").sum().item()
        torch.cuda.empty_cache()
        runtime.resume()
        with torch.inference_mode():
            assert torch.equal(model(inputs), expected)
        assert {name: (id(tensor), tensor.data_ptr()) for name, tensor in model.named_parameters()} == parameters
    assert runtime.status().state is MemoryState.RUNNING


def test_a_cuda_graph_replays_after_a_loan(pool: Pool) -> None:
    import torch

    model = model_in(pool)
    with pool.torch_scope("model_extra", RestoreMode.CPU):
        inputs = torch.zeros(16, WIDTH, device="cuda")
        outputs = torch.zeros(16, WIDTH, device="cuda")
    warm = torch.cuda.Stream()
    warm.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(warm), torch.inference_mode():
        for _ in range(3):
            outputs.copy_(model(inputs))
    torch.cuda.current_stream().wait_stream(warm)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.inference_mode():
        outputs.copy_(model(inputs))
    question = torch.randn(16, WIDTH, device="cuda")

    def answer() -> torch.Tensor:
        inputs.copy_(question)
        graph.replay()
        torch.cuda.synchronize()
        return outputs.clone()

    expected = answer()
    runtime = Runtime(pool)
    for _ in range(2):
        runtime.release()
        runtime.resume()
        outputs.zero_()
        assert torch.equal(answer(), expected)


def test_what_a_mode_drops_is_zero_where_it_says_so(pool: Pool) -> None:
    import torch

    with pool.torch_scope("kv_cache", RestoreMode.MEMSET):
        cache = torch.full((GIB // 16,), 1.5, device="cuda")
    runtime = Runtime(pool)
    runtime.release(["kv_cache"])
    runtime.resume(["kv_cache"])
    assert int(torch.count_nonzero(cache)) == 0


def test_a_training_step_after_a_loan_is_the_step_without_one(pool: Pool) -> None:
    import torch

    inputs = torch.randn(16, WIDTH, device="cuda")

    def trained(with_loan: bool) -> list[torch.Tensor]:
        torch.manual_seed(11)
        with pool.torch_scope("model_weights"):
            layer = torch.nn.Linear(WIDTH, WIDTH, device="cuda")
            optimizer = torch.optim.AdamW(layer.parameters(), lr=1e-3)
            layer(inputs).square().mean().backward()
            optimizer.step()
        if with_loan:
            runtime = Runtime(pool)
            runtime.release()
            runtime.resume()
        optimizer.zero_grad(set_to_none=True)
        layer(inputs).square().mean().backward()
        optimizer.step()
        return [parameter.detach().clone() for parameter in layer.parameters()]

    for one, other in zip(trained(False), trained(True), strict=True):
        assert torch.equal(one, other)


def test_scopes_nest(pool: Pool) -> None:
    import torch

    with pool.torch_scope("model_weights"):
        outer = torch.ones(GIB // 64, device="cuda")
        with pool.torch_scope("kv_cache", RestoreMode.NONE):
            inner = torch.ones(GIB // 64, device="cuda")
            with pool.torch_scope("kv_cache", RestoreMode.CPU):
                kept = torch.full((GIB // 64,), 4.0, device="cuda")
        after = torch.full((GIB // 64,), 2.0, device="cuda")
    runtime = Runtime(pool)
    runtime.release(["kv_cache"])
    assert pool.bytes_by_tag()["kv_cache"] >= inner.nbytes + kept.nbytes
    assert pool.bytes_by_tag()["model_weights"] >= outer.nbytes + after.nbytes
    assert bool((outer + after == 3).all())  # the outer one is untouched
    runtime.resume(["kv_cache"])
    assert bool((kept == 4).all())


def test_tensors_may_be_dropped_while_parked(pool: Pool) -> None:
    import torch

    with pool.torch_scope("model_weights"):
        kept = torch.full((GIB // 16,), 3.0, device="cuda")
        dropped = torch.ones(GIB // 16, device="cuda")
    runtime = Runtime(pool)
    runtime.release()
    del dropped
    gc.collect()
    torch.cuda.empty_cache()
    runtime.resume()
    assert bool((kept == 3).all())
    with pool.torch_scope("model_weights"):
        again = torch.ones(GIB // 16, device="cuda")
    runtime.release()
    runtime.resume()
    assert bool((again + kept == 4).all())


def test_what_does_not_fit_is_torchs_own_error(pool: Pool) -> None:
    import torch

    _, total_bytes = torch.cuda.mem_get_info()
    with pool.torch_scope("model_weights"):
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(2 * total_bytes, dtype=torch.uint8, device="cuda")
        small = torch.ones(8, device="cuda")
    assert float(small.sum()) == 8
