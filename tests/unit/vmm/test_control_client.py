"""The client against answers of every shape. Against the real routes: tests/integration/vmm."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from lull.vmm import control_client
from lull.vmm.control_client import (
    Conflict,
    ControlClient,
    ControlError,
    EngineUnreachable,
    NotServed,
    OperationFailed,
    OutcomeUnknown,
    RequestInvalid,
    Unauthorized,
)
from lull.vmm.errors import LullMemoryError

KEY = b"secret"


class Server:
    """Answers each connection once with what it was given, and keeps what it was sent."""

    def __init__(self, listener: socket.socket) -> None:
        self.answer = b""
        self.requests: list[bytes] = []
        self._listener = listener
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def respond(self, status: str, body: bytes, headers: str = "") -> None:
        self.answer = f"HTTP/1.1 {status}\r\ncontent-length: {len(body)}\r\n{headers}\r\n".encode() + body

    def _run(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection:
                connection.settimeout(10)
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(65536)
                head, _, body = request.partition(b"\r\n\r\n")
                lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
                while lengths and len(body) < int(lengths[0].split(b":")[1]):
                    body += connection.recv(65536)
                self.requests.append(head + b"\r\n\r\n" + body)
                connection.sendall(self.answer)

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server(socket.create_server(("127.0.0.1", 0)))
    yield server
    server.close()


@pytest.fixture
def client(server: Server) -> ControlClient:
    port = server._listener.getsockname()[1]
    return ControlClient(f"http://127.0.0.1:{port}/engine/", KEY, now=lambda: 1_800_000_000.5, status_seconds_max=10)


def test_requests_are_signed_for_the_route_and_never_twice_alike(client: ControlClient, server: Server) -> None:
    server.respond("200 OK", b'{"status":"success"}')
    client.release(["model", "kv_cache"])
    client.release(["model", "kv_cache"])
    client.resume()
    first, second, third = server.requests
    assert first.startswith(b"POST /engine/release_memory HTTP/1.1\r\n")
    assert first.endswith(b'{"tags": ["model", "kv_cache"]}')
    assert b"content-type: application/json" in first
    assert b"timestamp: 1800000000" in first
    assert b"connection: close" in first
    assert third.startswith(b"POST /engine/resume_memory HTTP/1.1\r\n")
    assert b"content-type" not in third
    nonces = {line for one in server.requests for line in one.split(b"\r\n") if b"nonce" in line}
    assert len(nonces) == 3
    assert second != first


@pytest.mark.parametrize(
    ("status", "body", "kind", "text"),
    [
        (
            "400 Bad Request",
            b'{"error": {"message": "Runtime memory tags must not be empty."}}',
            RequestInvalid,
            "empty",
        ),
        ("400 Bad Request", b'{"error": "the body is not JSON"}', RequestInvalid, "is not JSON"),
        ("413 Content Too Large", b'{"error": "too large"}', RequestInvalid, "too large"),
        ("401 Unauthorized", b'{"detail": "Invalid runtime control request authentication."}', Unauthorized, "Invalid"),
        ("409 Conflict", b'{"error": {"message": "already parked"}}', Conflict, "already parked"),
        ("500 Error", b'{"error": {"message": "state diverged"}}', OperationFailed, "500: state diverged"),
        ("503 Busy", b"no json", OperationFailed, "503: no json"),
        ("500 Error", b"[1]", OperationFailed, r"\[1\]"),
        ("404 Not Found", b'{"detail": "Not Found"}', NotServed, "are the control routes enabled"),
        ("405 Method Not Allowed", b"", NotServed, "405"),
        ("307 Temporary Redirect", b"", NotServed, "307"),
        ("200 OK", b"not json", OperationFailed, "200 without JSON"),
        ("200 OK", b"[" * 100_000, OperationFailed, "200 without JSON"),
    ],
)
def test_every_shape_of_error_has_its_kind(
    client: ControlClient, server: Server, status: str, body: bytes, kind: type[ControlError], text: str
) -> None:
    server.respond(status, body, "location: http://127.0.0.1:1/elsewhere\r\n" if "307" in status else "")
    with pytest.raises(kind, match=text) as caught:
        client.release()
    assert caught.value.status == int(status[:3])
    assert isinstance(caught.value, LullMemoryError)
    assert len(str(caught.value)) < 700
    assert len(server.requests) == 1  # nothing is followed or repeated


@pytest.mark.parametrize(
    "body", [b"{}", b"[]", b'{"state": "asleep", "parked_tags": []}', b'{"state": "parked", "parked_tags": 3}']
)
def test_a_status_that_is_none(client: ControlClient, server: Server, body: bytes) -> None:
    server.respond("200 OK", body)
    with pytest.raises(OperationFailed, match="no memory status"):
        client.status()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 200 OK\r\ncontent-length: 100\r\n\r\nhalf", b"garbage\r\n\r\n"])
def test_no_whole_answer_leaves_the_outcome_open(client: ControlClient, server: Server, answer: bytes) -> None:
    server.answer = answer
    with pytest.raises(OutcomeUnknown, match="ask for the status"):
        client.release()


def test_nothing_is_sent_without_a_connection() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(EngineUnreachable, match="cannot be reached"):
        ControlClient(f"http://127.0.0.1:{port}", KEY).status()


def test_silence_is_bounded() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = ControlClient(f"http://127.0.0.1:{listener.getsockname()[1]}", KEY, operation_seconds_max=0.05)
        with pytest.raises(OutcomeUnknown, match="TimeoutError"):
            client.release()


def test_an_answer_is_read_within_a_bound(
    client: ControlClient, server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_client, "_ANSWER_BYTES_MAX", 10)
    server.respond("200 OK", b'"' + b"x" * 1000 + b'"')
    with pytest.raises(OperationFailed, match="without JSON"):
        client.release()


def test_over_a_unix_socket(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "engine.sock"))
        listener.listen()
        server = Server(listener)
        try:
            server.respond("200 OK", b'{"state": "parked", "parked_tags": ["model"]}')
            assert ControlClient(f"unix:{tmp_path / 'engine.sock'}", KEY).status().parked_tags == ("model",)
        finally:
            server.close()


@pytest.mark.parametrize("url", ["ftp://host", "http://", "unix:", "host:80", "http://host?x=1", "http://host#x"])
def test_bad_urls(url: str) -> None:
    with pytest.raises(ValueError, match="url is"):
        ControlClient(url, KEY)
