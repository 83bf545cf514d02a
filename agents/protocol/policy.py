"""What an engine's owner allows: the policy, as people write it in TOML and over REST.

A field that this version does not obey yet is refused by name: a policy that is silently ignored is worse
than none.
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal, cast

from pydantic import Field, field_validator, model_validator

from ...vmm.tags import INIT_ONLY_TAGS, KEEPS_CONTENTS, TAG_PATTERN, TRTLLM_TAGS, RestoreMode
from .sizes import Bytes
from .written import Written

NOT_OBEYED_YET: Final = {
    "windows": "lending in time windows",
    "share": "more than one owner of a device at a time",
    "recall_waiting_seconds": "recalling a loan for waiting traffic",
    "parks_per_hour_max": "a park budget",
    "awake_seconds_min": "a minimum time awake",
    "min_serving": "a minimum number of serving engines",
    "preempt": "preemption by policy",
}

Seconds = Annotated[float, Field(gt=0, le=7 * 24 * 3600)]


class CanaryPolicy(Written):
    """The fixed greedy prompt whose answer must be the same before and after a loan."""

    prompt: Annotated[str, Field(min_length=1, max_length=4096)] = "The quick brown fox"
    tokens: Annotated[int, Field(ge=1, le=256)] = 8
    deadline_seconds: Seconds = 60.0
    logprob_tolerance: Annotated[float, Field(ge=0, le=10)] = 1e-3


class EnginePolicy(Written):
    """How and when one engine may be lent. Times are seconds."""

    restore_modes: dict[str, RestoreMode] = Field(
        default_factory=lambda: {"model_weights": RestoreMode.CPU, "kv_cache": RestoreMode.NONE}
    )
    when: Literal["manual", "always"] = "manual"
    # Parked without a job once the node's MemAvailable was below the bound three times in a row and the engine has
    # been idle for `idle_seconds_min`; the next request wakes it.
    on_pressure: bool = False
    pressure_free_bytes_min: Annotated[Bytes, Field(gt=0)] | None = None
    idle_seconds_min: Seconds = 300.0
    drain_seconds_max: Seconds = 60.0
    on_drain_deadline: Literal["abort_loan", "abort_requests"] = "abort_loan"
    park_call_seconds_max: Seconds = 300.0
    settle_seconds_max: Seconds = 15.0
    settle_samples: Annotated[int, Field(ge=1, le=100)] = 3
    resume_seconds_max: Seconds = 300.0
    park_seconds_max: Seconds = 4 * 3600.0
    gate: Literal["hold", "refuse"] = "hold"
    hold_requests_max: Annotated[int, Field(ge=0, le=100_000)] = 1000
    hold_seconds_max: Seconds = 600.0
    restart: Literal["after_loan", "now", "never"] = "after_loan"
    canary: CanaryPolicy | Literal["off"] = Field(default_factory=CanaryPolicy)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_obeyed(cls, value: Any) -> Any:
        if isinstance(value, dict):
            fields = cast("dict[str, Any]", value)
            for name in fields:
                if name in NOT_OBEYED_YET:
                    raise ValueError(
                        f"{name}: this version does not do {NOT_OBEYED_YET[name]} yet; leave the field out"
                    )
            if fields.get("when") in ("window", "idle"):
                raise ValueError(f"when: {fields['when']!r} is not obeyed yet; use 'manual' or 'always'")
        return cast("Any", value)

    @model_validator(mode="after")
    def _check_pressure(self) -> EnginePolicy:
        if not self.on_pressure:
            return self
        if self.pressure_free_bytes_min is None:
            raise ValueError(
                "pressure_free_bytes_min: on_pressure needs it: below how many bytes of MemAvailable is memory short?"
            )
        if all(mode in KEEPS_CONTENTS for mode in self.restore_modes.values()):
            raise ValueError(
                "on_pressure: restore_modes keep every tag in host memory: a park would free none of it; give a tag"
                " mode NONE, for example kv_cache"
            )
        return self

    @field_validator("restore_modes")
    @classmethod
    def _check_tags(cls, modes: dict[str, RestoreMode]) -> dict[str, RestoreMode]:
        if not modes:
            raise ValueError("name at least one tag, for example {'model_weights': 'CPU'}")
        for tag in modes:
            if not TAG_PATTERN.fullmatch(tag):
                raise ValueError(f"tag {tag!r}: a tag is lower-case letters, digits and underscores")
            if tag not in TRTLLM_TAGS and tag not in INIT_ONLY_TAGS:
                # One vocabulary for all engines; which of the tags an engine has, and in which modes, it says itself.
                raise ValueError(f"tag {tag!r} does not exist; known: {', '.join(TRTLLM_TAGS)}")
            if tag in INIT_ONLY_TAGS:
                raise ValueError(f"tag {tag!r} is an initialization-only tag and cannot be released")
        return modes
