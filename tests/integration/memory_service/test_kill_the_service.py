"""kill -9 of the service after every request: what an engine holds it keeps, and only what was parked there is lost."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path

import pytest

from tests.memory_clients import DEVICE_BYTES, memory_clients
from tests.memory_services import MIB, MemoryService, host_service
from tests.waiting import wait_until

WHOLE, NOT_BUILT, LOST, NOT_SO_LONG = 0, 3, 4, 5
WAKE_REQUESTS = 4  # resume, slots, and an export for each of two allocations


class Restarting:
    """Starts the service again when it has died, as an agent does, until the block ends."""

    def __init__(self, service: MemoryService) -> None:
        self._service = service
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run)

    def __enter__(self) -> None:
        self._thread.start()

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._ended.wait(0.02):
            assert self._service.process is not None
            if self._service.process.poll() is not None:
                self._service.start()


@pytest.mark.long
def test_an_engine_outlives_its_service_at_every_step(tmp_path: Path) -> None:
    outcomes: list[int] = []
    with (
        host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device),
        memory_clients(str(device.path), service.socket) as clients,
    ):
        for step in range(1, 100):
            killed = service.process
            assert killed is not None
            with Restarting(service):
                outcome = clients.outlive(service.pid, step)
                if outcome == NOT_SO_LONG:
                    break
                wait_until(partial(_is_another, service, killed), 20, "another service")
            outcomes.append(outcome)
            pool = wait_until(lambda: _unused(service), 10, "the engine forgotten")
            assert pool is not None
            used_bytes = device.capacity_bytes - device.free_bytes()
            assert used_bytes == pool["resident_bytes"]
            assert used_bytes in (0, DEVICE_BYTES)
            if pool["state"] != "gone":
                assert clients.life() == 0, "what the new service has is right"
            service.kill()
            service.start()
            assert device.free_bytes() == device.capacity_bytes
    assert outcomes[-1] == WHOLE
    assert len(outcomes) > 10
    assert set(outcomes) == {WHOLE, NOT_BUILT, LOST}
    first_built = outcomes.index(WHOLE)
    assert set(outcomes[:first_built]) == {NOT_BUILT}
    assert NOT_BUILT not in outcomes[first_built:]
    lost = [step for step, outcome in enumerate(outcomes) if outcome == LOST]
    assert lost == list(range(lost[0], lost[0] + len(lost))), "only between the end of the park and the last export"
    assert len(lost) <= WAKE_REQUESTS + 1, "the end of the park may be answered before the service is hit"


def _is_another(service: MemoryService, killed: object) -> bool:
    return service.process is not killed


def _unused(service: MemoryService) -> dict[str, object] | None:
    pool = service.pool()
    users = [*pool.get("writer_pids", []), *pool["reader_pids"], *pool.get("parked_pids", [])]
    return None if users else pool
