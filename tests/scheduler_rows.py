"""Rows of a scheduler's snapshot with one node, as most tests of its decisions want them."""

from __future__ import annotations

from typing import Any

from lull.agents.protocol.policy import EnginePolicy
from lull.agents.protocol.wire import EngineState, GateState
from lull.scheduler.model import (
    Attempt,
    Device,
    DeviceId,
    Engine,
    EngineId,
    Job,
    JobId,
    Loan,
    Node,
    NodeId,
    Snapshot,
)

NODE = Node(NodeId("n"), "box", up=True, silent=False)
ALWAYS = EnginePolicy(when="always")


def device(name: str, free: int = 100, **more: Any) -> Device:
    """Of 100 bytes; its number is the last digit of its name."""
    return Device(DeviceId(name), NODE.id, int(name[-1]), 100, free, **more)


def engine(name: str, *devices: str, held: int = 60, **more: Any) -> Engine:
    """One that runs, is right and may be lent."""
    values: dict[str, Any] = {
        "state": EngineState.RUNNING,
        "gate": GateState.OPEN,
        "verified": True,
        "policy": ALWAYS,
        "device_bytes": dict.fromkeys(devices, held),
        "residual_bytes": {},
        **more,
    }
    return Engine(EngineId(name), NODE.id, name, tuple(DeviceId(each) for each in devices), **values)


def job(name: str, hbm: int | None = 50, **more: Any) -> Job:
    return Job(JobId(name), more.pop("priority", 0), more.pop("created_at", 1.0), more.pop("gpus", 1), hbm, **more)


def snapshot(*rows: Any) -> Snapshot:
    """Of rows of any kind, in any order; more nodes than one may be among them."""

    def of(kind: type) -> Any:
        return tuple(row for row in rows if isinstance(row, kind))

    return Snapshot((NODE, *of(Node)), of(Device), of(Engine), of(Job), of(Attempt), of(Loan))
