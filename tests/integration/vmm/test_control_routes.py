"""Our client against our routes, mounted in a real server."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.routing import Mount

from lull.vmm.control import control_app
from lull.vmm.control_client import Conflict, ControlClient, NotServed, RequestInvalid, Unauthorized
from lull.vmm.lifecycle import MemoryState
from lull.vmm.pool import Pool
from lull.vmm.runtime import MemoryStatus, Runtime
from tests.memory import GRANULE_BYTES, read, small_driver, write
from tests.waiting import wait_until

KEY = b"the key"


@pytest.fixture
def runtime(tmp_path: Path) -> Iterator[Runtime]:
    pool = Pool(small_driver(tmp_path / "device"))
    write(pool.allocate(GRANULE_BYTES, "model"), b"weights")
    pool.allocate(GRANULE_BYTES, "kv_cache")
    yield Runtime(pool)
    pool.close()


@pytest.fixture
def port(runtime: Runtime) -> Iterator[int]:
    app = Starlette(routes=[Mount("/engine", app=control_app(runtime, KEY))])
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_until(lambda: server.started, 30, "the server")
    yield server.servers[0].sockets[0].getsockname()[1]
    server.should_exit = True
    thread.join(30)


def test_park_and_wake_over_http(runtime: Runtime, port: int) -> None:
    client = ControlClient(f"http://127.0.0.1:{port}/engine", KEY)
    assert client.status() == MemoryStatus(MemoryState.RUNNING, ())
    client.release(["model", "kv_cache"])
    client.release(["model"])
    assert client.status() == MemoryStatus(MemoryState.PARKED, ("kv_cache", "model"))
    with pytest.raises(Conflict, match="already parked"):
        client.release()
    client.resume(["model"])
    assert client.status() == MemoryStatus(MemoryState.PARKED, ("kv_cache",))
    client.resume()
    assert client.status() == runtime.status() == MemoryStatus(MemoryState.RUNNING, ())
    pool = runtime.pools[0]
    assert isinstance(pool, Pool)
    assert read(pool.allocations("model")[0])[:7] == b"weights"


def test_what_the_routes_refuse(port: int) -> None:
    url = f"http://127.0.0.1:{port}/engine"
    with pytest.raises(Unauthorized, match="authentication"):
        ControlClient(url, b"another key").status()
    with pytest.raises(Unauthorized, match="validity window"):
        ControlClient(url, KEY, now=lambda: 1.0).release()
    with pytest.raises(RequestInvalid, match="Invalid runtime memory tag 'weights'"):
        ControlClient(url, KEY).release(["weights"])
    with pytest.raises(RequestInvalid, match="must not be empty"):
        ControlClient(url, KEY).resume([])
    with pytest.raises(NotServed, match="404"):
        ControlClient(f"http://127.0.0.1:{port}", KEY).status()


def test_a_large_body_that_is_only_announced_is_refused_at_once(port: int) -> None:
    with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
        head = "POST /engine/release_memory HTTP/1.1\r\nhost: x\r\ncontent-length: 100000000\r\n\r\n"
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")
