"""`lull doctor` beside a real server, agent, gateway and engine, and beside what is really wrong."""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import httpx
import pytest

from lull.agents.gates.base import GateError
from lull.agents.gates.gateway import GatewayGate
from lull.agents.main import STOP_EVERYTHING
from lull.agents.protocol.wire import GateState, Reason
from lull.agents.quarantine import write_quarantine
from lull.vmm.host_device import HostDevice
from lull.vmm.host_driver import HostDriver
from tests.agent_node import free_port
from tests.cli_here import run_here
from tests.engines.spawned import ROOT, spawned, stand_in_command
from tests.odd_json import DEEP
from tests.waiting import wait_until

LULL = str(Path(sys.executable).with_name("lull"))
MIB = 1 << 20


def agent_toml(root: Path, *, more: str = "", engines: str = "", port: int | None = None, server: str = "") -> Path:
    """A file that is in order, but for what the test gives. The device directory is made by the agent alone."""
    token = root / "token"
    if not token.exists():
        token.write_text("lull_test")
        token.chmod(0o600)
    config = root / "agent.toml"
    config.write_text(
        f"""\
server_url = "{server or "http://127.0.0.1:1"}"
token_file = "token"
data_dir = "agent"
node_name = "box"
host_reserve_bytes = 0
{more}
[gateway]
listen = "127.0.0.1:{port or free_port()}"
[[devices]]
path = "device"
capacity_bytes = "16MiB"
{engines}
"""
    )
    return config


def engine_toml(name: str, kind: str, port: int, **more: object) -> str:
    fields = {"name": name, "kind": kind, "models": [name], "url": f"http://127.0.0.1:{port}", "device_indexes": [0]}
    return "[[engines]]\n" + "\n".join(f"{key} = {toml(value)}" for key, value in {**fields, **more}.items())


def toml(value: object) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {json.dumps(item)}" for key, item in value.items()) + " }"
    return json.dumps(value)


def doctor(config: Path, *words: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
    """The exit code, and the findings by check."""
    told = run_here(["doctor", "--config", str(config), "--json", *words], dict(os.environ))
    assert told.stderr == ""
    found: dict[str, list[dict[str, str]]] = {}
    for one in json.loads(told.stdout)["checks"]:
        found.setdefault(one["check"], []).append(one)
    return told.returncode, found


def statuses(found: dict[str, list[dict[str, str]]], check: str) -> list[str]:
    return [one["status"] for one in found[check]]


@contextmanager
def process(root: Path, *argv: str) -> Iterator[subprocess.Popen[bytes]]:
    with open(root / f"{argv[0]}.log", "wb") as log:
        child = subprocess.Popen([LULL, *argv], stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield child
    finally:
        child.terminate()
        child.wait(30)


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The agent's file of a node whose one engine serves."""
    root = tmp_path_factory.mktemp("node")
    server_port, port, engine_port = free_port(), free_port(), free_port()
    argv = stand_in_command("plain_server.py", root, root / "device", engine_port)
    engine = engine_toml("small", "process", engine_port, command=argv, env={"PYTHONPATH": str(ROOT)})
    url = f"http://127.0.0.1:{server_port}"
    config = agent_toml(root, engines=engine, port=port, server=url)
    (root / "token").unlink()
    (root / "token").symlink_to(root / "server" / "token")
    with process(root, "server", "--data-dir", str(root / "server"), "--port", str(server_port)):
        wait_until((root / "server" / "token").exists, 30, "the server's token")
        with process(root, "agent", "--config", str(config)) as agent:
            try:
                wait_until(lambda: agent.poll() is not None or is_routed(root / "agent"), 60, "the engine serves")
                assert agent.poll() is None, (root / "agent.log").read_text()
                yield config
            finally:
                agent.send_signal(STOP_EVERYTHING)
                agent.wait(60)


def is_routed(data_dir: Path) -> bool:
    if not (data_dir / "gateway.sock").exists():
        return False
    try:
        routes = asyncio.run(GatewayGate(data_dir / "gateway.sock").observe_all())
    except GateError:
        return False
    return [one.state for one in routes.values()] == [GateState.OPEN]


def test_a_node_in_order(node: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in node.parent.glob("agent/*.json")}
    code, found = doctor(node)
    bad = [one for findings in found.values() for one in findings if one["status"] == "failed"]
    assert (code, bad) == (0, [])
    for check in ("config", "key_files", "agent", "data_dir", "quarantine", "server", "token", "clock", "versions"):
        assert statuses(found, check) == ["ok"], found[check]
    for check in ("gateway", "gateway_port", "public_route", "engine_bind", "engines", "parked"):
        assert statuses(found, check) == ["ok"], found[check]
    assert "pid" in found["agent"][0]["seen"]
    assert {path: path.stat().st_mtime_ns for path in node.parent.glob("agent/*.json")} == before


def test_words_for_people_and_an_exit_code_that_counts_warnings(node: Path) -> None:
    told = run_here(["doctor", "--config", str(node)], dict(os.environ))
    assert told.returncode == 0
    assert "ok       engines small: " in told.stdout
    assert told.stdout.splitlines()[-1].startswith("0 failed, ")
    warns = "WARNING" in told.stdout
    assert run_here(["doctor", "--config", str(node), "--strict"], dict(os.environ)).returncode == int(warns)


def test_another_agent_of_the_same_port_and_a_token_that_the_server_refuses(node: Path, tmp_path: Path) -> None:
    words = node.read_text().splitlines()
    server = words[0].partition('"')[2].strip('"')
    port = int(next(word for word in words if word.startswith("listen")).rpartition(":")[2].strip('"'))
    code, found = doctor(agent_toml(tmp_path, port=port, server=server))
    assert code == 1
    assert statuses(found, "gateway_port") == ["failed"]
    assert "lull" in found["gateway_port"][0]["seen"]
    assert statuses(found, "server") == ["ok"]
    assert statuses(found, "token") == ["failed"]
    assert statuses(found, "agent") == ["warning"]
    assert statuses(found, "gateway") == ["not_applicable"]
    assert not (tmp_path / "agent").exists()


# ---- what is wrong ----------------------------------------------------------------------------------------------


def test_a_file_that_is_not_there_and_one_with_a_wrong_key(tmp_path: Path) -> None:
    code, found = doctor(tmp_path / "none.toml")
    assert (code, statuses(found, "config"), statuses(found, "server")) == (1, ["failed"], ["not_applicable"])
    assert statuses(found, "cgroup") != ["not_applicable"]

    config = agent_toml(tmp_path, more="host_reserv_bytes = 1\nengine_poll_seconds = 0")
    code, found = doctor(config)
    assert code == 1
    said = [one["seen"] for one in found["config"]]
    assert [line.split(": ")[1] for line in said] == ["host_reserv_bytes", "engine_poll_seconds"]


def test_key_files_that_others_can_read_or_that_are_none(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("secret")
    engine = engine_toml("small", "sglang", 9, api_key_file="key", control_key_file="fifo")
    os.mkfifo(tmp_path / "fifo", 0o600)
    key.chmod(0o640)
    config = agent_toml(tmp_path, engines=engine)
    (tmp_path / "token").write_text("\n")
    _, found = doctor(config)
    told = {one["subject"]: (one["status"], one["way_out"]) for one in found["key_files"]}
    assert told["engines.small.api_key_file"] == ("failed", f"chmod 0600 {key}")
    assert told["engines.small.control_key_file"][0] == "failed"
    assert told["token_file"] == ("failed", "write the key into it, and nothing else")
    key.chmod(0o600)
    (tmp_path / "token").write_text("lull_test")
    _, found = doctor(config)
    told = {one["subject"]: (one["status"], one["way_out"]) for one in found["key_files"]}
    assert [told[name][0] for name in ("token_file", "engines.small.api_key_file")] == ["ok", "ok"]
    for content in (b"old\nnew\n", "schlüssel".encode(), b"\xff\xfekey"):
        key.write_bytes(content)
        _, found = doctor(config)
        (seen,) = [one for one in found["key_files"] if one["subject"] == "engines.small.api_key_file"]
        assert (seen["status"], "printable ASCII" in seen["seen"]) == ("failed", True)


def test_a_data_directory_that_is_a_file_open_to_others_or_quarantined(tmp_path: Path) -> None:
    config, data_dir = agent_toml(tmp_path), tmp_path / "agent"
    data_dir.write_text("")
    _, found = doctor(config)
    assert statuses(found, "data_dir") == ["failed"]
    data_dir.unlink()
    data_dir.mkdir(mode=0o755)
    write_quarantine(data_dir, ["gpu-0"], Reason(code="JournalCorrupt", sentence="the journal could not be read"))
    (data_dir / "journal.sqlite.corrupt-1").touch()
    _, found = doctor(config)
    assert statuses(found, "data_dir") == ["warning"]
    assert [(one["status"], one["subject"]) for one in found["quarantine"]] == [("failed", "gpu-0")]
    (data_dir / "quarantine.json").unlink()
    _, found = doctor(config)
    assert statuses(found, "quarantine") == ["warning"]


def test_a_port_that_somebody_else_holds_and_an_address_that_is_not_ours(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        _, found = doctor(agent_toml(tmp_path, port=port))
    assert statuses(found, "gateway_port") == ["failed"]
    assert f"process {os.getpid()}" in found["gateway_port"][0]["seen"]
    config = agent_toml(tmp_path)
    _, found = doctor(config)
    assert statuses(found, "gateway_port") == ["ok"]
    config.write_text(config.read_text().replace("127.0.0.1:", "192.0.2.1:").replace('192.0.2.1:1"', '127.0.0.1:1"'))
    _, found = doctor(config)
    assert statuses(found, "gateway_port") == ["failed"]


def test_a_port_that_is_held_by_a_process_whose_words_are_no_text(tmp_path: Path) -> None:
    code = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); input()"
    argv: list[str | bytes] = [sys.executable, "-c", code, b"\xff"]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        told = run_here(
            ["doctor", "--config", str(agent_toml(tmp_path, port=int(child.stdout.readline())))], dict(os.environ)
        )
        child.kill()
    assert told.returncode == 1
    assert f"process {child.pid}" in told.stdout


@contextmanager
def http_server(
    status: int, address: str = "127.0.0.1", date: str = "", leads_to: str = "", body: bytes = b"{}"
) -> Iterator[int]:
    """``leads_to``: where it redirects to, the path of the request put after it."""

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, format: str, *args: Any) -> None:
            pass

        def date_time_string(self, timestamp: float | None = None) -> str:
            return date or super().date_time_string(timestamp)

        def do_GET(self) -> None:
            self.send_response(status)
            if leads_to:
                self.send_header("location", leads_to + self.path)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

    with HTTPServer((address, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,))
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10)


def test_servers_that_are_none_or_live_in_another_time(tmp_path: Path) -> None:
    _, found = doctor(agent_toml(tmp_path, server=f"http://127.0.0.1:{free_port()}"))
    assert statuses(found, "server") == ["failed"]
    assert statuses(found, "token") == ["not_applicable"]
    with http_server(200, date="Mon, 01 Jan 2035 00:00:00 GMT") as port:
        _, found = doctor(agent_toml(tmp_path, server=f"http://127.0.0.1:{port}"))
    assert [statuses(found, check) for check in ("server", "token", "clock")] == [["ok"], ["failed"], ["failed"]]
    with http_server(200, body=DEEP) as port:
        _, found = doctor(agent_toml(tmp_path, server=f"http://127.0.0.1:{port}"))
    assert [statuses(found, check) for check in ("server", "token")] == [["ok"], ["failed"]]
    with http_server(503) as port:
        _, found = doctor(agent_toml(tmp_path, server=f"http://127.0.0.1:{port}"))
    assert statuses(found, "server") == ["failed"]


def test_control_routes_that_are_open_to_clients(tmp_path: Path) -> None:
    config = agent_toml(tmp_path)
    with http_server(200) as port:
        code, found = doctor(config, "--public-url", f"http://127.0.0.1:{port}/")
    assert (code, statuses(found, "public_route")) == (1, ["failed"])
    assert "/is_sleeping" in found["public_route"][0]["seen"]
    with http_server(404) as port:
        _, found = doctor(config, "--public-url", f"http://127.0.0.1:{port}")
        assert statuses(found, "public_route") == ["ok"]
        with http_server(301, leads_to=f"http://127.0.0.1:{port}") as first:
            _, found = doctor(config, "--public-url", f"http://127.0.0.1:{first}")
    assert statuses(found, "public_route") == ["ok"]
    with http_server(200) as port, http_server(308, leads_to=f"http://127.0.0.1:{port}") as first:
        _, found = doctor(config, "--public-url", f"http://127.0.0.1:{first}")
        assert statuses(found, "public_route") == ["failed"]
        with http_server(302, leads_to=f"http://127.0.0.1:{port}/login?to=") as guarded:
            _, found = doctor(config, "--public-url", f"http://127.0.0.1:{guarded}")
    assert statuses(found, "public_route") == ["warning"]
    with http_server(302, leads_to="") as port:
        _, found = doctor(config, "--public-url", f"http://127.0.0.1:{port}")
    assert statuses(found, "public_route") == ["warning"]
    _, found = doctor(config)
    assert statuses(found, "public_route") == ["not_applicable"]


def test_an_engine_that_listens_on_every_address(tmp_path: Path) -> None:
    with http_server(200, "0.0.0.0") as port:
        _, found = doctor(agent_toml(tmp_path, engines=engine_toml("small", "ollama", port)))
    assert statuses(found, "engine_bind") == ["failed"]
    assert "--host 127.0.0.1" in found["engine_bind"][0]["way_out"]


# ---- engines ----------------------------------------------------------------------------------------------------


@pytest.mark.long
def test_engines_that_cannot_be_parked_or_are_asleep_already(tmp_path: Path) -> None:
    with spawned(tmp_path, "sglang_server.py", health="/ready") as engine:
        _, found = doctor(agent_toml(tmp_path, engines=engine_toml("small", "sglang", engine.port)))
        assert statuses(found, "engines") == ["failed"]
        assert "--enable-memory-saver" in found["engines"][0]["seen"]
        assert statuses(found, "parked") == ["ok"]


def test_an_engine_that_is_asleep_and_one_whose_policy_it_cannot_honour(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_SERVER_DEV_MODE", "1")
    with spawned(tmp_path, "vllm_server.py", "--enable-sleep-mode", "--version", "0.14.1") as engine:
        config = agent_toml(tmp_path, engines=engine_toml("small", "vllm", engine.port))
        _, found = doctor(config)
        assert (statuses(found, "engines"), statuses(found, "parked")) == (["failed"], ["ok"]), found["engines"]
        assert httpx.post(f"{engine.url}/sleep?level=1", timeout=20, trust_env=False).status_code == 200
        calls = len(engine.raw_calls())
        _, found = doctor(config)
        assert statuses(found, "parked") == ["failed"]
        assert "no agent runs" in found["parked"][0]["seen"]
        assert all(call.startswith("GET ") for call in engine.calls()[calls:])


def test_an_engine_that_nobody_runs(tmp_path: Path) -> None:
    engines = engine_toml("mine", "process", free_port(), command=["true"])
    engines += "\n" + engine_toml("theirs", "ollama", free_port())
    _, found = doctor(agent_toml(tmp_path, engines=engines))
    assert [(one["subject"], one["status"]) for one in found["engines"]] == [
        ("mine", "not_applicable"),
        ("theirs", "failed"),
    ]
    assert [(one["subject"], one["status"]) for one in found["parked"]] == [
        ("mine", "ok"),
        ("theirs", "not_applicable"),
    ]


def test_an_engine_that_does_not_say_whether_it_is_parked(tmp_path: Path) -> None:
    with http_server(500) as port:
        _, found = doctor(agent_toml(tmp_path, engines=engine_toml("small", "vllm", port)))
    assert statuses(found, "parked") == ["warning"]


def test_an_api_of_kubernetes_that_nobody_told_of_hides_no_other_gate(tmp_path: Path) -> None:
    pod = engine_toml("pod", "vllm", 9, gate_kind="kubernetes")
    pod += '\n[engines.kubernetes]\npod = "p"\nservices = ["s"]\ncondition = "lull.dev/serving"\n'
    other = engine_toml("other", "vllm", 10, gate_kind="haproxy")
    other += f'\n[engines.haproxy]\nsockets = ["{tmp_path}/no.sock"]\nbackend = "b"\ngateway_backup = false\n'
    _, found = doctor(agent_toml(tmp_path, engines=f"{pod}\n{other}"))
    assert [(one["subject"], one["status"]) for one in found["gates"]] == [("pod", "failed"), ("other", "failed")]
    assert "kubernetes.api_url: missing" in found["gates"][0]["seen"]
    assert statuses(found, "gateway") == ["not_applicable"]


def test_a_host_device_of_another_size_or_with_somebody_on_it(tmp_path: Path) -> None:
    config = agent_toml(tmp_path)
    _, found = doctor(config)
    assert statuses(found, "host_devices") == ["ok"]
    assert not (tmp_path / "device").exists()
    device = HostDevice.create(tmp_path / "device", capacity_bytes=16 * MIB)
    driver = HostDriver(device)
    handle = driver.create(driver.granularity())
    _, found = doctor(config)
    assert statuses(found, "host_devices") == ["ok", "warning"]
    assert f"{os.getpid()} (" in found["host_devices"][1]["seen"]
    driver.release(handle)
    config.write_text(config.read_text().replace("16MiB", "32MiB"))
    _, found = doctor(config)
    assert statuses(found, "host_devices") == ["failed"]
    config.write_text(config.read_text().replace("32MiB", "900TiB").replace('"device"', '"other"'))
    _, found = doctor(config)
    assert statuses(found, "host_devices") == ["warning"]


def test_a_gate_that_does_not_answer(tmp_path: Path) -> None:
    """The socket is there, and nobody who speaks HAProxy's language is behind it."""
    engine = engine_toml("small", "ollama", 9, gate_kind="haproxy")
    engine += f'\n[engines.haproxy]\nsockets = ["{tmp_path}/haproxy.sock"]\nbackend = "be"\ncall_seconds_max = 0.5\n'
    config = agent_toml(tmp_path, engines=engine)
    _, found = doctor(config)
    assert statuses(found, "gates") == ["failed"]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "haproxy.sock"))
        listener.listen(1)
        _, found = doctor(config)
    assert statuses(found, "gates") == ["failed"]
    assert "haproxy" in found["gates"][0]["seen"]
    _, found = doctor(agent_toml(tmp_path))
    assert statuses(found, "gates") == ["not_applicable"]


@pytest.mark.long
def test_a_file_system_that_hangs_keeps_nobody(tmp_path: Path) -> None:
    """A pipe that nobody writes stands in for it: whoever reads it is stuck until the end of its process."""
    config = agent_toml(tmp_path)
    (tmp_path / "agent").mkdir(mode=0o700)
    os.mkfifo(tmp_path / "agent" / "agent.json")
    argv = [LULL, "doctor", "--config", str(config), "--json"]
    told = subprocess.run(argv, capture_output=True, timeout=60, check=False)
    assert told.returncode == 1
    found = {one["check"]: one for one in json.loads(told.stdout)["checks"]}
    assert found["agent"]["status"] == "failed"
    assert "did not end within" in found["agent"]["seen"]
    assert found["config"]["status"] == "ok"
