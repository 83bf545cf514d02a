"""What is judged of the way of requests, and of engines that are parked or cannot be asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from lull.agents.doctor.engines import ParkedFacts, judge_parked
from lull.agents.doctor.findings import Status
from lull.agents.doctor.traffic import GatewayFacts, PortFacts, judge_gateway, judge_port, judge_public_route
from lull.agents.gates.gateway import GatewayInfo
from lull.agents.settings import AgentSettings

LISTEN = "127.0.0.1:8070"
NO_GATEWAY = GatewayFacts(False, None, "")
GATEWAY = GatewayInfo(pid=7, start_ticks=1, boot_id="b", listen=LISTEN, version="1")


@pytest.mark.parametrize(
    ("status", "wanted"),
    [
        (200, Status.FAILED),
        (404, Status.OK),
        (403, Status.OK),
        (302, Status.WARNING),
        (429, Status.WARNING),
        (502, Status.WARNING),
    ],
)
def test_only_a_refusal_says_that_a_control_route_is_closed(status: int, wanted: Status) -> None:
    found = judge_public_route("http://llm.example", {"/is_sleeping": status, "/server_info": 404})
    assert found.status is wanted
    if wanted is Status.WARNING:
        assert f"/is_sleeping (HTTP {status})" in found.seen


def test_a_gateway_that_no_engine_needs_is_not_missed() -> None:
    assert judge_gateway(NO_GATEWAY, LISTEN, agent_runs=True, is_needed=True).status is Status.FAILED
    assert judge_gateway(NO_GATEWAY, LISTEN, agent_runs=True, is_needed=False).status is Status.NOT_APPLICABLE
    left = judge_gateway(GatewayFacts(True, GATEWAY, ""), LISTEN, agent_runs=False, is_needed=False)
    assert left.status is Status.WARNING
    taken = PortFacts(LISTEN, True, 8, "other")
    assert judge_port(taken, None, is_needed=True).status is Status.FAILED
    assert judge_port(taken, None, is_needed=False).status is Status.NOT_APPLICABLE


@pytest.mark.parametrize(("kinds", "is_needed"), [([], True), (["gateway", "none"], True), (["none"], False)])
def test_who_needs_a_gateway(tmp_path: Path, kinds: list[str], is_needed: bool) -> None:
    settings = AgentSettings.model_validate(
        {
            "server_url": "http://127.0.0.1:1",
            "token_file": tmp_path / "token",
            "data_dir": tmp_path / "agent",
            "devices": [{"path": tmp_path / "device", "capacity_bytes": 1 << 20}],
            "engines": [
                {
                    "name": kind,
                    "kind": "vllm",
                    "models": ["m"],
                    "url": "http://127.0.0.1:1",
                    "device_indexes": [0],
                    "gate_kind": kind,
                    **({"none": {}} if kind == "none" else {}),
                }
                for kind in kinds
            ],
        }
    )
    assert settings.needs_gateway is is_needed


def test_an_engine_that_could_not_be_asked_is_not_called_awake() -> None:
    silent = ParkedFacts("a", is_parked=False, words="", in_loan=False, trouble="connection refused")
    assert judge_parked(silent, agent_runs=True).status is Status.WARNING
    gone = ParkedFacts("a", is_parked=False, words="", in_loan=False, runs=False)
    assert judge_parked(gone, agent_runs=True).status is Status.NOT_APPLICABLE
    assert judge_parked(ParkedFacts("a", False, "running", False), agent_runs=True).status is Status.OK
