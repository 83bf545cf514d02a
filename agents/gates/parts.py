"""What several parts say together: a gate that is closed only when all of it is."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import TypeVar

from ..protocol.wire import GateState
from .base import GateError, GateObservation

T = TypeVar("T")


async def all_of(*acts: Awaitable[T]) -> list[T]:
    """Every act is done to its end, then the first that failed raises: one part in trouble keeps none from closing."""
    results = await asyncio.gather(*acts, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [result for result in results if not isinstance(result, BaseException)]


def together(looks: Sequence[GateObservation | BaseException]) -> GateObservation:
    """OPEN or CLOSED where all are, else UNKNOWN: some of it lets requests through.

    A part that does not answer raises its GateError, unless another is known not to be closed: that has to be acted on.
    """
    seen: list[GateObservation] = []
    silent: list[GateError] = []
    for look in looks:
        if isinstance(look, GateError):
            silent.append(look)
        elif isinstance(look, BaseException):
            raise look
        else:
            seen.append(look)
    states = {one.state for one in seen}
    if silent and states <= {GateState.CLOSED}:
        raise silent[0]
    ages = [one.last_request_seconds_ago for one in seen if one.last_request_seconds_ago is not None]
    counts = [one.in_flight for one in seen if one.in_flight is not None]
    return GateObservation(
        state=states.pop() if len(states) == 1 and not silent else GateState.UNKNOWN,
        in_flight=sum(counts) if len(counts) == len(looks) else None,
        held=sum(one.held for one in seen),
        last_request_seconds_ago=min(ages, default=None),
        requests_total=sum(one.requests_total for one in seen),
    )
