"""Files that users write: read with a bound, refused with file, key and the way out."""

from __future__ import annotations

import math
import tomllib
from pathlib import Path
from typing import Any, Final, cast

from .exits import ExitCode, fail

DOCUMENT_BYTES_MAX: Final = 1 << 20


def mapping_of(value: object) -> dict[str, Any] | None:
    """`value` if it is a mapping with string keys."""
    if not isinstance(value, dict):
        return None
    found = cast(dict[object, Any], value)
    return cast(dict[str, Any], value) if all(isinstance(key, str) for key in found) else None


def _read(path: Path) -> bytes:
    try:
        with path.open("rb") as file:
            content = file.read(DOCUMENT_BYTES_MAX + 1)
    except OSError as error:
        fail(f"{path}: cannot be read: {error.strerror}", ExitCode.USAGE)
    if len(content) > DOCUMENT_BYTES_MAX:
        fail(f"{path}: is larger than {DOCUMENT_BYTES_MAX} bytes", ExitCode.USAGE)
    return content


def read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(_read(path).decode())
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        fail(f"{path}: is not TOML: {error}", ExitCode.USAGE)


def read_yaml_mapping(path: Path, known: str) -> dict[str, Any]:
    """A YAML file that holds one mapping of `known`."""
    import yaml

    try:
        raw: object = yaml.safe_load(_read(path))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        fail(f"{path}: is not YAML: {' '.join(str(error).split())}", ExitCode.USAGE)
    found = mapping_of(raw)
    if found is None:
        fail(f"{path}: has to be a mapping of {known}", ExitCode.USAGE)
    wrong = _not_finite(found)
    if wrong is not None:
        fail(f"{path}: {wrong}: has to be a finite number", ExitCode.USAGE)
    return found


def _not_finite(value: object, place: str = "") -> str | None:
    """The key of a number that JSON cannot carry."""
    if isinstance(value, float):
        return None if math.isfinite(value) else place
    if isinstance(value, dict):
        inner = [
            (f"{place}.{key}" if place else str(key), item) for key, item in cast(dict[Any, object], value).items()
        ]
    elif isinstance(value, list):
        inner = [(f"{place}[{index}]", item) for index, item in enumerate(cast(list[object], value))]
    else:
        return None
    return next((wrong for key, item in inner if (wrong := _not_finite(item, key)) is not None), None)
