"""The real server process over loopback: starts, refuses to start, serves an agent, ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
import typer
from typer.testing import CliRunner

from lull.agents.protocol.wire import FetchLog, OpenLoan, ReportBatch
from lull.api import Client, ServerUnreachable
from lull.cli.server import server as server_command
from tests.waiting import wait_until
from tests.wire_node import JSON, order_of

START_SECONDS_MAX = 30
_RUN = "import typer; from lull.cli.server import server; typer.run(server)"


@dataclass
class ServerProcess:
    process: subprocess.Popen[str]
    data_dir: Path
    url: str = ""

    @property
    def token(self) -> str:
        return (self.data_dir / "token").read_text().strip()

    def client(self) -> Client:
        return Client(self.url, self.token, timeout_seconds=10)

    def end(self, number: int = signal.SIGTERM) -> int:
        """The exit code."""
        self.process.send_signal(number)
        return self.process.wait(END_SECONDS_MAX)


END_SECONDS_MAX = 10  # less than any stream lasts by itself
Start = Callable[..., ServerProcess]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    begun: list[ServerProcess] = []

    def begin(*options: str) -> ServerProcess:
        directory = tmp_path / "data"
        argv = [sys.executable, "-c", _RUN, "--data-dir", str(directory), "--port", "0", *options]
        environment = {key: value for key, value in os.environ.items() if not key.startswith("LULL_")}
        server = ServerProcess(
            subprocess.Popen(
                argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, cwd=tmp_path
            ),
            directory,
        )
        begun.append(server)
        wait_until(
            lambda: (directory / "server.json").exists() or server.process.poll() is not None,
            START_SECONDS_MAX,
            "the server to start",
        )
        assert server.process.poll() is None, server.process.communicate()
        server.url = json.loads((directory / "server.json").read_text())["url"]
        return server

    yield begin
    for server in begun:
        if server.process.poll() is None:
            server.process.kill()
        server.process.communicate(timeout=10)


def _refused(capfd: pytest.CaptureFixture[str], *options: str) -> str:
    """The one line on stderr of a server that cannot start; in this process, which is quicker."""
    capfd.readouterr()
    result = CliRunner().invoke(_app(), ["--port", "0", *options])
    assert result.exit_code == 1, result.output
    text = result.stderr + capfd.readouterr().err
    lines = [line for line in text.splitlines() if line.strip()]
    assert len(lines) == 1, text
    return lines[0]


def _app() -> typer.Typer:
    app = typer.Typer()
    app.command()(server_command)
    return app


def test_it_starts_says_where_it_is_holds_its_directory_and_ends(
    start: Start, capfd: pytest.CaptureFixture[str]
) -> None:
    server = start()
    line = _refused(capfd, "--data-dir", str(server.data_dir))
    assert line.startswith(f"lull server: another lull server (pid {server.process.pid}, {server.url}) uses ")
    assert "--data-dir" in line
    assert stat.S_IMODE((server.data_dir / "token").stat().st_mode) == 0o600
    assert stat.S_IMODE(server.data_dir.stat().st_mode) == 0o700
    said = json.loads((server.data_dir / "server.json").read_text())
    assert said["pid"] == server.process.pid
    assert httpx.get(f"{server.url}/livez").text == "ok\n"
    assert httpx.get(f"{server.url}/readyz").status_code == 200
    assert httpx.get(f"{server.url}/api/v1/jobs").status_code == 401
    with server.client() as client:
        job = client.submit(["true"], idempotency_key="k")
        wait_until(lambda: [r.code for r in client.job(job.id).reasons] == ["NoNode"], 10, "the reason to be told")
    assert server.end() == 0
    out, err = server.process.communicate()
    assert out == f"lull server listens on {server.url}\n"
    logged = [json.loads(line) for line in err.splitlines()]
    assert [line["event"] for line in logged] == ["server started", "server stopped"]
    assert not any(server.token in line for line in (out, err))
    assert not (server.data_dir / "server.json").exists()

    again = start()
    with again.client() as client:
        assert client.submit(["true"], idempotency_key="k").id == job.id


def test_nothing_is_lost_when_it_is_killed_and_a_client_outlives_it(start: Start) -> None:
    server = start()
    port = server.url.rpartition(":")[2]
    with server.client() as client:
        ids = [client.submit(["true"], name=str(number)).id for number in range(3)]
        server.end(signal.SIGKILL)
        with pytest.raises(ServerUnreachable):
            client.version()
        (server.data_dir / "server.json").unlink()
        start("--port", port)
        assert [job.id for job in client.all_jobs()] == ids[::-1]


def test_open_streams_do_not_hold_up_the_end(start: Start) -> None:
    server = start()
    headers = {"Authorization": f"Bearer {server.token}"}
    with httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=10) as http:
        _, after = _register(http)
        with (
            http.stream("GET", "/agent/orders", params={"node_id": "n", "after": after}) as orders,
            http.stream("GET", "/events") as events,
            http.stream("GET", "/events") as _unread,
        ):
            lines, texts = orders.iter_lines(), events.iter_text()
            assert next(lines) == '{"seq":0}'
            next(texts)
            server.process.send_signal(signal.SIGTERM)
            assert list(lines) == []
            for _ in texts:
                pass
            assert server.process.wait(END_SECONDS_MAX) == 0


def test_an_agent_registers_reports_and_sends_a_log(start: Start) -> None:
    server = start()
    headers = {"Authorization": f"Bearer {server.token}"}
    with (
        server.client() as client,
        httpx.Client(base_url=f"{server.url}/api/v1", headers=headers, timeout=10) as http,
    ):
        incarnation, after = _register(http)
        job = client.submit(["true"], hbm_bytes=2**20)
        report_id = 0

        def report(**fields: object) -> None:
            nonlocal report_id
            report_id += 1
            entry = {"id": report_id, "at": time.time(), "report": fields}
            batch = ReportBatch(node_id="n", incarnation=incarnation, journal_id="j", reports=[entry])
            answer = http.post("/agent/reports", content=batch.model_dump_json(), headers=JSON)
            assert answer.status_code == 200, answer.text

        with http.stream("GET", "/agent/orders", params={"node_id": "n", "after": after}) as stream:
            orders = (envelope.order for envelope in map(order_of, stream.iter_lines()) if envelope.order is not None)
            loan = next(orders)
            assert isinstance(loan, OpenLoan)
            attempt = loan.attempts[0]
            assert (attempt.job_id, attempt.argv) == (job.id, ["true"])
            named = {"attempt_id": attempt.attempt_id, "job_id": job.id, "loan_id": loan.loan_id}
            report(kind="loan_changed", loan_id=loan.loan_id, epoch=loan.epoch, event=None, state="settling")
            report(kind="loan_changed", loan_id=loan.loan_id, epoch=loan.epoch, event="memory_free", state="lent")
            report(kind="attempt_changed", state="running", started_at=time.time(), **named)
            # A client of its own: one httpx connection pool per thread of talk.
            with subprocess.Popen(
                [sys.executable, "-c", _READ_LOG, server.url, server.token, job.id], stdout=subprocess.PIPE
            ) as reader:
                order = next(order for order in orders if isinstance(order, FetchLog))
                log_headers = {"Lull-Log-Offset": "0", "Lull-Log-End": "1"}
                body = iter([b"hello ", b"world\n"])
                assert http.post(f"/agent/logs/{order.request_id}", content=body, headers=log_headers).is_success
                report(kind="attempt_changed", state="ended", end="exited", exit_code=0, ended_at=time.time(), **named)
                out, _ = reader.communicate(timeout=20)
            assert out == b"hello world\n"
        ended = client.wait(job.id, 10)
        assert (ended.state, ended.exit_code) == ("succeeded", 0)


_READ_LOG = """
import sys
from lull.api import Client
url, token, job_id = sys.argv[1:]
with Client(url, token) as client:
    for chunk in client.logs(job_id, follow=True):
        sys.stdout.buffer.write(chunk)
"""


def test_a_port_in_use_is_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        line = _refused(capfd, "--data-dir", str(tmp_path / "data"), "--port", str(port))
    assert line.endswith(f"port {port} on 127.0.0.1 is in use; stop what uses it, or choose another --port (0: any)")


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--database-url", "postgresql://u:secret@127.0.0.1:1/x"], "database"),
        (["--database-url", "mysql://x"], "not supported"),
        (["--database-url", "sqlite:////proc/none/lull.db"], "database"),
        (["--host", "0.0.0.0"], "--insecure-i-know"),
        (["--host", "no.such.host.invalid"], "no.such.host.invalid"),
        (["--role", "api"], "all"),
        (["--role", "scheduler"], "all"),
        (["--config", "absent.toml"], "absent.toml"),
        (["--data-dir", "/proc/none"], "data directory"),
        (["--port", "70000"], "--port"),
    ],
)
def test_what_cannot_work_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], options: list[str], says: str
) -> None:
    line = _refused(capfd, "--data-dir", str(tmp_path / "data"), *options)
    assert line.startswith("lull server: ")
    assert says in line
    assert "secret" not in line


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("port = 7070\nhost = \n", ["server.toml", "line 2"]),
        ("port = 7070\n\nprot = 1\n", ["server.toml:3: prot: unknown key"]),
        ('port = "many"\n', ["server.toml:1: port: "]),
        ("lease_seconds = -1\n", ["server.toml:1: lease_seconds: "]),
    ],
)
def test_a_malformed_configuration_names_file_line_and_key(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], text: str, says: list[str]
) -> None:
    path = tmp_path / "server.toml"
    path.write_text(text)
    line = _refused(capfd, "--data-dir", str(tmp_path / "data"), "--config", str(path))
    for word in says:
        assert word in line


def test_a_token_that_others_may_read_is_refused(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_text("lull_" + "x" * 43)
    (tmp_path / "token").chmod(0o644)
    assert "chmod 600" in _refused(capfd, "--data-dir", str(tmp_path))


def test_any_interface_is_served_to_who_insists(start: Start) -> None:
    server = start("--host", "0.0.0.0", "--insecure-i-know")
    port = server.url.rpartition(":")[2]
    assert httpx.get(f"http://127.0.0.1:{port}/livez").text == "ok\n"


def _register(http: httpx.Client) -> tuple[int, int]:
    body = {
        "node_id": "n", "name": "n", "version": "0.1.0", "boot_id": "b", "machine_id": "m", "journal_id": "j",
        "devices": [
            {"device_id": "d", "index": 0, "device_kind": "host_discrete", "capacity_bytes": 2**30, "free_bytes": 2**30}
        ],
        "engines": [], "loans": [], "attempts": [],
    }  # fmt: skip
    answer = http.post("/agent/register", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()["incarnation"], answer.json()["orders_after"]
