"""What a policy may say, and what is refused by name."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from lull.agents.protocol.capabilities import refusal, trtllm_capabilities
from lull.agents.protocol.policy import NOT_OBEYED_YET, EnginePolicy


def test_defaults_are_the_design_s() -> None:
    policy = EnginePolicy()
    assert policy.when == "manual"
    assert policy.on_drain_deadline == "abort_loan"
    assert (policy.drain_seconds_max, policy.park_call_seconds_max) == (60, 300)
    assert (policy.settle_seconds_max, policy.settle_samples) == (15, 3)
    assert (policy.resume_seconds_max, policy.park_seconds_max) == (300, 4 * 3600)
    assert (policy.gate, policy.hold_requests_max, policy.hold_seconds_max) == ("hold", 1000, 600)
    assert policy.restart == "after_loan"
    assert policy.canary != "off"


@pytest.mark.parametrize("name", sorted(NOT_OBEYED_YET))
def test_a_field_that_is_not_obeyed_yet_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValidationError, match=f"{name}.*yet"):
        EnginePolicy.model_validate({name: 1})


@pytest.mark.parametrize("when", ["window", "idle"])
def test_a_way_of_lending_that_is_not_obeyed_yet_is_refused(when: str) -> None:
    with pytest.raises(ValidationError, match="not obeyed yet"):
        EnginePolicy.model_validate({"when": when})


@pytest.mark.parametrize("mode", ["NONE", "MEMSET"])
@pytest.mark.parametrize("tag", ["model_weights", "model", "draft_model_weights", "draft_model"])
def test_weights_may_not_be_lost_where_they_cannot_be_loaded_again(tag: str, mode: str) -> None:
    policy = EnginePolicy.model_validate({"restore_modes": {tag: mode, "kv_cache": "MEMSET"}})
    said = refusal(trtllm_capabilities(), policy)
    assert said is not None
    assert f"tag '{tag}' with mode {mode} loses the weights" in said
    assert f'restore_modes = {{ {tag} = "CPU", kv_cache = "MEMSET" }}' in said


@pytest.mark.parametrize("mode", ["CPU", "PINNED", "NONE", "MEMSET"])
def test_a_cache_may_be_kept_or_lost(mode: str) -> None:
    assert EnginePolicy.model_validate({"restore_modes": {"kv_cache": mode}}).restore_modes["kv_cache"] == mode


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("restore_modes", {}, "at least one tag"),
        ("restore_modes", {"Model": "CPU"}, "lower-case"),
        ("restore_modes", {"weights": "CPU"}, "does not exist; known: model_weights"),
        ("restore_modes", {"_no_capture_init_kv_cache": "NONE"}, "initialization-only"),
        ("restore_modes", {"kv_cache": "DISK"}, "'CPU', 'PINNED', 'NONE' or 'MEMSET'"),
        ("settle_samples", 0, "greater than or equal to 1"),
        ("drain_seconds_max", 0, "greater than 0"),
        ("gate", "drop", "'hold' or 'refuse'"),
        ("canary", {"tokens": 0}, "greater than or equal to 1"),
        ("windov", 3, "not permitted"),
        ("on_pressure", True, "pressure_free_bytes_min: on_pressure needs it"),
        ("pressure_free_bytes_min", "8 Gigs", "not a size: unknown unit 'Gigs'"),
        ("pressure_free_bytes_min", "9" * 400, "not a size; write for example 40GiB"),
        ("pressure_free_bytes_min", 10**400, "less than or equal to"),
        ("drain_seconds_max", True, "has to be a number, not true"),
        ("settle_samples", True, "has to be a number, not true"),
        ("idle_seconds_min", False, "has to be a number, not false"),
        ("pressure_free_bytes_min", 0, "greater than 0"),
        ("idle_seconds_min", 0, "greater than 0"),
    ],
)
def test_bad_values_name_the_field_and_the_way_out(field: str, value: object, says: str) -> None:
    with pytest.raises(ValidationError) as caught:
        EnginePolicy.model_validate({field: value})
    assert field in str(caught.value)
    assert says in str(caught.value)


def test_a_park_that_frees_no_host_memory_is_no_help_against_pressure() -> None:
    fields = {"on_pressure": True, "pressure_free_bytes_min": "8GiB"}
    assert EnginePolicy.model_validate(fields).pressure_free_bytes_min == 8 << 30
    kept = {**fields, "restore_modes": {"model_weights": "CPU", "kv_cache": "PINNED"}}
    with pytest.raises(ValidationError, match="on_pressure: restore_modes keep every tag in host memory"):
        EnginePolicy.model_validate(kept)
