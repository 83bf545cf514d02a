"""Whatever a client sends, it ends its own connection at most: nobody else's, and never the service."""

from __future__ import annotations

import array
import contextlib
import os
import socket
import stat
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.service import protocol
from lull.vmm.service.client import ServiceClient
from lull.vmm.service.errors import (
    InvalidRequest,
    LayoutInvalid,
    MalformedFrame,
    ServiceRefused,
    ServiceUnavailable,
    to_wire,
)
from lull.vmm.service.holdings import Holdings, Limits
from lull.vmm.service.pool import Piece, ServicePool
from lull.vmm.service.state import Lock
from tests.integration.memory_service.conftest import World
from tests.memory_clients import TAG
from tests.memory_services import MIB
from tests.service_here import service_here
from tests.waiting import wait_until

OPS = [
    *("state", "events", "hello", "resume", "allocate", "donate", "free", "put", "delete"),
    *("commit", "slots", "entries", "export", "prepare_park", "abort_park", "commit_park", "confirm"),
    *("seal", "begin_write", "end_write", "torn", "places", "leave"),
]
HELLO = {"op": "hello", "version": 1, "pool": "w", "lock": "read_write", "wait_seconds": 0, "oom_wait_seconds": 0}
FIELDS = st.sampled_from(
    [
        *("version", "pool", "lock", "wait_seconds", "oom_wait_seconds", "expect_layout", "bytes", "tag", "slot"),
        *("key", "offset", "value", "after", "mode", "keep_backup", "reserved_bytes", "more"),
    ]
)
VALUES: st.SearchStrategy[object] = st.one_of(
    st.integers(-2, 5),
    st.sampled_from([1 << 62, -(1 << 70), 1e300, "w", "x" * 200, "read_only", "parked", "CPU", None, [], {}, True]),
    st.text(max_size=5),
)


def exchange(world: World, *frames: bytes, fds: tuple[int, ...] = ()) -> list[protocol.Message]:
    """Sends them on one connection, and what came back until it was closed or all were answered."""
    answers: list[protocol.Message] = []
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as connection:
        connection.settimeout(10)
        connection.connect(str(world.service.socket))
        for frame in frames:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                connection.sendmsg([frame], rights)
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_WR)
        with contextlib.suppress(ConnectionResetError):
            while received := protocol.receive(connection, first_byte_seconds_max=10):
                answers.append(received[0])
                protocol.close_quietly(received[1])
    return answers


@settings(max_examples=40, deadline=None)
@given(data=st.binary(min_size=1, max_size=80))
def test_bytes_that_are_no_frames_end_one_connection(module_world: World, data: bytes) -> None:
    exchange(module_world, data)
    assert module_world.service.state()["ok"]


@settings(max_examples=60, deadline=None)
@given(
    requests=st.lists(
        st.tuples(st.sampled_from([*OPS, "", "nonsense"]), st.dictionaries(FIELDS, VALUES, max_size=5)), max_size=4
    ),
    begins=st.booleans(),
    with_fd=st.booleans(),
)
def test_requests_that_make_no_sense_end_one_connection(
    module_world: World, requests: list[tuple[str, dict[str, object]]], begins: bool, with_fd: bool
) -> None:
    messages: list[dict[str, object]] = [{**HELLO}] if begins else []
    messages += [{**fields, "op": op} for op, fields in requests]
    frames = [protocol.pack(message) for message in messages]
    fds = (module_world.clients.process.stdin.fileno(),) if with_fd else ()  # type: ignore[union-attr]
    answers = exchange(module_world, *frames, fds=fds)
    assert len(answers) <= len(frames)
    assert module_world.service.state()["ok"]


def test_nothing_of_all_that_is_left(world: World) -> None:
    """Runs after the two above: what they sent has left no descriptor, mapping, thread or pool."""
    wait_until(lambda: world.service.footprint()[2] == 1, 20, "their connections ended")
    world.clear()
    before = world.service.footprint_at_rest()
    holder = world.clients.hold("w")
    exchange(world, b"\xff" * 40)
    exchange(world, protocol.pack(HELLO)[:-1])
    exchange(world, protocol.pack({"op": "nonsense"}), fds=(0, 1, 2))
    exchange(world, protocol.pack(HELLO), protocol.pack({"op": "donate", "bytes": 1}), fds=(0,))
    assert world.service.pool()["reader_pids"] == [holder], "whoever has a lock keeps it"
    world.clients.kill(holder)
    wait_until(lambda: world.service.pool()["reader_pids"] == [], 10, "the holder gone")
    world.clear()
    assert world.service.footprint_at_rest() == before


@pytest.mark.parametrize(
    ("message", "code", "match"),
    [
        ({"op": "nonsense"}, "malformed", "knows no such request"),
        ({"op": ["hello"]}, "malformed", "knows no such request"),
        ({}, "malformed", "knows no such request"),
        ({"op": "commit"}, "malformed", "comes before hello"),
        ({**HELLO, "more": 1}, "invalid", "unknown field 'more'"),
        ({**HELLO, "pool": "../w"}, "invalid", "pool is"),
        ({**HELLO, "lock": "read"}, "invalid", "lock is"),
        ({**HELLO, "wait_seconds": -1}, "invalid", "wait_seconds is"),
        ({**HELLO, "lock": "parked"}, "invalid", "expect_layout is missing"),
        ({"op": "events", "after": "0"}, "invalid", "after is"),
    ],
)
def test_what_is_wrong_with_a_request_is_said(world: World, message: dict[str, object], code: str, match: str) -> None:
    (answer,) = exchange(world, protocol.pack(message))
    assert answer["ok"] is False
    assert answer["error"]["code"] == code
    assert match in answer["error"]["text"]


def test_a_request_with_bad_values_keeps_its_lock_and_what_was_written(world: World) -> None:
    with contextlib.closing(world.service.client()) as client:
        client.ask(**HELLO)  # type: ignore[arg-type]
        answer, fd = client.ask_fd("allocate", bytes=MIB, tag=TAG, oom_wait_seconds=0)
        os.close(fd)
        put: dict[str, Any] = {"slot": answer["slot"], "key": "k", "offset": 0, "bytes": 1, "value": None}
        bad: list[dict[str, Any]] = [
            *({"bytes": 0}, {"bytes": 5.5}, {"key": ""}, {"key": "k" * 513}, {"offset": -1}, {"value": "v" * 20000}),
            *({"bytes": 2 * MIB}, {"slot": 7}, {"more": 1}),
        ]
        for wrong in bad:
            (field,) = wrong
            with pytest.raises((InvalidRequest, LayoutInvalid), match=f"{field} |entry k|field"):
                client.ask("put", **(put | wrong))
        too_long: dict[str, Any] = {"value": "v" * protocol.FRAME_BYTES_MAX}
        with pytest.raises(MalformedFrame, match="longer than"):
            client.ask("put", **(put | too_long))
        client.ask("put", **put)
        client.ask("commit")


def test_hello_comes_once(world: World) -> None:
    first, second = exchange(world, protocol.pack(HELLO), protocol.pack(HELLO))
    assert first["granted"] == "read_write"
    assert second["error"]["text"] == "hello comes twice"


def test_another_version_is_refused_with_what_to_do(world: World) -> None:
    (answer,) = exchange(world, protocol.pack({**HELLO, "version": 2}))
    assert answer["error"]["code"] == "refused"
    assert "this service speaks 1" in answer["error"]["text"]


def test_a_descriptor_where_none_belongs_and_none_where_one_belongs(world: World) -> None:
    (answer,) = exchange(world, protocol.pack(HELLO), fds=(0,))
    assert answer["error"]["text"] == "hello takes no descriptor"
    donate = {"op": "donate", "bytes": 1, "tag": TAG, "key": "k", "reserved_bytes": 1}
    _, answer = exchange(world, protocol.pack(HELLO), protocol.pack(donate))
    assert answer["error"]["text"] == "donate comes without a descriptor"


def test_a_donated_descriptor_must_be_memory_of_the_device(world: World) -> None:
    client = world.service.client()
    client.ask(**HELLO)  # type: ignore[arg-type]
    with pytest.raises(Exception, match="is not memory of device"):
        client.call("donate", fd=0, bytes=1, tag=TAG, key="k", reserved_bytes=2 * MIB)
    driver = HostDriver(world.device)
    handle = driver.create(2 * MIB)
    fd = driver.export_handle(handle)
    with pytest.raises(Exception, match="not within"):
        client.call("donate", fd=fd, bytes=3 * MIB, tag=TAG, key=handle.key, reserved_bytes=2 * MIB)
    os.close(fd)
    driver.release(handle)
    client.close()


def test_socket_and_folder_are_private(world: World) -> None:
    assert stat.S_IMODE(world.service.socket.stat().st_mode) == 0o600
    assert stat.S_IMODE(world.service.socket.parent.stat().st_mode) == 0o700


def test_clients_pools_and_silence_are_bounded(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    limits = Limits(clients_max=3, pools_max=1, silent_seconds_max=0.2)
    with service_here(Holdings(HostDriver(device), limits), tmp_path / "s" / "m.sock") as connect:
        first = connect()
        first.ask(**{**HELLO, "pool": "a"})  # type: ignore[arg-type]
        second = connect()
        with pytest.raises(ServiceRefused, match="1 pools already"):
            second.ask(**{**HELLO, "pool": "b"})  # type: ignore[arg-type]
        second.ask("state")
        wait_until(lambda: not second.connected, 5, "who says nothing and holds nothing is dropped")
        third, fourth = connect(), connect()
        third.ask("state")
        fourth.ask("state")
        with pytest.raises(ServiceRefused, match="3 clients, and 3 at most"):
            connect().ask("state")
        assert first.connected, "a lock may be silent for ever"


def test_silent_connections_shut_nobody_out(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    limits = Limits(clients_max=3, silent_seconds_max=300, crowded_silent_seconds_max=0.0)
    with service_here(Holdings(HostDriver(device), limits), tmp_path / "s" / "m.sock") as connect:
        silent = [connect() for _ in range(3)]
        locked = connect()
        locked.ask(**HELLO)  # type: ignore[arg-type]
        assert [one.connected for one in silent] == [False, True, True], "the one that was silent longest has gone"
        for _ in range(4):
            assert connect().ask("state")["ok"]
        assert locked.connected


def test_a_refusal_reaches_a_client_that_has_not_spoken_yet(tmp_path: Path) -> None:
    path = tmp_path / "s"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(path))
        listener.listen()
        client = ServiceClient(path)
        connection, _ = listener.accept()
        with connection:
            protocol.send(connection, {"ok": False, "error": to_wire(ServiceRefused("64 at most"))})
        with pytest.raises(ServiceRefused, match="64 at most"):
            client.ask("state")
        assert not client.connected


def test_a_client_waits_for_a_service_no_longer_than_it_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    stale = tmp_path / "stale"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(str(stale))
    for path in (tmp_path / "missing", stale):
        caplog.clear()
        began = time.monotonic()
        with pytest.raises(ServiceUnavailable, match=r"after 0\.2 s; is `lull memory-service` running"):
            ServicePool(HostDriver(device), path, "w", wait_seconds=0.2)
        assert time.monotonic() - began < 5
        assert "does not answer yet; waiting for it up to 0.2 s" in caplog.text
    (tmp_path / "file").write_text("")
    began = time.monotonic()
    with pytest.raises(ServiceUnavailable, match="this is no socket"):
        ServicePool(HostDriver(device), tmp_path / "file", "w")
    assert time.monotonic() - began < 5


def test_one_driver_uses_a_pool_once(world: World) -> None:
    driver = HostDriver(world.device)
    first = world.attach(Lock.READ_WRITE_OR_READ_ONLY, driver)
    first.build({"x": Piece(5)})
    first.commit()
    with pytest.raises(ServiceRefused, match=r"pool w .* is used with this driver already; use that ServicePool"):
        world.attach(Lock.READ_ONLY, driver)
    other = world.attach(Lock.READ_ONLY)  # another driver, as in another process
    other.close()
    first.close()
    world.attach(Lock.READ_ONLY, driver).close()


def test_other_users_are_refused(tmp_path: Path) -> None:
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    holdings = Holdings(HostDriver(device))
    us = os.geteuid()
    refused = pytest.raises(ServiceRefused, match=f"user {us} may not")
    with service_here(holdings, tmp_path / "a" / "m.sock", allowed_uids=[us + 1]) as connect, refused:
        connect().ask("state")
    with service_here(holdings, tmp_path / "b" / "m.sock", allowed_uids=[us + 1, us]) as connect:
        assert connect().ask("state")["ok"]


def test_a_client_that_does_not_understand_the_answer_says_so(tmp_path: Path) -> None:
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "s"))
    listener.listen()
    client = ServiceClient(tmp_path / "s")
    connection, _ = listener.accept()
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    with pytest.raises(ServiceUnavailable) as caught:
        client.ask("state")
    assert isinstance(caught.value.__cause__, MalformedFrame)
    assert not client.connected
    connection.close()
    listener.close()
