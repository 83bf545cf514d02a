"""The engine's own record of what reached it: one JSON line for each generation request, appended to a file.

It is evidence against everybody else's counters, so it is written by nobody but the engine, and a line is in the file
before the last byte of its answer leaves.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, cast

CANARY_HEADER: Final = "x-lull-canary"  # gateways strip it from what clients send


class Witness:
    """Opens (or makes) the file at once, so that a path that cannot be written is known before serving."""

    def __init__(self, path: Path | None) -> None:
        self._fd = None
        if path is not None:
            self._fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)

    def arrived(self, request_id: str, *, canary: bool, state: str) -> WitnessLine:
        return WitnessLine(self, request_id, canary=canary, state=state)

    def append(self, line: dict[str, object]) -> None:
        if self._fd is not None:
            os.write(self._fd, json.dumps(line).encode() + b"\n")  # O_APPEND: whole lines, also of several processes

    def close(self) -> None:
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None


class WitnessLine:
    """One request from arrival to outcome; the first `ended` writes it, later ones are nothing."""

    def __init__(self, witness: Witness, request_id: str, *, canary: bool, state: str) -> None:
        self._witness = witness
        self._written = False
        self._id = request_id
        self._canary = canary
        self._at = time.time()
        self.state = state

    def ended(self, *, served: bool) -> None:
        if self._written:
            return
        self._written = True
        self._witness.append(
            {
                "at": self._at,
                "pid": os.getpid(),
                "kind": "canary" if self._canary else "request",
                "state": self.state,
                "served": served,
                "id": self._id,
            }
        )


@dataclass(frozen=True, slots=True)
class WitnessCounts:
    requests: int  # without canaries
    canaries: int
    while_not_running: int  # of either kind
    served: int  # requests answered to the end, without canaries


def read_witness(path: Path) -> WitnessCounts:
    """Counts a witness file, which may still grow; a last line without its end is not there yet."""
    whole_lines = path.read_bytes().split(b"\n")[:-1]
    lines = [cast("dict[str, Any]", json.loads(line)) for line in whole_lines]
    requests = [line for line in lines if line["kind"] == "request"]
    return WitnessCounts(
        requests=len(requests),
        canaries=len(lines) - len(requests),
        while_not_running=sum(line["state"] != "running" for line in lines),
        served=sum(bool(line["served"]) for line in requests),
    )
