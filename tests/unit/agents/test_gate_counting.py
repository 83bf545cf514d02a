"""Gauges of engines, and times that have to pass where there are none."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator

import pytest

from lull.agents.gates.base import GateRefused, GateUnreachable
from lull.agents.gates.counting import Counter, sum_of_gauges
from lull.agents.gates.sections import NoneSection
from tests.gates.metered_engine import MeteredEngine

# docs.vllm.ai "Production Metrics" v0.11, of a server with two data-parallel engines.
VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 2.0
vllm:num_requests_running{engine="1",model_name="m"} 1.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 0.0
vllm:num_requests_running_total{engine="0"} 99.0
"""
NAMES = ("vllm:num_requests_running", "vllm:num_requests_waiting")


@pytest.fixture
async def engine() -> AsyncIterator[MeteredEngine]:
    engine = await MeteredEngine().start()
    yield engine
    await engine.stop()


def test_all_samples_of_a_gauge_are_added_and_nothing_else() -> None:
    assert sum_of_gauges(VLLM, NAMES) == 3
    assert sum_of_gauges("a 0.2\nb 7\n", ("a",)) == 1  # a part of a request is one


@pytest.mark.parametrize("text", ["", "vllm:num_requests_running 1\n", "# vllm:num_requests_waiting 1\n"])
def test_a_gauge_that_is_not_there_is_not_zero(text: str) -> None:
    with pytest.raises(ValueError, match="there is no gauge"):
        sum_of_gauges(text, NAMES)


@pytest.mark.parametrize("value", ["NaN", "+Inf", "many"])
def test_no_number_is_not_zero(value: str) -> None:
    with pytest.raises(ValueError):
        sum_of_gauges(f"a {value}\n", ("a",))


async def test_an_engine_that_does_not_tell_is_not_drained(engine: MeteredEngine) -> None:
    counter = Counter(engine.url, "vllm", NoneSection())
    assert await counter.wait_drained(5) == 0
    engine.has_metrics = False
    with pytest.raises(GateUnreachable, match="cannot be told"):
        await counter.wait_drained(5)


async def test_where_nobody_counts_the_time_has_to_pass_since_the_gate_closed() -> None:
    counter = Counter("http://127.0.0.1:1", "ollama", NoneSection(drain_grace_seconds=0.3))
    assert counter.counted_by == "grace"
    counter.closed()
    began = time.monotonic()
    assert await counter.wait_drained(5) == 0
    assert time.monotonic() - began >= 0.25
    assert await counter.in_flight() is None
    began = time.monotonic()
    assert await counter.wait_drained(5) == 0  # it passed already
    assert time.monotonic() - began < 0.2


async def test_a_time_longer_than_the_policy_s_is_refused() -> None:
    counter = Counter("http://127.0.0.1:1", "ollama", NoneSection(drain_grace_seconds=30))
    with pytest.raises(GateRefused, match="drain_seconds_max"):
        await counter.wait_drained(1)


async def test_a_time_and_gauges_both_have_to_agree(engine: MeteredEngine) -> None:
    counter = Counter(engine.url, "vllm", NoneSection(drain_grace_seconds=0.2))
    assert counter.counted_by == "engine"
    engine.running = 1
    assert await counter.wait_drained(0.5) == 1
