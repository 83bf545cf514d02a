"""What processes hold of the fake devices, read from outside: the layout is that of budget.h."""

from __future__ import annotations

import struct
from pathlib import Path

from lull.agents.processes import start_ticks

_ROW = struct.Struct("<QQQiiii")
_HEAD_BYTES = 16 + 8 * 8 + 8


def bytes_by_pid(state: Path, device: int = 0) -> dict[int, int]:
    """Of live processes; none before the first one used the device."""
    try:
        content = (state / "budget").read_bytes()[_HEAD_BYTES:]
    except FileNotFoundError:
        return {}
    held: dict[int, int] = {}
    for row in _ROW.iter_unpack(content[: len(content) // _ROW.size * _ROW.size]):
        _, nbytes, ticks, pid, at, references, _ = row
        if references and at == device and start_ticks(pid) == ticks:
            held[pid] = held.get(pid, 0) + nbytes
    return held
