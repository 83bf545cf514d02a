"""Keeps one engine running, right and routed, whenever no loan has it.

The keeper and a loan never act at the same time: whoever acts holds ``hand``. An engine that is found parked, dead or
closed without a loan is an orphan: its gate is closed, it is brought back by the same proofs as after a loan.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final, NoReturn

import structlog

from .engine_body import MakeAdapter
from .engine_hand import POLL_SECONDS_FIRST, POLL_SECONDS_MAX, EngineHand, StepSink
from .engine_process import EngineWillNotDie
from .engines.base import Observation
from .errors import AgentError, EngineLost
from .gates.base import GateError
from .gates.kept import KeptGate
from .node import Node
from .protocol.engine_kinds import MAY_END_AT_PARK, MODES_ARE_FLAGS
from .protocol.policy import EnginePolicy
from .protocol.wire import EngineState, GateState, PolicyRefused, Reason
from .settings import EngineSettings
from .trial import learn_parks

log = structlog.get_logger(__name__)

_BACK_OFF_SECONDS_MAX: Final = 60.0
_UNHEALTHY_LOOKS_MAX: Final = 5
_NO_PROCESS: Final = "no process"
# What may go wrong with an engine and is tried again; anything else is our own fault and ends the agent.
ENGINE_TROUBLE: Final = (AgentError, EngineWillNotDie, OSError)  # GateError is an AgentError


class EngineKeeper(EngineHand):
    """An engine, and the loop that looks after it."""

    def __init__(
        self, node: Node, engine_id: str, settings: EngineSettings, make_adapter: MakeAdapter, gate: KeptGate
    ) -> None:
        super().__init__(node, engine_id, settings, make_adapter, gate)
        self.restart_wanted = False
        self._failures = 0
        self._left_as: str | None = None  # the alert that was raised over what is left as it is
        self._said_state: EngineState | None = None  # that it was said to be in, without a loan
        self._poked = asyncio.Event()

    # ---- policy -------------------------------------------------------------------------------------------------

    def set_policy(self, version: int, policy: EnginePolicy) -> str | None:
        """Takes a newer policy; returns and reports why not. Other modes restart a supervised one when it is free."""
        refusal = self._policy_refusal(version, policy)
        if refusal is None:
            self.node.journal.set_policy(self.engine_id, version, policy)
            self.policy_version, self.policy, self.policy_refused = version, policy, None
            self.poke()
        elif version >= self.policy_version and policy != self.policy:
            self.policy_refused = PolicyRefused(version=version, sentence=refusal)
        self.report()
        return refusal

    def _policy_refusal(self, version: int, policy: EnginePolicy) -> str | None:
        if version < self.policy_version:
            return f"policy version {version} is older than {self.policy_version}"
        if self.settings.policy_locked:
            return "the agent's file locks this engine's policy"
        changes_modes = policy.restore_modes != self.policy.restore_modes
        refusal = self.settings.gate_refusal(policy) or (self.refusal(policy) if changes_modes else None)
        fixed = self.process is None and MODES_ARE_FLAGS[self.settings.kind]
        if refusal is None and fixed and changes_modes:
            refusal = "restore modes of an attached engine are fixed by whoever started it"
        return refusal

    async def probe(self) -> None:
        """Asks it what it can do, and tells the operator where that is not what its policy wants."""
        before = self.capabilities
        await super().probe()
        refused = self.refusal(self.policy)
        if self.capabilities != before and refused is not None:
            sentence = f"engine {self.name} serves and is not lent: {refused}"
            self.node.alert("warning", "engine_not_lendable", sentence, engine_id=self.engine_id)

    def needs_other_flags(self) -> bool:
        return self.process is not None and self.process.alive and not self.in_effect(self.policy)

    # ---- what operators want ------------------------------------------------------------------------------------

    def want_restart(self) -> None:
        """A supervised engine is restarted as soon as the keeper has it, also one that was given up.

        Ways whose trial went wrong may be tried again: whoever asks for this has looked at it.
        """
        self.parks.forgive()
        self.remember(given_up=None, restart_of=self.incarnation or _NO_PROCESS)
        self.restart_wanted = True
        self.poke()

    def give_up(self) -> None:
        """From now on it is left as it is, its gate closed, until somebody wants it restarted, or an attached one's
        owner has restarted it. Raises OSError."""
        self.remember(verified=None, given_up=self.incarnation or _NO_PROCESS)
        self.restart_wanted, self.verified = False, False

    def take_up(self) -> None:
        """It was not given up after all."""
        self.remember(given_up=None)

    def _is_given_up(self) -> bool:
        given_up = self.data.get("given_up")
        return given_up is not None and (self.process is not None or given_up == (self.incarnation or _NO_PROCESS))

    async def _leave_alone(self) -> None:
        await self.close_gate()
        self.state = EngineState.GONE if self.process_identity is None else EngineState.FAILED
        self.reason = Reason(code="GivenUp", sentence=f"engine {self.name} was given up; restart it to use it again")
        self.report()

    # ---- the loop -----------------------------------------------------------------------------------------------

    def poke(self) -> None:
        """Look at once instead of at the next poll."""
        self._poked.set()

    async def run(self) -> None:
        """Until cancelled. A loan that holds ``hand`` stops it; nothing else does."""
        while True:
            pause = self.node.settings.engine_poll_seconds
            async with self.hand:
                try:
                    await self.look_after()
                    self._failures = 0
                except ENGINE_TROUBLE as error:
                    self._failures += 1
                    self._say(error)
                    pause = min(_BACK_OFF_SECONDS_MAX, 0.25 * 2 ** min(self._failures, 10))
            await self._pause(pause)

    async def _pause(self, seconds: float) -> None:
        """Waits, but not past the end of the process or a poke."""
        waits: list[asyncio.Future[Any]] = [asyncio.ensure_future(self._poked.wait())]
        if self.process is not None and self.process.alive:
            waits.append(asyncio.ensure_future(self.process.wait_gone(seconds)))
        await asyncio.wait(waits, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        for wait in waits:
            wait.cancel()
        self._poked.clear()

    def _say(self, error: BaseException) -> None:
        self.reason = Reason(code="EngineNotReady", sentence=str(error))
        log.warning("engine is not ready", engine=self.name, failures=self._failures, error=str(error))
        if self._failures in (1, 5, 20):
            self.node.alert(
                "critical" if self._failures > 1 else "warning",
                "engine_not_ready",
                f"engine {self.name} is not ready: {error}",
                engine_id=self.engine_id,
            )
        self.report()

    async def look_after(self) -> None:
        """One round: leaves a right engine alone, brings any other back."""
        await self.ensure_route()
        if self._is_given_up():
            await self._leave_alone()
            return
        lost = next(filter(None, map(self.node.absences.lost, self.device_ids)), None)
        if lost is not None:
            await self._keep_closed(lost)
            return
        if self.data.get("restart_of") == (self.incarnation or _NO_PROCESS):
            self.restart_wanted = True  # an earlier agent was told to
        if self.process is not None and (self.restart_wanted or self.needs_other_flags()):
            await self._stop_gently()
        elif await self._is_well():
            return
        await self.bring_back(lambda step, data: None, learns=True)

    async def _keep_closed(self, lost: Reason) -> None:
        """Its GPU is lost: it answers nobody until that is back and its answer was right."""
        if self.data.get("verified") is not None:
            self.device_lost()
        await self.close_gate()
        self.state, self.verified, self.reason = EngineState.FAILED, False, lost
        self.report()

    async def _is_well(self) -> bool:
        if not self.verified_now():
            self.state = EngineState.GONE if self.process_identity is None else EngineState.STARTING
            return False
        seen = await self._observed()
        if seen.is_our_fault or seen.is_held:
            await self._leave_as_it_is(seen)
            return True
        self._left_as = None
        if seen.state is not EngineState.RUNNING:
            self.state, self.verified = seen.state, False
            if seen.state is not EngineState.UNREACHABLE:
                self.released()  # whatever brought it there: it has to prove itself before it is routed again
            self._say_not_running(seen)
            return False
        self._said_state = None
        await self.probe()
        gate = await self.gate.observe(self.engine_id)
        self.gate_state = gate.state
        if not self.has_golden():
            await self.check_canary(take_golden=True)  # a new canary; the process was right by the old one
        if gate.state is not GateState.OPEN or self.gate.is_wanted_closed:
            await self.open_gate()  # the gateway is a new one: same process, nothing was released since
        self.device_bytes = self.bytes_on(await self.node.look())
        self.state, self.verified, self.reason = EngineState.RUNNING, True, None
        self.report()
        return True

    def _say_not_running(self, seen: Observation) -> None:
        """Once for each state: it may be found in it at every look."""
        if seen.state is self._said_state:
            return
        self._said_state = seen.state
        sentence = f"engine {self.name} is {seen.state} and no loan has it. {seen.detail}".strip()
        self.node.alert("critical", "engine_not_running", sentence, engine_id=self.engine_id)

    async def _observed(self) -> Observation:
        """Silence is looked at again, so often."""
        seen = await self.adapter.observe()
        for _ in range(_UNHEALTHY_LOOKS_MAX):
            if not seen.is_silent or self.process_identity is None:
                break
            await asyncio.sleep(POLL_SECONDS_MAX)
            seen = await self.adapter.observe()
        return seen

    async def _leave_as_it_is(self, seen: Observation) -> None:
        """One that cannot be asked serves on as far as anybody knows; a closed gate stays closed. One that somebody
        else has stopped has no traffic until it runs again: nothing of it was released, so it is right as it was."""
        if seen.is_held:
            code, sentence = "engine_held", f"engine {self.name} does not run, and not by this agent: {seen.detail}"
            await self.close_gate()
            self.state, self.verified = seen.state, False
            self.reason = Reason(code="EngineNotReady", sentence=sentence)
            self.report()
        else:
            code, sentence = "engine_not_observable", f"engine {self.name} cannot be asked for its state: {seen.detail}"
        if self._left_as != code:
            self._left_as = code
            log.error("engine is left as it is", engine=self.name, code=code, detail=seen.detail)
            self.node.alert("critical", code, f"{sentence}; it is left as it is", engine_id=self.engine_id)

    async def _stop_gently(self) -> None:
        await self.close_gate()
        left = 0
        if self.process_identity is not None:  # a dead engine has nothing in flight, and nobody to tell it
            try:
                left = await self.gate.wait_drained(self.engine_id, self.policy.drain_seconds_max)
            except GateError as error:
                if await self._serves_on():
                    raise
                log.warning("it is stopped, drained or not", engine=self.name, error=str(error))
        if left and self.policy.on_drain_deadline == "abort_loan" and self.verified_now():
            await self.open_gate()  # as for a loan: its owner would rather wait than cut these requests
            raise EngineLost(f"engine {self.name} is not restarted yet: {left} requests did not end in time")
        self.remember(verified=None)
        if self.process is not None:
            await self.process.stop(self.settings.stop_seconds_max)
        self.restart_wanted = True  # until the new process has been started

    async def _serves_on(self) -> bool:
        """Its gate is closed and cannot be drained: one that is right gets its traffic back. One that is not has none,
        and does not stay as it is because nobody can count that."""
        seen = await self._observed()
        is_right = self.verified_now() and (seen.state is EngineState.RUNNING or seen.is_our_fault)
        if is_right:
            await self.open_gate()
        return is_right or seen.is_held

    # ---- bringing an engine back --------------------------------------------------------------------------------

    async def bring_back(self, step: StepSink, policy: EnginePolicy | None = None, *, learns: bool = False) -> None:
        """From any state to running, right and routed. Raises, with the gate closed, if it is not.

        ``policy``: the snapshot of the loan that it is brought back from. ``learns``: its parks are tried first, where
        its settings say so.
        """
        await self.ensure_route()
        await self.close_gate(policy)
        self.verified = False
        self.report()
        try:
            async with self.node.turns.starting(self.device_ids):
                seen = await self._ensure_process(step)
            if seen.state is not EngineState.RUNNING:
                self.released()
                await self.wake(step, policy)
            else:
                await self.finish_wake(policy)  # an earlier agent may have ended in the middle of it
            await self.verify(step, policy, take_golden=self.may_give_golden())
            if learns:
                await learn_parks(self)
        finally:
            self.room_taken()
        await self.open_gate(step)

    async def _ensure_process(self, step: StepSink) -> Observation:
        """A process that answers; restarts a supervised one that is gone, failed or condemned, where it may."""
        incarnation = self.incarnation
        # One without a process may have ended by its park: then its adapter knows.
        gone = incarnation is None and self.settings.kind not in MAY_END_AT_PARK
        seen = Observation(EngineState.GONE) if gone else await self.adapter.observe()
        if incarnation is None and seen.state is EngineState.PARKED and not self.restart_wanted:
            self.set_state(seen.state)
            return seen
        condemned = incarnation is not None and self.data.get("condemned") == incarnation
        # Alive, verified once, and silent: waiting for its start to end would wait for ever.
        known = incarnation in (self.data.get("verified"), self.data.get("released"))
        stuck = seen.is_silent and known
        broken = seen.state in (EngineState.GONE, EngineState.FAILED) or condemned or stuck or self.restart_wanted
        if not broken and (seen.is_held or (seen.is_our_fault and known)):
            self._raise_left(seen)
        if self.process is None:
            if broken and not condemned:
                self.set_state(seen.state)
                raise EngineLost(f"attached engine {self.name} is {seen.state}. {seen.detail}".strip())
            return seen  # a condemned one is asked again: its owner may have mended it
        if broken:
            if self.policy.restart == "never" and self._was_started() and not self.restart_wanted:
                self.set_state(seen.state)
                raise EngineLost(f"engine {self.name} is {seen.state} and its policy says restart = never")
            await self.process.stop(self.settings.stop_seconds_max)
            await self.prove_room(step)
            self.process.start(self.policy)
            self.restart_wanted = False
            self.remember(started_in_boot=self.node.boot_id, released=None, verified=None, restart_of=None)
            log.info("engine started", engine=self.name, incarnation=self.incarnation)
        self.set_state(EngineState.STARTING)
        return await self._wait_healthy()

    def _raise_left(self, seen: Observation) -> NoReturn:
        """Tried again later, and not touched."""
        self.set_state(seen.state)
        why = "does not run, and not by this agent" if seen.is_held else "cannot be asked for its state"
        raise EngineLost(f"engine {self.name} {why}; it is left as it is, its gate closed: {seen.detail}")

    def _was_started(self) -> bool:
        """Since the node booted, by this agent or an earlier one."""
        return self.data.get("started_in_boot") == self.node.boot_id

    async def _wait_healthy(self) -> Observation:
        loop = asyncio.get_running_loop()
        deadline = loop.time() + self.settings.health_seconds_max
        pause = POLL_SECONDS_FIRST
        while True:
            if await self.adapter.healthy():
                seen = await self.adapter.observe()
                if seen.state is not EngineState.UNREACHABLE:
                    await self.probe()
                    self.set_state(seen.state)
                    return seen
                if not seen.is_silent:
                    self._raise_left(seen)
            if self.process is not None and not self.process.alive:
                self.set_state(EngineState.GONE)
                raise EngineLost(f"engine {self.name} ended while it started; see {self.process.log_path}")
            if loop.time() > deadline:
                seen = await self.adapter.observe()
                if seen.is_our_fault or seen.is_held:
                    self._raise_left(seen)  # that it is not healthy says nothing against it
                self.remember(condemned=self.incarnation)
                raise EngineLost(f"engine {self.name} was not healthy within {self.settings.health_seconds_max} s")
            await asyncio.sleep(pause)
            pause = min(POLL_SECONDS_MAX, pause * 1.5)
