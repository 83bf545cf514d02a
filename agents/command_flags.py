"""The flags that an engine was started with, read from its words in every spelling that its own parser takes. Pure.

vLLM takes `_` for `-` in every long flag, TensorRT-LLM has `_` where others have `-`, and Python's argparse takes the
beginning of a long flag for it. A spelling that an engine does not take keeps it from starting, so all of them are
read for every kind.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

_NUMBER: Final = re.compile(r"-\d")


def flag(words: Sequence[str], *names: str) -> str | None:
    """The value of the last of ``names`` (one flag: `--long-name` and its short ones), "" for one without or with a
    part of a value (`--long-name.key`); None if it is not there."""
    found: str | None = None
    for number, word in enumerate(words):
        key, has_value, value = word.partition("=")
        key, has_part, _ = key.partition(".")
        if not any(_is(key, name) for name in names):
            continue
        following = words[number + 1 : number + 2]
        if has_part:
            found = ""
        elif has_value:
            found = value
        else:
            found = following[0] if following and _is_value(following[0]) else ""
    return found


def _is(key: str, name: str) -> bool:
    if not name.startswith("--"):
        return key == name
    return key.startswith("--") and len(key) > 2 and name.replace("_", "-").startswith(key.replace("_", "-"))


def _is_value(word: str) -> bool:
    return not word.startswith("-") or _NUMBER.match(word) is not None
