"""A small deterministic transformer in which every weight has a part in every token.

It knows nothing of pools, servers or parking: it is given one flat tensor for its weights and one for
its KV cache, and never allocates memory that outlives a call. That is all an engine needs for parking:
to know which tensors are big, and to keep them where they are.

Three choices make one wrong 4 KiB page show in an answer of eight tokens, at any size:
bytes enter and leave by dense codes and not by rows of a table; a decoding step starts from the hidden
state of the step before, so that a small error in the last layer reaches all layers; and the activation
is a sine, which lets an error grow from step to step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn import functional

VOCABULARY = 256  # one token is one byte
FIRST_TOKEN, LAST_TOKEN = 0x20, 0x7E  # answers are printable ASCII, so that text and tokens say the same
PREFILL_TOKENS = 64  # rows of a prompt computed together; between two chunks a request can be cancelled
WEIGHT_BYTES_MIN = 1 << 20
FLOAT_BYTES = 4

_HEAD_WIDTH = 64
_LAYERS = 8  # at every size, so that errors grow alike in small models and in large ones
_ATTENTION_SHARPNESS = 3.0  # random keys hardly differ: without it every token would see the plain average
_SINE_GAIN = 2.2  # above 1 an error grows; far above, even rounding would, and the tolerance of a canary were lost
_LOGIT_SCALE = 4.0  # spreads the logits so that log-probabilities are neither flat nor saturated


@dataclass(frozen=True, slots=True)
class Shape:
    """How a number of bytes becomes a model: the width follows from it, the MLPs take what is left."""

    width: int
    mlp_widths: tuple[int, ...]  # one for each layer

    @classmethod
    def for_bytes(cls, weight_bytes: int) -> Shape:
        """The largest shape within ``weight_bytes``; at most one MLP unit (8 * width bytes) stays unused."""
        if weight_bytes < WEIGHT_BYTES_MIN:
            raise ValueError(f"weights: {weight_bytes} bytes are too few, the least is {WEIGHT_BYTES_MIN} (1MiB)")
        floats = weight_bytes // FLOAT_BYTES
        width = _HEAD_WIDTH
        while _floats_usual(width + _HEAD_WIDTH, _LAYERS) <= floats:
            width += _HEAD_WIDTH
        layers = _LAYERS
        while _floats_usual(width, layers) > floats:  # the smallest models only
            layers -= 1
        units = (floats - _floats_without_mlps(width, layers)) // (2 * width)
        each, more = divmod(units, layers)
        return cls(width, tuple(each + (layer < more) for layer in range(layers)))

    @property
    def layers(self) -> int:
        return len(self.mlp_widths)

    @property
    def weight_floats(self) -> int:
        return _floats_without_mlps(self.width, self.layers) + 2 * self.width * sum(self.mlp_widths)

    @property
    def weight_bytes(self) -> int:
        return self.weight_floats * FLOAT_BYTES

    @property
    def kv_bytes_per_token(self) -> int:
        return self.layers * 2 * self.width * FLOAT_BYTES


def _floats_without_mlps(width: int, layers: int) -> int:
    vectors = 2 + 2 * layers  # start, final norm, two norms a layer
    return 2 * VOCABULARY * width + vectors * width + layers * 4 * width * width


def _floats_usual(width: int, layers: int) -> int:
    """With an MLP of four times the width in each layer, the usual proportion."""
    return _floats_without_mlps(width, layers) + layers * 2 * width * 4 * width


@dataclass(frozen=True, slots=True)
class Token:
    id: int
    logprob: float

    @property
    def text(self) -> str:
        return chr(self.id)


@dataclass(frozen=True, slots=True)
class _Layer:
    attention_norm: Tensor
    query_key_value: Tensor
    attention_out: Tensor
    mlp_norm: Tensor
    mlp_in: Tensor
    mlp_out: Tensor


class BlockStore(Protocol):
    """Where blocks of the KV cache may be kept; each is PREFILL_TOKENS tokens at the end of a prompt."""

    def load(self, prompt: Sequence[int]) -> bytes | memoryview | None: ...
    def save(self, prompt: Sequence[int], block: bytes) -> None: ...


class Model:
    """Views into ``weights`` and ``kv_cache``; fill_weights writes the first, generate uses both.

    Not thread-safe: the KV cache holds one sequence.
    """

    def __init__(self, shape: Shape, weights: Tensor, kv_cache: Tensor) -> None:
        if weights.shape != (shape.weight_floats,) or weights.dtype != torch.float32:
            raise ValueError(f"weights: need {shape.weight_floats} float32, got {tuple(weights.shape)} {weights.dtype}")
        self.shape = shape
        self.weights = weights
        self.offload: BlockStore | None = None
        self.cached_tokens = 0  # of the last prompt, that came from there
        self.context_tokens = kv_cache.numel() * FLOAT_BYTES // shape.kv_bytes_per_token
        if self.context_tokens < 1:
            raise ValueError(
                f"kv_cache: {kv_cache.numel() * FLOAT_BYTES} bytes hold no token, "
                f"one takes {shape.kv_bytes_per_token} at {shape.weight_bytes} bytes of weights"
            )
        width = shape.width
        heads = width // _HEAD_WIDTH
        used = kv_cache[: self.context_tokens * shape.layers * 2 * width]
        self._keys, self._values = used.view(2, shape.layers, heads, self.context_tokens, _HEAD_WIDTH).unbind(0)
        self._code = _byte_code()
        self._scales: list[tuple[Tensor, float]] = []
        self._cursor = 0
        self._embedding = self._take(VOCABULARY, width, spread=1.0)
        self._start = self._take(width, spread=1.0)
        self._layers = [self._take_layer(mlp_width) for mlp_width in shape.mlp_widths]
        self._final_norm = self._take(width, spread=1.0)
        self._head = self._take(VOCABULARY, width, spread=width**-0.5)

    def _take(self, *size: int, spread: float) -> Tensor:
        """The next piece of the flat weights as a view; views are what keeps an address over a park."""
        count = math.prod(size)
        view = self.weights[self._cursor : self._cursor + count].view(size)
        self._cursor += count
        self._scales.append((view, spread))
        return view

    def _take_layer(self, mlp_width: int) -> _Layer:
        width = self.shape.width
        return _Layer(
            attention_norm=self._take(width, spread=1.0),
            query_key_value=self._take(3 * width, width, spread=width**-0.5),
            attention_out=self._take(width, width, spread=width**-0.5),
            mlp_norm=self._take(width, spread=1.0),
            mlp_in=self._take(mlp_width, width, spread=_SINE_GAIN * width**-0.5),
            mlp_out=self._take(width, mlp_width, spread=(2.0 / mlp_width) ** 0.5),
        )

    def fill_weights(self, seed: int) -> None:
        """Equal seeds give equal weights in every process: torch fills serially from one generator."""
        generator = torch.Generator().manual_seed(seed)
        for view, spread in self._scales:
            bound = spread * 3**0.5  # of a uniform distribution whose standard deviation is ``spread``
            view.uniform_(-bound, bound, generator=generator)

    @torch.inference_mode()
    def generate(self, prompt: Sequence[int], choose: Callable[[Tensor], int]) -> Iterator[Token | None]:
        """Tokens without end, or until the context is full; None after each chunk of the prompt but the last.

        Everything a token depends on is computed here from ``prompt``, or comes from the store of blocks: what was in
        the KV cache before is overwritten before it is read, so losing it in a park changes no answer.
        """
        hidden = torch.zeros(1, self.shape.width)
        self.cached_tokens = 0
        for begin in range(0, len(prompt), PREFILL_TOKENS):
            if begin:
                yield None
            end = begin + PREFILL_TOKENS
            is_last = end >= len(prompt)  # it is always computed: the first token follows from it
            if not is_last and self._take_block(prompt[:end]):
                continue
            hidden = self._forward(prompt[begin:end], begin, carry=None)[-1:]
            if not is_last and self.offload is not None:
                self.offload.save(prompt[:end], self._block(begin).numpy().tobytes())
        for position in range(len(prompt), self.context_tokens + 1):
            logprobs = self._logprobs(hidden)
            token = choose(logprobs)
            yield Token(token, float(logprobs[token]))
            if position < self.context_tokens:
                hidden = self._forward([token], position, carry=hidden)

    @property
    def block_bytes(self) -> int:
        return PREFILL_TOKENS * self.shape.kv_bytes_per_token

    def _block(self, begin: int) -> Tensor:
        cut = slice(begin, begin + PREFILL_TOKENS)
        return torch.stack((self._keys[:, :, cut], self._values[:, :, cut]))

    def _take_block(self, prompt: Sequence[int]) -> bool:
        """Puts the last block of ``prompt`` into the KV cache, if it is kept somewhere."""
        block = None if self.offload is None else self.offload.load(prompt)
        if block is None:
            return False
        begin = len(prompt) - PREFILL_TOKENS
        kept = torch.frombuffer(bytearray(block), dtype=torch.float32).view(self._block(begin).shape)
        self._keys[:, :, begin : len(prompt)], self._values[:, :, begin : len(prompt)] = kept[0], kept[1]
        self.cached_tokens += PREFILL_TOKENS
        return True

    def _forward(self, tokens: Sequence[int], position: int, carry: Tensor | None) -> Tensor:
        states = self._code[list(tokens)] @ self._embedding + self._start + self._positions(position, len(tokens))
        if carry is not None:
            states = states + carry
        for index, layer in enumerate(self._layers):
            states = states + self._attend(index, layer, states, position)
            inner = functional.linear(_normalise(states, layer.mlp_norm), layer.mlp_in)
            states = states + functional.linear(inner.sin_(), layer.mlp_out)
        return _normalise(states, self._final_norm)

    def _attend(self, index: int, layer: _Layer, states: Tensor, position: int) -> Tensor:
        count, width = states.shape
        end = position + count
        mixed = functional.linear(_normalise(states, layer.attention_norm), layer.query_key_value)
        queries, keys, values = mixed.view(count, 3, -1, _HEAD_WIDTH).permute(1, 2, 0, 3)
        self._keys[index, :, position:end] = keys
        self._values[index, :, position:end] = values
        scores = queries @ self._keys[index, :, :end].transpose(1, 2) * (_ATTENTION_SHARPNESS * _HEAD_WIDTH**-0.5)
        if count > 1:
            future = torch.ones(count, end, dtype=torch.bool).triu_(position + 1)
            scores.masked_fill_(future, -math.inf)
        seen = scores.softmax(dim=-1) @ self._values[index, :, :end]
        return functional.linear(seen.transpose(0, 1).reshape(count, width), layer.attention_out)

    def _positions(self, begin: int, count: int) -> Tensor:
        half = self.shape.width // 2
        rates = torch.exp(torch.arange(half) * (-math.log(10_000.0) / half))
        angles = torch.arange(begin, begin + count)[:, None] * rates
        return torch.cat((angles.sin(), angles.cos()), dim=1)

    def _logprobs(self, hidden: Tensor) -> Tensor:
        logits = (functional.linear(hidden, self._head) @ self._code)[0] * _LOGIT_SCALE
        logits[:FIRST_TOKEN] = -math.inf
        logits[LAST_TOKEN + 1 :] = -math.inf
        return logits.log_softmax(dim=0)


def _normalise(states: Tensor, gain: Tensor) -> Tensor:
    return states * torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + 1e-6) * gain


def _byte_code() -> Tensor:
    """A Hadamard matrix: one row of +-1/16 for each byte, all rows orthogonal and none with a zero."""
    code = torch.ones(1, 1)
    while code.shape[0] < VOCABULARY:
        code = torch.cat((torch.cat((code, code), 1), torch.cat((code, -code), 1)), 0)
    return code.div_(VOCABULARY**0.5)


def greedy(logprobs: Tensor) -> int:
    return int(logprobs.argmax())


def sampler(temperature: float, seed: int) -> Callable[[Tensor], int]:
    """Draws with its own generator, so that equal seeds give equal answers whatever else is served."""
    generator = torch.Generator().manual_seed(seed)

    def draw(logprobs: Tensor) -> int:
        weights = ((logprobs - logprobs.max()) / max(temperature, 1e-6)).softmax(dim=0)
        return int(torch.multinomial(weights, 1, generator=generator))

    return draw
