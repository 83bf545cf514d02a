"""One box under test: `lull server` and `lull agent` as real processes, that tests kill as they like.

Engines are small, everything else is what users run. Whatever is left at the end is ended by its identity.
"""

from __future__ import annotations

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from lull.agents.processes import find_by_environ, identity, is_same, send_signal
from lull.agents.protocol.wire import ProcessIdentity
from lull.api import Client
from lull.api.client import ClientError
from lull.bench.agent_file import EngineEntry, write_agent_toml
from tests.agent_node import free_port
from tests.waiting import wait_until

MIB = 1 << 20
LULL = str(Path(sys.executable).with_name("lull"))


class Box:
    """``engines``: name to its policy, faults and flags. Every engine has a device of its own."""

    def __init__(
        self,
        root: Path,
        engines: dict[str, dict[str, Any]],
        *,
        database_url: str | None,
        capacity: int,
        agent: dict[str, Any] | None = None,
    ) -> None:
        self.root = root
        self.engines = engines
        self.database_url = database_url
        self.capacity = capacity
        self.agent_settings = agent or {}
        self.server_port = free_port()
        self.gateway_port = free_port()
        self.config = root / "agent.toml"
        self._write_agent_toml()
        self.server_process: subprocess.Popen[bytes] | None = None
        self.agent_process: subprocess.Popen[bytes] | None = None
        self._client: Client | None = None
        self._logs = itertools.count()

    def _write_agent_toml(self) -> None:
        settings = {
            "server_url": f"http://127.0.0.1:{self.server_port}",
            "token_file": self.root / "server" / "token",
            "data_dir": self.root / "agent",
            "node_name": "box",
            "settle_poll_seconds": 0.05,
            "engine_poll_seconds": 0.5,
            "host_reserve_bytes": 0,
            "unkillable_seconds_max": 3,
            "gateway": {"listen": f"127.0.0.1:{self.gateway_port}"},
            **self.agent_settings,
        }
        write_agent_toml(self.config, settings, [self._entry(name, wants) for name, wants in self.engines.items()])

    def _entry(self, name: str, wants: dict[str, Any]) -> EngineEntry:
        faults = itertools.chain.from_iterable(("--fault", fault) for fault in wants.get("faults", []))
        return EngineEntry(
            name=name,
            port=free_port(),
            directory=self.root,
            lull=(LULL,),
            weights_bytes=4 * MIB,
            kv_cache_bytes=2 * MIB,
            capacity_bytes=self.capacity,
            policy={"when": "always", "settle_samples": 2, "settle_seconds_max": 2, **wants.get("policy", {})},
            flags=[*faults, *wants.get("flags", [])],
            more={"health_seconds_max": 90, "stop_seconds_max": 5},
        )

    def witness_path(self, name: str) -> Path:
        return self.root / f"{name}.witness"

    # ---- processes --------------------------------------------------------------------------------------------

    def _start(self, *argv: str) -> subprocess.Popen[bytes]:
        with (self.root / f"{argv[0]}-{next(self._logs)}.log").open("wb") as log:
            return subprocess.Popen([LULL, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def start_server(self) -> None:
        argv = ["server", "--data-dir", str(self.root / "server"), "--port", str(self.server_port)]
        if self.database_url is not None:
            argv += ["--database-url", self.database_url]
        self.server_process = self._start(*argv)
        self._forget_client()

        def answers() -> bool:
            assert self.server_process is not None
            if self.server_process.poll() is not None:
                raise AssertionError(f"the server ended with {self.server_process.returncode}:\n{self.log('server')}")
            try:
                return bool(self.client.version())
            except (ClientError, OSError):
                self._forget_client()
                return False

        wait_until(answers, 60, "the server answers")

    def start_agent(self) -> None:
        self.agent_process = self._start("agent", "--config", str(self.config))

    def kill_server(self) -> None:
        assert self.server_process is not None
        self.server_process.kill()
        self.server_process.wait(10)

    def kill_agent(self) -> None:
        assert self.agent_process is not None
        self.agent_process.kill()
        self.agent_process.wait(10)

    def log(self, what: str) -> str:
        files = sorted(self.root.glob(f"{what}-*.log"), key=lambda path: path.stat().st_mtime)
        return files[-1].read_text(errors="replace")[-4000:] if files else ""

    @property
    def client(self) -> Client:
        if self._client is None:
            token = (self.root / "server" / "token").read_text().strip()
            self._client = Client(f"http://127.0.0.1:{self.server_port}", token)
        return self._client

    def _forget_client(self) -> None:
        if self._client is not None:
            self._client.close()
        self._client = None

    # ---- looking ----------------------------------------------------------------------------------------------

    def until(self, look: Callable[[], Any], what: str, seconds: float = 90) -> Any:
        try:
            return wait_until(look, seconds, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n--- agent\n{self.log('agent')}\n--- server\n{self.log('server')}") from None

    def ready(self) -> None:
        def all_open() -> bool:
            engines = self.client.engines()
            return len(engines) == len(self.engines) and all(e.verified and e.gate == "open" for e in engines)

        self.until(all_open, "every engine verified and open")

    def submit(self, argv: list[str], **fields: Any) -> str:
        return str(self.client.submit(argv, **fields).id)

    def until_job(self, job_id: str, *states: str, seconds: float = 90) -> Any:
        def there() -> Any:
            job = self.client.job(job_id)
            return job if job.state in states else None

        return self.until(there, f"job {job_id} {' or '.join(states)}", seconds)

    def until_quiet(self) -> None:
        """No loan is open any more and every engine serves."""
        self.until(lambda: not [loan for loan in self.loans() if loan.state != "closed"], "every loan closed")
        self.ready()

    def loans(self) -> list[Any]:
        return list(self.client.loans().items)

    def witness(self, name: str) -> list[dict[str, Any]]:
        path = self.witness_path(name)
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def strays(self, name: str = "alpha") -> list[dict[str, Any]]:
        """Requests that reached the engine while it was not running: there must never be one."""
        return [line for line in self.witness(name) if line["state"] != "running"]

    # ---- the end ----------------------------------------------------------------------------------------------

    def end_everything(self) -> None:
        self._forget_client()
        for process in (self.agent_process, self.server_process):
            if process is not None and process.poll() is None:
                process.terminate()
                try:
                    process.wait(20)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)
        for found in self._left():
            send_signal(found, signal.SIGKILL)
            wait_until(partial(_gone, found), 10, f"process {found.pid} gone")

    def _left(self) -> list[ProcessIdentity]:
        """Engines, gateway, runners and jobs of this box, by what only they carry."""
        records = [*self.root.glob("agent/engines/*/process.json"), *self.root.glob("agent/attempts/*/identity.json")]
        found: list[ProcessIdentity] = []
        for record in records:
            value = json.loads(record.read_text())
            found.append(ProcessIdentity.model_validate(value.get("process", value)))
        for attempt in self.root.glob("agent/attempts/*"):
            found += [one for pid in find_by_environ("LULL_ATTEMPT", attempt.name) if (one := identity(pid))]
        pid_file = self.root / "agent" / "gateway" / "gateway.pid"
        if pid_file.exists() and (gateway := identity(int(pid_file.read_text().split()[0]))):
            found.append(gateway)
        return [one for one in found if is_same(one)]


def _gone(process: ProcessIdentity) -> bool:
    return not is_same(process)


@contextmanager
def box(
    root: Path,
    engines: dict[str, dict[str, Any]] | None = None,
    *,
    database_url: str | None = None,
    capacity: int = 16 * MIB,
    agent: dict[str, Any] | None = None,
) -> Iterator[Box]:
    """A started box whose engines serve."""
    it = Box(root, engines or {"alpha": {}}, database_url=database_url, capacity=capacity, agent=agent)
    try:
        it.start_server()
        it.start_agent()
        it.ready()
        yield it
    finally:
        it.end_everything()
