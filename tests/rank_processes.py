"""Real processes that are ranks of one engine. One interpreter imports once and forks them; it is also what they run.

A rank says where it stands when it was asked to stop there: ``preparing`` (in its release hook), ``committing`` (before
its first unmap), ``waking`` (in its resume hook). Commands and answers are JSON lines over a Unix socket.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tests.waiting import wait_until

if TYPE_CHECKING:
    from lull.vmm.ranks import RankedRuntime

SECONDS_MAX = 30
GRANULE_BYTES = 64 << 10
WEIGHTS_BYTES = 3 * GRANULE_BYTES


class RankProcess:
    """The test's side of one rank."""

    def __init__(self, connection: socket.socket) -> None:
        connection.settimeout(SECONDS_MAX)
        self._connection = connection
        self._file = connection.makefile("rw", encoding="utf-8")
        self._said: list[dict[str, Any]] = []
        hello = json.loads(self._file.readline())
        self.rank, self.pid = int(hello["rank"]), int(hello["pid"])

    def tell(self, **command: object) -> None:
        self._file.write(json.dumps(command) + "\n")
        self._file.flush()

    def heard(self, kind: str) -> Any:
        """The next answer of that kind; others are kept."""
        while True:
            for position, answer in enumerate(self._said):
                if kind in answer:
                    return self._said.pop(position)[kind]
            line = self._file.readline()
            assert line, f"rank {self.rank} is gone"
            self._said.append(json.loads(line))

    def stop_at(self, step: str) -> None:
        self.tell(stop_at=step)
        self.heard("armed")

    def ask(self, what: str) -> Any:
        self.tell(do=what)
        return self.heard(what)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def close(self) -> None:
        self.kill()
        self._file.close()
        self._connection.close()

    def failed(self) -> str:
        """Waits until it is, and says why."""
        wait_until(lambda: self.ask("memory")["state"] == "failed", SECONDS_MAX, f"rank {self.rank} failing")
        return str(self.ask("memory")["failure"])


class RankProcesses:
    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._listener.bind(str(folder / "control"))
        self._listener.listen(16)
        self._listener.settimeout(SECONDS_MAX)
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.rank_processes", str(folder / "control")],
            stdin=subprocess.PIPE,
            cwd=Path(__file__).parent.parent,
            text=True,
        )
        self._engines = 0
        self._running: list[RankProcess] = []

    def start(self, ranks: int, **settings: float) -> list[RankProcess]:
        """All ranks of a new engine, joined. Those of the last one are killed."""
        self.stop()
        self._engines += 1
        folder = self._folder / str(self._engines)
        folder.mkdir()
        assert self._process.stdin is not None
        for rank in range(ranks):
            order = {"rank": rank, "ranks": ranks, "folder": str(folder), "settings": settings}
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
            connection, _ = self._listener.accept()
            self._running.append(RankProcess(connection))
        for one in self._running:
            one.heard("ready")
        return list(self._running)

    def stop(self) -> None:
        while self._running:
            self._running.pop().close()

    def close(self) -> None:
        self.stop()
        self._process.communicate(timeout=SECONDS_MAX)
        self._listener.close()


# -- inside


def serve(control: str) -> None:
    import lull.vmm.pool
    import lull.vmm.ranks  # noqa: F401  what a rank needs is imported before the fork

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    for line in sys.stdin:
        if os.fork() == 0:
            Inside(control, **json.loads(line)).run()
            os._exit(0)


class Inside:
    """One rank. Its memory is a pool of three granules, filled with its number."""

    def __init__(self, control: str, rank: int, ranks: int, folder: str, settings: dict[str, float]) -> None:
        from lull.vmm.host_device import HostDevice
        from lull.vmm.host_driver import HostDriver
        from lull.vmm.pool import Pool
        from lull.vmm.runtime import Runtime

        self.rank, self.ranks = rank, ranks
        self.socket_path, self.settings = Path(folder) / "ranks", settings
        self._stop_at: set[str] = set()
        self._go = threading.Event()
        self._saying = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        connection.connect(control)
        self._file = connection.makefile("rw", encoding="utf-8")
        stop = self.stop

        class Stopping(HostDriver):
            def unmap(self, address: int, nbytes: int) -> None:
                stop("committing")
                super().unmap(address, nbytes)

        device = HostDevice.create(Path(folder) / f"device{rank}", capacity_bytes=64 * GRANULE_BYTES)
        self.pool = Pool(Stopping(device, granularity_bytes=GRANULE_BYTES))
        self.weights = self.pool.allocate(WEIGHTS_BYTES, "model_weights")
        ctypes.memset(self.weights.address, rank + 1, WEIGHTS_BYTES)
        self.runtime = Runtime(self.pool)
        self.runtime.on_release(lambda tags: self.stop("preparing"))
        self.runtime.on_resume(lambda tags: self.stop("waking"))

    def say(self, **answer: object) -> None:
        with self._saying:
            self._file.write(json.dumps(answer) + "\n")
            self._file.flush()

    def stop(self, step: str) -> None:
        if step in self._stop_at:
            self._stop_at.discard(step)
            self._go.clear()
            self.say(stopped=step)
            self._go.wait(SECONDS_MAX)

    def run(self) -> None:
        from lull.vmm.ranks import RankedRuntime, RankFollower, RankSettings

        self.say(rank=self.rank, pid=os.getpid())
        settings = RankSettings(**self.settings)
        leader: RankedRuntime | None = None
        if self.rank == 0:
            leader = RankedRuntime(self.runtime, self.socket_path, self.ranks, settings)
            threading.Thread(target=self.say_when_joined, args=(leader,), daemon=True).start()
        else:
            follower = RankFollower(self.runtime, self.socket_path, self.rank, self.ranks, settings)
            self.say(ready=follower.runtime is self.runtime)
        for line in self._file:
            self.obey(json.loads(line), leader)

    def say_when_joined(self, leader: RankedRuntime) -> None:
        self.say(ready=leader.wait_joined(SECONDS_MAX))

    def obey(self, command: dict[str, Any], leader: Any) -> None:
        if "stop_at" in command:
            self._stop_at.add(command["stop_at"])
            self.say(armed=True)
        elif "go" in command:
            self._go.set()
        elif command["do"] == "memory":
            self.say(memory=self.memory())
        elif command["do"] == "status":
            status = leader.status()
            self.say(status={"state": status.state, "parked_tags": status.parked_tags, "failure": leader.failure})
        else:
            threading.Thread(target=self.operate, args=(command["do"], leader), daemon=True).start()

    def operate(self, verb: str, leader: Any) -> None:
        error = ""
        try:
            getattr(leader, verb)()
        except Exception as raised:
            error = f"{type(raised).__name__}: {raised}"
        self.say(**{verb: error})

    def memory(self) -> dict[str, object]:
        status = self.runtime.status()
        return {
            "state": status.state,
            "failure": self.runtime.failure,
            "bytes": self.pool.device_bytes(),
            "intact": self.contents() == bytes([self.rank + 1]) * WEIGHTS_BYTES,
        }

    def contents(self) -> bytes:
        """By a system call: a park may take the memory away just now."""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            try:
                return os.pread(memory.fileno(), WEIGHTS_BYTES, self.weights.address)
            except OSError:
                return b""


if __name__ == "__main__":
    serve(sys.argv[1])
