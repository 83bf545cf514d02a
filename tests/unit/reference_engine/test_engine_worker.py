from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch

from lull.vmm.reference_engine.model import FLOAT_BYTES, Model, Shape, Token, greedy
from lull.vmm.reference_engine.worker import EngineBusy, EngineStopping, Generation, Worker
from tests.waiting import wait_until_async


class Admission:
    """Counts who is in, as a runtime does."""

    def __init__(self) -> None:
        self.inside = 0

    @contextmanager
    def step(self) -> Iterator[None]:
        self.inside += 1
        try:
            yield
        finally:
            self.inside -= 1


@pytest.fixture(scope="module")
def model() -> Model:
    shape = Shape.for_bytes(1 << 20)
    kv_cache = torch.zeros(512 * shape.kv_bytes_per_token // FLOAT_BYTES)
    model = Model(shape, torch.zeros(shape.weight_floats), kv_cache)
    model.fill_weights(0)
    return model


@pytest.fixture
def admission() -> Admission:
    return Admission()


@contextmanager
def running(worker: Worker) -> Iterator[Worker]:
    worker.start()
    try:
        yield worker
    finally:
        worker.stop()
        worker.join()


def submit(worker: Worker, admission: Admission, prompt: bytes = b"abc", tokens_max: int = 4) -> Generation:
    generation = Generation(prompt, tokens_max, greedy, admission.step())
    worker.submit(generation)
    return generation


async def collect(generation: Generation) -> list[Token]:
    return [token async for token in generation.tokens()]


async def test_concurrent_requests_get_the_answers_they_get_alone(model: Model, admission: Admission) -> None:
    prompts = [bytes([65 + number]) * (number + 1) for number in range(6)]
    with running(Worker(model)) as worker:
        alone = [await collect(submit(worker, admission, prompt)) for prompt in prompts]
        together = await asyncio.gather(*(collect(submit(worker, admission, prompt)) for prompt in prompts))
    assert list(together) == alone
    assert admission.inside == 0


async def test_the_end_of_an_answer_is_seen_after_its_admission_has_ended(model: Model, admission: Admission) -> None:
    with running(Worker(model)) as worker:
        for _ in range(20):
            await collect(submit(worker, admission, tokens_max=1))
            assert admission.inside == 0


async def test_a_request_that_waits_is_in_flight(model: Model, admission: Admission) -> None:
    worker = Worker(model)
    generations = [submit(worker, admission) for _ in range(3)]
    assert admission.inside == 3
    with running(worker):
        for generation in generations:
            assert len(await collect(generation)) == 4
    assert admission.inside == 0


async def test_leaving_an_answer_ends_it_and_frees_the_next(model: Model, admission: Admission) -> None:
    with running(Worker(model, token_delay_seconds=60)) as worker:
        left = submit(worker, admission)
        after = submit(worker, admission, tokens_max=1)
        tokens = left.tokens()
        assert isinstance(await anext(tokens), Token)
        await tokens.aclose()  # type: ignore[attr-defined]
        assert len(await asyncio.wait_for(collect(after), 20)) == 1
    assert admission.inside == 0


async def test_a_request_cancelled_while_it_waits_is_never_computed(model: Model, admission: Admission) -> None:
    worker = Worker(model)
    generation = submit(worker, admission)
    generation.cancelled.set()
    with running(worker):
        assert await collect(generation) == []
    assert admission.inside == 0


async def test_stopping_ends_the_current_request_and_those_that_wait(model: Model, admission: Admission) -> None:
    with running(Worker(model, token_delay_seconds=60)) as worker:
        current, waiting = submit(worker, admission), submit(worker, admission)
        assert isinstance(await anext(current.tokens()), Token)
        worker.stop()
        for generation in (current, waiting):
            with pytest.raises(EngineStopping):
                await asyncio.wait_for(collect(generation), 20)
        with pytest.raises(EngineStopping):
            submit(worker, admission)
    assert admission.inside == 0


async def test_more_than_may_wait_are_refused_without_admission(model: Model, admission: Admission) -> None:
    worker = Worker(model, waiting_max=2)
    generations = [submit(worker, admission) for _ in range(2)]
    with pytest.raises(EngineBusy, match="2 requests are waiting"):
        submit(worker, admission)
    assert admission.inside == 2
    with running(worker):
        for generation in generations:
            await collect(generation)


async def test_what_goes_wrong_reaches_the_request_and_not_the_next(model: Model, admission: Admission) -> None:
    def fail(_logprobs: torch.Tensor) -> int:
        raise ArithmeticError("on purpose")

    with running(Worker(model)) as worker:
        broken = Generation(b"abc", 4, fail, admission.step())
        worker.submit(broken)
        with pytest.raises(ArithmeticError, match="on purpose"):
            await collect(broken)
        assert len(await collect(submit(worker, admission))) == 4
    await wait_until_async(lambda: threading.active_count() == 1 or not admission.inside, 5, "the admission ending")
