"""The base of what people write, in TOML and over REST: nothing unknown, and no `true` where a number belongs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationInfo, field_validator


class Written(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    @field_validator("*", mode="before")
    @classmethod
    def _number_is_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        said = next((each for each in _each(value) if isinstance(each, bool)), None)
        if said is not None and info.field_name is not None:
            kinds = _kinds(cls.model_fields[info.field_name].annotation)
            if kinds & {int, float} and bool not in kinds:
                raise ValueError(f"has to be a number, not {str(said).lower()}")
        return value


def _each(value: Any) -> list[Any]:
    return list(cast("Sequence[Any]", value)) if isinstance(value, list) else [value]


def _kinds(annotation: Any) -> set[Any]:
    """The types that an annotation is made of: of ``Annotated[int, …] | None`` int and NoneType."""
    parts = get_args(annotation)
    return {annotation} if not parts else set[Any]().union(*(_kinds(part) for part in parts))


def check_url(value: str) -> str:
    """Has a host, and no port that does not exist."""
    try:
        parts = urlsplit(value)
    except ValueError as error:
        raise ValueError(f"{value!r} is no URL: {error}") from None
    try:
        is_port = parts.port != 0
    except ValueError:
        is_port = False
    if not is_port:
        raise ValueError(f"{value!r} has a port that does not exist; one of 1 to 65535")
    if not parts.hostname:
        raise ValueError(f"{value!r} names no host")
    return value


def check_port(value: str) -> str:
    """``HOST:PORT``, or an address that ends in one: the port is one that exists."""
    port = value.rsplit(":", 1)[-1]
    if port.isdigit() and not 1 <= int(port) <= 65535:
        raise ValueError(f"{value!r} has a port that does not exist; one of 1 to 65535")
    return value
