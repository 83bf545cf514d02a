"""Looks at every engine's gate: what requests it shows, and whether one that was closed is open again by itself."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping

from .engine_keeper import EngineKeeper
from .gates.base import ClosedTerms, GateError, GateObservation
from .gates.gateway import GatewayGate
from .loan import Loan
from .protocol.loans import LoanState, LoanStep

_CLOSED_BY = frozenset({LoanStep.GATE_CLOSING, LoanStep.GATE_CLOSED})
_GATE_STEPS = _CLOSED_BY | {LoanStep.GATE_OPENING, LoanStep.GATE_OPENED}


def keep_closed(loan: Loan) -> None:
    """What an earlier agent closed for the loan stays closed: this one has not asked for it yet."""
    last: dict[str | None, LoanStep] = {}
    for row in loan.node.journal.steps(loan.loan_id):
        if row.step in _GATE_STEPS:
            last[row.engine_id] = row.step
    for engine in loan.engines:
        if last.get(engine.engine_id) in _CLOSED_BY or loan.state is LoanState.FAULTED:
            engine.gate.want_closed(ClosedTerms.of(loan.policy_of(engine)))


class GateWatch:
    """``gateway``: the node's own, which tells of all its routes in one call."""

    def __init__(self, gateway: GatewayGate, keepers: Mapping[str, EngineKeeper]) -> None:
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
        looks = await asyncio.gather(*(self._keepers[engine_id].gate.guard(engine_id) for engine_id in others))
        return seen | {engine_id: look for engine_id, look in zip(others, looks, strict=True) if look is not None}

    async def guard(self, poll_seconds: float) -> None:
        """Looks at closed gates that may open by themselves, and closes them again. Until cancelled."""
        while True:
            await asyncio.gather(
                *(
                    keeper.gate.guard(engine_id)
                    for engine_id, keeper in self._keepers.items()
                    if keeper.gate.traits.may_open_by_itself and keeper.gate.is_wanted_closed
                )
            )
            await asyncio.sleep(poll_seconds)
