"""What may stand in a JSON file that somebody or something damaged."""

from __future__ import annotations

import copy
import json
from typing import Any

from hypothesis import strategies as st

DEEP = b"[" * 200_000
KEYS_DEEP = b'{"a":' * 100_000
AS_DEEP_AS_IS_READ = b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"

_NUMBERS = st.integers() | st.sampled_from([10**400, -(10**400), 2**63, -1, 0]) | st.floats()
_SCALARS = st.none() | st.booleans() | _NUMBERS | st.text(max_size=5) | st.sampled_from(["\ud800", "\0", "x" * 5000])
VALUES = st.recursive(
    _SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


def _places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(place for key, item in items for place in _places(item, (*path, key)))]


def _with(value: Any, path: tuple[Any, ...], odd: Any, *, gone: bool) -> Any:
    if not path:
        return odd
    whole = copy.deepcopy(value)
    inner = whole
    for key in path[:-1]:
        inner = inner[key]
    if gone:
        del inner[path[-1]]
    else:
        inner[path[-1]] = odd
    return whole


def changed_somewhere(good: Any) -> st.SearchStrategy[Any]:
    """A document that was written, with one place gone or of another kind."""
    return st.builds(lambda path, odd, gone: _with(good, path, odd, gone=gone), _any_of(good), VALUES, st.booleans())


def _any_of(good: Any) -> st.SearchStrategy[tuple[Any, ...]]:
    return st.sampled_from(_places(good))


def odd_bytes(good: Any) -> st.SearchStrategy[bytes]:
    """Contents of a file in which ``good`` was written: torn, overwritten, changed, or somebody else's."""
    whole = json.dumps(good).encode()
    cuts = st.integers(0, len(whole))
    return st.one_of(
        st.binary(max_size=50),
        st.sampled_from([DEEP, KEYS_DEEP, AS_DEEP_AS_IS_READ, b"\0" * 100, b"", b"1" * 5000, b"\xef\xbb\xbf" + whole]),
        st.builds(lambda cut: whole[:cut], cuts),
        st.builds(
            lambda cut, odd: whole[:cut] + odd + whole[cut + len(odd) :], cuts, st.binary(min_size=1, max_size=3)
        ),
        changed_somewhere(good).map(lambda value: json.dumps(value).encode()),
        VALUES.map(lambda value: json.dumps(value).encode()),
    )
