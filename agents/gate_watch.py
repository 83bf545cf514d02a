"""Looks at every engine's gate: what requests it shows, and whether one that was closed is open again by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Protocol

from .gates.base import ClosedTerms, GateError, GateObservation
from .gates.gateway import GatewayGate
from .gates.kept import KeptGate
from .loan import Loan
from .protocol.loans import LoanState, LoanStep
from .tasks import all_or_none

_CLOSED_BY = frozenset({LoanStep.GATE_CLOSING, LoanStep.GATE_CLOSED})
_GATE_STEPS = _CLOSED_BY | {LoanStep.GATE_OPENING, LoanStep.GATE_OPENED}


def keep_closed(loan: Loan) -> None:
    """What an earlier agent closed for the loan stays closed: this one has not asked for it yet."""
    last: dict[str | None, LoanStep] = {}
    for row in loan.node.journal.steps(loan.loan_id):
        if row.step in _GATE_STEPS:
            last[row.engine_id] = row.step
    for engine in loan.engines:
        if loan.state is LoanState.FAULTED:
            is_closed = not engine.verified_now()  # one that is right serves, though another one is not back yet
        else:
            is_closed = last.get(engine.engine_id) in _CLOSED_BY
        if is_closed:
            engine.gate.want_closed(ClosedTerms.of(loan.policy_of(engine)))


class BehindGate(Protocol):
    """An engine, as far as its gate is concerned."""

    @property
    def gate(self) -> KeptGate: ...


class GateWatch:
    """``gateway``: the node's own, which tells of all its routes in one call."""

    def __init__(self, gateway: GatewayGate, keepers: Mapping[str, BehindGate]) -> None:
        self._gateway = gateway
        self._keepers = keepers

    async def look(self) -> dict[str, GateObservation]:
        """By engine, what each gate that answers says now."""
        others = [
            engine_id
            for engine_id, keeper in self._keepers.items()
            if keeper.gate.traits.kind not in ("gateway", "none")
        ]
        kinds = {keeper.gate.traits.kind for keeper in self._keepers.values()}
        seen: dict[str, GateObservation] = {}
        if "gateway" in kinds:
            try:
                seen = await self._gateway.observe_all()
            except GateError:
                seen = {}
        looks = await asyncio.gather(*(self._keepers[engine_id].gate.look(engine_id) for engine_id in others))
        return seen | {engine_id: look for engine_id, look in zip(others, looks, strict=True) if look is not None}

    async def guard(self, poll_seconds: float) -> None:
        """Looks at closed gates that may open by themselves, and closes them again; none waits for another. Until
        cancelled."""
        guarded = [one for one in self._keepers.items() if one[1].gate.traits.may_open_by_itself]
        await all_or_none(*(_guard(engine_id, keeper.gate, poll_seconds) for engine_id, keeper in guarded))


async def _guard(engine_id: str, gate: KeptGate, poll_seconds: float) -> None:
    while True:
        if gate.is_wanted_closed:
            await gate.guard(engine_id)
        await asyncio.sleep(poll_seconds)
