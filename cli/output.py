"""How answers are printed: aligned tables for people, the API's own JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, TextIO, cast

from .options import OutputFormat
from .quantities import format_duration
from .terminal import strip_escapes

Row = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a table; `wide` ones show with `-o wide` only."""

    title: str
    text: Callable[[Row], str]
    wide: bool = False


def plain(value: Any) -> Any:
    """What the API answered, as plain JSON values."""
    dump = getattr(value, "model_dump", None)
    if dump is not None:
        return dump(mode="json")
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in cast(Mapping[object, object], value).items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in cast(Sequence[object], value)]
    return value


def parse_time(stamp: str | float) -> datetime:
    return datetime.fromtimestamp(stamp, UTC) if isinstance(stamp, int | float) else datetime.fromisoformat(stamp)


def age(stamp: str | float | None, now: datetime | None = None) -> str:
    """`3m10s` since `stamp`; a dash where there is none."""
    if stamp is None:
        return "-"
    seconds = ((now or datetime.now(UTC)) - parse_time(stamp)).total_seconds()
    return f"in {format_duration(-seconds)}" if seconds < -1 else format_duration(max(0.0, seconds))


def part_of(row: Row, key: str) -> Row:
    """The object in `key`; an empty one if there is none."""
    return cast(Row, row.get(key) or {})


def parts_of(row: Row, key: str) -> list[Row]:
    """The objects in the list in `key`."""
    return cast(list[Row], row.get(key) or [])


def text_of(value: Any) -> str:
    """One value as a table cell: one line, nothing that drives a terminal."""
    if value is None or value == "":
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list | tuple):
        return ",".join(text_of(item) for item in cast(Sequence[object], value)) or "-"
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return ",".join(f"{key}={text_of(item)}" for key, item in items) or "-"
    return strip_escapes(str(value)).replace("\n", " ").replace("\t", " ")


def field(name: str) -> Callable[[Row], str]:
    return lambda row: text_of(row.get(name))


class Output:
    """Prints lists and single things in the format that the user chose."""

    def __init__(self, form: OutputFormat, no_headers: bool = False, stream: TextIO | None = None) -> None:
        self.form = form
        self.no_headers = no_headers
        self.stream = stream if stream is not None else sys.stdout
        self.colour = self.stream.isatty() and not os.environ.get("NO_COLOR")

    @property
    def for_people(self) -> bool:
        return self.form in (OutputFormat.TABLE, OutputFormat.WIDE)

    def rows(self, items: Sequence[Any], columns: Sequence[Column], *, name: str = "name") -> None:
        """A list. `name` is the field that `-o name` prints."""
        rows = [plain(item) for item in items]
        match self.form:
            case OutputFormat.JSON:
                self._json(rows)
            case OutputFormat.JSONL:
                for row in rows:
                    self.line(row)
            case OutputFormat.YAML:
                self._yaml(rows)
            case OutputFormat.NAME:
                for row in rows:
                    self.print(text_of(row.get(name) or row.get("id")))
            case _:
                self.table(rows, columns)

    def item(self, item: Any, lines: Callable[[Row], Sequence[str]], *, name: str = "name") -> None:
        """One thing. `lines` makes the text for people."""
        row = plain(item)
        match self.form:
            case OutputFormat.JSON:
                self._json(row)
            case OutputFormat.JSONL:
                self.line(row)
            case OutputFormat.YAML:
                self._yaml(row)
            case OutputFormat.NAME:
                self.print(text_of(row.get(name) or row.get("id")))
            case _:
                for text in lines(row):
                    self.print(text)

    def table(self, rows: Sequence[Row], columns: Sequence[Column]) -> None:
        shown = [column for column in columns if not column.wide or self.form is OutputFormat.WIDE]
        cells = [[column.text(row) for column in shown] for row in rows]
        titles = [column.title for column in shown]
        widths = [max(map(len, column)) for column in zip(titles, *cells, strict=True)]
        if not self.no_headers:
            head = _aligned(titles, widths)
            self.print(f"\x1b[1m{head}\x1b[0m" if self.colour else head)
        for row_cells in cells:
            self.print(_aligned(row_cells, widths))

    def line(self, item: Any) -> None:
        """One JSON value on one line."""
        self.print(json.dumps(plain(item), separators=(",", ":"), ensure_ascii=False))

    def print(self, text: str) -> None:
        print(text, file=self.stream, flush=True)

    def _json(self, value: Any) -> None:
        self.print(json.dumps(value, indent=2, ensure_ascii=False))

    def _yaml(self, value: Any) -> None:
        import yaml

        text: str = yaml.safe_dump(value, sort_keys=False, allow_unicode=True)  # pyright: ignore[reportUnknownMemberType]
        self.print(text.rstrip())


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)).rstrip()


def described(pairs: Sequence[tuple[str, str]]) -> list[str]:
    """`key: value` lines with the values under each other; pairs without a value are left out."""
    kept = [(key, value) for key, value in pairs if value not in ("", "-")]
    width = max((len(key) for key, _ in kept), default=0) + 2
    return [f"{key + ':':<{width}}{value}" for key, value in kept]
