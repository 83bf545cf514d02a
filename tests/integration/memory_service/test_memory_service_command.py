"""Starting and stopping: one clear line for whatever keeps it from serving, and a clean end."""

from __future__ import annotations

import json
import logging
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import typer

from lull.cli.memory_service import memory_service as command
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service.command import ServiceSettings, run_service
from lull.vmm.service.holdings import Limits
from lull.vmm.service.pool import Piece, ServicePool
from tests.memory_services import MIB, host_service
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def _log_kept() -> Iterator[None]:
    """The command sets up the log of its process, which is the tests' own here."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:], root.level = handlers, level


def refused(tmp_path: Path, capsys: pytest.CaptureFixture[str], socket_path: Path, device: str | None = None) -> str:
    """What a start that fails says; in this process, since it does not get far."""
    HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    assert run_service(ServiceSettings(device=device or str(tmp_path / "device"), socket=socket_path)) == 1
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("lull memory-service: ")
    return lines[0]


def open_folder(path: Path) -> Path:
    folder = path / "open"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    return folder / "m.sock"


def folder_that_is_a_file(path: Path) -> Path:
    (path / "file").write_text("")
    return path / "file" / "m.sock"


def place_that_is_taken(path: Path) -> Path:
    (path / "own").mkdir(mode=0o700)
    (path / "own" / "m.sock").write_text("not a socket")
    return path / "own" / "m.sock"


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (lambda path: path / ("x" * 120) / "m.sock", "longer than the 107 bytes of a Unix socket's path; use another"),
        (open_folder, "is open to others; use a folder of its own, which is made private"),
        (folder_that_is_a_file, "Not a directory|File exists"),
        (place_that_is_taken, "there is a file that is no socket; remove it or use another path"),
    ],
)
def test_what_is_wrong_with_the_socket_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], place: Callable[[Path], Path], match: str
) -> None:
    said = refused(tmp_path, capsys, place(tmp_path))
    assert any(part in said for part in match.split("|")), said


@pytest.mark.parametrize(
    ("device", "match"),
    [("/nowhere", "is not a host device"), ("GPU-00000000-0000-0000-0000-000000000000", "GPU-0000")],
)
def test_what_is_wrong_with_the_device_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], device: str, match: str, new_fake_cuda: Callable[[], object]
) -> None:
    new_fake_cuda()
    assert match in refused(tmp_path, capsys, tmp_path / "s" / "m.sock", device)


def test_a_socket_in_use_is_left_alone_and_a_stale_one_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device):
        said = refused(tmp_path / "other", capsys, service.socket)
        assert "another memory service runs there; stop it or use another socket" in said
        said = refused(tmp_path, capsys, tmp_path / "second" / "m.sock")
        assert f"serves it already (process {service.pid} on socket {service.socket}); attach there" in said
        assert not (tmp_path / "second").exists()
        assert service.state()["pid"] == service.pid
        service.kill()
        assert service.socket.is_socket()
        service.start()  # in the place of the one that was killed
        pool = ServicePool(HostDriver(device), service.socket, "w")
        pool.build({"x": Piece(MIB)})
        pool.commit()

        assert service.stop() == 0
        assert not service.socket.exists()
        assert not (service.state_dir / "memory-service.pid").exists()
        assert "Traceback" not in service.log()
        pool.close()
        assert device.free_bytes() == device.capacity_bytes


def test_a_socket_of_somebody_else_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(folder / "m.sock"))
        listener.listen()
        assert "another process listens there" in refused(tmp_path, capsys, folder / "m.sock")


def test_what_it_holds_is_shown_and_what_nobody_uses_is_dropped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def shown(*flags: str) -> tuple[object, str]:
        with pytest.raises(SystemExit) as ended:
            as_command()(["--socket", str(tmp_path / "service" / "m.sock"), *flags])
        said = capsys.readouterr()
        if ended.value.code:
            return ended.value.code, said.err
        return [(pool["name"], pool["state"], pool["resident_bytes"]) for pool in json.loads(said.out)], said.err

    assert shown("--show")[0] == 1
    with host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device):
        pool = ServicePool(HostDriver(device), service.socket, "old/weights")
        pool.build({"x": Piece(4 * MIB)})
        pool.commit()
        assert shown("--show") == ([("old/weights", "reading", 4 * MIB)], "")
        code, said = shown("--drop", "old/weights")
        assert (code, "used by processes" in str(said)) == (1, True)
        pool.close()
        code, said = shown("--drop", "nope")
        assert (code, "there is no pool 'nope'; it holds [old/weights]" in str(said)) == (1, True)
        wait_until(lambda: service.pool("old/weights")["state"] == "committed", 10, "nobody reads")
        assert shown("--drop", "old/weights") in (([], ""), ([("old/weights", "writing", 0)], ""))
        wait_until(lambda: device.free_bytes() == device.capacity_bytes, 10, "the memory given back")


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"allowed_uids": (-1,)}, "--allow-uid is -1"),
        ({"allowed_uids": (1 << 32,)}, "--allow-uid is"),
        ({"copy_threads": 10**6}, "--copy-threads is 1000000; 1 to 64"),
        ({"limits": Limits(oom_wait_seconds_max=float("nan"))}, "--oom-wait-seconds-max is nan"),
    ],
)
def test_settings_that_cannot_be_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], given: dict[str, Any], match: str
) -> None:
    assert run_service(ServiceSettings(device="/nowhere", socket=tmp_path / "s" / "m.sock", **given)) == 1
    assert match in capsys.readouterr().err
    with pytest.raises(SystemExit):
        as_command()(["--device", "d", "--socket", "s", "--allow-uid", "-1"])


def as_command() -> Callable[[Sequence[str]], None]:
    app = typer.Typer()
    app.command()(command)
    return typer.main.get_command(app)


def test_it_serves_without_a_mapping_until_a_backup_is_wanted(tmp_path: Path) -> None:
    with host_service(tmp_path, capacity_bytes=16 * MIB) as (service, device):
        pool = ServicePool(HostDriver(device), service.socket, "w")
        pool.build({"x": Piece(4 * MIB)})
        pool.commit()
        assert service.footprint()[1] == 0
        pool.release(["model_weights"])
        pool.resume(["model_weights"])
        assert service.footprint()[1] == 0, "mapped for the time of the copies only"
        pool.close()


def test_the_command_line_starts_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[ServiceSettings] = []

    def note(settings: ServiceSettings) -> int:
        asked.append(settings)
        return 0

    monkeypatch.setattr("lull.cli.memory_service.run_service", note)
    argv = ["--device", "d", "--socket", "s", "--state-dir", "t", "--allow-uid", "7", "--oom-wait-seconds-max", "3"]
    with pytest.raises(SystemExit) as ended:
        as_command()(argv)
    assert ended.value.code == 0
    (settings,) = asked
    assert (settings.device, settings.socket, settings.state_dir) == ("d", Path("s"), Path("t"))
    assert (tuple(settings.allowed_uids), settings.limits.oom_wait_seconds_max) == ((7,), 3.0)


def modules_after(code: Sequence[str]) -> str:
    ran = subprocess.run(
        [sys.executable, "-c", "; ".join(code)], capture_output=True, text=True, check=True, timeout=60
    )
    return ran.stdout


def test_the_service_needs_the_standard_library_alone() -> None:
    said = modules_after(
        [
            "import sys, lull.vmm.service.command, lull.vmm.service.pool, lull.vmm.service.scratch",
            "others = 'torch', 'cuda', 'typer', 'pydantic', 'asyncio', 'numpy'",
            "print([name for name in others if name in sys.modules])",
        ]
    )
    assert said == "[]\n"
