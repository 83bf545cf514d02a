"""PURE: engines that sleep without a job. When one may be put to sleep, and what jobs may do with its devices then.

A job that fits runs inside such a loan: the memory is proved free already, and a wake and a park are saved. One that
needs more devices than the loan has makes it end, unless an operator said that the engine stays parked whatever comes.
Only engines that may be lent to jobs anyway (`when = "always"`) give them their sleep. See decision 0008.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Final

from ..agents.protocol.loans import LoanState
from ..agents.protocol.wire import EngineState, GateState, WithoutJob
from .actions import OpenLoan
from .model import Device, DeviceId, Engine, EngineId, Loan, LoanId, Snapshot
from .placement import Blocker, Group

NEEDED: Final = "NeededByJob"  # why a loan without a job is ended for one that needs more
# What keeps a device from every loan, whoever asks for it.
_OF_DEVICES: Final = ("NodeUnreachable", "DeviceQuarantined", "LoanOpen")


def obstacle(group: Group, *, wanted_by_name: bool) -> Blocker | None:
    """Why the engines of the group cannot be put to sleep now. An operator who names one engine does not mean those
    that share its devices, and knows about its policy's `when` and about earlier trouble."""
    if group.blocker is not None and group.blocker.code in _OF_DEVICES:
        return group.blocker
    if wanted_by_name and len(group.engines) > 1:
        names = ", ".join(engine.name for engine in group.engines)
        return Blocker("SharedDevices", f"engines {names} live on the same devices: one of them alone is not parked")
    for engine in group.engines:
        if engine.refused is not None:
            return Blocker("PolicyRefused", f"engine {engine.name} cannot be parked by its policy: {engine.refused}")
        if engine.state is not EngineState.RUNNING or not engine.verified or engine.gate is not GateState.OPEN:
            doubt = "" if engine.verified else ", not verified"
            sentence = f"engine {engine.name} is {engine.state}, its gate {engine.gate}{doubt}"
            return Blocker("EngineNotReady", sentence, {"state": engine.state.value})
    return None


def sleep(group: Group, without_job: WithoutJob) -> OpenLoan:
    """The loan in which the engines of the group sleep."""
    room = dict(group.room_bytes)
    times = [engine.policy.park_seconds_max for engine in group.engines]
    if without_job.until_seconds is not None:
        times.append(without_job.until_seconds)
    return OpenLoan(
        node_id=group.node.id,
        device_ids=tuple(sorted(room)),
        engine_ids=tuple(sorted(engine.id for engine in group.engines)),
        need_bytes=0,
        need_bytes_by_device={},
        room_bytes=room,
        restore_by_seconds=min(times),
        places=(),
        without_job=without_job,
    )


def under_pressure(groups: Iterable[Group], given: set[DeviceId], now: float) -> list[OpenLoan]:
    """Loans for engines whose nodes say that host memory is short and that nobody asks them anything."""
    found: list[OpenLoan] = []
    for group in groups:
        wanted = bool(group.engines) and all(_is_pressed(engine, now) for engine in group.engines)
        wanted = wanted and all(device.not_before <= now for device in group.devices)
        if not wanted or given.intersection(group.room_bytes) or obstacle(group, wanted_by_name=False) is not None:
            continue
        found.append(sleep(group, WithoutJob(wanted_by="pressure")))
    return found


def _is_pressed(engine: Engine, now: float) -> bool:
    return engine.is_pressed and engine.policy.on_pressure and engine.not_before <= now


def takes_jobs(loan: Loan, engines: Mapping[EngineId, Engine]) -> bool:
    """A loan that was opened for jobs, or whose engines might be lent to them at any time."""
    if loan.without_job is None:
        return True
    return all(engine_id in engines and engines[engine_id].policy.when == "always" for engine_id in loan.engine_ids)


def at_most_free(
    room_bytes: Mapping[DeviceId, int], devices: Mapping[DeviceId, Device], engines: Sequence[Engine]
) -> dict[DeviceId, int]:
    """What is left for jobs where engines sleep and nothing runs: nobody has proved more free than is seen.

    A device may have been looked at before the engines told what they hold now, and before the last job there ended.
    """
    left: dict[DeviceId, int] = {}
    for device_id, nbytes in room_bytes.items():
        device = devices.get(device_id)
        if device is not None:
            held = sum(engine.device_bytes.get(device_id, 0) for engine in engines)
            free = device.free_bytes + max(0, device.engine_bytes - held) + device.job_bytes
            nbytes = min(nbytes, max(0, free - (device.margin_bytes or 0)))
        left[device_id] = nbytes
    return left


def may_make_way(snapshot: Snapshot, loans: Iterable[Loan]) -> set[LoanId]:
    """Loans in which engines sleep and nothing runs: they may be ended for a job that needs more than they have."""
    busy = {attempt.loan_id for attempt in snapshot.attempts}
    return {
        loan.id
        for loan in loans
        if loan.without_job is not None
        and loan.without_job.wake_on_request
        and loan.state is LoanState.LENT
        and loan.id not in busy
    }
