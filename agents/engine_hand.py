"""What is done to an engine, by its keeper and by a loan alike: park, wake, verify, close and open.

Whoever acts holds ``hand``. The proofs are here, so a loan that ends and an agent that starts bring an engine back
the same way: room before the resume, the engine's own word and its bytes after it, the canary before traffic.
A call that got no answer is never repeated blindly: the engine is looked at again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Final

import structlog

from . import canary
from .engine_body import EngineBody
from .engines.base import Answer, Observation
from .errors import (
    AgentError,
    CanaryFailed,
    EngineAuthRefused,
    EngineLost,
    EngineRefused,
    EngineTimedOut,
    EngineUnreachable,
)
from .gates.base import ClosedTerms
from .node import SharedPool
from .probe import DeviceFacts
from .protocol.loans import LoanStep
from .protocol.plans import SharedBytes
from .protocol.policy import EnginePolicy
from .protocol.wire import EngineChanged, EngineState, GateState

log = structlog.get_logger(__name__)

POLL_SECONDS_FIRST: Final = 0.02
CLOCK_SKEW_SECONDS_MAX: Final = 60.0  # a signed call is good for 300 s; more is no accident
POLL_SECONDS_MAX: Final = 1.0  # a signed status costs a nonce for 301 s
_BACK_OFF_SECONDS_MAX: Final = 60.0
RESUMES_MAX: Final = 8  # over a minute or more, each with room proved: only a restart brings such an engine back
_BYTES_BACK_SHARE: Final = 0.95
_ROOM_ALERT_SECONDS: Final = 10.0
_GOLDEN_KEPT_MAX: Final = 8

StepSink = Callable[[LoanStep, dict[str, Any]], None]


class EngineHand(EngineBody):
    """One engine with its process, its adapter and its gate."""

    # ---- room, wake -------------------------------------------------------------------------------------------

    async def prove_room(self, step: StepSink, facts: dict[str, DeviceFacts] | None = None) -> None:
        """Waits, without bound and with an alert, until every device has what the engine takes back (S5).

        ``facts``: a look that was taken just now. The room is promised to this engine until `room_taken`.
        """
        loop = asyncio.get_running_loop()
        began, alerted = loop.time(), False
        while True:
            facts = facts or await self.node.look()
            lack = self._lacking(facts)
            if not lack:
                self.node.waking[self.engine_id] = self.still_to_take
                step(LoanStep.ROOM_PROVED, {"free_bytes": {key: facts[key].free_bytes for key in self.device_ids}})
                return
            if not alerted and loop.time() - began > _ROOM_ALERT_SECONDS:
                alerted = True
                self.node.alert(
                    "critical",
                    "no_room_to_wake",
                    f"engine {self.name} is not resumed: there is no room for it; its gate stays closed",
                    engine_id=self.engine_id,
                    data=lack,
                )
            await asyncio.sleep(min(POLL_SECONDS_MAX, self.node.settings.settle_poll_seconds))
            facts = None

    def still_to_take(self, facts: dict[str, DeviceFacts]) -> dict[str, int]:
        """Bytes by device of its footprint that it does not hold, and does not find in the device's memory service."""
        pids = self.pids()
        own = {device_id: facts[device_id].bytes_of(pids) for device_id in self.device_ids if device_id in facts}
        return {
            device_id: max(0, footprint_bytes - own.get(device_id, 0) - self._waiting_there(device_id))
            for device_id, footprint_bytes in self.footprint.items()
            if device_id in facts
        }

    def _waiting_there(self, device_id: str) -> int:
        """Bytes on the device that it will map and does not map now: others have them, or the service alone."""
        names, pids = self.data.get("shared", {}).get(device_id, ()), self.pids()
        pools = self.node.shared.get(device_id, ())
        return sum(pool.resident_bytes for pool in pools if pool.name in names and not pool.mapped_by & pids)

    def _shared_names(self) -> dict[str, list[str]]:
        """The pools of memory services that it uses, by device."""
        pids = self.pids()
        return {
            device_id: [pool.name for pool in pools if pool.users & pids]
            for device_id, pools in self.node.shared.items()
            if device_id in self.device_ids
        }

    def shared_bytes(self) -> dict[str, list[SharedBytes]]:
        """What it maps of memory services now, by device, as of the last look, and which engines map it, too."""
        pids = self.pids()
        return {
            device_id: found
            for device_id, pools in self.node.shared.items()
            if device_id in self.device_ids
            and (found := [self._shared(pool) for pool in pools if pool.mapped_by & pids])
        }

    def _shared(self, pool: SharedPool) -> SharedBytes:
        owners = self.node.owners.of(pool.mapped_by).values()
        return SharedBytes(
            pool=pool.name,
            bytes=pool.resident_bytes,
            tags=list(pool.tags),
            engines=sorted(owner_id for kind, owner_id in set(owners) if kind == "engine" and owner_id is not None),
            strangers=any(kind != "engine" for kind, _ in owners),
        )

    def changed(self) -> EngineChanged:
        report = super().changed()
        shared = self.shared_bytes()
        if not shared or report.learned is None:
            return report
        return report.model_copy(update={"learned": report.learned.model_copy(update={"shared": shared})})

    def room_taken(self) -> None:
        """The promise of room ends: the bytes are there, or the engine will not take them now."""
        self.node.waking.pop(self.engine_id, None)

    def _lacking(self, facts: dict[str, DeviceFacts]) -> dict[str, Any]:
        promised = [take(facts) for engine_id, take in self.node.waking.items() if engine_id != self.engine_id]
        self.bytes_on(facts)  # raises DeviceAbsent: nobody knows of room there
        lack: dict[str, Any] = {}
        for device_id, take_bytes in self.still_to_take(facts).items():
            need = take_bytes + self.node.settings.wake_margin_bytes
            free = facts[device_id].free_bytes - sum(other.get(device_id, 0) for other in promised)
            if free < need:
                lack[device_id] = {"need_bytes": need, "free_bytes": free}
        return lack

    async def wake(
        self,
        step: StepSink,
        policy: EnginePolicy | None = None,
        on_out_of_memory: Callable[[str], None] = lambda said: None,
    ) -> None:
        """Parked to running, with its bytes back: one resume call per proof of room. Raises EngineLost.

        ``on_out_of_memory``: called with the engine's words whenever it is still parked after one.
        """
        policy = policy or self.policy
        try:
            await self._wake(step, policy, on_out_of_memory)
        finally:
            self.room_taken()

    async def _wake(self, step: StepSink, policy: EnginePolicy, on_out_of_memory: Callable[[str], None]) -> None:
        facts: dict[str, DeviceFacts] | None
        facts, seen = await asyncio.gather(self.node.look(), self.adapter.observe())
        if seen.state not in (EngineState.RUNNING, EngineState.PARKED):
            facts, seen = None, await self.settled_state(policy.resume_seconds_max, "")
        back_off, resumes = 0.5, 0
        said = ""
        while seen.state is not EngineState.RUNNING:
            if resumes >= RESUMES_MAX:
                self.remember(condemned=self.incarnation)
                raise EngineLost(
                    f"engine {self.name} is still parked after {resumes} resumes with room for it {said}".strip(),
                    timed_out=True,
                )
            said, resumes = "", resumes + 1
            await self.prove_room(step, facts)
            facts = None
            step(LoanStep.RESUME_SENT, {})
            self.set_state(EngineState.WAKING)
            try:
                await self.adapter.resume(policy, policy.resume_seconds_max)
            except (AgentError, OSError) as error:
                said = str(error)  # proves nothing either way: look again
            seen = await self.settled_state(policy.resume_seconds_max, said)
            if seen.state is EngineState.PARKED:
                self.room_taken()
                on_out_of_memory(said)
                log.warning("the engine is still parked after a resume", engine=self.name, said=said)
                await asyncio.sleep(back_off)
                back_off = min(_BACK_OFF_SECONDS_MAX, back_off * 2)
        await self.finish_wake(policy)
        await self._bytes_back(step)
        self.set_state(EngineState.RUNNING)

    async def finish_wake(self, policy: EnginePolicy | None = None) -> None:
        """Weights that are loaded again, caches emptied: before the canary. Raises EngineLost."""
        policy = policy or self.policy
        try:
            await self.adapter.after_resume(policy, policy.resume_seconds_max)
        except (AgentError, OSError) as error:
            self.remember(condemned=self.incarnation)
            raise EngineLost(f"engine {self.name} woke and could not be made ready: {error}") from error

    async def settled_state(self, seconds_max: float, said: str) -> Observation:
        """The state once it is `running` or `parked`; EngineLost if it is neither by the deadline."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds_max
        pause = POLL_SECONDS_FIRST
        while True:
            seen = await self.adapter.observe()
            if seen.state in (EngineState.RUNNING, EngineState.PARKED):
                return seen
            if self.is_lost_while_parked() or seen.state is EngineState.GONE:
                self.set_state(EngineState.GONE)
                raise EngineLost(f"engine {self.name} has no process any more {said}".strip())
            self.set_state(seen.state)
            if seen.state is EngineState.FAILED:
                raise EngineLost(f"engine {self.name} says failed {said}".strip())
            if loop.time() > deadline:
                if not (seen.is_our_fault or seen.is_held):  # those say nothing against it
                    self.remember(condemned=self.incarnation)
                raise EngineLost(
                    f"engine {self.name} is still {seen.state} after {seconds_max} s {said}".strip(), timed_out=True
                )
            await asyncio.sleep(pause)
            pause = min(POLL_SECONDS_MAX, pause * 1.5)

    async def _bytes_back(self, step: StepSink) -> None:
        self.device_bytes = self.bytes_on(await self.node.look())
        for device_id, footprint_bytes in self.footprint.items():
            held = self.device_bytes.get(device_id, 0)
            if device_id in self.device_ids and held < footprint_bytes * _BYTES_BACK_SHARE:
                self.remember(condemned=self.incarnation)
                raise EngineLost(
                    f"engine {self.name} says running and holds {held} of {footprint_bytes} bytes on {device_id}"
                )
        step(LoanStep.RUNNING_SEEN, {"device_bytes": self.device_bytes})

    # ---- the canary -------------------------------------------------------------------------------------------

    def _config_key(self, policy: EnginePolicy) -> str:
        return self.settings_key(None if policy.canary == "off" else [policy.canary.prompt, policy.canary.tokens])

    def has_golden(self, policy: EnginePolicy | None = None) -> bool:
        policy = policy or self.policy
        return policy.canary == "off" or self._config_key(policy) in self.data.get("golden", {})

    async def check_canary(self, policy: EnginePolicy | None = None, *, take_golden: bool = False) -> None:
        """Raises CanaryFailed unless the engine's answer equals the golden one; fails closed."""
        policy = policy or self.policy
        if policy.canary == "off":
            return
        key, kept = self._config_key(policy), dict(self.data.get("golden", {}))
        if key in kept:
            golden = canary.from_json(kept[key])
        elif take_golden:
            golden = await self._ask(policy)  # asked again below: an answer that changes by itself proves nothing
        else:
            raise CanaryFailed(f"engine {self.name} has no golden answer for this canary")
        wrong = canary.difference(golden, await self._ask(policy), policy.canary.logprob_tolerance)
        if wrong is not None:
            raise CanaryFailed(f"engine {self.name} answers {wrong}")
        if key not in kept:
            kept[key] = canary.to_json(golden)
            self.remember(golden=dict(list(kept.items())[-_GOLDEN_KEPT_MAX:]))

    async def _ask(self, policy: EnginePolicy) -> Answer:
        assert policy.canary != "off"
        try:
            async with asyncio.timeout(policy.canary.deadline_seconds):
                return await self.adapter.answer(policy.canary)
        except (TimeoutError, EngineTimedOut) as error:
            text = f"engine {self.name} did not answer the canary within {policy.canary.deadline_seconds} s"
            raise CanaryFailed(text, timed_out=True) from error
        except EngineRefused as error:
            raise CanaryFailed(f"engine {self.name} refused the canary: {error}") from error
        except (EngineUnreachable, EngineAuthRefused) as error:  # not reached, or not with this key
            text = f"engine {self.name} could not be asked the canary: {error}"
            raise CanaryFailed(text, unasked=True) from error

    async def verify(self, step: StepSink, policy: EnginePolicy | None = None, *, take_golden: bool = False) -> None:
        """The canary is right: this process is written down as verified.

        CanaryFailed condemns it, unless it was not asked: then it is asked again, its gate closed.
        """
        asked = self.incarnation
        try:
            await self.check_canary(policy, take_golden=take_golden)
        except CanaryFailed as failed:
            self.remember(verified=None, **({} if failed.unasked else {"condemned": asked}))
            raise
        if asked is None or self.incarnation != asked:
            raise EngineLost(f"engine {self.name} was replaced while it was verified")
        self.device_bytes = self.bytes_on(await self.node.look())
        self.remember(
            verified=asked,
            condemned=None,
            released=None,
            footprint=self.device_bytes,
            footprint_of=self.settings_key(),
            shared=self._shared_names(),
        )
        step(LoanStep.VERIFIED, {})

    # ---- the gate ---------------------------------------------------------------------------------------------

    async def ensure_route(self) -> None:
        await self.gate.ensure_route(self.engine_id, self.name, self.settings.models, self.settings.url)

    async def close_gate(self, policy: EnginePolicy | None = None) -> int | None:
        """Closes it; returns the requests that are in flight, where the gate can tell."""
        policy = policy or self.policy
        in_flight = await self.gate.close(self.engine_id, ClosedTerms.of(policy))
        self.gate_state = GateState.CLOSED
        return in_flight

    async def open_gate(self, step: StepSink = lambda step, data: None) -> None:
        """Opens it: only for the very process that was verified since its last park."""
        if not self.verified_now():
            raise EngineLost(f"engine {self.name} changed under our hands: its gate stays closed")
        step(LoanStep.GATE_OPENING, {})
        await self.gate.open(self.engine_id)
        self.gate_state = GateState.OPEN
        self.verified, self.reason = True, None
        self.set_state(EngineState.RUNNING)
        step(LoanStep.GATE_OPENED, {})
