"""What an engine is to its node: its process, its bytes, the facts that are kept about it, and the report of it.

``EngineHand`` adds what is done to it. What is written down here outlives the agent.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import structlog

from .engine_facts import read_facts
from .engine_process import EngineProcess, listening_pid
from .engines.base import EngineAdapter
from .engines.ledger import Ledger
from .engines.outside import EngineOutside
from .errors import AgentError, DeviceAbsent
from .gates.kept import KeptGate
from .memory_service import service_socket
from .node import Node, cuda_visible
from .node_files import replace_json
from .park_history import ParkHistory
from .probe import DeviceFacts, why_absent
from .processes import descendants, identity, is_same
from .protocol.capabilities import Capabilities, refusal
from .protocol.engine_kinds import LOADS_AT_WAKE, MAY_END_AT_PARK, MODES_ARE_FLAGS, known_capabilities
from .protocol.policy import EnginePolicy
from .protocol.unified import without_backups
from .protocol.wire import (
    EngineChanged,
    EngineState,
    GateState,
    HostPressure,
    PolicyRefused,
    ProcessIdentity,
    Reason,
)
from .settings import EngineSettings

log = structlog.get_logger(__name__)

_FIRST_LOOK_SECONDS_MAX: Final = 10.0

MakeAdapter = Callable[[EngineSettings, Ledger, EngineOutside], EngineAdapter]


class EngineBody:
    """One engine with its process, its adapter and its gate."""

    def __init__(
        self, node: Node, engine_id: str, settings: EngineSettings, make_adapter: MakeAdapter, gate: KeptGate
    ) -> None:
        self.node = node
        self.engine_id = engine_id
        self.settings = settings
        self.gate = gate
        self.hand = asyncio.Lock()
        directory = Path(node.settings.data_dir) / "engines" / settings.name
        directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.adapter = make_adapter(settings, Ledger(directory / "ledger.json", lambda: self.incarnation), self)
        self.capabilities: Capabilities | None = None
        self._probed: str | None = None  # the incarnation that they were asked of
        devices = [device for device in node.devices.values() if device.index in settings.device_indexes]
        self.device_ids = [device.device_id for device in devices]
        self._on_unified = any(device.unified for device in devices)
        socket = service_socket(Path(node.settings.data_dir), self.device_ids[0])
        visible = cuda_visible(devices)
        self.process = (
            None if settings.command is None else EngineProcess(directory, engine_id, settings, socket, visible)
        )
        self._facts_path = directory / "facts.json"
        self.data = read_facts(self._facts_path)
        self._kept_verified = self.data.get("verified")  # in the file, whatever could not be written since
        kept = None if settings.policy_locked else node.journal.policy(engine_id)
        self.policy_version, self.policy = (0, settings.policy) if kept is None else kept
        self.policy_refused: PolicyRefused | None = None
        self.parks = ParkHistory(
            lambda: self.data,
            lambda parks: self.remember(parks=parks),
            self.settings_key,
            lambda: self.incarnation,
            lambda: self.policy.restore_modes,
            node.settings.spawn_margin_bytes,
        )
        self._state: EngineState | None = None
        self.gate_state = GateState.UNKNOWN
        self.verified = False
        self.reason: Reason | None = None
        self.pressure: HostPressure | None = None  # its policy wants it parked now
        self.device_bytes: dict[str, int] = {}
        self._attached: ProcessIdentity | None = None
        self._reported: EngineChanged | None = None
        node.owners.engines[engine_id] = self.pids

    # ---- what it is ---------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self.settings.name

    @property
    def state(self) -> EngineState:
        """As last seen. Before that nobody knows: it counts as unreachable, and is not reported."""
        return self._state or EngineState.UNREACHABLE

    @state.setter
    def state(self, state: EngineState) -> None:
        self._state = state

    @property
    def footprint(self) -> dict[str, int]:
        """Bytes by device that the engine held when it last ran and was right, as it is configured now."""
        if self.data.get("footprint_of") != self.settings_key():
            return {}
        return {str(key): int(value) for key, value in self.data.get("footprint", {}).items()}

    @property
    def process_identity(self) -> ProcessIdentity | None:
        if self.process is not None:
            return self.process.process if self.process.alive else None
        if self._attached is None or not is_same(self._attached):
            pid = listening_pid(int(self.settings.url.rsplit(":", 1)[1]))
            self._attached = None if pid is None else identity(pid)
        return self._attached

    @property
    def incarnation(self) -> str | None:
        process = self.process_identity
        return None if process is None else f"{process.boot_id}:{process.pid}:{process.start_ticks}"

    def pids(self) -> set[int]:
        process = self.process_identity
        return set() if process is None else {process.pid, *descendants(process.pid)}

    async def held_bytes(self) -> dict[str, int]:
        return self.bytes_on(await self.node.look())

    def bytes_on(self, facts: dict[str, DeviceFacts]) -> dict[str, int]:
        """By device. Raises DeviceAbsent if one of them could not be read."""
        absent = why_absent(facts, self.device_ids)
        if absent is not None:
            raise DeviceAbsent(absent.sentence)
        pids = self.pids()
        return {device_id: facts[device_id].bytes_of(pids) for device_id in self.device_ids}

    def device_lost(self) -> None:
        """Its GPU is lost, and with it whatever it held there: nothing that it says counts until it answered right."""
        try:
            self.released()
        except OSError as error:  # this agent knows all the same
            log.error("that an engine lost its GPU could not be kept", engine=self.name, error=str(error))

    def verified_now(self) -> bool:
        """The process that runs is the one whose answer was right since its last park."""
        now = self.incarnation
        return now is not None and self.data.get("verified") == now and self.data.get("condemned") != now

    def released(self) -> None:
        """Written down before the engine may park, and whenever it is seen not to run: its answers are to be proved."""
        self.remember(verified=None, released=self.incarnation)

    def may_give_golden(self) -> bool:
        """A process that has never parked answers as it was built to; another one would be its own witness."""
        return self.settings.kind in LOADS_AT_WAKE or self.data.get("released") != self.incarnation

    def is_lost_while_parked(self) -> bool:
        return self.process_identity is None and self.settings.kind not in MAY_END_AT_PARK

    async def probe(self) -> None:
        """Asks a process that was not asked yet what it can do. Raises what the adapter does."""
        now = self.incarnation
        if now is not None and self._probed != now:
            self.capabilities = self._here(await self.adapter.capabilities())
            self._probed = now

    def forget_capabilities(self) -> None:
        self._probed = None

    def refusal(self, policy: EnginePolicy) -> str | None:
        """Why this engine cannot honour ``policy``, by what it said itself, else by what its kind can at best."""
        return refusal(self.capabilities or self._here(known_capabilities(self.settings.kind)), policy)

    def _here(self, capabilities: Capabilities) -> Capabilities:
        return without_backups(capabilities) if self._on_unified else capabilities

    def in_effect(self, policy: EnginePolicy) -> bool:
        """The restore modes of ``policy`` hold now; an engine that takes them with every park has any."""
        wanted = {tag: str(mode) for tag, mode in policy.restore_modes.items()}
        return not MODES_ARE_FLAGS[self.settings.kind] or self.modes_in_effect() == wanted

    def modes_in_effect(self) -> dict[str, str]:
        if self.process is not None and self.process.restore_modes:
            return self.process.restore_modes
        return {tag: str(mode) for tag, mode in self.policy.restore_modes.items()}

    def remember(self, **values: Any) -> None:
        """Writes facts about the engine that the next agent needs."""
        self.data = {**self.data, **values}
        try:
            # All but the golden answers is about processes that a power cut ends as well.
            replace_json(self._facts_path, self.data, flush="golden" in values)
            self._kept_verified = self.data.get("verified")
        except OSError as error:
            # This agent still knows; the next one finds an engine that is not verified, and proves it again.
            log.error("facts about an engine could not be kept", engine=self.name, error=str(error))
            if values.get("verified", "") is None and self._kept_verified is not None:
                raise  # the old file would call it verified: nothing may be released then

    def changed(self) -> EngineChanged:
        process = self.process_identity
        return EngineChanged(
            engine_id=self.engine_id,
            name=self.name,
            engine_kind=self.settings.kind,
            models=self.settings.models,
            device_ids=self.device_ids,
            supervised=self.process is not None,
            state=self.state,
            gate=self.gate_state,
            verified=self.verified,
            incarnation=self.incarnation,
            device_bytes=self.device_bytes,
            residual_bytes=self.parks.residual_bytes(self.policy.restore_modes),
            policy_version=self.policy_version,
            processes={} if process is None else {"engine": process},
            endpoint=self.gate.traits.endpoint,
            reason=self.reason,
            capabilities=self.capabilities,
            learned=self.parks.learned(),
            pressure=self.pressure,
            tells_requests=self.gate.tells_requests,
            policy_refused=self.policy_refused,
        )

    async def first_look(self, facts: dict[str, DeviceFacts]) -> None:
        """How it and its gate are, for the report of an agent that starts; a loan may hold it for hours.

        Bounded, and nothing is done. Whatever its keeper or its loan has seen meanwhile is newer and stays.
        """
        if self._state is not None:
            return
        state, gate = await asyncio.gather(self._first_state(), self._first_gate())
        if self._state is not None:
            return
        with contextlib.suppress(DeviceAbsent):
            self.device_bytes = self.bytes_on(facts)
        self._state, self.gate_state = state, gate
        self.verified = self.verified_now() and (state, gate) == (EngineState.RUNNING, GateState.OPEN)

    async def _first_state(self) -> EngineState:
        if self.is_lost_while_parked():
            return EngineState.GONE
        state = EngineState.UNREACHABLE
        try:
            async with asyncio.timeout(_FIRST_LOOK_SECONDS_MAX):
                state = (await self.adapter.observe()).state
        except (AgentError, OSError, TimeoutError) as error:
            log.warning("an engine was not seen yet", engine=self.name, error=repr(error))
        known = (self.data.get("verified"), self.data.get("released"))
        is_new = state is EngineState.UNREACHABLE and self.incarnation not in known
        return EngineState.STARTING if is_new else state

    async def _first_gate(self) -> GateState:
        try:
            async with asyncio.timeout(_FIRST_LOOK_SECONDS_MAX):
                return (await self.gate.observe(self.engine_id)).state
        except (AgentError, OSError, TimeoutError) as error:
            log.warning("a gate was not seen yet", engine=self.name, error=repr(error))
            return GateState.UNKNOWN

    def report(self) -> None:
        """Reports the engine if it was looked at, and anything about it changed since the last report."""
        if self._state is None:
            return
        now = self.changed()
        if now != self._reported:
            self._reported = now
            self.node.journal.report(now)
            self.node.on_change()

    def set_state(self, state: EngineState) -> None:
        self.state = state
        self.report()

    def settings_key(self, *more: Any) -> str:
        """What golden answers and footprints belong to: how the engine is configured, restore modes left out."""
        settings = self.settings
        value = [settings.kind, settings.url, settings.command, settings.env, settings.models, settings.device_indexes]
        value += [settings.vllm.loras] if settings.vllm.loras else []
        return hashlib.sha256(json.dumps([value, *more]).encode()).hexdigest()
