"""What stands in an engine's facts.json. A fact that is of another kind than what was written there is forgotten: the
agent finds it out anew, as it does where there is no file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

from pydantic import BaseModel, Field, TypeAdapter

from ..vmm.tags import RestoreMode
from .node_files import Bytes, Count, Seconds, Text, fitting

_BytesByDevice = dict[Text, Bytes]
_Nothing = Annotated[dict[str, Any], Field(max_length=0)]


class _Golden(BaseModel):
    text: str
    token_ids: list[int] | None
    token_logprobs: list[float] | None


class _Fresh(BaseModel):
    freed: _BytesByDevice
    residual: _BytesByDevice


class _Short(_Fresh):
    incarnation: Text | None
    released: bool
    times: Count


class _Way(BaseModel):
    """Of `ParkHistory`; a key that a record lacks is one that an older agent did not write."""

    modes: dict[Text, RestoreMode]
    first: _BytesByDevice = {}
    fresh: _Fresh | _Nothing = {}
    incarnation: Text | None = None
    freed: list[_BytesByDevice] = []
    residuals: list[_BytesByDevice] = []
    alarmed: _BytesByDevice = {}
    short: _Short | _Nothing = {}
    park_seconds: list[Seconds] = []
    wake_seconds: list[Seconds] = []
    parks: Count = 0
    trials: Count = 0
    trouble: Text | None = None
    at: Seconds | None = None


class _Parks(BaseModel):
    of: Text
    ways: dict[Text, _Way]


_NAMES: Final = ("verified", "released", "condemned", "given_up", "restart_of", "started_in_boot", "footprint_of")
_SHAPES: Final[dict[str, TypeAdapter[Any]]] = {
    **{name: TypeAdapter[Any](Text | None) for name in _NAMES},
    "footprint": TypeAdapter(_BytesByDevice),
    "shared": TypeAdapter(dict[Text, list[Text]]),
    "golden": TypeAdapter(dict[Text, _Golden]),
    "parks": TypeAdapter(_Parks),
    "short_sleeps": TypeAdapter(Count),
}


def read_facts(path: Path) -> dict[str, Any]:
    return fitting(path, _SHAPES)
