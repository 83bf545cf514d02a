"""`--selector` and `--sort-by` of the lists: which rows, and in which order, by the fields of the JSON output."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Annotated, Any, Final, TypeVar, cast

import typer

from .exits import ExitCode, fail
from .output import Row, plain, text_of

T = TypeVar("T")

SelectorOption = Annotated[
    list[str] | None,
    typer.Option("--selector", metavar="FIELD=VALUE", help="Only rows like this; several have to hold together."),
]
SortOption = Annotated[
    str | None, typer.Option("--sort-by", metavar="FIELD", help="A field of the JSON output; -FIELD: highest first.")
]
_NOTHING: Final[tuple[Any, ...]] = (None, "", [], {})


def selected(items: Iterable[T], selectors: Sequence[str] | None) -> Iterator[T]:
    """Those of which every field is as a selector wants it: equal to its text, or a list that holds it."""
    wanted = [_parts(selector) for selector in selectors or ()]
    for item in items:
        row: Row = plain(item) if wanted else {}
        if all(_holds(_field(row, name, "--selector"), value) for name, value in wanted):
            yield item


def ordered(items: Iterable[T], sort_by: str | None) -> list[T]:
    """By a field; rows that do not have it come last."""
    rows = list(items)
    if sort_by is None:
        return rows
    name, highest_first = sort_by.removeprefix("-"), sort_by.startswith("-")
    keyed = [(_field(plain(row), name, "--sort-by"), row) for row in rows]
    have = [(key, row) for key, row in keyed if key not in _NOTHING]
    numbers = all(isinstance(key, int | float) for key, _ in have)
    have.sort(key=lambda pair: (pair[0] if numbers else 0, "" if numbers else text_of(pair[0])), reverse=highest_first)
    return [row for _, row in have] + [row for key, row in keyed if key in _NOTHING]


def _parts(selector: str) -> tuple[str, str]:
    name, equals, value = selector.partition("=")
    if not name or not equals:
        fail(f"--selector: {selector!r} is not FIELD=VALUE, for example state=queued", ExitCode.USAGE)
    return name, value


def _field(row: Row, name: str, option: str) -> Any:
    if name not in row:
        fail(f"{option}: there is no field {name!r}; there are {', '.join(sorted(row))}", ExitCode.USAGE)
    return row[name]


def _holds(found: Any, wanted: str) -> bool:
    if isinstance(found, list):
        return wanted in [text_of(each) for each in cast("list[object]", found)]
    return _text(found) == wanted


def _text(value: Any) -> str:
    return "" if value is None else text_of(value)
