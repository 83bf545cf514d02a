"""The model where the host cannot touch the device: it computes on the host, on copies.

The weights and the KV cache lie on the device and nowhere else. Each answer begins with a copy of the weights from
there, so a byte that was lost over a park shows in it, and ends with a copy of the KV cache to there. Slow by the copy,
and honest on every machine: it needs no kernels, so no CUDA build of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ..driver import Driver
from .model import FLOAT_BYTES, Model, Shape, Token


class StagedModel(Model):
    """``weights_address`` and ``kv_address`` are the device's. Not thread-safe, as its parent."""

    def __init__(self, shape: Shape, driver: Driver, weights_address: int, kv_address: int, kv_bytes: int) -> None:
        self._driver = driver
        self._weights_address = weights_address
        self._kv_address = kv_address
        self._kv_cache = torch.empty(kv_bytes // FLOAT_BYTES)
        super().__init__(shape, torch.empty(shape.weight_floats), self._kv_cache)

    def fill_weights(self, seed: int) -> None:
        super().fill_weights(seed)
        self._driver.copy(self._weights_address, self.weights.data_ptr(), self.shape.weight_bytes)

    def generate(self, prompt: Sequence[int], choose: Callable[[Tensor], int]) -> Iterator[Token | None]:
        """Raises DriverError if the device does not give its bytes."""
        self._driver.copy(self.weights.data_ptr(), self._weights_address, self.shape.weight_bytes)
        try:
            yield from super().generate(prompt, choose)
        finally:
            used_bytes = self.context_tokens * self.shape.kv_bytes_per_token
            self._driver.copy(self._kv_address, self._kv_cache.data_ptr(), used_bytes)
