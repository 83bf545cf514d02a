"""Gates in the agent's file: for all engines, for one, and what is wrong with one, told by file, line and key."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from lull.agents.gates import make_gate
from lull.agents.gates.gateway import GatewayGate
from lull.agents.gates.kept import KeptGate
from lull.agents.protocol.config_file import ConfigFileError, load_toml
from lull.agents.settings import AgentSettings

HEAD = """\
server_url = "http://127.0.0.1:7070"
token_file = "/run/token"
data_dir = "/var/lib/lull"
{top}
[[devices]]
path = "/var/lib/lull/device0"
capacity_bytes = "1GiB"

{sections}
[[engines]]
name = "alpha"
kind = "{kind}"
models = ["m"]
url = "http://127.0.0.1:9001"
device_indexes = [0]
{engine}
"""
HAPROXY = '[haproxy]\nsockets = ["/run/haproxy/admin.sock"]\nbackend = "llm"\n'
KUBERNETES = """\
[engines.kubernetes]
api_url = "https://10.0.0.1:6443"
namespace = "serving"
pod = "vllm-0"
services = ["vllm"]
condition = "lull.dev/serving"
"""
WEBHOOK = '[engines.webhook]\nurl = "https://gates.example/lull"\nsecret_file = "secret"\nallow = ["10.0.0.0/8"]\n'
ABORTS = '[engines.policy]\non_drain_deadline = "abort_requests"\n'
SHORT = "[engines.policy]\ndrain_seconds_max = 5\n"
PRESSURE = '[engines.policy]\non_pressure = true\npressure_free_bytes_min = "1GiB"\n'


def load(tmp_path: Path, *, top: str = "", sections: str = "", engine: str = "", kind: str = "vllm") -> AgentSettings:
    path = tmp_path / "agent.toml"
    path.write_text(HEAD.format(top=top, sections=sections, engine=engine, kind=kind))
    return load_toml(path, AgentSettings)


def gate(settings: AgentSettings) -> KeptGate:
    def say(*words: Any, **about: Any) -> None:
        raise AssertionError(words)

    return make_gate(settings, settings.engines[0], GatewayGate(Path("/nowhere.sock")), say)


def test_without_a_word_it_is_the_gateway(tmp_path: Path) -> None:
    settings = load(tmp_path)
    traits = gate(settings).traits
    assert (traits.kind, traits.endpoint) == ("gateway", "http://127.0.0.1:8070")
    assert settings.engines[0].needs_gateway


def test_what_the_file_says_for_all_is_each_engine_s_where_that_is_silent(tmp_path: Path) -> None:
    own = '[engines.haproxy]\nbackend = "other"\nserver = "beta"\n'
    (engine,) = load(tmp_path, top='gate_kind = "haproxy"', sections=HAPROXY, engine=own).engines
    assert engine.gate_kind == "haproxy"
    assert engine.haproxy is not None
    assert (engine.haproxy.sockets, engine.haproxy.backend) == (["/run/haproxy/admin.sock"], "other")
    (engine,) = load(tmp_path, top='gate_kind = "haproxy"', sections=HAPROXY, engine='gate_kind = "none"').engines
    assert (engine.gate_kind, engine.haproxy) == ("none", None)
    assert not engine.needs_gateway


def test_haproxy_needs_the_gateway_unless_it_is_told_otherwise(tmp_path: Path) -> None:
    assert load(tmp_path, top='gate_kind = "haproxy"', sections=HAPROXY).engines[0].needs_gateway
    alone = HAPROXY + "gateway_backup = false\n"
    assert not load(tmp_path, top='gate_kind = "haproxy"', sections=alone).engines[0].needs_gateway


@pytest.mark.parametrize("policy", [ABORTS, PRESSURE, SHORT])
def test_a_policy_that_its_gate_can_obey_is_taken(tmp_path: Path, policy: str) -> None:
    assert load(tmp_path, top='gate_kind = "haproxy"', sections=HAPROXY, engine=policy).engines[0].needs_gateway
    load(tmp_path, engine=policy)
    grace = f'gate_kind = "webhook"\n{WEBHOOK}drain_grace_seconds = 5\n{SHORT}'
    load(tmp_path, engine=grace)


def test_a_server_at_a_port_that_does_not_exist_is_named(tmp_path: Path) -> None:
    path = tmp_path / "agent.toml"
    path.write_text('server_url = "http://127.0.0.1:70700"\ntoken_file = "t"\ndata_dir = "d"\n')
    with pytest.raises(
        ConfigFileError, match=r"server_url: 'http://127\.0\.0\.1:70700' has a port that does not exist"
    ):
        load_toml(path, AgentSettings)


def test_files_are_meant_from_the_folder_of_the_file(tmp_path: Path) -> None:
    (engine,) = load(tmp_path, engine=f'gate_kind = "webhook"\n{WEBHOOK}').engines
    assert engine.webhook is not None
    assert engine.webhook.secret_file == tmp_path / "secret"


@pytest.mark.parametrize(
    ("engine", "kind", "counted_by"),
    [
        (f'gate_kind = "kubernetes"\n{KUBERNETES}', "vllm", "engine"),
        (f'gate_kind = "kubernetes"\n{KUBERNETES}in_flight_metrics = []\ndrain_grace_seconds = 9', "vllm", "grace"),
        (f'gate_kind = "webhook"\n{WEBHOOK}', "vllm", "gate"),
        ('gate_kind = "none"', "sglang", "engine"),
        ('gate_kind = "none"', "llama-server", "engine"),
        ('gate_kind = "none"\n[engines.none]\ndrain_grace_seconds = 9', "ollama", "grace"),
        ('gate_kind = "none"\n[engines.none]\nin_flight_metrics = ["busy"]', "ollama", "engine"),
    ],
)
def test_each_kind_says_who_counts(tmp_path: Path, engine: str, kind: str, counted_by: str) -> None:
    made = gate(load(tmp_path, engine=engine, kind=kind))
    assert made.counted_by == counted_by
    assert made.traits.may_open_by_itself is ("none" not in engine.splitlines()[0])


@pytest.mark.parametrize(
    ("text", "line", "says"),
    [
        ({"top": 'gate_kind = "nginx"'}, 4, "gate_kind: "),
        ({"top": "gate_poll_seconds = 0"}, 4, "gate_poll_seconds: "),
        ({"engine": 'gate_kind = "haproxy"'}, None, "haproxy.sockets: is missing"),
        (
            {"engine": '[engines.haproxy]\nsockets = ["/s"]\nbackend = "b"'},
            None,
            "haproxy: only for gate_kind 'haproxy'",
        ),
        ({"sections": '[haproxy]\nsocket = "/s"\n'}, 10, "haproxy.socket: unknown key"),
        (
            {"top": 'gate_kind = "haproxy"', "sections": HAPROXY.replace("/run", "run")},
            None,
            "neither the absolute path",
        ),
        (
            {"top": 'gate_kind = "haproxy"', "sections": HAPROXY.replace("/run/haproxy/admin.sock", "10.0.0.1:9")},
            None,
            "nor a loopback",
        ),
        ({"top": 'gate_kind = "haproxy"', "sections": HAPROXY.replace('"llm"', '"a b; c"')}, None, "haproxy.backend: "),
        (
            {"engine": f'gate_kind = "kubernetes"\n{KUBERNETES}pod_selector = "a=b"'},
            None,
            "pod: name the engine's pod, or",
        ),
        (
            {"engine": 'gate_kind = "kubernetes"\n' + KUBERNETES.replace('condition = "lull.dev/serving"\n', "")},
            None,
            "condition: name a readiness gate",
        ),
        (
            {"engine": 'gate_kind = "kubernetes"\n' + KUBERNETES.replace('namespace = "serving"\n', "")},
            None,
            "namespace: missing",
        ),
        (
            {"engine": f'gate_kind = "kubernetes"\n{KUBERNETES}client_key_file = "k"'},
            None,
            "client_key_file: a client's certificate",
        ),
        ({"engine": 'gate_kind = "kubernetes"\n' + KUBERNETES.replace("https://10", "http://10")}, None, "api_url: "),
        (
            {"engine": f'gate_kind = "kubernetes"\n{KUBERNETES}', "kind": "ollama"},
            None,
            "kubernetes.drain_grace_seconds: missing. This gate cannot count",
        ),
        (
            {"engine": 'gate_kind = "none"', "kind": "ollama"},
            None,
            "none.drain_grace_seconds: missing. This gate cannot count",
        ),
        ({"engine": 'gate_kind = "webhook"\n' + WEBHOOK.replace("https", "http")}, None, "webhook.url: "),
        ({"engine": 'gate_kind = "webhook"\n' + WEBHOOK.replace("https://", "https://user@")}, None, "webhook.url: "),
        (
            {"engine": 'gate_kind = "webhook"\n' + WEBHOOK.replace('"10.0.0.0/8"', '"10.0.0.1/8"')},
            None,
            "webhook.allow.0: ",
        ),
        ({"engine": 'gate_kind = "webhook"\n' + WEBHOOK.replace('"10.0.0.0/8"', "")}, None, "webhook.allow: "),
        *(
            (
                {"engine": 'gate_kind = "webhook"\n' + WEBHOOK.replace("gates.example", host)},
                None,
                f"webhook.url: {says}",
            )
            for host, says in (
                ("gates.example:99999", "'https://gates.example:99999/lull' has a port that does not exist"),
                ("gates.example:0", "'https://gates.example:0/lull' has a port that does not exist"),
                ("gates.example:http", "'https://gates.example:http/lull' has a port that does not exist"),
                (":443", "'https://:443/lull' names no host"),
                ("[fd00::1", "'https://[fd00::1/lull' is no URL"),
            )
        ),
        (
            {"engine": 'gate_kind = "kubernetes"\n' + KUBERNETES.replace(":6443", ":66443")},
            None,
            "kubernetes.api_url: 'https://10.0.0.1:66443' has a port that does not exist",
        ),
        (
            {"engine": f'gate_kind = "kubernetes"\n{KUBERNETES}{ABORTS}'},
            None,
            "policy.on_drain_deadline: 'abort_requests': gate_kind 'kubernetes' cannot abort",
        ),
        (
            {"engine": f'gate_kind = "none"\n{ABORTS}'},
            None,
            "policy.on_drain_deadline: 'abort_requests': gate_kind 'none' cannot abort",
        ),
        (
            {"engine": f'gate_kind = "webhook"\n{WEBHOOK}drain_grace_seconds = 100\n{SHORT}'},
            None,
            "policy.drain_seconds_max: 5 s are over before webhook.drain_grace_seconds, which are 100",
        ),
        (
            {"engine": f'gate_kind = "none"\n{PRESSURE}'},
            None,
            "policy.on_pressure: the gate of this engine does not see requests",
        ),
    ],
)
def test_a_wrong_one_names_file_and_key(tmp_path: Path, text: dict[str, str], line: int | None, says: str) -> None:
    with pytest.raises(ConfigFileError) as caught:
        load(tmp_path, **text)
    words = str(caught.value)
    assert words.startswith(f"{tmp_path}/agent.toml:" + ("" if line is None else f"{line}:")), words
    assert says in words, words
