"""Reads a TOML file into a settings model; every error names file, line and key, as far as the file spells it out."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ValidationError, ValidationInfo
from pydantic_core import ErrorDetails

M = TypeVar("M", bound=BaseModel)

_FILE_BYTES_MAX = 1 << 20
_SHOWN_MAX = 20
_HEADER = re.compile(r"^\s*(\[\[?)\s*([^\]]+?)\s*\]\]?\s*(?:#.*)?$")
_NAMED = re.compile(r"([a-z_]+(?:\.[a-z_0-9]+)*): ")  # at the head of what a check of several keys says
_KEY = re.compile(r"^\s*([A-Za-z0-9_.\"'-]+)\s*=")


class ConfigFileError(ValueError):
    """What is wrong, as ``file:line: key: text``."""


def _from_folder(path: Path, info: ValidationInfo[Path | None]) -> Path:
    return path if info.context is None else info.context / path


# A path of a file: relative ones are meant from the folder of that file, whoever reads it from wherever.
FilePath = Annotated[Path, AfterValidator(_from_folder)]


def load_toml(path: Path, model: type[M], given: Mapping[str, Any] | None = None) -> M:
    """The file at ``path`` as ``model``, with what the command line has ``given``; raises ConfigFileError."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigFileError(f"{path}: {error.strerror or error}") from error
    if len(raw) > _FILE_BYTES_MAX:
        raise ConfigFileError(f"{path}: larger than {_FILE_BYTES_MAX} bytes")
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise ConfigFileError(f"{path}: not UTF-8 at byte {error.start}") from error
    try:
        values = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        place = re.search(r"line (\d+)", str(error))
        line = place.group(1) if place else str(text.count("\n") + 1)
        raise ConfigFileError(f"{path}:{line}: {error}") from error
    paths = {key: value.absolute() for key, value in (given or {}).items() if isinstance(value, Path)}
    return validate(path, text, {**values, **(given or {}), **paths}, model)


def validate(path: Path, text: str, values: dict[str, Any], model: type[M]) -> M:
    try:
        return model.model_validate(values, context=path.absolute().parent)
    except ValidationError as error:
        # A misspelled key is also a missing one: the spelling is what has to change, so it comes first.
        found = sorted(error.errors(include_url=False), key=lambda one: one["type"] != "extra_forbidden")
        raise ConfigFileError("\n".join(_one_line(path, text, one) for one in found[:_SHOWN_MAX])) from error


def _one_line(path: Path, text: str, error: ErrorDetails) -> str:
    place = tuple(part for part in error["loc"] if part != "off")
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error" and (named := _NAMED.match(message)):
        place += tuple(int(part) if part.isdecimal() else part for part in named.group(1).split("."))
        message = message[named.end() :]
    key = ".".join(str(part) for part in place) or "(whole file)"
    if error["type"] == "extra_forbidden":
        message = "unknown key; remove it or correct its spelling"
    elif error["type"] == "missing":
        message = "is missing"
    line = line_of(text, place)
    return f"{path}{'' if line is None else f':{line}'}: {key}: {message}"


def line_of(text: str, place: tuple[str | int, ...]) -> int | None:
    """The line, from 1, of the deepest part of ``place`` that the text spells out; None if none is."""
    best_line, best_depth = None, 0
    table: list[str | int] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(text.splitlines(), 1):
        header = _HEADER.match(line)
        if header:
            table = _table_path(header.group(2), header.group(1) == "[[", seen)
            here = table
        else:
            key = _KEY.match(line)
            if not key:
                continue
            here = [*table, *_split(key.group(1))]
        depth = 0
        while depth < min(len(here), len(place)) and here[depth] == place[depth]:
            depth += 1
        if depth == len(here) and depth > best_depth:
            best_line, best_depth = number, depth
    return best_line


def _split(dotted: str) -> list[str]:
    return [part.strip().strip("\"'") for part in dotted.split(".")]


def _table_path(dotted: str, is_array: bool, seen: dict[str, int]) -> list[str | int]:
    path: list[str | int] = []
    names = _split(dotted)
    for depth, name in enumerate(names):
        path.append(name)
        spelled = ".".join(names[: depth + 1])
        if is_array and depth == len(names) - 1:
            seen[spelled] = seen.get(spelled, -1) + 1
        if spelled in seen:
            path.append(seen[spelled])
    return path
