"""What a node says of its devices and engines."""

from __future__ import annotations

from typing import Any

from sqlalchemy import insert, select, update

from ...agents.protocol.policy import EnginePolicy
from ...agents.protocol.wire import DeviceObserved, EngineChanged
from ..tables import devices, engines
from .changes import AGENT, as_json
from .writer import Tx


def device_observed(tx: Tx, node_id: str, report: DeviceObserved, now: float) -> None:
    row = (
        tx.conn.execute(select(devices).where(devices.c.id == report.device_id).with_for_update())
        .mappings()
        .one_or_none()
    )
    values: dict[str, Any] = {
        "node_id": node_id,
        "position": report.index,
        "kind": report.device_kind,
        "capacity_bytes": report.capacity_bytes,
        "free_bytes": report.free_bytes,
        "spawn_margin_bytes": report.spawn_margin_bytes,
        "processes": [process.model_dump(mode="json") for process in report.processes],
        "quarantined": as_json(report.quarantined),
        "observed_at": now,
        "present": True,
    }
    if row is None:
        tx.conn.execute(insert(devices).values(id=report.device_id, epoch=0, **values))
        tx.event("device_added", "a device came", now, actor=AGENT, device_id=report.device_id, node_id=node_id)
        tx.touch("nodes", "decide")
        return
    tx.conn.execute(update(devices).where(devices.c.id == report.device_id).values(**values))
    if row["node_id"] != node_id:
        tx.event(
            "alert",
            f"the device was of node {row['node_id']}",
            now,
            severity="warning",
            device_id=report.device_id,
            node_id=node_id,
            data={"code": "device_moved"},
        )
        _leave_behind(tx, row["node_id"], report.device_id)
    if (row["quarantined"] is None) != (report.quarantined is None):
        reason = report.quarantined
        tx.event(
            "device_quarantined" if reason else "device_released",
            reason.sentence if reason else "the device is no longer quarantined",
            now,
            actor=AGENT,
            severity="critical" if reason else "info",
            device_id=report.device_id,
            node_id=node_id,
            data=as_json(reason),
        )
    decides = ("free_bytes", "spawn_margin_bytes", "capacity_bytes", "processes", "quarantined", "present")
    if any(row[name] != values[name] for name in decides):
        tx.touch("nodes", "decide")


def _leave_behind(tx: Tx, node_id: str, device_id: str) -> None:
    """The engines that the device's old node had on it are not there any more."""
    there = select(engines.c.id, engines.c.device_ids).where(engines.c.node_id == node_id, engines.c.present)
    gone = [row.id for row in tx.conn.execute(there) if device_id in row.device_ids]
    tx.conn.execute(update(engines).where(engines.c.id.in_(gone)).values(present=False))
    tx.touch("engines", "decide")


def engine_values(report: EngineChanged) -> dict[str, Any]:
    # What it said once stays known while an agent that started again has not asked it yet.
    known = None if report.capabilities is None else report.capabilities.model_dump(mode="json")
    learned = None if report.learned is None else report.learned.model_dump(mode="json")
    # What it said of an older policy is over by the version; it is told anew at every registration.
    refused = None if report.policy_refused is None else report.policy_refused.model_dump(mode="json")
    return {
        **({} if known is None else {"capabilities": known}),
        **({} if learned is None else {"learned": learned}),
        **({} if refused is None else {"policy_refused": refused}),
        "name": report.name,
        "kind": report.engine_kind,
        "models": report.models,
        "device_ids": report.device_ids,
        "supervised": report.supervised,
        "state": report.state.value,
        "gate": report.gate.value,
        "verified": report.verified,
        "incarnation": report.incarnation,
        "device_bytes": report.device_bytes,
        "residual_bytes": report.residual_bytes,
        "processes": {name: who.model_dump(mode="json") for name, who in report.processes.items()},
        "endpoint": report.endpoint,
        "reason": as_json(report.reason),
        "policy_version_in_force": report.policy_version,
        "pressure": None if report.pressure is None else report.pressure.model_dump(mode="json"),
        "tells_requests": report.tells_requests,
        "present": True,
    }


def engine_changed(tx: Tx, node_id: str, report: EngineChanged, now: float) -> None:
    row = (
        tx.conn.execute(select(engines).where(engines.c.id == report.engine_id).with_for_update())
        .mappings()
        .one_or_none()
    )
    values = engine_values(report)
    if row is None:
        add_engine(tx, node_id, report, EnginePolicy(), locked=False, now=now)
        return
    tx.conn.execute(
        update(engines).where(engines.c.id == report.engine_id).values(node_id=node_id, updated_at=now, **values)
    )
    before = f"{row['state']}, gate {row['gate']}{'' if row['verified'] else ', not verified'}"
    after = f"{report.state}, gate {report.gate}{'' if report.verified else ', not verified'}"
    if before != after:
        tx.event(
            "engine_changed",
            f"engine {report.name}: {report.reason.sentence if report.reason else after}",
            now,
            actor=AGENT,
            severity="warning" if report.state.value in ("failed", "gone", "unreachable") else "info",
            engine_id=report.engine_id,
            node_id=node_id,
            from_state=row["state"],
            to_state=report.state.value,
            data={"gate": report.gate.value, "verified": report.verified},
        )
    if any(row[name] != value for name, value in values.items()):
        tx.touch("engines", "decide")


def add_engine(tx: Tx, node_id: str, report: EngineChanged, policy: EnginePolicy, *, locked: bool, now: float) -> None:
    tx.conn.execute(
        insert(engines).values(
            id=report.engine_id,
            node_id=node_id,
            policy=policy.model_dump(mode="json"),
            policy_version=report.policy_version + 1,  # the agent refuses one below what it has in force
            policy_locked=locked,
            not_before=0.0,
            trouble_count=0,
            updated_at=now,
            **engine_values(report),
        )
    )
    tx.event(
        "engine_added",
        f"engine {report.name} came",
        now,
        actor=AGENT,
        engine_id=report.engine_id,
        node_id=node_id,
        to_state=report.state.value,
    )
    tx.touch("engines", "decide")
