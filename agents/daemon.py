"""The agent of one node: makes the parts, takes up what the journal holds, obeys orders, and looks around.

Killing it at any moment is safe: every loan goes on with the next agent from what is written down. It never ends an
engine, a gateway or a job, unless it is told to stop everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import structlog
import uuid_utils
from filelock import FileLock, Timeout

from .device_opening import open_devices
from .disk_reserve import RESERVE_NAME, DiskReserve
from .engine_keeper import ENGINE_TROUBLE, EngineKeeper
from .engines import make_adapter
from .errors import ConfigError
from .gate_watch import GateWatch, keep_closed
from .gates import make_gate
from .gates.gateway import GatewayGate
from .gateway.launch import GatewayPaths
from .gateway_keeper import GatewayKeeper
from .loan import Loan
from .loan_without_job import tell_first_byte
from .log_retention import LogRetention
from .log_sender import LogSender
from .log_tails import LogTails
from .memory_service import MemoryServiceKeeper
from .node import Node
from .node_files import NodeFile, replace_json
from .opening import open_home, open_journal
from .orders import Orders
from .pressure import PressureWatch
from .processes import boot_id, identity
from .protocol.loans import LoanState
from .protocol.wire import (
    AttemptChanged,
    AttemptState,
    EngineDeclared,
    OrderEnvelope,
    Reason,
    Register,
    Registered,
)
from .settings import AgentSettings, EngineSettings
from .tasks import end_on_fault
from .upstream import Upstream
from .watch import Watch

log = structlog.get_logger(__name__)

_DRAINING_STOP_SECONDS: Final = 10.0
_STOP_ALL_SECONDS: Final = 600.0
_FAULTED_STOP_SECONDS: Final = 60.0
_LOOK_SECONDS: Final = 1.0
_STOP_REASON: Final = "AgentStops"
_GATEWAY_TASK: Final = "gateway"


class Daemon:
    """Everything that one agent process has. ``run`` returns after ``stop`` or ``stop_everything`` was called."""

    def __init__(self, settings: AgentSettings) -> None:
        self.settings = settings
        self.data_dir = Path(settings.data_dir)
        self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = FileLock(self.data_dir / "agent.lock")
        try:
            self._lock.acquire(timeout=0)
        except Timeout:
            raise ConfigError(f"data_dir {self.data_dir}: another agent runs with this directory") from None
        self.home = open_home(self.data_dir, boot_id())
        reserve = DiskReserve(self.data_dir / RESERVE_NAME, settings.journal_reserve_bytes)
        devices = open_devices(settings)
        self.journal, corrupt = open_journal(self.data_dir, reserve, devices)
        self.node = Node(settings, self.journal, devices)
        self.file = NodeFile(self.data_dir / "node.json", _new_id, self.journal)
        try:
            self.node_id = self.file.id_of("node")
        except OSError as error:
            raise ConfigError(f"data_dir {self.data_dir}: {error}") from error
        paths = GatewayPaths(control=self.data_dir / "gateway.sock", state_dir=self.data_dir / "gateway")
        self.gateway_gate = GatewayGate(paths.control)
        self.memory_services = [
            MemoryServiceKeeper(self.node, device)
            for device, declared in zip(devices, settings.devices, strict=True)
            if declared.memory_service
        ]
        self.keepers: dict[str, EngineKeeper] = {}
        for engine in settings.engines:
            self._add_keeper(engine)
        self.loans: dict[str, Loan] = {}
        behind_gateway = {key: keeper for key, keeper in self.keepers.items() if keeper.settings.needs_gateway}
        self.gateway = GatewayKeeper(
            self.node, self.gateway_gate, paths, behind_gateway, is_needed=settings.needs_gateway
        )
        self.gates = GateWatch(self.gateway_gate, self.keepers)
        self.watch = Watch(self.node, self.gates, self.keepers, self.loans, self.loan_on)
        self.pressure = PressureWatch(self.node, self.keepers, self.loan_on)
        self.node.on_change = self.watch.look_soon
        self.node.absences.on_lost = self._on_device_lost
        self.upstream = Upstream(
            settings.server_url,
            settings.token_file,
            self.journal,
            self.node.connected,
            self._make_register,
            self._on_registered,
            self._on_order,
        )
        self.logs = LogSender(self.node, self.upstream.client)
        self.tails = LogTails(self.node, self.upstream.client)
        self.log_retention = LogRetention(self.node)
        self.node.on_attempt_end = self._attempt_ended
        self.orders = Orders(self)
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._stopping = asyncio.Event()
        self._stop_all = False
        if corrupt is not None:
            self.node.alert("critical", "journal_corrupt", corrupt)
        for device_id, reason in self.node.quarantined.items():
            log.warning("the device is quarantined", device=device_id, reason=reason.sentence)

    def _add_keeper(self, engine: EngineSettings) -> None:
        """An engine whose id cannot be kept is left out: at the next start its process would be nobody's."""
        try:
            engine_id = self.file.id_of(f"engine:{engine.name}")
            gate = make_gate(self.settings, engine, self.gateway_gate, self.node.alert)
            self.keepers[engine_id] = EngineKeeper(self.node, engine_id, engine, make_adapter, gate)
        except OSError as error:
            sentence = f"the new engine {engine.name} is left out until the agent is restarted: {error}"
            log.error("no room for a new engine", engine=engine.name, error=str(error))
            self.node.alert("critical", "engine_left_out", sentence)

    # ---- start and stop ---------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends this process; engines, gateway and jobs stay."""
        self._stopping.set()

    def stop_everything(self) -> None:
        """Recalls the loans, then ends engines and gateway, then this process."""
        self._stop_all = True
        self._stopping.set()

    @property
    def is_stopping(self) -> bool:
        return self._stopping.is_set()

    async def run(self) -> None:
        me = identity(os.getpid())
        assert me is not None
        record = self.data_dir / "agent.json"
        try:
            replace_json(record, me.model_dump(), flush=False)
        except OSError as error:
            log.error("`lull agent --stop` will not find this agent", record=str(record), error=str(error))
        try:
            await self._start()
            await self._stopping.wait()
            await self._wind_down()
        finally:
            for task in self._tasks.values():
                task.cancel()
            await asyncio.gather(*self._tasks.values(), return_exceptions=True)
            await self.upstream.aclose()
            self.node.spares.close()
            with contextlib.suppress(OSError):
                record.unlink(missing_ok=True)
            self.journal.close()
            self._lock.release()

    async def _start(self) -> None:
        for keeper in self.keepers.values():
            if keeper.process is not None:
                keeper.process.adopt()
        await asyncio.gather(self.gateway.ensure(), *(service.ensure() for service in self.memory_services))
        for row in self.journal.open_loans():
            missing = [engine_id for engine_id in row.order.engine_ids if engine_id not in self.keepers]
            if missing:
                raise ConfigError(
                    f"engines {missing} of the open loan {row.order.loan_id} are not in the configuration any more:"
                    " put them back until the loan is closed"
                )
            gone = [device_id for device_id in row.order.device_ids if device_id not in self.node.devices]
            if gone:
                raise ConfigError(
                    f"devices {gone} of the open loan {row.order.loan_id} are not in the configuration any more:"
                    " put them back until the loan is closed"
                )
            loan = Loan(self.node, row, self.keepers)
            keep_closed(loan)
            self.add_loan(loan)
        for loan in list(self.loans.values()):
            await loan.holding.wait()  # before any keeper acts on its own
        for keeper in () if self._stop_all else self.keepers.values():
            self._spawn(_engine_task(keeper), keeper.run())
            if self.loan_on(keeper.device_ids[0]) is None:
                self._spawn(f"first byte {keeper.name}", tell_first_byte(self.node, keeper))
        self._spawn(_GATEWAY_TASK, self.gateway.run())
        for service in self.memory_services:
            self._spawn(_service_task(service), service.run())
        self._spawn("look", self.watch.look_around())
        self._spawn("look at gates", self.watch.look_at_gates())
        self._spawn("gates", self.gates.guard(self.settings.gate_poll_seconds))
        self._spawn("pressure", self.pressure.run())
        self._spawn("occupancy", self.watch.report_occupancy())
        self._spawn("log retention", self.log_retention.run())
        self._spawn("upstream", self.upstream.run())
        self._spawn("log tails", self.tails.run())
        if not self._stop_all:
            self.node.spares.start()

    def _spawn(self, name: str, work: Any) -> None:
        task = asyncio.get_running_loop().create_task(work, name=name)
        self._tasks[name] = task
        task.add_done_callback(self._on_task_end)

    def _on_task_end(self, task: asyncio.Task[Any]) -> None:
        self._tasks.pop(task.get_name(), None)
        end_on_fault(task)

    async def _wind_down(self) -> None:
        """A draining loan has released nothing: it is broken off. Everything else waits for the next agent."""
        if self._stop_all:
            await self._end_everything()
            return
        draining = [loan for loan in self.loans.values() if loan.state is LoanState.DRAINING]
        for loan in draining:
            loan.recall(_STOP_REASON)
        await asyncio.gather(*(_closed(loan, _DRAINING_STOP_SECONDS) for loan in draining))

    async def _end_everything(self) -> None:
        """Loans, then engines, then the gateway; the trouble of one keeps no other from its end."""
        # A loan has its engines to itself. From here on nobody else starts one.
        await self._cancel(*(_engine_task(keeper) for keeper in self.keepers.values()))
        loans = list(self.loans.values())
        for loan in loans:
            loan.recall(_STOP_REASON)
        await asyncio.gather(*(_closed(loan, _STOP_ALL_SECONDS) for loan in loans))
        services = [_service_task(service) for service in self.memory_services]
        await self._cancel(*(_loan_task(loan) for loan in self.loans.values()), _GATEWAY_TASK, *services)
        ended = await asyncio.gather(*(_end_engine(keeper) for keeper in self.keepers.values()), return_exceptions=True)
        await asyncio.gather(self.gateway.end(), *(service.end() for service in self.memory_services))
        for keeper, trouble in zip(self.keepers.values(), ended, strict=True):
            if isinstance(trouble, BaseException):
                log.error("the engine was not stopped", engine=keeper.name, error=str(trouble), exc_info=trouble)

    async def _cancel(self, *names: str) -> None:
        tasks = [task for name in names if (task := self._tasks.get(name)) is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- loans ------------------------------------------------------------------------------------------------

    def add_loan(self, loan: Loan) -> None:
        self.loans[loan.loan_id] = loan
        self.pressure.loan_opens(loan)
        self._spawn(_loan_task(loan), self._run_loan(loan))

    async def _run_loan(self, loan: Loan) -> None:
        await loan.run()
        self.loans.pop(loan.loan_id, None)
        self.watch.look_soon()
        await asyncio.gather(*(tell_first_byte(self.node, engine) for engine in loan.engines))

    def loan_on(self, device_id: str) -> Loan | None:
        return next((loan for loan in self.loans.values() if device_id in loan.order.device_ids), None)

    def _on_device_lost(self, device_id: str, reason: Reason) -> None:
        """What ran there is over: engines have to prove themselves again, and loans end as soon as they can."""
        log.critical("a GPU is lost", device=device_id, reason=reason.sentence)
        for keeper in self.keepers.values():
            if device_id in keeper.device_ids:
                keeper.device_lost()
                keeper.poke()
        loan = self.loan_on(device_id)
        if loan is not None:
            loan.recall(reason.code)

    # ---- the scheduler ----------------------------------------------------------------------------------------

    async def _make_register(self) -> Register:
        facts = await self.node.look()
        await asyncio.gather(*(keeper.first_look(facts) for keeper in self.keepers.values()))
        devices = self.node.observed(facts)
        attempts: list[AttemptChanged] = self.journal.ended_unacknowledged()
        for loan in self.loans.values():
            attempts += [
                AttemptChanged(
                    attempt_id=run.attempt_id,
                    job_id=run.spec.job_id,
                    loan_id=loan.loan_id,
                    state=AttemptState.RUNNING if run.running else AttemptState.PLACED,
                )
                for run in loan.live_attempts
            ]
        return Register(
            node_id=self.node_id,
            name=self.settings.node_name,
            version=version("gpu-lull"),
            boot_id=self.node.boot_id,
            machine_id=_machine_id(self.file),
            journal_id=self.journal.journal_id,
            start_id=self.node.start_id,
            home=self.home,
            devices=devices,
            engines=[
                EngineDeclared(
                    engine=keeper.changed(),
                    policy=keeper.settings.policy,
                    policy_locked=keeper.settings.policy_locked,
                )
                for keeper in self.keepers.values()
            ],
            loans=[loan.held() for loan in self.loans.values()],
            attempts=attempts,
            term=self.journal.highest("term"),
            incarnation=self.journal.highest("incarnation"),
            orders_after=self.journal.highest("orders_after"),
            epochs={device_id: self.journal.highest(f"epoch:{device_id}") for device_id in self.node.devices},
            newest_report=self.journal.newest_report(),
            reports_at_start=self.journal.reports_at_start,
        )

    async def _on_registered(self, registered: Registered) -> None:
        # On disk before it is used: a journal that does not know it is taken for an older copy after a reboot.
        with self.journal.together(flush=True):
            self.journal.raise_to("term", registered.term)
            self.journal.raise_to("incarnation", registered.incarnation)
            self.journal.raise_to("orders_after", registered.orders_after)
        for policy in registered.policies:
            if policy.engine_id in self.keepers:
                self.keepers[policy.engine_id].set_policy(policy.version, policy.policy)
        for loan_id in registered.recall_loans:
            if loan_id in self.loans:
                self.loans[loan_id].recall("UnknownToScheduler")
        for attempt_id in registered.stop_attempts:
            self.orders.stop_attempt(attempt_id)
        for keeper in self.keepers.values():
            keeper.report()
        self.watch.tell_all()

    async def _on_order(self, envelope: OrderEnvelope) -> None:
        await self.orders.take(envelope)

    def _attempt_ended(self, attempt_id: str) -> None:
        self.tails.add(attempt_id)
        self.log_retention.look_soon()


def _engine_task(keeper: EngineKeeper) -> str:
    return f"engine {keeper.name}"


def _service_task(service: MemoryServiceKeeper) -> str:
    return f"memory service {service.socket.name}"


def _loan_task(loan: Loan) -> str:
    return f"loan {loan.loan_id}"


async def _closed(loan: Loan, seconds_max: float) -> None:
    """Returns once the loan is closed, or after a bound: a shorter one for an engine that does not come back."""
    loop = asyncio.get_running_loop()
    deadline, faulted = loop.time() + seconds_max, False
    while not loan.closed.is_set() and (left := deadline - loop.time()) > 0:
        if loan.state is LoanState.FAULTED and not faulted:
            faulted, deadline = True, min(deadline, loop.time() + _FAULTED_STOP_SECONDS)
            continue
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(min(left, _LOOK_SECONDS)):
                await loan.closed.wait()


async def _end_engine(keeper: EngineKeeper) -> None:
    if keeper.process is None:
        return
    try:
        await keeper.close_gate()
    except ENGINE_TROUBLE as error:
        log.warning("the gate was not closed before its engine is stopped", engine=keeper.name, error=str(error))
    await keeper.process.stop(keeper.settings.stop_seconds_max)


def _new_id() -> str:
    return str(uuid_utils.uuid7())


def _machine_id(file: NodeFile) -> str:
    try:
        found = Path("/etc/machine-id").read_text().strip()
    except OSError:
        found = ""
    return found or file.id_of("machine")
