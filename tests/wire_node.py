"""A node that is nothing but wire messages: what an agent says to the server, without an agent."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any

import httpx

from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import (
    AttemptChanged,
    AttemptEnd,
    AttemptState,
    DeviceObserved,
    EngineChanged,
    EngineDeclared,
    EngineState,
    GateState,
    OrderEnvelope,
    Register,
    Registered,
)
from lull.scheduler import actions
from lull.scheduler.model import AttemptRow, DeviceId, JobId, NodeId
from lull.scheduler.store import Store

GIB = 2**30
JSON = {"Content-Type": "application/json"}


@dataclass
class WireNode:
    """An agent that is nothing but wire messages."""

    http: httpx.AsyncClient
    node_id: str = "node-1"
    capacities: tuple[int, ...] = (2 * GIB,)
    engines: tuple[EngineDeclared, ...] = ()
    incarnation: int = 0
    after: int = 0
    report_id: int = 0

    def device_id(self, index: int) -> str:
        return f"{self.node_id}-device-{index}"

    async def register(self) -> Registered:
        body = Register(
            node_id=self.node_id,
            name=f"{self.node_id}.example",
            version="0.1.0",
            boot_id="boot",
            machine_id=f"machine-of-{self.node_id}",
            journal_id=f"journal-of-{self.node_id}",
            devices=[
                DeviceObserved(
                    device_id=self.device_id(index),
                    index=index,
                    device_kind="host_discrete",
                    capacity_bytes=capacity,
                    free_bytes=capacity,
                )
                for index, capacity in enumerate(self.capacities)
            ],
            engines=list(self.engines),
            loans=[],
            attempts=[],
        )
        answer = await self.http.post("/agent/register", content=body.model_dump_json(), headers=JSON)
        assert answer.status_code == 200, answer.text
        registered = Registered.model_validate_json(answer.content)
        self.incarnation = registered.incarnation
        self.after = registered.orders_after
        # The first use of a registration puts it in force: nothing is started on the node before.
        assert (await self.report()).status_code == 200
        return registered

    async def report(self, *reports: dict[str, Any]) -> httpx.Response:
        envelopes: list[dict[str, Any]] = []
        for report in reports:
            self.report_id += 1
            envelopes.append({"id": self.report_id, "at": time.time(), "report": report})
        return await self.http.post(
            "/agent/reports",
            json={
                "node_id": self.node_id,
                "incarnation": self.incarnation,
                "journal_id": f"journal-of-{self.node_id}",
                "reports": envelopes,
            },
        )

    @contextlib.asynccontextmanager
    async def orders(self) -> AsyncIterator[AsyncIterator[str]]:
        """The open order stream, line by line."""
        params: dict[str, str | int] = {"node_id": self.node_id, "after": self.after}
        async with self.http.stream("GET", "/agent/orders", params=params) as response:
            if response.status_code != 200:
                await response.aread()
            assert response.status_code == 200, response.text
            yield response.aiter_lines()

    def engine(self, name: str, *, supervised: bool = True, locked: bool = False) -> EngineDeclared:
        return EngineDeclared(
            engine=EngineChanged(
                engine_id=f"{self.node_id}-{name}",
                name=name,
                engine_kind="trtllm",
                models=[name],
                device_ids=[self.device_id(0)],
                supervised=supervised,
                state=EngineState.RUNNING,
                gate=GateState.OPEN,
                verified=True,
                device_bytes={self.device_id(0): GIB},
                endpoint="http://127.0.0.1:8070",
            ),
            policy=EnginePolicy(when="always"),
            policy_locked=locked,
        )

    async def attempt_changed(
        self, attempt: AttemptRow, state: AttemptState, end: AttemptEnd | None = None, exit_code: int | None = None
    ) -> None:
        changed = AttemptChanged(
            attempt_id=attempt.id,
            job_id=attempt.job_id,
            loan_id=attempt.loan_id,
            state=state,
            end=end,
            exit_code=exit_code,
            started_at=time.time(),
            ended_at=time.time() if end else None,
        )
        answer = await self.report(changed.model_dump(mode="json"))
        assert answer.status_code == 200, answer.text

    async def place(self, store: Store, job_id: str, attempt_no: int = 0) -> AttemptRow:
        """What the scheduler would decide: a loan of the first device with one attempt of the job in it."""
        await store.lead("test", 60, take_over=True)
        devices = (DeviceId(self.device_id(0)),)
        loan = actions.OpenLoan(
            node_id=NodeId(self.node_id),
            device_ids=devices,
            engine_ids=(),
            need_bytes=GIB,
            room_bytes={devices[0]: 2 * GIB},
            restore_by_seconds=None,
            places=(actions.Place(JobId(job_id), attempt_no, devices, GIB),),
        )
        assert await store.commit([loan], time.time()) == 1
        return (await store.get_job(job_id)).attempts[-1]


def order_of(line: str) -> OrderEnvelope:
    return OrderEnvelope.model_validate_json(line)
