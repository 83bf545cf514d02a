from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice

import pytest
import torch

from lull.vmm.reference_engine.model import (
    FIRST_TOKEN,
    FLOAT_BYTES,
    LAST_TOKEN,
    PREFILL_TOKENS,
    Model,
    Shape,
    Token,
    greedy,
    sampler,
)

MIB = 1 << 20
PAGE_FLOATS = 1024
CANARY_PROMPT = b"The quick brown fox"


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def make_model(weights_bytes: int = MIB, *, seed: int = 0, context_tokens: int = 256) -> Model:
    shape = Shape.for_bytes(weights_bytes)
    kv_cache = torch.full((context_tokens * shape.kv_bytes_per_token // FLOAT_BYTES,), torch.nan)
    model = Model(shape, torch.zeros(shape.weight_floats), kv_cache)
    model.fill_weights(seed)
    return model


def answer(model: Model, prompt: bytes = CANARY_PROMPT, count: int = 8) -> list[Token]:
    return list(islice((token for token in model.generate(prompt, greedy) if token is not None), count))


def differs(one: list[Token], other: list[Token]) -> bool:
    """As a canary sees it: token ids, or a log-probability by more than 1e-3. What is not a number differs."""
    return any(a.id != b.id or not abs(a.logprob - b.logprob) <= 1e-3 for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("weights_bytes", [MIB, MIB + 1, 3 * MIB, 8 * MIB, 100 * MIB, 1 << 30, 5 << 30])
def test_a_shape_uses_the_bytes_it_is_given(weights_bytes: int) -> None:
    shape = Shape.for_bytes(weights_bytes)
    unit_bytes = 8 * shape.width
    assert weights_bytes - unit_bytes - FLOAT_BYTES < shape.weight_bytes <= weights_bytes
    assert min(shape.mlp_widths) >= 4 * shape.width
    assert shape.layers == (8 if weights_bytes > 2 * MIB else 4)


def test_a_shape_needs_a_mebibyte() -> None:
    with pytest.raises(ValueError, match="1MiB"):
        Shape.for_bytes(MIB - 1)


def test_every_weight_is_written_and_belongs_to_a_layer() -> None:
    model = make_model()
    assert int((model.weights == 0).sum()) == 0


def test_equal_seeds_give_equal_answers_and_others_do_not() -> None:
    assert answer(make_model(seed=3)) == answer(make_model(seed=3))
    assert differs(answer(make_model(seed=3)), answer(make_model(seed=4)))


def test_an_answer_depends_on_nothing_that_was_served_before() -> None:
    model = make_model()  # its KV cache starts as not-a-number everywhere
    first = answer(model)
    answer(model, b"something else " * 10, count=20)
    assert answer(model) == first


def test_an_answer_depends_on_all_of_a_long_prompt() -> None:
    model = make_model()
    prompt = bytes(random.Random(1).choices(range(256), k=2 * PREFILL_TOKENS + 7))
    whole = answer(model, prompt)
    assert whole == answer(model, prompt)
    for position in (0, PREFILL_TOKENS - 1, PREFILL_TOKENS, len(prompt) - 1):
        changed = prompt[:position] + bytes([prompt[position] ^ 1]) + prompt[position + 1 :]
        assert differs(answer(model, changed), whole), position


def test_a_long_prompt_can_be_left_between_its_chunks() -> None:
    tokens = make_model().generate(b"x" * (2 * PREFILL_TOKENS + 1), greedy)
    assert next(tokens) is None
    assert next(tokens) is None
    assert isinstance(next(tokens), Token)


def test_tokens_are_printable_and_log_probabilities_add_up() -> None:
    model = make_model()
    seen: list[torch.Tensor] = []

    def look(logprobs: torch.Tensor) -> int:
        seen.append(logprobs)
        return greedy(logprobs)

    tokens = list(islice(model.generate(CANARY_PROMPT, look), 8))
    assert all(token is not None and FIRST_TOKEN <= token.id <= LAST_TOKEN for token in tokens)
    for logprobs in seen:
        assert abs(float(logprobs.exp().sum()) - 1) < 1e-5


def test_generation_ends_where_the_context_does() -> None:
    model = make_model(context_tokens=24)
    assert model.context_tokens == 24
    assert len([token for token in model.generate(CANARY_PROMPT, greedy) if token]) == 24 - len(CANARY_PROMPT) + 1


def test_a_kv_cache_without_room_for_a_token_is_refused() -> None:
    shape = Shape.for_bytes(MIB)
    with pytest.raises(ValueError, match="hold no token"):
        Model(shape, torch.zeros(shape.weight_floats), torch.zeros(8))


def test_sampling_is_repeatable_by_its_seed_and_near_zero_is_greedy() -> None:
    model = make_model()

    def sampled(temperature: float, seed: int) -> list[Token | None]:
        return list(islice(model.generate(CANARY_PROMPT, sampler(temperature, seed)), 12))

    assert sampled(1.0, 5) == sampled(1.0, 5)
    assert sampled(1.0, 5) != sampled(1.0, 6)
    assert sampled(1e-12, 5)[:8] == answer(model)


def pages_to_try(model: Model, count: int) -> list[int]:
    """The first and last ones (embedding, head), those with the norms and the last layer, and a seeded sample."""
    begin = model.weights.data_ptr()
    layer = model._layers[-1]  # pyright: ignore[reportPrivateUsage]
    named = [
        layer.attention_norm,
        layer.query_key_value,
        layer.attention_out,
        layer.mlp_norm,
        layer.mlp_in,
        layer.mlp_out,
        model._final_norm,  # pyright: ignore[reportPrivateUsage]
        model._head,  # pyright: ignore[reportPrivateUsage]
    ]
    pages = {(tensor.data_ptr() - begin) // 4096 for tensor in named}
    last = (model.shape.weight_floats - 1) // PAGE_FLOATS
    pages |= {page + 1 for page in pages if page < last} | {0, last}
    return sorted(pages | set(random.Random(7).sample(range(last + 1), count)))


@pytest.mark.parametrize(("weights_bytes", "count"), [(MIB, 60), (8 * MIB, 60), (24 * MIB, 10)])
def test_any_lost_page_of_the_weights_shows_in_eight_tokens(weights_bytes: int, count: int) -> None:
    model = make_model(weights_bytes)
    right = answer(model)
    for page in pages_to_try(model, count):
        part = model.weights[page * PAGE_FLOATS : (page + 1) * PAGE_FLOATS]
        kept = part.clone()
        part.zero_()  # of all contents the one that disturbs least
        assert differs(answer(model), right), f"page {page} of {model.shape}"
        part.copy_(kept)
    assert answer(model) == right


def test_a_page_with_the_contents_of_another_shows_too() -> None:
    model = make_model(8 * MIB)
    right = answer(model)
    pages = model.weights[: 2000 * PAGE_FLOATS].view(-1, PAGE_FLOATS)
    for page in random.Random(8).sample(range(1, 2000), 20):
        kept = pages[page].clone()
        pages[page] = pages[page - 1]
        assert differs(answer(model), right), page
        pages[page] = kept


def test_rounding_alone_stays_within_the_tolerance() -> None:
    model = make_model(8 * MIB)
    right = answer(model)
    generator = torch.Generator().manual_seed(1)
    noise = torch.rand(model.weights.shape, generator=generator).sub_(0.5).mul_(2.0**-23)
    model.weights.mul_(1 + noise)
    assert not differs(answer(model), right)
