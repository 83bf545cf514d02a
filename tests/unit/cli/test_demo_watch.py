from __future__ import annotations

import pytest

from lull.cli.demo_story import ALIGN_BYTES, MIB, job_need_bytes, plan_engines
from lull.cli.demo_watch import PART, Seen, role_of, with_parts

PYTHON = ["/usr/bin/python3", "-P", "-m"]


@pytest.mark.parametrize(
    ("argv", "role"),
    [
        ([*PYTHON, "lull.cli", "server", "--data-dir", "x"], ("server", None)),
        ([*PYTHON, "lull.cli", "agent", "--config", "x"], ("agent", None)),
        ([*PYTHON, "lull.cli", "up"], ("up", None)),
        ([*PYTHON, "lull.cli", "engine", "serve", "--name", "alpha"], ("engine", "alpha")),
        ([*PYTHON, "lull.agents.gateway", "--listen", "x"], ("gateway", None)),
        ([*PYTHON, "lull.cli", "gateway", "--listen", "x"], ("gateway", None)),
        (["/usr/bin/python3", "-I", "-S", "/x/agents/runner.py", "/d"], ("runner", None)),
        ([*PYTHON, "lull.cli.demo_job", "--bytes", "1"], ("job", None)),
        ([*PYTHON, "lull.cli.demo_load"], ("load", None)),
        (["/bin/sh"], ("other", None)),
        ([], ("other", None)),
    ],
)
def test_roles(argv: list[str], role: tuple[str, str | None]) -> None:
    assert role_of(argv) == role


@pytest.mark.parametrize("weights_bytes", [16 * MIB, 32 * MIB, 1024 * MIB])
def test_the_job_needs_more_than_is_free_and_no_more_than_there_is(weights_bytes: int) -> None:
    for plan in plan_engines(weights_bytes):
        need_bytes = job_need_bytes(plan.free_bytes, weights_bytes)
        assert plan.free_bytes < need_bytes <= plan.capacity_bytes
        assert need_bytes % ALIGN_BYTES == 0


def test_with_a_gibibyte_of_weights_the_job_needs_half_a_gibibyte_more_than_is_free() -> None:
    plan = plan_engines(1024 * MIB)[0]
    assert job_need_bytes(plan.free_bytes, plan.weights_bytes) - plan.free_bytes >= 512 * MIB


def test_processes_below_an_engine_are_parts_of_it() -> None:
    """A vLLM's memory is held by its worker, two processes below the one that serves."""
    serving = ("python", "-m", "vllm.entrypoints.openai.api_server", "--served-model-name", "alpha", "--port", "1")
    assert role_of(serving) == ("engine", "alpha")
    seen = [
        Seen("agent", None, 1, 0, ()),
        Seen("engine", "alpha", 2, 1, serving),
        Seen("other", None, 3, 2, ("VLLM::EngineCore",)),
        Seen("other", None, 4, 3, ("VLLM::Worker",)),
        Seen("other", None, 5, 1, ("something",)),
    ]
    assert [(one.role, one.name) for one in with_parts(seen)] == [
        ("agent", None),
        ("engine", "alpha"),
        (PART, "alpha"),
        (PART, "alpha"),
        ("other", None),
    ]
