"""What a user asks for when submitting a job. Also the REST body: unknown fields are errors."""

from __future__ import annotations

import unicodedata
from typing import Annotated, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from ..agents.protocol.written import Written

ARGV_BYTES_MAX = 128 * 1024  # Linux: MAX_ARG_STRLEN, one string of argv or environ
COMMAND_BYTES_MAX = 1024 * 1024  # argv and env together: half of what Linux takes by default, one order's worth


class JobRequest(Written):
    argv: Annotated[tuple[str, ...], Field(min_length=1, max_length=4096)]
    env: dict[str, str] = Field(default_factory=dict, max_length=1024)
    workdir: Annotated[str, Field(min_length=1, max_length=4096)] | None = None
    name: Annotated[str, Field(min_length=1, max_length=200)] | None = None
    priority: Annotated[int, Field(ge=-1000, le=1000)] = 0
    project: Annotated[str, Field(min_length=1, max_length=100)] | None = None
    gpus: Annotated[int, Field(ge=1, le=1024)] = 1
    hbm_bytes: Annotated[int, Field(ge=1, le=2**50)] | None = None  # on each device; None: the whole device
    time_limit_seconds: Annotated[float, Field(gt=0, le=366 * 24 * 3600)] | None = None
    kill_grace_seconds: Annotated[float, Field(ge=0, le=3600)] = 30.0

    @field_validator("argv")
    @classmethod
    def _check_argv(cls, argv: tuple[str, ...]) -> tuple[str, ...]:
        if not argv[0]:
            raise ValueError("the first word is the program and may not be empty")
        for word in argv:
            _check_text("argv", word)
        return argv

    @field_validator("env")
    @classmethod
    def _check_env(cls, env: dict[str, str]) -> dict[str, str]:
        for key, value in env.items():
            if not key or "=" in key:
                raise ValueError(f"{key!r} cannot be the name of an environment variable")
            _check_shown("env", key)
            _check_text("env", key)
            _check_text(f"env {key}", value)
        return env

    @field_validator("name", "project")
    @classmethod
    def _check_names(cls, value: str | None, info: ValidationInfo) -> str | None:
        if value is not None:
            _check_shown(str(info.field_name), value)
        return value

    @field_validator("workdir")
    @classmethod
    def _check_workdir(cls, workdir: str | None) -> str | None:
        if workdir is not None:
            _check_text("workdir", workdir)
            if not workdir.startswith("/"):
                raise ValueError("give an absolute path: the job runs on another machine")
        return workdir

    @model_validator(mode="after")
    def _check_command(self) -> Self:
        words = (*self.argv, *self.env, *self.env.values())
        total = sum(len(word.encode("utf-8", "surrogatepass")) + 1 for word in words)
        if total > COMMAND_BYTES_MAX:
            raise ValueError(f"argv and env are {total} bytes, at most {COMMAND_BYTES_MAX} go; pass a file instead")
        return self


def _check_shown(field: str, text: str) -> None:
    """What terminals and logs show to others: no escape sequence may hide in it."""
    for letter in text:
        if unicodedata.category(letter) in ("Cc", "Cs"):
            raise ValueError(f"{field}: the control character {letter!r} may not be in a name; leave it out")


def _check_text(field: str, text: str) -> None:
    if any("\ud800" <= letter <= "\udfff" for letter in text):
        raise ValueError(f"{field}: a lone surrogate is no character; send UTF-8")
    if "\0" in text:
        raise ValueError(f"{field}: a NUL byte cannot be passed to a program")
    if len(text.encode("utf-8", "surrogatepass")) >= ARGV_BYTES_MAX:
        raise ValueError(f"{field}: one string may not exceed {ARGV_BYTES_MAX} bytes; pass a file instead")


class ParkRequest(Written):
    """How an operator wants an engine parked without a job. ``for_seconds`` None: as long as its policy allows."""

    for_seconds: Annotated[float, Field(gt=0, le=7 * 24 * 3600)] | None = None
    wake_on_request: bool = True
