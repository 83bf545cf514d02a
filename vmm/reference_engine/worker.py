"""The one thread that touches the model: requests are served whole and in order, so none can change another's answer.

Admission is taken by the server when a request arrives and is given back here, by the thread that used the memory:
only so does a park never unmap what a computation of a client that has just gone away still reads.
"""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Final

from torch import Tensor

from .model import Model, Token

WAITING_MAX: Final = 4096  # a gate may let a thousand held requests go at once


class EngineBusy(Exception):
    """Too many requests wait already."""


class EngineStopping(Exception):
    """The process ends; the answer is not complete."""


class Generation:
    """One request's way through the worker. Made and read in the event loop, filled by the worker's thread."""

    def __init__(
        self,
        prompt: Sequence[int],
        tokens_max: int,
        choose: Callable[[Tensor], int],
        admission: AbstractContextManager[None],
    ) -> None:
        """Enters ``admission`` (a runtime's step), which may refuse."""
        self.prompt = prompt
        self.tokens_max = tokens_max
        self.choose = choose
        self.cancelled = threading.Event()
        self.cached_tokens = 0  # of the prompt, once the first token is there
        self._loop = asyncio.get_running_loop()
        self._answer: asyncio.Queue[Token | Exception | None] = asyncio.Queue()  # never more than tokens_max + 1
        self._admission = ExitStack()
        self._admission.enter_context(admission)

    async def tokens(self) -> AsyncIterator[Token]:
        """The answer as it comes. Leaving early cancels the rest."""
        try:
            while (item := await self._answer.get()) is not None:
                if isinstance(item, Exception):
                    raise item
                yield item
        finally:
            self.cancelled.set()

    def put(self, token: Token) -> None:
        self._loop.call_soon_threadsafe(self._answer.put_nowait, token)

    def end(self, failure: Exception | None) -> None:
        """Admission first: whoever has seen the end of an answer must not see the request in flight."""
        self._admission.close()
        self._loop.call_soon_threadsafe(self._answer.put_nowait, failure)


class Worker:
    def __init__(self, model: Model, *, token_delay_seconds: float = 0.0, waiting_max: int = WAITING_MAX) -> None:
        self._model = model
        self._token_delay_seconds = token_delay_seconds
        self._waiting_max = waiting_max
        self._waiting: queue.SimpleQueue[Generation | None] = queue.SimpleQueue()
        self._stopping = False
        self._current: Generation | None = None
        self._thread = threading.Thread(target=self._run, name="lull-engine-worker")

    def start(self) -> None:
        self._thread.start()

    def submit(self, generation: Generation) -> None:
        """From the event loop only. If it raises, it has given the admission back."""
        if self._stopping:
            generation.end(None)
            raise EngineStopping("the engine is stopping")
        if self._waiting.qsize() >= self._waiting_max:
            generation.end(None)
            raise EngineBusy(f"{self._waiting_max} requests are waiting already; try again later")
        self._waiting.put(generation)

    def stop(self) -> None:
        """Ends all requests, the current one at its next token. Safe in a signal handler."""
        self._stopping = True
        if (current := self._current) is not None:
            current.cancelled.set()  # it may be in its delay
        self._waiting.put(None)

    def join(self) -> None:
        self._thread.join()

    def _run(self) -> None:
        while (generation := self._waiting.get()) is not None:
            self._current = generation
            failure: Exception | None = None
            try:
                self._serve(generation)
            except Exception as error:  # noqa: BLE001  whatever it is belongs to this request's client
                failure = error
            self._current = None
            generation.end(failure)

    def _serve(self, generation: Generation) -> None:
        tokens = self._model.generate(generation.prompt, generation.choose)
        left = generation.tokens_max
        while left:
            if self._stopping:
                raise EngineStopping("the engine is stopping")
            if generation.cancelled.is_set():
                return
            token = next(tokens)
            if token is None:  # a part of the prompt is done
                continue
            generation.cached_tokens = self._model.cached_tokens
            generation.put(token)
            left -= 1
            if left and self._token_delay_seconds:
                generation.cancelled.wait(self._token_delay_seconds)
