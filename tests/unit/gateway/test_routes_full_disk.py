"""The gateway's file of routes on a disk that is full: the gates go on, the old file stays, the next call mends it."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.agents.gateway.admission import Terms
from lull.agents.gateway.process import _write_pid_file
from lull.agents.gateway.routes import RouteSpec, RouteTable
from lull.agents.gateway.settings import Limits
from tests.small_disk import SmallDisk, small_disk

MIB = 1 << 20


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", 1 * MIB) as disk:
        yield disk


def table(disk: SmallDisk) -> RouteTable:
    made = RouteTable(disk.path, Limits(), reuse_connections=True)
    made.load()
    return made


def held(disk: SmallDisk) -> list[tuple[str, str]]:
    routes = json.loads((disk.path / "routes.json").read_text())["routes"]
    return [(route["engine_id"], route["terms"]["gate"]) for route in routes]


def spec(number: int) -> RouteSpec:
    return RouteSpec(name=f"engine-{number}", models=(f"model-{number}",), upstream=f"http://127.0.0.1:{9000 + number}")


async def test_a_gate_closes_and_the_file_stays_whole(disk: SmallDisk, caplog: pytest.LogCaptureFixture) -> None:
    routes = table(disk)
    for number in range(40):  # more than the last block of the file has room for
        routes.put(f"e{number}", spec(number))
    await routes.save()
    before = held(disk)
    disk.fill()
    for route in routes:
        route.close(Terms(gate="refuse", hold_requests_max=1, hold_seconds_max=1.0, retry_after_seconds=1))
    with caplog.at_level(logging.ERROR):
        await routes.save()
    assert "disk refuses it" in caplog.text
    assert held(disk) == before
    assert sorted(path.name for path in disk.path.iterdir()) == ["ballast", "routes.json"]
    assert [route.admission.terms.gate for route in routes] == ["refuse"] * 40
    assert len(list(table(disk))) == 40, "a gateway that starts now finds the old file"
    disk.clear()
    await routes.save()
    assert {gate for _, gate in held(disk)} == {"refuse"}


def test_a_pid_file_that_does_not_fit_leaves_nothing(disk: SmallDisk) -> None:
    disk.fill()
    with pytest.raises(OSError, match="No space"):
        _write_pid_file(disk.path / "gateway.pid", 1)
    assert [path.name for path in disk.path.iterdir()] == ["ballast"]
