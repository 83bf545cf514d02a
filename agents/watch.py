"""Looks around on the node, and says what changed: devices, their holders, the gates, the disk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping

from .engine_keeper import EngineKeeper
from .gate_watch import GateWatch
from .loan import Loan
from .node import Node
from .occupancy import EngineFacts, Holder, holder
from .protocol.wire import DeviceObserved, OccupancyChanged


class Watch:
    """``loan_on``: the open loan that has a device, if one has."""

    def __init__(
        self,
        node: Node,
        gates: GateWatch,
        keepers: Mapping[str, EngineKeeper],
        loans: Mapping[str, Loan],
        loan_on: Callable[[str], Loan | None],
    ) -> None:
        self._node = node
        self._gates = gates
        self._keepers = keepers
        self._loans = loans
        self._loan_on = loan_on
        self._look_soon = asyncio.Event()
        self._holders: dict[str, Holder] = {}
        self._said: dict[str, int] = {}  # reports of the holder, by device
        self._requests: dict[str, float | None] = {}
        self._observed: dict[str, DeviceObserved] = {}
        self._foreign: set[str] = set()
        self._disk_said = ""

    def look_soon(self) -> None:
        """An engine, a loan or an attempt changed."""
        self._look_soon.set()

    def tell_all(self) -> None:
        """Whoever listens now knows nothing of the holders."""
        self._holders.clear()
        self.look_soon()

    async def look_around(self) -> None:
        """Devices, while somebody listens; peaks of what jobs hold. Until cancelled."""
        while True:
            self._look_at_disk()
            facts = await self._node.look()
            self._foreign = {device_id for device_id, fact in facts.items() if self._node.foreign(fact)}
            for loan in self._loans.values():
                for run in loan.live_attempts:
                    pids = run.pids()
                    seen = [facts[device_id] for device_id in run.spec.device_ids if device_id in facts]
                    held = max((fact.bytes_of(pids) for fact in seen), default=0)
                    run.peak_hbm_bytes = max(run.peak_hbm_bytes, held)
            if self._node.connected.is_set():
                for observed in self._node.observed(facts):
                    self._report_if_new(observed)
            self.look_soon()
            await asyncio.sleep(self._node.settings.engine_poll_seconds)

    async def look_at_gates(self) -> None:
        """Apart from the devices: a gate that is somebody else's may take long. Until cancelled."""
        while True:
            seen = await self._gates.look()
            now = time.monotonic()
            for engine_id, gate in seen.items():
                ago = gate.last_request_seconds_ago
                self._requests[engine_id] = None if ago is None else now - ago
            self.look_soon()
            await asyncio.sleep(self._node.settings.engine_poll_seconds)

    def _look_at_disk(self) -> None:
        journal = self._node.journal
        journal.mend()
        if journal.short and not self._disk_said:
            sentence = f"no new loan is taken: the agent's disk is short ({journal.short}); make room on it"
            self._node.alert("critical", "disk_short", sentence, data={"in_memory": journal.in_memory})
        elif self._disk_said and not journal.short:
            self._node.alert("info", "disk_well", "the agent's disk has room again: loans are taken")
        self._disk_said = journal.short

    def _report_if_new(self, observed: DeviceObserved) -> None:
        if self._observed.get(observed.device_id) != observed:
            self._observed[observed.device_id] = observed
            self._node.journal.report(observed)

    async def report_occupancy(self) -> None:
        """Until cancelled."""
        while True:
            await self._look_soon.wait()
            self._look_soon.clear()
            now = time.monotonic()
            for device_id in self._node.devices:
                holds = self._holder(device_id, now)
                if self._holders.get(device_id) != holds:
                    self._holders[device_id] = holds
                    self._say(device_id, holds)

    def _say(self, device_id: str, holds: Holder) -> None:
        self._said[device_id] = self._said.get(device_id, 0) + 1
        self._node.journal.report(
            OccupancyChanged(
                device_id=device_id,
                occupancy=holds.occupancy,
                owner_id=holds.owner_id,
                loan_id=holds.loan_id,
                start_id=self._node.start_id,
                report_no=self._said[device_id],
            )
        )

    def _holder(self, device_id: str, now: float) -> Holder:
        loan = self._loan_on(device_id)
        engines: list[EngineFacts] = []
        for engine_id, keeper in self._keepers.items():
            if device_id in keeper.device_ids:
                last = self._requests.get(engine_id)
                engines.append(EngineFacts(engine_id, keeper.state, None if last is None else now - last))
        return holder(
            quarantined=device_id in self._node.quarantined,
            loan_id=None if loan is None else loan.loan_id,
            loan_state=None if loan is None else loan.state,
            running_attempt_ids=[] if loan is None else [run.attempt_id for run in loan.live_attempts if run.running],
            engines=engines,
            foreign=device_id in self._foreign,
        )
