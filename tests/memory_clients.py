"""Clients of a memory service that die where the test says: forked from one interpreter, so that each costs little."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

SECONDS_MAX = 60
TAG = "model_weights"
A_BYTES, B_BYTES = 3 << 20, 1 << 20
DEVICE_BYTES = 6 << 20  # of the two on a device with granules of 2 MiB

PROGRAM = f"""
import ctypes, os, signal, sys
from pathlib import Path
from lull.vmm.service import client as clients
from lull.vmm.errors import ContentsLost
from lull.vmm.service.errors import ServiceUnavailable
from lull.vmm.service.data_pool import DataPool
from lull.vmm.service.pool import Piece, ServicePool

TAG, A_BYTES, B_BYTES = {TAG!r}, {A_BYTES}, {B_BYTES}
device, socket = sys.argv[1], Path(sys.argv[2])
calls, kill_at, moment, victim = 0, 0, "", os.getpid()
whole_call, whole_wait = clients.ServiceClient.call, clients.ServiceClient._await_answer

def call(self, op, **fields):
    global calls
    calls += 1
    answer = whole_call(self, op, **fields)
    if calls == kill_at and moment == "answered":
        os.kill(os.getpid(), signal.SIGKILL)  # answered, and nothing was made of it
    return answer

def wait(*given, **fields):
    if calls == kill_at and moment == "sent":
        os.kill(os.getpid(), signal.SIGKILL)
    if calls == kill_at and moment == "service":
        os.kill(victim, signal.SIGKILL)
    return whole_wait(*given, **fields)

clients.ServiceClient.call, clients.ServiceClient._await_answer = call, wait

def new_driver():
    if device.startswith("GPU-"):
        from lull.vmm.cuda_driver import CudaDriver
        return CudaDriver(device)
    from lull.vmm import HostDevice, HostDriver
    return HostDriver(HostDevice.open(Path(device)))

def attach(name):
    pool = ServicePool(new_driver(), socket, name, wait_seconds=20)
    if pool.writer:
        regions = pool.build({{"a": Piece(A_BYTES, [1]), "b": Piece(B_BYTES, [2])}}, slab_bytes=2 << 20)
        ctypes.memset(regions["a"].address, 0x5A, A_BYTES)
        ctypes.memset(regions["b"].address, 0xA5, B_BYTES)
        pool.commit()
    return pool

def check(pool):
    regions = pool.regions()
    assert ctypes.string_at(regions["a"].address, A_BYTES) == b"\\x5a" * A_BYTES
    assert ctypes.string_at(regions["b"].address, B_BYTES) == b"\\xa5" * B_BYTES
    assert (regions["a"].value, regions["b"].value) == ([1], [2])

def life(name):
    pool = attach(name)
    check(pool)
    pool.release([TAG])
    pool.resume([TAG])
    check(pool)
    pool.close()

def outlive(name):
    '''A whole life whose service dies in it, and is started again by somebody.'''
    try:
        pool = attach(name)
    except ServiceUnavailable:
        return 3  # never built: as if it had not been
    check(pool)
    for act in (pool.release, pool.resume):
        while True:
            try:
                act([TAG])
                break
            except ServiceUnavailable:
                if act == pool.release:
                    check(pool)  # it goes on as before
            except ContentsLost:
                assert act == pool.resume, "a park loses nothing"
                return 4
    check(pool)
    pool.close()
    return 0 if calls >= kill_at else 5

def hold(name, *acts):
    pool = attach(name)
    for act in acts:
        getattr(pool, act)([TAG])
    print("holds", os.getpid(), flush=True)
    signal.pause()

def write_to_it(name):
    pool = attach(name)
    print("writes", flush=True)
    ctypes.memset(pool.regions()["a"].address, 1, 1)

def adopt(name):
    '''Builds or adopts: the same calls either way. Two allocations, so that one may be torn and the other not.'''
    pool = DataPool(new_driver(), socket, name, wait_seconds=20)
    pool.build({{"a": Piece(B_BYTES, [1]), "b": Piece(B_BYTES, [2])}}, slab_bytes=B_BYTES)
    pool.seal()
    return pool

def put(pool, key, value):
    with pool.writing(key) as regions:
        ctypes.memset(regions[key].address, value, B_BYTES)

def data_life(name):
    pool = adopt(name)
    put(pool, "a", 1)
    put(pool, "b", 1)
    pool.release(["kv_cache"])
    pool.resume(["kv_cache"])
    put(pool, "a", 2)
    pool.close()

def write_half(name):
    pool = adopt(name)
    with pool.writing("a") as regions:
        ctypes.memset(regions["a"].address, 3, B_BYTES // 2)
        print("holds", os.getpid(), flush=True)
        signal.pause()

def write_outside(name):
    pool = adopt(name)
    print("writes", flush=True)
    ctypes.memset(pool.regions()["b"].address, 9, 1)

for line in sys.stdin:
    verb, name, *rest = line.split()
    pid = os.fork()
    if pid == 0:
        os.close(0)
        if verb == "life":
            kill_at, moment = int(rest[0]), rest[1]
            life(name)
        elif verb == "outlive":
            kill_at, moment, victim = int(rest[0]), "service", int(rest[1])
            os._exit(outlive(name))
        elif verb == "data_life":
            kill_at, moment = int(rest[0]), rest[1]
            data_life(name)
        elif verb == "write_half":
            write_half(name)
        elif verb == "write_outside":
            write_outside(name)
        elif verb == "hold":
            hold(name, *rest)
        else:
            write_to_it(name)
        os._exit(0)
    if verb in ("hold", "write_half"):
        continue
    _, status = os.waitpid(pid, 0)
    print("status", os.waitstatus_to_exitcode(status), flush=True)
"""


@dataclass
class Clients:
    """What the test tells the interpreter to fork, and what the children say."""

    process: subprocess.Popen[bytes]
    held: list[int]
    _pending: bytes = b""

    def life(self, name: str = "w", *, kill_at: int = 0, moment: str = "answered") -> int:
        """A whole life with that pool, or one that ends at its ``kill_at``-th call: its exit code."""
        self._say(f"life {name} {kill_at} {moment}")
        return int(self._heard().split()[1])

    def data_life(self, name: str = "kv", *, kill_at: int = 0, moment: str = "answered") -> int:
        """The same with a pool that is sealed for data: builds or adopts it, writes, parks, wakes, writes."""
        self._say(f"data_life {name} {kill_at} {moment}")
        return int(self._heard().split()[1])

    def write_half(self, name: str = "kv") -> int:
        """Adopts, writes the first half of an entry, and stays inside that: its pid."""
        self._say(f"write_half {name}")
        pid = int(self._heard().split()[1])
        self.held.append(pid)
        return pid

    def write_outside(self, name: str = "kv") -> int:
        """Adopts, and writes without having said so: its exit code."""
        self._say(f"write_outside {name}")
        assert self._heard() == "writes"
        return int(self._heard().split()[1])

    def outlive(self, service_pid: int, kill_at: int) -> int:
        """A life in which the service is killed after the ``kill_at``-th request.

        0: whole, 3: not built, 4: lost, 5: not so long.
        """
        self._say(f"outlive w {kill_at} {service_pid}")
        return int(self._heard().split()[1])

    def hold(self, name: str = "w", *acts: str) -> int:
        """Attaches, does ``acts``, and stays: its pid."""
        self._say(f"hold {name} {' '.join(acts)}")
        pid = int(self._heard().split()[1])
        self.held.append(pid)
        return pid

    def write_to(self, name: str = "w") -> int:
        """Writes to what it has read-only: its exit code."""
        self._say(f"write {name}")
        assert self._heard() == "writes"
        return int(self._heard().split()[1])

    def kill(self, pid: int) -> None:
        self.held.remove(pid)
        os.kill(pid, signal.SIGKILL)

    def _say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(f"{line}\n".encode())
        self.process.stdin.flush()

    def _heard(self) -> str:
        assert self.process.stdout is not None
        deadline = time.monotonic() + SECONDS_MAX
        while b"\n" not in self._pending:
            readable, _, _ = select.select([self.process.stdout], [], [], max(0, deadline - time.monotonic()))
            assert readable, f"the clients said nothing for {SECONDS_MAX} s"
            piece = os.read(self.process.stdout.fileno(), 65536)
            assert piece, "the clients' interpreter has ended"
            self._pending += piece
        line, _, self._pending = self._pending.partition(b"\n")
        return line.decode()


@contextmanager
def memory_clients(device: str, socket: Path, environment: Mapping[str, str] | None = None) -> Iterator[Clients]:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, device, str(socket)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, **(environment or {})},
    ) as process:
        clients = Clients(process, [])
        try:
            yield clients
        finally:
            for pid in list(clients.held):
                clients.kill(pid)
            process.kill()
