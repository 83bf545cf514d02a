"""One node under test: the real agent in this process, with real engines, gateway, runners and memory.

There is no server: orders are given by hand, reports are read from the outbox, which is what a scheduler would get.
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import random
import secrets
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from lull.agents.daemon import Daemon
from lull.agents.engine_keeper import EngineKeeper
from lull.agents.gates.gateway import GatewayGate
from lull.agents.job_logs import read_log
from lull.agents.loan import Loan
from lull.agents.processes import find_by_environ, identity, send_signal, wait_exited
from lull.agents.protocol.loans import LoanState, LoanStep
from lull.agents.protocol.plans import Plan
from lull.agents.protocol.wire import AttemptSpec, GateState, OpenLoan, OrderEnvelope
from lull.agents.settings import MEMORY_SERVICE_FLAGS, AgentSettings
from lull.vmm.service.client import read_state
from lull.vmm.service.errors import ServiceUnavailable
from tests import kept_nodes
from tests.waiting import wait_until_async

MIB = 1 << 20


def free_port() -> int:
    """A port that nothing uses now, below those that the kernel gives to outgoing connections meanwhile."""
    while True:
        port = random.randrange(15000, 30000)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return port


@contextmanager
def _cut_off() -> Iterator[None]:
    """A call that is cut off leaves its socket, or a connection that was not begun yet, to the collector; a process
    that ends closes nothing either."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)
        warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
        yield


@dataclass
class EngineUnderTest:
    """What the test wants of one engine. ``faults`` are the reference engine's."""

    name: str = "alpha"
    weights_bytes: int = 4 * MIB
    kv_bytes: int = 2 * MIB
    devices: list[int] = field(default_factory=lambda: [0])
    faults: list[str] = field(default_factory=list)
    extra: list[str] = field(default_factory=list)
    policy: dict[str, Any] = field(default_factory=dict)
    port: int = field(default_factory=free_port)
    attached: bool = False  # the test starts it, with the policy's restore modes, as its owner would
    more: dict[str, Any] = field(default_factory=dict)  # other fields of its [[engines]]


class AgentNode:
    """Starts and restarts the agent of one directory; everything else lives on, as it would."""

    def __init__(
        self,
        root: Path,
        engines: list[EngineUnderTest],
        capacities: list[int],
        *,
        gateway_port: int | None = None,
        **settings: Any,
    ) -> None:
        self.root = root
        self.engines = engines
        self.capacities = capacities
        self.may_be_kept = False
        self.commands: dict[str, list[str]] = {}
        self.owned: dict[str, subprocess.Popen[bytes]] = {}
        self.gateway_port = gateway_port or free_port()
        self.token_file = root / "token"
        self.token_file.write_text("lull_test")
        self.settings = AgentSettings.model_validate(
            {
                "server_url": "http://127.0.0.1:1",
                "token_file": self.token_file,
                "data_dir": root / "agent",
                "node_name": "box",
                "gateway": {"listen": f"127.0.0.1:{self.gateway_port}"},
                "devices": [
                    {
                        "path": root / f"device{index}",
                        "capacity_bytes": capacity,
                        "memory_service": any(
                            MEMORY_SERVICE_FLAGS in engine.extra and index in engine.devices for engine in engines
                        ),
                    }
                    for index, capacity in enumerate(capacities)
                ],
                "engines": [self._engine(engine) for engine in engines],
                "settle_poll_seconds": 0.02,
                "engine_poll_seconds": 0.2,
                "loan_idle_seconds_max": 0.2,
                "host_reserve_bytes": 0,
                "journal_reserve_bytes": MIB,
                **settings,
            }
        )
        self.daemon: Daemon | None = None
        self._task: asyncio.Task[None] | None = None
        self._children: list[Any] = []
        self._seq = itertools.count(1)

    def _engine(self, engine: EngineUnderTest) -> dict[str, Any]:
        key = self.root / f"{engine.name}.key"
        if not key.exists():
            key.write_text(secrets.token_hex(16))
            key.chmod(0o600)
        command = [
            *(str(Path(sys.executable).with_name("lull")), "engine", "serve", "--name", engine.name),
            *("--port", str(engine.port), "--device", str(self.root / f"device{engine.devices[0]}")),
            *("--weights", str(engine.weights_bytes), "--kv-cache", str(engine.kv_bytes)),
            *("--control-key-file", str(key), "--witness", str(self.witness_path(engine.name))),
            *itertools.chain.from_iterable(("--fault", fault) for fault in engine.faults),
            *engine.extra,
            "{restore_mode_flags}",
        ]
        self.commands[engine.name] = [word for word in command if word != "{restore_mode_flags}"]
        return {
            "name": engine.name,
            "models": [engine.name],
            "url": f"http://127.0.0.1:{engine.port}",
            "device_indexes": engine.devices,
            "control_key_file": key,
            **({} if engine.attached else {"command": command, "health_seconds_max": 60, "stop_seconds_max": 5}),
            "policy": {"when": "always", "settle_samples": 2, "settle_seconds_max": 2, **engine.policy},
            **engine.more,
        }

    def witness_path(self, name: str) -> Path:
        return self.root / f"{name}.witness"

    def start_owned(self, name: str = "alpha") -> None:
        """Starts an attached engine, as its owner does."""
        self.owned[name] = subprocess.Popen(self.commands[name], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)

    def kill_owned(self, name: str = "alpha") -> None:
        process = self.owned.pop(name)
        process.kill()
        process.wait(10)

    # ---- the agent --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        self.daemon = Daemon(self.settings)
        self._task = asyncio.create_task(self.daemon.run())

    async def stop(self) -> None:
        """As SIGTERM does."""
        if self.daemon is not None and self._task is not None:
            self.daemon.stop()
            await asyncio.wait_for(self._task, 30)
            self._forget_daemon()

    async def crash(self) -> None:
        """As SIGKILL does, as far as one process can: nothing is wound down, nothing more is written."""
        assert self.daemon is not None
        assert self._task is not None
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        with _cut_off():
            for task in tasks:
                task.cancel()
            _, left = await asyncio.wait(tasks, timeout=20)
            assert not left, f"cut off, and still there: {left}"
            del tasks
            self._forget_daemon()

    def _forget_daemon(self) -> None:
        """Engines outlive the agent object, so their process objects have to, until they are reaped."""
        assert self.daemon is not None
        processes = [keeper.process for keeper in self.daemon.keepers.values()]
        self._children += [process._child for process in processes if process is not None and process._child]
        self.daemon = self._task = None
        with _cut_off():
            gc.collect()

    async def end_everything(self) -> None:
        """Whatever the test left behind: engines, gateway and jobs, by their marks."""
        await self.stop()
        for name in list(self.owned):
            self.kill_owned(name)
        pids: list[int] = []
        for engine_id in (self._engine_ids or {}).values():
            pids += find_by_environ("LULL_ENGINE", engine_id)
        for process in [found for pid in pids if (found := identity(pid))]:
            send_signal(process, signal.SIGKILL)
            await wait_exited(process, 10)
        for child in self._children:
            await asyncio.to_thread(child.wait, 10)
        for socket_path in (self.root / "agent").glob("memory/*.sock"):
            await self._end_process_of(socket_path)
        gate = GatewayGate(self.root / "agent" / "gateway.sock")
        try:
            info = await gate.info()
        except Exception:
            return
        send_signal(info.process, signal.SIGKILL)
        await wait_exited(info.process, 10)

    async def _end_process_of(self, memory_socket: Path) -> None:
        try:
            pid = int(read_state(memory_socket)["pid"])
        except ServiceUnavailable:
            return
        if process := identity(pid):
            send_signal(process, signal.SIGKILL)
            await wait_exited(process, 10)

    _engine_ids: dict[str, str] | None = None

    def keeper(self, name: str = "alpha") -> EngineKeeper:
        assert self.daemon is not None
        self._engine_ids = {keeper.name: keeper.engine_id for keeper in self.daemon.keepers.values()}
        return next(keeper for keeper in self.daemon.keepers.values() if keeper.name == name)

    async def ready(self, *names: str) -> None:
        for name in names or [engine.name for engine in self.engines]:
            keeper = self.keeper(name)

            def routed(keeper: EngineKeeper = keeper) -> bool:
                return keeper.verified and keeper.gate_state is GateState.OPEN

            await wait_until_async(
                routed,
                60,
                f"engine {name} verified and open (state {keeper.state}, {keeper.reason})",
            )

    # ---- orders and reports -----------------------------------------------------------------------------------

    async def order(self, order: Any, term: int = 1) -> None:
        assert self.daemon is not None
        seq = self.daemon.journal.highest("orders_after") + 1
        await self.daemon.orders.take(OrderEnvelope(seq=seq, term=term, order=order))

    def job(self, argv: list[str], **fields: Any) -> AttemptSpec:
        number = next(self._seq)
        values: dict[str, Any] = {
            # What an attempt left is found by its id on the whole machine, where other tests run as well.
            "attempt_id": f"attempt-{number}-{secrets.token_hex(4)}",
            "job_id": f"job-{number}",
            "attempt_no": 1,
            "argv": argv,
            "device_ids": self.device_ids[:1],
            "hbm_bytes": 2 * MIB,
            "kill_grace_seconds": 1.0,
        }
        return AttemptSpec.model_validate({**values, **fields})

    @property
    def device_ids(self) -> list[str]:
        assert self.daemon is not None
        return sorted(self.daemon.node.devices, key=lambda key: self.daemon.node.devices[key].index)  # type: ignore[union-attr]

    async def open_loan(
        self,
        *attempts: AttemptSpec,
        engines: list[str] | None = None,
        need_bytes: int | None = None,
        restore_by_seconds: float = 600.0,
        loan_id: str = "loan-1",
        epoch: int = 1,
        device_ids: list[str] | None = None,
        need_bytes_by_device: dict[str, int] | None = None,
        expects_more: bool = False,
        plans: dict[str, Plan] | None = None,
    ) -> str:
        keepers = [self.keeper(name) for name in (engines if engines is not None else [self.engines[0].name])]
        devices = device_ids or sorted({d for keeper in keepers for d in keeper.device_ids}) or self.device_ids[:1]
        order = OpenLoan(
            loan_id=loan_id,
            epoch=epoch,
            device_ids=devices,
            engine_ids=[keeper.engine_id for keeper in keepers],
            need_bytes=need_bytes if need_bytes is not None else sum(a.hbm_bytes for a in attempts),
            restore_by_seconds=restore_by_seconds,
            policies={keeper.engine_id: keeper.policy for keeper in keepers},
            attempts=list(attempts),
            need_bytes_by_device=need_bytes_by_device,
            expects_more=expects_more,
            plans={self.keeper(name).engine_id: plan for name, plan in (plans or {}).items()},
        )
        await self.order(order)
        return loan_id

    def reports(self, kind: str) -> list[dict[str, Any]]:
        assert self.daemon is not None
        unsent = self.daemon.journal.unsent(100_000)
        return [one["report"] for one in unsent if one["report"]["kind"] == kind]

    def states(self, loan_id: str = "loan-1") -> list[str]:
        """The states that the loan went through, repeats left out."""
        seen = [one["state"] for one in self.reports("loan_changed") if one["loan_id"] == loan_id]
        return [state for state, _ in itertools.groupby(seen)]

    def steps(self, loan_id: str = "loan-1") -> list[LoanStep]:
        assert self.daemon is not None
        return [row.step for row in self.daemon.journal.steps(loan_id)]

    def data_of(self, step: LoanStep, loan_id: str = "loan-1") -> dict[str, Any]:
        """What was written down with the last such step."""
        assert self.daemon is not None
        return next(row.data for row in reversed(self.daemon.journal.steps(loan_id)) if row.step is step)

    def loan(self, loan_id: str = "loan-1") -> Loan:
        assert self.daemon is not None
        return self.daemon.loans[loan_id]

    def log_of(self, attempt_id: str) -> bytes:
        """What the attempt wrote to stdout so far."""
        try:
            return read_log(self.root / "agent" / "attempts" / attempt_id, "stdout", 0).data
        except FileNotFoundError:
            return b""

    def last_reason(self, loan_id: str = "loan-1") -> dict[str, Any] | None:
        reasons = [one["reason"] for one in self.reports("loan_changed") if one["loan_id"] == loan_id]
        return next((reason for reason in reversed(reasons) if reason), None)

    def attempt_end(self, attempt_id: str) -> dict[str, Any] | None:
        ends = [r for r in self.reports("attempt_changed") if r["attempt_id"] == attempt_id and r["state"] == "ended"]
        assert len(ends) <= 1, f"attempt {attempt_id} ended more than once: {ends}"
        return ends[0] if ends else None

    def state(self, loan_id: str = "loan-1") -> LoanState | None:
        assert self.daemon is not None
        row = self.daemon.journal.loan(loan_id)
        return None if row is None else row.state

    async def until(self, look: Callable[[], Any], what: str, seconds: float = 60) -> Any:
        try:
            return await wait_until_async(look, seconds, what)
        except AssertionError as error:
            raise AssertionError(
                f"{error}; states {self.states()}, steps {self.steps()}, reason {self.last_reason()}"
            ) from None

    async def until_closed(self, loan_id: str = "loan-1", seconds: float = 60) -> None:
        await self.until(
            lambda: self.state(loan_id) is LoanState.CLOSED and loan_id not in self.daemon.loans,  # type: ignore[union-attr]
            f"loan {loan_id} closed",
            seconds,
        )

    # ---- clients ----------------------------------------------------------------------------------------------

    async def ask(self, model: str = "alpha", prompt: str = "hello", port: int | None = None) -> httpx.Response:
        """One completion through the gateway, as a client would."""
        url = f"http://127.0.0.1:{port or self.gateway_port}/v1/completions"
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await client.post(url, json={"model": model, "prompt": prompt, "max_tokens": 4, "temperature": 0})

    def witness(self, name: str = "alpha") -> list[dict[str, Any]]:
        path = self.witness_path(name)
        if not path.exists():
            return []
        return [json.loads(line) for line in path.read_text().splitlines()]


@asynccontextmanager
async def agent_node(
    root: Path, *engines: EngineUnderTest, capacities: list[int] | None = None, **settings: Any
) -> AsyncIterator[AgentNode]:
    """A started node whose engines are verified. Its processes are another test's, if one left them in order."""
    wanted = list(engines) or [EngineUnderTest()]
    node = await kept_nodes.take(root, wanted, capacities or [16 * MIB], settings)
    kept = False
    try:
        await node.start()
        for engine in wanted:
            if engine.attached:
                node.start_owned(engine.name)
        await node.ready()
        yield node
        kept = await kept_nodes.keep(node)
    finally:
        if not kept:
            await node.end_everything()
            assert not [pid for it in (node._engine_ids or {}).values() for pid in find_by_environ("LULL_ENGINE", it)]
