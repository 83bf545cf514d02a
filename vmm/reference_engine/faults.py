"""Test switches that make the engine lie or break, so that whoever drives it can be shown to notice.

Nothing here is needed to park an engine: without `--fault` the server uses a plain Runtime.
"""

from __future__ import annotations

import math
import os
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TYPE_CHECKING, Final

from ..errors import TransitionRefused
from ..lifecycle import MemoryState
from ..pool import Pool
from ..pool_like import PoolLike
from ..runtime import Runtime

if TYPE_CHECKING:
    from torch import Tensor

PAGE_BYTES: Final = 4096
DEATH_EXIT_CODE: Final = 70


class Fault(StrEnum):
    KEEP_MEMORY = "keep-memory"  # says parked and keeps the device memory
    LOSE_WEIGHTS = "lose-weights"  # the weights are zero after the wake
    OVERWRITE_BLOCK = "overwrite-block"  # one page of the weights' backup is overwritten while parked
    HANG_PARK = "hang-park"  # stays in parking
    HANG_WAKE = "hang-wake"  # stays in waking
    DIE_PARKED = "die-parked"  # the process exits once the park is answered
    DIE_ON_RESUME = "die-on-resume"  # the process exits instead of waking
    REFUSE_PARK = "refuse-park"  # answers 409 and changes nothing
    WRONG_AFTER_WAKE = "wrong-after-wake"  # from the wake on, the first token of each answer is wrong


# They need the device memory or the backup of the weights to be this process's own.
OF_OWN_WEIGHTS: Final = frozenset({Fault.KEEP_MEMORY, Fault.LOSE_WEIGHTS, Fault.OVERWRITE_BLOCK})

FaultPlan = Mapping[Fault, int | None]  # how many times each; None: always


def parse_faults(texts: Sequence[str]) -> FaultPlan:
    """``NAME`` or ``NAME=N`` texts."""
    plan: dict[Fault, int | None] = {}
    for text in texts:
        name, equals, times = text.partition("=")
        if name not in set(Fault):
            raise ValueError(f"--fault {text!r}: no such fault; expected one of {', '.join(Fault)}")
        if equals and not (times.isdecimal() and int(times) > 0):
            raise ValueError(f"--fault {text!r}: what follows = must be how many times, at least 1")
        plan[Fault(name)] = int(times) if equals else None
    return plan


class FaultyRuntime(Runtime):
    """A Runtime that goes wrong as planned. Counts are kept for the life of the process."""

    def __init__(self, pools: Sequence[PoolLike], plan: FaultPlan, weights_tag: str) -> None:
        """The first pool is the process's own."""
        super().__init__(pools)
        own = pools[0]
        assert isinstance(own, Pool), "the first pool is the process's own"
        self._pool = own
        self._plan = plan
        self._weights_tag = weights_tag
        self._happened: Counter[Fault] = Counter()
        self._stopped = threading.Event()
        self._dying = False
        self._wrong = False
        self.on_release(lambda _tags: self._hang(Fault.HANG_PARK))
        self.on_resume(lambda _tags: self._hang(Fault.HANG_WAKE))
        self.on_resume(self._learn_wrong)

    def release(self, tags: Sequence[str] | None = None) -> None:
        if self.status().state is not MemoryState.RUNNING:  # repeated or refused: no park of its own
            super().release(tags)
            return
        if self._due(Fault.REFUSE_PARK):
            raise TransitionRefused("Invalid executor admission transition: running -> parking; refused by --fault")
        self._pool.keep_memory_on_release = self._due(Fault.KEEP_MEMORY)
        super().release(tags)
        if self._due(Fault.LOSE_WEIGHTS):
            for backup in self._pool.backup_views(self._weights_tag):
                backup[:] = bytes(len(backup))
        if self._due(Fault.OVERWRITE_BLOCK):
            self._overwrite_block()
        self._dying = self._due(Fault.DIE_PARKED)

    def resume(self, tags: Sequence[str] | None = None) -> None:
        if self.status().state is not MemoryState.PARKED:
            super().resume(tags)
            return
        if self._due(Fault.DIE_ON_RESUME):
            os._exit(DEATH_EXIT_CODE)
        super().resume(tags)

    def after_control_answer(self) -> None:
        """For the server, once the answer to a control request has been handed to the system."""
        if self._dying:
            os._exit(DEATH_EXIT_CODE)

    def stop(self) -> None:
        """Ends what hangs, so that the process can exit."""
        self._stopped.set()

    def spoil(self, choose: Callable[[Tensor], int]) -> Callable[[Tensor], int]:
        """``choose``, or one that is wrong about the first token."""
        if not self._wrong:
            return choose
        first = True

        def choose_wrongly(logprobs: Tensor) -> int:
            nonlocal first
            token = choose(logprobs)
            if first:
                first = False
                others = logprobs.clone()
                others[token] = -math.inf
                return int(others.argmax())
            return token

        return choose_wrongly

    def _learn_wrong(self, _tags: tuple[str, ...]) -> None:
        self._wrong = self._due(Fault.WRONG_AFTER_WAKE)

    def _due(self, fault: Fault) -> bool:
        if fault not in self._plan:
            return False
        times = self._plan[fault]
        self._happened[fault] += 1
        return times is None or self._happened[fault] <= times

    def _hang(self, fault: Fault) -> None:
        if self._due(fault):
            self._stopped.wait()
            raise TransitionRefused(f"Cannot change memory while state is {self.status().state}: the engine stops")

    def _overwrite_block(self) -> None:
        """Zeroes one page in the middle: of all overwritings the hardest to see in an answer."""
        for backup in self._pool.backup_views(self._weights_tag):
            begin = len(backup) // 2 // PAGE_BYTES * PAGE_BYTES
            backup[begin : begin + PAGE_BYTES] = bytes(PAGE_BYTES)
            return
