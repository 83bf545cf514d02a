"""What an engine was told, for engines that forget it or tell it wrong: a small file in the engine's directory.

Flushed before the call that it tells of. What stands in it is about one process of the engine: with another one it is
empty, whatever the file says. So it is where a value is of another kind than any adapter writes: its values belong
together.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from pydantic import TypeAdapter

from ..errors import EngineRefused
from ..node_files import Bytes, Count, ProcessRecord, fitting, replace_json

_OWNER: Final = "incarnation"
_SHAPES: Final[dict[str, TypeAdapter[Any]]] = {
    **{name: TypeAdapter[Any](str | None) for name in (_OWNER, "state", "why", "ending", "park", "wake")},
    **{name: TypeAdapter[Any](list[str]) for name in ("tags", "calling")},
    "bytes": TypeAdapter(dict[str, Bytes]),
    "reload": TypeAdapter(bool | str | None),
    "level": TypeAdapter(Count),
    "wakes_failed": TypeAdapter(Count),
    "processes": TypeAdapter(list[ProcessRecord]),
}


class Ledger:
    """``incarnation`` tells the process that runs now; None while none does."""

    def __init__(self, path: Path, incarnation: Callable[[], str | None] = lambda: None) -> None:
        self.path = path
        self.incarnation = incarnation
        self._data = fitting(path, _SHAPES, whole=True)

    def read(self) -> dict[str, Any]:
        """What was written about the process that runs now."""
        owner = self.incarnation()
        if owner is None or self._data.get(_OWNER) != owner:
            return {}
        return {key: value for key, value in self._data.items() if key != _OWNER}

    def write(self, **values: Any) -> None:
        """Adds ``values``, durably. Raises OSError with the old ones kept: then the call must not be made."""
        data = {**self.read(), **values, _OWNER: self.incarnation()}
        replace_json(self.path, data, flush=True)
        self._data = data

    def intend(self, **values: Any) -> None:
        """`write` before a call. Raises EngineRefused where it cannot be written: then the call must not be made."""
        try:
            self.write(**values)
        except OSError as error:
            raise EngineRefused(0, f"it cannot be written down what is asked of it: {error}") from error

    def clear(self) -> None:
        """The engine is as it was started. A file that cannot be written keeps the old word, which is the safe one."""
        data = {_OWNER: self.incarnation()}
        replace_json(self.path, data, flush=True)
        self._data = data
