"""A model that a server keeps in a child process: started to load it, ended to unload it, asked over HTTP."""

from __future__ import annotations

import argparse
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

from tests.engines.plain_server import Reply


class ChildModel:
    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._port = 0
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        return None if self._child is None else self._child.poll()

    def start(self) -> None:
        options = self._options
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        argv = [sys.executable, str(Path(__file__).with_name("plain_server.py")), "--port", str(self._port)]
        argv += ["--device", options.device, "--model", options.model, "--weights-mib", str(options.weights_mib)]
        argv += ["--kv-mib", str(options.kv_mib), *(["--faults", options.faults] if options.faults else [])]
        self._child = subprocess.Popen([*argv, "--dies-with", str(os.getpid())], stderr=subprocess.DEVNULL)

    def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(10)

    def wait_ready(self, seconds_max: float = 30.0) -> bool:
        """False if it ended instead."""
        deadline, never = time.monotonic() + seconds_max, threading.Event()
        while self.alive and time.monotonic() < deadline:
            try:
                if self.ask("GET", "/health", b"").status == 200:
                    return True
            except OSError:
                never.wait(0.02)
        return False

    def ask(self, method: str, path: str, body: bytes) -> Reply:
        url = f"http://127.0.0.1:{self._port}{path}"
        request = urllib.request.Request(url, data=body or None, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as reply:
                return Reply(reply.status, reply.read(), reply.headers["content-type"])
        except urllib.error.HTTPError as error:
            return Reply(error.code, error.read(), error.headers["content-type"])
