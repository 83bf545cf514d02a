from __future__ import annotations

import copy
import io
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lull.vmm.errors import LayoutChanged, OutOfDeviceMemory, UnsupportedMode
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from lull.vmm.tags import RestoreMode
from lull.vmm.torch_cuda import refuse_expandable_segments
from lull.vmm.torch_scope import host_tensor, move_module, move_optimizer, torch_scope
from tests.doc_examples import example
from tests.memory import GRANULE_BYTES, memfd_bytes, small_driver


@pytest.fixture
def driver(tmp_path: Path) -> HostDriver:
    return small_driver(tmp_path / "device", granules=1024)


def tag_of(pool: Pool, tensor: torch.Tensor) -> str | None:
    """Where all bytes of it lie."""
    address = tensor.data_ptr()
    for one in pool.allocations():
        if one.address <= address and address + tensor.nbytes <= one.address + one.nbytes:
            return one.tag
    return None


def saved() -> io.BytesIO:
    file = io.BytesIO()
    torch.save({"weight": torch.arange(300.0)}, file)
    file.seek(0)
    return file


MAKERS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "empty": lambda x: torch.empty(3),
    "tensor": lambda x: torch.tensor([1.0, 2.0]),
    "as_tensor": lambda x: torch.as_tensor([3.0]),
    "legacy": lambda x: torch.Tensor([1, 2]),
    "new": lambda x: x.new(3),
    "clone": lambda x: x.clone(),
    "deepcopy": lambda x: copy.deepcopy(x),
    "deepcopy of a parameter": lambda x: copy.deepcopy(torch.nn.Parameter(x)),
    "to": lambda x: x.to(torch.float64),
    "arithmetic": lambda x: x + 1,
    "several results": lambda x: torch.sort(x, descending=True).values,
    "out": lambda x: torch.add(x, x, out=torch.empty(0)),
    "resize_": lambda x: torch.empty(0).resize_(7),
    "load": lambda x: torch.load(saved())["weight"],
    "generator": lambda x: torch.randperm(5),
    "gradient": lambda x: (
        torch.autograd.grad((x.clone().requires_grad_() ** 2).sum(), x, allow_unused=True)[0]
        if x.requires_grad
        else x * 2
    ),
}


@pytest.mark.parametrize("name", MAKERS)
def test_what_is_made_inside_lies_in_the_pool(pool: Pool, name: str) -> None:
    source = torch.arange(5.0)
    expected = MAKERS[name](source)
    with pool.torch_scope("model_weights"):
        made = MAKERS[name](source)
        assert tag_of(pool, made) == "model_weights"
    assert (made.shape, made.dtype) == (expected.shape, expected.dtype)
    if name not in {"empty", "new", "resize_", "generator"}:
        assert torch.equal(made, expected)
    assert tag_of(pool, source) is None
    assert torch.equal(source, torch.arange(5.0))


def test_what_is_only_wrapped_stays_where_it_is(pool: Pool) -> None:
    source, array, raw = torch.ones(5), np.ones(3), bytearray(16)
    with pool.torch_scope("model_weights"):
        view = source[1:]
        wrapped = torch.from_numpy(array)
        framed = torch.frombuffer(raw, dtype=torch.uint8)
        aliased = torch.empty(0).set_(source.untyped_storage())
        shared = torch.ones(3).share_memory_()
        source.add_(1)
        torch.ones(3, device="meta")
    assert [tag_of(pool, tensor) for tensor in (source, view, wrapped, framed, aliased, shared)] == [None] * 6
    array[0] = 7
    assert wrapped[0] == 7
    assert pool.allocations() == ()


def test_values_and_random_numbers_are_those_of_before(pool: Pool) -> None:
    def build() -> list[torch.Tensor]:
        torch.manual_seed(5)
        module = torch.nn.TransformerEncoderLayer(16, 2, 32, batch_first=True).eval()
        return [*module.state_dict().values(), module(torch.randn(2, 3, 16))]

    expected = build()
    with pool.torch_scope("model_weights"):
        found = build()
    assert all(torch.equal(one, other) for one, other in zip(found, expected, strict=True))
    assert {tag_of(pool, tensor) for tensor in found} == {"model_weights"}


def test_a_whole_module_parks(pool: Pool, driver: HostDriver) -> None:
    with pool.torch_scope("model_weights"):
        first, last = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
        module = torch.nn.Sequential(first, torch.nn.BatchNorm1d(64), last)
        last.weight = first.weight
    module.eval()
    identities = {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()}
    addresses = [tensor.data_ptr() for tensor in module.state_dict().values()]
    row = first.weight[3]
    given = torch.randn(4, 64)
    with torch.no_grad():
        expected, expected_row = module(given), row.clone()
    for _ in range(2):
        pool.release(["model_weights"])
        assert memfd_bytes(os.getpid(), driver.device_uuid) == 0
        pool.resume(["model_weights"])
        assert torch.equal(module(given), expected)
    assert {name: id(tensor) for name, tensor in module.state_dict(keep_vars=True).items()} == identities
    assert [tensor.data_ptr() for tensor in module.state_dict().values()] == addresses
    assert last.weight is first.weight
    assert torch.equal(row, expected_row)
    with torch.no_grad():
        first.weight[3] = 5
    assert row.eq(5).all()
    del module, first, last, row
    assert pool.allocations() == ()


@pytest.mark.parametrize("where", ["outside", "inside"])
def test_a_loaded_checkpoint_is_taken_in(pool: Pool, where: str) -> None:
    expected = torch.nn.Linear(8, 8)
    checkpoint = {name: tensor.clone() for name, tensor in expected.state_dict().items()}
    with pool.torch_scope("model_weights"):
        if where == "inside":
            checkpoint = {name: tensor.clone() for name, tensor in checkpoint.items()}
        with torch.device("meta"):
            module = torch.nn.Linear(8, 8)
        module.register_buffer("scale", torch.ones(1))
        module.load_state_dict(checkpoint, assign=True, strict=False)
        module.scale = torch.full((1,), 2.0)
    assert all(torch.equal(module.state_dict()[name], tensor) for name, tensor in expected.state_dict().items())
    assert {tag_of(pool, tensor) for tensor in module.state_dict().values()} == {"model_weights"}
    outside = torch.nn.Linear(2, 2)
    assert tag_of(pool, outside.weight) is None


def test_conversion_keeps_the_parameters(pool: Pool) -> None:
    module = torch.nn.Linear(8, 8)
    parameter = module.weight
    with pool.torch_scope("model_weights"):
        module.to(torch.bfloat16)
    assert module.weight is parameter
    assert {tag_of(pool, tensor) for tensor in module.parameters()} == {"model_weights"}


def test_scopes_nest(pool: Pool) -> None:
    with pool.torch_scope("model_weights"):
        first = torch.ones(3)
        with torch_scope(pool, "kv_cache", RestoreMode.CPU), torch.inference_mode():
            inner = torch.full((3,), 2.0)
            with torch_scope(pool, "kv_cache", RestoreMode.NONE):
                dropped = torch.full((3,), 4.0)
        second = torch.full((3,), 3.0)
    after = torch.ones(3)
    tags = [tag_of(pool, tensor) for tensor in (first, inner, dropped, second, after)]
    assert tags == ["model_weights", "kv_cache", "kv_cache", "model_weights", None]
    pool.release(["kv_cache"])
    assert torch.equal(first + second, torch.full((3,), 4.0))  # the outer one is untouched
    with pytest.raises(LayoutChanged), pool.torch_scope("kv_cache"):
        torch.ones(1)
    with pool.torch_scope("model_weights"):
        assert tag_of(pool, torch.ones(1)) == "model_weights"
    pool.resume(["kv_cache"])
    assert torch.equal(inner, torch.full((3,), 2.0))
    assert not dropped.any()


def test_pools_nest(pool: Pool, tmp_path: Path) -> None:
    other = Pool(small_driver(tmp_path / "other", granules=64))
    with pool.torch_scope("sampler"), other.torch_scope("drafter"):
        tensor = torch.ones(3)
    assert (tag_of(pool, tensor), tag_of(other, tensor)) == (None, "drafter")


def test_a_scope_is_its_threads(pool: Pool) -> None:
    entered, checked = threading.Event(), threading.Event()
    made: dict[str, torch.Tensor] = {}

    def work() -> None:
        with pool.torch_scope("drafter"):
            entered.set()
            assert checked.wait(30)
            made["theirs"] = torch.ones(3)
            made["module"] = torch.nn.Linear(2, 2).weight

    thread = threading.Thread(target=work)
    thread.start()
    assert entered.wait(30)
    made["outside"] = torch.ones(3)
    made["module outside"] = torch.nn.Linear(2, 2).weight
    with pool.torch_scope("sampler"):
        checked.set()
        thread.join(30)
        made["ours"] = torch.ones(3)
    tags = {name: tag_of(pool, tensor) for name, tensor in made.items()}
    assert tags == {
        "theirs": "drafter",
        "module": "drafter",
        "outside": None,
        "module outside": None,
        "ours": "sampler",
    }


def test_an_exception_leaves_nothing_behind(pool: Pool, driver: HostDriver) -> None:
    def fail() -> None:
        with pool.torch_scope("model_weights"), pool.torch_scope("sampler"):
            kept = torch.ones(1000)
            assert tag_of(pool, kept) == "sampler"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert tag_of(pool, torch.ones(3)) is None
    assert (pool.allocations(), driver.free_bytes()) == ((), driver.capacity_bytes)


def test_what_does_not_fit_raises_and_leaks_nothing(pool: Pool, driver: HostDriver) -> None:
    with pool.torch_scope("model_weights"):
        small = torch.ones(3)
        with pytest.raises(OutOfDeviceMemory):
            torch.ones(driver.capacity_bytes // 4 + 1)
        assert tag_of(pool, small + 1) == "model_weights"
    assert pool.device_bytes() <= 32 * GRANULE_BYTES


def test_tensors_that_are_in_a_pool_stay_there(pool: Pool) -> None:
    lone = host_tensor(pool, (3,), torch.float32, "kv_cache")
    moved = torch.nn.Linear(4, 4)
    move_module(moved, pool, "model")
    with pool.torch_scope("model_weights"):
        module: Any = torch.nn.Linear(4, 4)
        module.weight = moved.weight
        module.register_buffer("lone", lone)
    assert tag_of(pool, module.weight) == "model"
    assert tag_of(pool, module.get_buffer("lone")) == "kv_cache"


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_segments_that_torch_maps_itself_are_refused(name: str) -> None:
    refuse_expandable_segments({name: "expandable_segments:False,max_split_size_mb:64"})
    with pytest.raises(UnsupportedMode, match=rf"{name} has expandable_segments:True"):
        refuse_expandable_segments({name: "max_split_size_mb:64, expandable_segments:True"})


# -- a job that is suspended


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        loss = model(torch.randn(8, 32, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
    optimizer.zero_grad(set_to_none=True)


def new_job() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


@pytest.fixture(scope="module")
def uninterrupted() -> list[torch.Tensor]:
    model, optimizer = new_job()
    train(model, optimizer, range(6))
    return [*model.state_dict().values(), *state_of(optimizer)]


def state_of(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for state in optimizer.state.values() for value in state.values()]


def scoped(pool: Pool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    with pool.torch_scope("model_weights"):
        model, optimizer = new_job()
    with pool.torch_scope("optimizer"):
        train(model, optimizer, range(3))
    return model, optimizer


def moved(pool: Pool) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    model, optimizer = new_job()
    assert move_optimizer(optimizer, pool, "optimizer") is None
    train(model, optimizer, range(3))
    move_module(model, pool, "model_weights")
    move_optimizer(optimizer, pool, "optimizer")
    return model, optimizer


@pytest.mark.parametrize("make", [scoped, moved])
def test_a_job_is_suspended_and_goes_on(
    pool: Pool,
    driver: HostDriver,
    uninterrupted: list[torch.Tensor],
    make: Callable[[Pool], tuple[torch.nn.Module, torch.optim.Optimizer]],
) -> None:
    model, optimizer = make(pool)
    assert {tag_of(pool, tensor) for tensor in model.state_dict().values()} == {"model_weights"}
    assert {tag_of(pool, tensor) for tensor in state_of(optimizer)} == {"optimizer"}
    assert memfd_bytes(os.getpid(), driver.device_uuid) == pool.device_bytes() > 0
    pool.release(["model_weights", "optimizer"])
    assert memfd_bytes(os.getpid(), driver.device_uuid) == 0
    pool.resume(["model_weights", "optimizer"])
    train(model, optimizer, range(3, 6))
    found = [*model.state_dict().values(), *state_of(optimizer)]
    assert all(torch.equal(one, other) for one, other in zip(found, uninterrupted, strict=True))


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(example("torch.md"), "docs/torch.md", "exec"), names)
    assert isinstance(names["pool"], Pool)
    assert names["pool"].device_bytes() > 0
    names.clear()
