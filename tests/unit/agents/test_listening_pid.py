"""How the process of an attached engine is found, and what it costs while there is none."""

from __future__ import annotations

import os
import socket

import psutil
import pytest

from lull.agents.engine_process import listening_pid


@pytest.mark.parametrize(("family", "host"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_it_is_the_one_that_listens(family: socket.AddressFamily, host: str) -> None:
    with socket.socket(family) as server:
        server.bind((host, 0))
        port = server.getsockname()[1]
        assert listening_pid(port) is None  # bound is not listening
        server.listen()
        assert listening_pid(port) == os.getpid()


def test_nobody_s_descriptors_are_looked_through_where_nobody_listens(monkeypatch: pytest.MonkeyPatch) -> None:
    def walk(kind: str) -> list[object]:
        raise AssertionError(f"all {kind} connections were asked for")

    monkeypatch.setattr(psutil, "net_connections", walk)
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        assert listening_pid(server.getsockname()[1]) is None
