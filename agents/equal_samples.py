"""Looks at memory that were equal, one after the other. Pure."""

from __future__ import annotations

from typing import Any


class EqualSamples:
    """Counts looks that were equal, one after the other."""

    def __init__(self) -> None:
        self._last: Any = None
        self.taken = 0
        self.still = 0  # equal ones up to now
        self.good = 0  # of them, how many in a row were good

    def take(self, sample: Any, *, is_good: bool) -> None:
        same = sample == self._last
        self.taken += 1
        self._last = sample
        self.still = self.still + 1 if same else 1
        self.good = 0 if not is_good else (self.good + 1 if same else 1)
