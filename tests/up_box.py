"""A `lull up` of the tests' own: real server, real agent, one small host device, and no engine."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Generator
from pathlib import Path

from lull.agents.processes import find_by_environ
from lull.api.client import Client, ClientError
from lull.api.schemas import Job
from lull.bench.agent_file import write_agent_toml
from lull.bench.box import free_ports
from lull.cli.up_files import UpPaths, UpRecord, read_record
from lull.cli.up_stop import UP_MARK
from tests.cli_here import run_here
from tests.waiting import wait_until

MIB = 1 << 20
DEVICE_BYTES = 64 * MIB
LULL = (sys.executable, "-P", "-m", "lull.cli")
START_SECONDS = 90


class UpBox:
    """One data directory. `start` and `up.kill()` may follow each other."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.paths = UpPaths(directory.resolve())
        self.port, self.gateway_port = free_ports(2)
        self.up: subprocess.Popen[bytes] | None = None
        directory.mkdir(exist_ok=True)
        self.config = directory / "agent.toml"
        settings = {
            "node_name": "box",
            "devices": [{"path": directory / "device", "capacity_bytes": DEVICE_BYTES}],
            "gateway": {"listen": f"127.0.0.1:{self.gateway_port}"},
        }
        write_agent_toml(self.config, settings)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def environ(self) -> dict[str, str]:
        own = {"LULL_CONFIG": str(self.directory / "cli.toml"), "NO_COLOR": "1"}
        kept = {name: value for name, value in os.environ.items() if not name.startswith("LULL_")}
        return {**kept, **own}

    def start(self) -> None:
        argv = [*LULL, "up", "--config", str(self.config), "--data-dir", str(self.directory), "--port", str(self.port)]
        with (self.directory / "up.log").open("ab") as log:
            self.up = subprocess.Popen(argv, env=self.environ, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait_until(self.ready, START_SECONDS, "a server with one node")

    def ready(self) -> bool:
        if self.up is not None and self.up.poll() is not None:
            said = (self.directory / "up.log").read_text()
            raise AssertionError(f"`lull up` ended with code {self.up.returncode}:\n{said}")
        if not self.paths.token_file.exists():
            return False
        try:
            with self.client() as client:
                return any(node.state == "up" for node in client.nodes())
        except ClientError:
            return False

    def client(self) -> Client:
        return Client(self.url, self.paths.token_file.read_text().strip())

    def job(self, job_id: str) -> Job:
        with self.client() as client:
            return client.job(job_id)

    def run(self, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
        """One command of the CLI, as a user of this box."""
        return run_here(words, {**self.environ, **environ})

    def run_process(self, *words: str, seconds: float = 60) -> subprocess.CompletedProcess[str]:
        """The same in a process of its own, as `lull up` needs it."""
        argv = [*LULL, *words]
        return subprocess.run(argv, env=self.environ, capture_output=True, text=True, timeout=seconds, check=False)

    def stop(self, *words: str) -> subprocess.CompletedProcess[str]:
        return self.run_process("up", "--stop", "--data-dir", str(self.directory), *words, seconds=120)

    def agent_words(self, data_dir: Path) -> tuple[str, ...]:
        """An agent by itself: what `lull up` fills in has to be said."""
        own = ("--server", self.url, "--token-file", str(self.paths.token_file), "--data-dir", str(data_dir))
        return ("agent", "--config", str(self.config), *own)

    def record(self) -> UpRecord:
        record = read_record(self.paths)
        assert record is not None
        return record

    def processes(self) -> list[int]:
        """What was started in this box and lives, jobs and runners excepted."""
        return find_by_environ(UP_MARK, str(self.paths.data_dir))

    def end(self) -> None:
        """Ends what a test has left, however it has left it."""
        if self.up is not None:
            self.stop("--stop-timeout", "30s")
            if self.up.poll() is None:
                self.up.kill()
            self.up.wait(30)
        for pid in self.processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@contextlib.contextmanager
def opened(directory: Path, *, start: bool = True) -> Generator[UpBox]:
    box = UpBox(directory)
    try:
        if start:
            box.start()
        yield box
    finally:
        box.end()
