"""The agent of one node: makes the parts, takes up what the journal holds, obeys orders, and looks around.

Killing it at any moment is safe: every loan goes on with the next agent from what is written down. It never ends an
engine, a gateway or a job, unless it is told to stop everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import signal
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

import structlog
import uuid_utils
from filelock import FileLock, Timeout

from ..vmm.host_device import HostDevice
from .attempt_run import attempt_path
from .engine_keeper import EngineKeeper
from .engines import make_adapter
from .errors import ConfigError, JournalCorrupt
from .gates.base import GateRefused, GateUnreachable
from .gates.gateway import GatewayGate
from .gateway.launch import GatewayNotStarted, GatewayPaths, adopt_or_start
from .journal import Journal
from .loan import Loan
from .log_sender import LogSender
from .node import Device, Node
from .node_files import NodeFile
from .occupancy import EngineFacts, Holder, holder
from .orders import Orders
from .processes import identity, send_signal, wait_exited
from .protocol.loans import LoanState
from .protocol.wire import (
    AttemptChanged,
    AttemptState,
    DeviceObserved,
    EngineDeclared,
    OccupancyChanged,
    OrderEnvelope,
    Reason,
    Register,
    Registered,
)
from .settings import AgentSettings
from .tasks import end_on_fault
from .upstream import Upstream

log = structlog.get_logger(__name__)

_DRAINING_STOP_SECONDS: Final = 10.0
_STOP_ALL_SECONDS: Final = 600.0
_GATEWAY_POLL_SECONDS: Final = 0.5
_FORGET_EVERY_SECONDS: Final = 3600.0


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
        self.journal, corrupt = _open_journal(self.data_dir / "journal.sqlite")
        self.node = Node(settings, self.journal, _open_devices(settings))
        self.node.on_change = self._on_change
        self.file = NodeFile(self.data_dir / "node.json", _new_id)
        self.node_id = self.file.id_of("node")
        self.paths = GatewayPaths(control=self.data_dir / "gateway.sock", state_dir=self.data_dir / "gateway")
        self.gate = GatewayGate(self.paths.control)
        self.keepers: dict[str, EngineKeeper] = {}
        for engine in settings.engines:
            engine_id = self.file.id_of(f"engine:{engine.name}")
            adapter = make_adapter(
                engine.kind, base_url=engine.url, model=engine.models[0], key_file=engine.control_key_file
            )
            self.keepers[engine_id] = EngineKeeper(self.node, engine_id, engine, adapter, self.gate)
        self.loans: dict[str, Loan] = {}
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
        self.orders = Orders(self)
        self._tasks: dict[str, asyncio.Task[Any]] = {}
        self._stopping = asyncio.Event()
        self._stop_all = False
        self._look_soon = asyncio.Event()
        self._holders: dict[str, Holder] = {}
        self._requests: dict[str, float | None] = {}
        self._observed: dict[str, DeviceObserved] = {}
        if corrupt is not None:
            self._quarantine_all(corrupt)

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
        record.write_text(me.model_dump_json())
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
            record.unlink(missing_ok=True)
            self.journal.close()
            self._lock.release()

    async def _start(self) -> None:
        for keeper in self.keepers.values():
            if keeper.process is not None:
                keeper.process.adopt()
        await self._ensure_gateway()
        await self._forget_routes()
        for row in self.journal.open_loans():
            missing = [engine_id for engine_id in row.order.engine_ids if engine_id not in self.keepers]
            if missing:
                raise ConfigError(
                    f"engines {missing} of the open loan {row.order.loan_id} are not in the configuration any more:"
                    " put them back until the loan is closed"
                )
            self.add_loan(Loan(self.node, row, self.keepers))
        for loan in self.loans.values():
            await loan.holding.wait()  # before any keeper acts on its own
        for keeper in self.keepers.values():
            self._spawn(f"engine {keeper.name}", keeper.run())
        self._spawn("gateway", self._keep_gateway())
        self._spawn("look", self._look_around())
        self._spawn("occupancy", self._report_occupancy())
        self._spawn("forget", self._forget_old())
        self._spawn("upstream", self.upstream.run())
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
        draining = [loan for loan in self.loans.values() if loan.state is LoanState.DRAINING]
        for loan in self.loans.values() if self._stop_all else draining:
            loan.recall("AgentStops")
        bound = _STOP_ALL_SECONDS if self._stop_all else _DRAINING_STOP_SECONDS
        waits = [loan.closed.wait() for loan in (list(self.loans.values()) if self._stop_all else draining)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(bound):
                await asyncio.gather(*waits)
        if not self._stop_all:
            return
        for name in [f"engine {keeper.name}" for keeper in self.keepers.values()] + ["gateway"]:
            if (task := self._tasks.get(name)) is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        for keeper in self.keepers.values():
            if keeper.process is not None:
                with contextlib.suppress(GateUnreachable):
                    await keeper.close_gate()
                await keeper.process.stop(keeper.settings.stop_seconds_max)
        await self._end_gateway()

    async def _end_gateway(self) -> None:
        try:
            info = await self.gate.info()
        except GateUnreachable:
            return
        send_signal(info.process, signal.SIGTERM)
        if not await wait_exited(info.process, 60.0):
            send_signal(info.process, signal.SIGKILL)
            await wait_exited(info.process, 10.0)

    # ---- loans ------------------------------------------------------------------------------------------------

    def add_loan(self, loan: Loan) -> None:
        self.loans[loan.loan_id] = loan
        self._spawn(f"loan {loan.loan_id}", self._run_loan(loan))

    async def _run_loan(self, loan: Loan) -> None:
        await loan.run()
        self.loans.pop(loan.loan_id, None)
        self._on_change()

    def loan_on(self, device_id: str) -> Loan | None:
        return next((loan for loan in self.loans.values() if device_id in loan.order.device_ids), None)

    # ---- the scheduler ----------------------------------------------------------------------------------------

    async def _make_register(self) -> Register:
        devices = self.node.observed(await self.node.look())
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
        )

    async def _on_registered(self, registered: Registered) -> None:
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
        self._holders.clear()
        self._on_change()

    async def _on_order(self, envelope: OrderEnvelope) -> None:
        await self.orders.take(envelope)

    # ---- the gateway ------------------------------------------------------------------------------------------

    async def _ensure_gateway(self) -> None:
        info, started = await adopt_or_start(self.settings.gateway.listen, self.paths)
        if info.listen != self.settings.gateway.listen:
            log.warning("the running gateway listens elsewhere", listens=info.listen)
        if started:
            log.info("gateway started", pid=info.pid)

    async def _forget_routes(self) -> None:
        """Engines that are in the configuration no more get no traffic; a gate of theirs is never opened again."""
        for engine_id in set(await self.gate.observe_all()) - set(self.keepers):
            await self.gate.close(engine_id, "refuse", 0, 1.0)
            try:
                await self.gate.remove_route(engine_id)
            except GateRefused as error:  # requests in flight: the next agent start does it
                log.warning("an old route is still in use", engine=engine_id, error=str(error))

    async def _keep_gateway(self) -> None:
        while True:
            try:
                info = await self.gate.info()
                await wait_exited(info.process, 3600.0)
            except GateUnreachable as error:
                log.warning("the gateway does not answer", error=str(error))
            try:
                await self._ensure_gateway()
            except GatewayNotStarted as error:
                log.error("the gateway did not start", error=str(error))
                self.node.alert("critical", "gateway_down", str(error))
            for keeper in self.keepers.values():
                keeper.poke()
            await asyncio.sleep(_GATEWAY_POLL_SECONDS)

    # ---- looking around ---------------------------------------------------------------------------------------

    def _on_change(self) -> None:
        self._look_soon.set()

    async def _look_around(self) -> None:
        """Devices, while somebody listens; peaks of what jobs hold; requests at the gates."""
        while True:
            facts = await self.node.look()
            for loan in self.loans.values():
                for run in loan.live_attempts:
                    pids = run.pids()
                    held = max((facts[device_id].bytes_of(pids) for device_id in run.spec.device_ids), default=0)
                    run.peak_hbm_bytes = max(run.peak_hbm_bytes, held)
            if self.node.connected.is_set():
                for observed in self.node.observed(facts):
                    self._report_if_new(observed)
            await self._look_at_gates()
            self._on_change()
            await asyncio.sleep(self.settings.engine_poll_seconds)

    def _report_if_new(self, observed: DeviceObserved) -> None:
        if self._observed.get(observed.device_id) != observed:
            self._observed[observed.device_id] = observed
            self.journal.report(observed)

    async def _look_at_gates(self) -> None:
        try:
            seen = await self.gate.observe_all()
        except GateUnreachable:
            return
        now = time.monotonic()
        for engine_id, gate in seen.items():
            ago = gate.last_request_seconds_ago
            self._requests[engine_id] = None if ago is None else now - ago

    async def _report_occupancy(self) -> None:
        while True:
            await self._look_soon.wait()
            self._look_soon.clear()
            now = time.monotonic()
            for device_id in self.node.devices:
                holds = self._holder(device_id, now)
                if self._holders.get(device_id) != holds:
                    self._holders[device_id] = holds
                    self.journal.report(
                        OccupancyChanged(
                            device_id=device_id,
                            occupancy=holds.occupancy,
                            owner_id=holds.owner_id,
                            loan_id=holds.loan_id,
                        )
                    )

    def _holder(self, device_id: str, now: float) -> Holder:
        loan = self.loan_on(device_id)
        engines: list[EngineFacts] = []
        for engine_id, keeper in self.keepers.items():
            if device_id in keeper.device_ids:
                last = self._requests.get(engine_id)
                engines.append(EngineFacts(engine_id, keeper.state, None if last is None else now - last))
        observed = self._observed.get(device_id)
        return holder(
            quarantined=device_id in self.node.quarantined,
            loan_id=None if loan is None else loan.loan_id,
            loan_state=None if loan is None else loan.state,
            running_attempt_ids=[] if loan is None else [run.attempt_id for run in loan.live_attempts if run.running],
            engines=engines,
            foreign=observed is not None and any(process.owner == "foreign" for process in observed.processes),
        )

    async def _forget_old(self) -> None:
        while True:
            for attempt_id in self.journal.forget_closed(time.time() - self.settings.logs_keep_seconds):
                await asyncio.to_thread(shutil.rmtree, attempt_path(self.node, attempt_id), True)
            await asyncio.sleep(_FORGET_EVERY_SECONDS)

    def _quarantine_all(self, text: str) -> None:
        reason = Reason(code="JournalCorrupt", sentence=text)
        for device_id in self.node.devices:
            self.node.quarantined[device_id] = reason
        self.node.alert("critical", "journal_corrupt", text)


def _new_id() -> str:
    return str(uuid_utils.uuid7())


def _open_journal(path: Path) -> tuple[Journal, str | None]:
    """The journal, and what was wrong with the old one if a new one had to be begun."""
    try:
        return Journal(path), None
    except JournalCorrupt as error:
        aside = path.with_name(f"{path.name}.corrupt-{time.time():.0f}")
        for suffix in ("", "-wal", "-shm"):
            with contextlib.suppress(FileNotFoundError):
                Path(f"{path}{suffix}").rename(f"{aside}{suffix}")
        text = f"the journal could not be read ({error}); it lies in {aside}: look for running jobs before you lend"
        log.critical("journal corrupt", error=str(error), kept=str(aside))
        return Journal(path), text


def _open_devices(settings: AgentSettings) -> list[Device]:
    devices: list[Device] = []
    for index, declared in enumerate(settings.devices):
        try:
            host = HostDevice.create(declared.path, capacity_bytes=declared.capacity_bytes)
        except (OSError, ValueError) as error:
            raise ConfigError(f"devices.{index}: {declared.path}: {error}") from error
        devices.append(Device(host.uuid, index, f"host_{host.kind}", host.capacity_bytes, str(host.path)))
    return devices


def _machine_id(file: NodeFile) -> str:
    try:
        found = Path("/etc/machine-id").read_text().strip()
    except OSError:
        found = ""
    return found or file.id_of("machine")
