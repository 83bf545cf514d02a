"""Reference engines whose weights live in a memory service: loaded once, shared, kept over parks and deaths."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm.host_device import HostDevice
from tests.memory_services import MIB, MemoryService, memory_service
from tests.reference_engines import EngineProcess, engine_process, small_settings


@pytest.fixture
def service(tmp_path: Path) -> Iterator[MemoryService]:
    HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    with memory_service(tmp_path, str(tmp_path / "device")) as service:
        yield service


def started(tmp_path: Path, service: MemoryService, *flags: str) -> Iterator[EngineProcess]:
    with engine_process(tmp_path, "--memory-service", str(service.socket), *flags) as engine:
        engine.wait_listening()
        yield engine


def device_bytes_of_all(engine: EngineProcess) -> int:
    return engine.device.capacity_bytes - engine.device.free_bytes()


async def test_weights_are_loaded_once_and_outlive_the_engine_also_while_it_is_parked(
    tmp_path: Path, service: MemoryService
) -> None:
    first_run = started(tmp_path, service)
    first = next(first_run)
    assert first.said["weights"] == "loaded"
    name = service.state()["pools"][0]["name"]
    async with first.client() as client:
        right = await client.answer()
    second_run = started(tmp_path, service)
    second = next(second_run)
    assert second.said["weights"] == "attached"
    for said in (first.said, second.said):
        assert 0 <= said["weights_seconds"] <= said["ready_seconds"] < 60
    async with first.client() as one, second.client() as two:
        assert await two.answer() == right
        # One copy of 2 MiB of weights, two KV caches of 2 MiB: counted from the pages, and by the device.
        assert device_bytes_of_all(first) == 6 * MIB
        assert service.device_bytes(first.device.uuid) == 2 * MIB

        # The park of one changes nothing while the other one reads, and says so.
        assert (await one.park()).json() == {"status": "success"}
        assert service.pool(name)["state"] == "reading"
        assert service.pool(name)["parked_pids"] == [first.pid]
        assert device_bytes_of_all(first) == 4 * MIB
        assert await two.answer() == right

        # The last one's park gives everything back; the copy lies in the service, which nobody's death touches.
        assert (await two.park()).json() == {"status": "success"}
        assert device_bytes_of_all(first) == 0
        assert service.pool(name)["state"] == "parked"
        assert service.pool(name)["backup_bytes"] >= 2 * MIB
    second.process.send_signal(signal.SIGKILL)
    second.process.wait(10)
    async with first.client() as one:
        assert (await one.wake()).json() == {"status": "success"}
        assert await one.answer() == right
        assert service.pool(name)["backup_bytes"] == 0
    for run in (first_run, second_run):
        run.close()  # type: ignore[attr-defined]


@pytest.mark.long
async def test_a_running_engine_survives_the_service_and_hands_its_weights_to_the_next_one(
    tmp_path: Path, service: MemoryService
) -> None:
    run = started(tmp_path, service)
    engine = next(run)
    name = service.state()["pools"][0]["name"]
    async with engine.client() as client:
        right = await client.answer()
        service.kill()
        assert await client.answer() == right
        service.start()
        assert service.pool(name)["state"] == "gone"
        assert (await client.park()).json() == {"status": "success"}
        assert service.pool(name)["state"] == "parked"
        assert engine.device.free_bytes() == engine.device.capacity_bytes
        assert (await client.wake()).json() == {"status": "success"}
        assert await client.answer() == right

        # What is parked dies with the service: that is said, and nothing wrong is ever served.
        assert (await client.park()).json() == {"status": "success"}
        service.kill()
        service.start()
        assert (await client.wake()).status_code == 500
        assert await client.state() == "failed"
    run.close()  # type: ignore[attr-defined]


def test_faults_of_own_weights_are_refused_with_a_service(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="lose-weights does not work on weights in a --memory-service"):
        small_settings(tmp_path, memory_service=tmp_path / "m.sock", faults=["lose-weights"])
