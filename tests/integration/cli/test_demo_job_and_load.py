"""The demo's job on a real device, and its load against a real HTTP server."""

from __future__ import annotations

import ctypes
import http.server
import json
import subprocess
import sys
import threading
from collections.abc import Generator
from pathlib import Path

import pytest

from lull.cli.demo_job import fill, wrong_blocks
from lull.cli.demo_load import Load, Record, fault_of, read_records, send
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from lull.vmm.pool import Pool
from tests.waiting import wait_until

MIB = 1 << 20


@pytest.fixture
def device(tmp_path: Path) -> HostDevice:
    return HostDevice.create(tmp_path / "device", capacity_bytes=32 * MIB)


def job(device: HostDevice, nbytes: int, **environ: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-P", "-m", "lull.cli.demo_job", "--bytes", str(nbytes), "--seconds", "0"]
    given = {"LULL_HOST_DEVICE": str(device.path), **environ}
    return subprocess.run(argv, env=given, capture_output=True, text=True, timeout=60, check=False)


def test_the_job_fills_its_memory_and_reads_it_back(device: HostDevice) -> None:
    ended = job(device, 12 * MIB)
    assert ended.returncode == 0, ended.stderr
    first, last = map(json.loads, ended.stdout.splitlines())
    assert first == {"allocated_bytes": 12 * MIB, "free_bytes_left": 20 * MIB}
    assert last["wrong_blocks"] == 0
    assert last["read_back_rounds"] == 1


def test_the_job_gets_no_more_than_there_is(device: HostDevice) -> None:
    assert job(device, 40 * MIB).returncode != 0


def test_one_wrong_byte_shows(device: HostDevice) -> None:
    pool = Pool(HostDriver(device))
    allocation = pool.allocate(3 * MIB + 4096, "job")
    fill(allocation, 7)
    assert wrong_blocks(allocation, 7) == 0
    ctypes.memset(allocation.address + 2 * MIB + 5, 0xEE, 1)
    assert wrong_blocks(allocation, 7) in (0, 1)
    ctypes.memset(allocation.address + 2 * MIB, 0xEE, 64)
    assert wrong_blocks(allocation, 7) == 1
    pool.free(allocation)


class Answers(http.server.BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        if body["model"] == "refused":
            self.send_error(503)
            return
        self.send_response(200)
        self.end_headers()
        if body["stream"]:
            self.wfile.write(b'data: {"choices":[{"text":"a"}]}\n\n')
            self.wfile.write(b"" if body["model"] == "broken" else b"data: [DONE]\n\n")
        else:
            self.wfile.write(json.dumps({"choices": [{"text": "a"}]}).encode())

    def log_message(self, format: str, *args: object) -> None:
        """Says nothing."""


@pytest.fixture
def port() -> Generator[int]:
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answers) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_is_one(port: int, stream: bool) -> None:
    record = send("127.0.0.1", port, 1, "alpha", stream)
    assert record.answered, record
    assert record.first_byte is not None
    assert record.sent <= record.first_byte <= (record.ended or 0)


def test_a_refusal_and_a_broken_stream_are_failures(port: int) -> None:
    assert send("127.0.0.1", port, 1, "refused", False).status == 503
    assert send("127.0.0.1", port, 1, "broken", True).error == "the stream broke off"
    assert not send("127.0.0.1", 1, 1, "alpha", False).answered


def test_every_request_of_the_load_is_written_down(port: int, tmp_path: Path) -> None:
    out = tmp_path / "load.jsonl"
    load = Load("127.0.0.1", port, out, 0.0)
    threads = [threading.Thread(target=load.run, args=("alpha", stream)) for stream in (False, True)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(read_records(out)) >= 6, 10, "six requests")
    load.stop.set()
    for thread in threads:
        thread.join(10)
    records = read_records(out)
    assert [record.number for record in records] == list(range(1, len(records) + 1))
    assert all(record.answered for record in records)


def test_a_request_without_an_end_counts_as_not_answered(tmp_path: Path) -> None:
    out = tmp_path / "load.jsonl"
    out.write_text('{"number": 1, "model": "alpha", "sent": 1.0}\n{"number": 2, "mo')
    assert read_records(out) == [Record(1, "alpha", 1.0)]
    assert not read_records(out)[0].answered


@pytest.mark.parametrize("content", [b"", b"[]", b"{}", b'{"choices": []}', b'{"choices": [{"text": null}]}'])
def test_an_answer_without_text_is_none(content: bytes) -> None:
    assert fault_of(200, content, False) is not None
