"""The real HAProxy, from Debian, with one backend; what is missing fails, since its absence proves nothing."""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
from pathlib import Path

from tests.frozen import freeze
from tests.waiting import wait_until

PROGRAM = shutil.which("haproxy") or "/usr/sbin/haproxy"

_CONFIG = """\
global
    stats socket {socket} mode 600 level admin
    {globals}
defaults
    mode http
    timeout connect 2s
    timeout client 120s
    timeout server 120s
    timeout queue 120s
    {defaults}
frontend clients
    bind 127.0.0.1:{port}
    default_backend llm
backend llm
    {backend}
    server {name} 127.0.0.1:{engine_port} {server}
    {backup}
"""


class Haproxy:
    """One process. ``folder`` must be short enough for a Unix socket."""

    def __init__(
        self,
        folder: Path,
        port: int,
        engine_port: int,
        *,
        name: str = "alpha",
        backup_port: int | None = None,
        server: str = "",
        backend: str = "",
        globals_: str = "",
        defaults: str = "",
    ) -> None:
        self.port = port
        self.socket = folder / f"haproxy-{port}.sock"
        self._config = folder / f"haproxy-{port}.cfg"
        self._log = folder / f"haproxy-{port}.log"
        self._process: subprocess.Popen[bytes] | None = None
        backup = "" if backup_port is None else f"server lull 127.0.0.1:{backup_port} backup"
        self._config.write_text(
            _CONFIG.format(
                socket=self.socket,
                port=port,
                name=name,
                engine_port=engine_port,
                server=server,
                backend=backend,
                backup=backup,
                globals=globals_,
                defaults=defaults,
            )
        )

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> Haproxy:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen([PROGRAM, "-db", "-f", str(self._config)], stdout=log, stderr=log)
        wait_until(self._answers, 10, f"HAProxy answers; it says {self._log.read_text()[-2000:]}")
        return self

    def _answers(self) -> bool:
        assert self._process is not None
        assert self._process.poll() is None, self._log.read_text()[-2000:]
        try:
            return "Uptime_sec" in self.ask("show info")
        except OSError:
            return False

    def ask(self, command: str) -> str:
        with socket.socket(socket.AF_UNIX) as line:
            line.settimeout(5)
            line.connect(str(self.socket))
            line.sendall(command.encode() + b"\n")
            said = bytearray()
            while chunk := line.recv(65536):
                said += chunk
            return said.decode()

    def stop(self) -> None:
        """As a crash: what it was told is gone with it."""
        process, self._process = self._process, None
        if process is not None:
            process.send_signal(signal.SIGCONT)
            process.kill()
            process.wait(10)
            self.socket.unlink(missing_ok=True)

    def restart(self) -> None:
        self.stop()
        self.start()

    def freeze(self) -> None:
        assert self._process is not None
        freeze(self._process.pid)

    def thaw(self) -> None:
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
