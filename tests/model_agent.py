"""A node as the scheduler's tests see it: it registers, follows its orders, reports. It keeps a journal of reports
that is numbered and resent as a real one's, and fails on any order that it was not told how to take.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from lull.agents.protocol.loans import LoanEvent, LoanState
from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    AttemptChanged,
    AttemptEnd,
    AttemptSpec,
    AttemptState,
    DeviceObserved,
    EngineChanged,
    EngineDeclared,
    EngineState,
    GateState,
    HeldLoan,
    LoanChanged,
    Message,
    OpenLoan,
    OrderAnswer,
    Register,
    Registered,
    ReportBatch,
    ReportsAnswer,
    StartAttempt,
)
from lull.scheduler.actions import MarkSilent
from lull.scheduler.store import Store

GIB = 2**30


def device(device_id: str, *, index: int = 0, capacity: int = GIB, free: int | None = None) -> DeviceObserved:
    return DeviceObserved(
        device_id=device_id,
        index=index,
        device_kind="host_discrete",
        capacity_bytes=capacity,
        free_bytes=capacity if free is None else free,
    )


def engine(engine_id: str, device_bytes: dict[str, int], **changes: Any) -> EngineChanged:
    values: dict[str, Any] = {
        "engine_id": engine_id,
        "name": engine_id,
        "engine_kind": "trtllm",
        "models": [engine_id],
        "device_ids": sorted(device_bytes),
        "supervised": True,
        "state": EngineState.RUNNING,
        "gate": GateState.OPEN,
        "verified": True,
        "device_bytes": device_bytes,
    }
    return EngineChanged(**{**values, **changes})


class ModelAgent:
    def __init__(
        self,
        store: Store,
        node_id: str = "node",
        *,
        devices: Sequence[DeviceObserved] = (),
        engines: Sequence[EngineChanged] = (),
        when: str = "always",
    ) -> None:
        self.store = store
        self.node_id = node_id
        self.devices = list(devices)
        self.engines = list(engines)
        self.when = when
        self.journal_id = "journal"
        self.boot_id = "boot"
        self.start_id = "start"
        self.home = "home"
        self.machine_id = f"machine-of-{node_id}"
        self.loans: dict[str, HeldLoan] = {}
        self.attempts: dict[str, AttemptChanged] = {}
        self.registered: Registered | None = None
        self.after = 0
        self.marks: dict[str, Any] = {}  # what it has persisted, as fields of Register
        self.report_id = 0

    def message(self) -> Register:
        """What it would register with now."""
        policy = EnginePolicy.model_validate({"when": self.when})
        marks: dict[str, Any] = {"orders_after": self.after, **self.marks}
        return Register(
            node_id=self.node_id,
            name=self.node_id,
            version="1",
            boot_id=self.boot_id,
            machine_id=self.machine_id,
            journal_id=self.journal_id,
            start_id=self.start_id,
            home=self.home,
            devices=self.devices,
            engines=[EngineDeclared(engine=each, policy=policy) for each in self.engines],
            loans=list(self.loans.values()),
            attempts=list(self.attempts.values()),
            **marks,
        )

    async def register(self, *, use: bool = True) -> Registered:
        answer = await self.store.register(self.message(), time.time())
        self.registered = answer
        self.after = max(self.after, answer.orders_after)
        if use:
            assert await self.store.orders_after(self.node_id, self.after) == []
        return answer

    async def orders(self) -> list[Any]:
        found = await self.store.orders_after(self.node_id, self.after)
        if found:
            self.after = found[-1].seq
        return found

    async def one_order(self) -> Any:
        found = await self.orders()
        assert len(found) == 1, found
        return found[0].order

    def envelope(self, report: Message, at: float | None = None) -> dict[str, Any]:
        self.report_id += 1
        at = time.time() if at is None else at
        return {"id": self.report_id, "at": at, "report": report.model_dump(mode="json")}

    async def send(self, *raw: dict[str, Any], incarnation: int | None = None) -> ReportsAnswer:
        assert self.registered is not None
        batch = ReportBatch(
            node_id=self.node_id,
            incarnation=self.registered.incarnation if incarnation is None else incarnation,
            journal_id=self.journal_id,
            reports=list(raw),
        )
        return await self.store.take_reports(batch, time.time())

    async def report(self, *reports: Message) -> ReportsAnswer:
        return await self.send(*(self.envelope(report) for report in reports))

    # ---- a loan as it goes -----------------------------------------------------------------------------------

    async def loan(self, loan_id: str, event: LoanEvent | None, state: LoanState, **more: Any) -> None:
        if loan_id in self.loans:
            if state is LoanState.CLOSED:
                del self.loans[loan_id]
            else:
                self.loans[loan_id] = self.loans[loan_id].model_copy(update={"state": state})
        await self.report(LoanChanged(loan_id=loan_id, epoch=1, event=event, state=state, **more))

    async def accept(self, order: OpenLoan) -> None:
        """Journals the loan and says so."""
        first = LoanState.DRAINING if order.engine_ids else LoanState.SETTLING
        self.loans[order.loan_id] = HeldLoan(
            loan_id=order.loan_id,
            epoch=order.epoch,
            state=first,
            device_ids=order.device_ids,
            engine_ids=order.engine_ids,
            attempt_ids=[spec.attempt_id for spec in order.attempts],
        )
        await self.report(
            OrderAnswer(seq=self.after, outcome="accepted"),
            LoanChanged(loan_id=order.loan_id, epoch=order.epoch, event=None, state=first),
        )

    async def lend(self, order: OpenLoan) -> None:
        """Accepts and goes on to `lent`."""
        await self.accept(order)
        if order.engine_ids:
            await self.loan(order.loan_id, LoanEvent.DRAINED, LoanState.PARKING)
            await self.loan(order.loan_id, LoanEvent.PARKED, LoanState.SETTLING)
        await self.loan(order.loan_id, LoanEvent.MEMORY_FREE, LoanState.LENT)

    async def attempt(
        self, order: OpenLoan | StartAttempt, spec: AttemptSpec, state: AttemptState, **more: Any
    ) -> None:
        changed = AttemptChanged(
            attempt_id=spec.attempt_id, job_id=spec.job_id, loan_id=order.loan_id, state=state, **more
        )
        self.attempts[spec.attempt_id] = changed
        if state is AttemptState.ENDED:
            del self.attempts[spec.attempt_id]
        await self.report(changed)

    async def run(self, order: OpenLoan | StartAttempt, spec: AttemptSpec) -> None:
        await self.attempt(order, spec, AttemptState.STARTING)
        await self.attempt(order, spec, AttemptState.RUNNING, started_at=time.time())

    async def end(self, order: OpenLoan | StartAttempt, spec: AttemptSpec, end: AttemptEnd, **more: Any) -> None:
        await self.attempt(order, spec, AttemptState.ENDED, end=end, **more)

    async def give_back(self, order: OpenLoan) -> None:
        """From `lent`, with nothing running, to `closed`."""
        await self.loan(order.loan_id, LoanEvent.WORK_ENDED, LoanState.RECALLING)
        if order.engine_ids:
            await self.loan(order.loan_id, LoanEvent.GROUPS_EMPTY, LoanState.WAKING)
            await self.loan(order.loan_id, LoanEvent.RUNNING, LoanState.VERIFYING)
            await self.loan(order.loan_id, LoanEvent.CANARY_RIGHT, LoanState.CLOSED)
        else:
            await self.loan(order.loan_id, LoanEvent.GROUPS_EMPTY_WITHOUT_ENGINE, LoanState.CLOSED)


async def silence(store: Store) -> None:
    """The scheduler marks its only node as silent."""
    [node] = (await store.load_snapshot(0.0)).nodes
    assert await store.commit([MarkSilent(node.id, node.heard_count)], time.time()) == 1
