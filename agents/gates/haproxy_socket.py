"""HAProxy's runtime API: one command a connection, every answer bounded, and what its answers mean.

Facts of HAProxy 2.6's management guide: `set server B/S state` answers an empty line when it is done; `show servers
state` has the administrative state as bits and the operational one as a number; `show stat` is CSV with a header.
"""

from __future__ import annotations

import asyncio
import csv
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, TypeVar

from .base import GateRefused, GateUnreachable

_ANSWER_BYTES_MAX: Final = 4 << 20
_CHUNK_BYTES: Final = 1 << 16
_WORDS_MAX: Final = 300
_SENTENCE_LINES_MAX: Final = 2
_STATE_VERSION: Final = "1"

# srv_admin_state
_FORCED_MAINT: Final = 0x01
_FORCED_DRAIN: Final = 0x08
_WAS_DISABLED_BY_FILE: Final = 0x04  # stays when the server is made ready: it says where a maintenance came from
# srv_op_state
_STARTING: Final = 1  # slow start: it takes requests
_RUNNING: Final = 2

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ServerState:
    """One server line, as HAProxy has it now."""

    name: str
    port: int
    admin_state: int
    op_state: int

    @property
    def is_closed(self) -> bool:
        """By a word at its socket or in its file, and not by its own checks, which change by themselves."""
        return bool(self.admin_state & (_FORCED_MAINT | _FORCED_DRAIN))

    @property
    def is_in_maintenance(self) -> bool:
        return bool(self.admin_state & _FORCED_MAINT)

    @property
    def is_open(self) -> bool:
        return not self.admin_state & ~_WAS_DISABLED_BY_FILE and self.op_state in (_STARTING, _RUNNING)


@dataclass(frozen=True, slots=True)
class ServerCount:
    """What one server has to do. ``last_seconds_ago``: since its last request; None if it never had one."""

    name: str
    is_backup: bool
    current: int
    queued: int
    total: int
    last_seconds_ago: float | None
    port: int | None

    @property
    def in_flight(self) -> int:
        return self.current + self.queued


def server_states(text: str) -> list[ServerState]:
    """The answer to `show servers state`. Raises ValueError for another format."""
    lines = [line for line in text.splitlines() if line.strip()]
    if len(lines) < 2 or lines[0].strip() != _STATE_VERSION or not lines[1].startswith("# "):
        raise ValueError(f"not the state of servers: {text[:_WORDS_MAX]!r}")
    names = lines[1][2:].split()
    rows = [dict(zip(names, line.split(), strict=False)) for line in lines[2:]]
    try:
        return [
            ServerState(
                name=row["srv_name"],
                port=int(row["srv_port"]),
                admin_state=int(row["srv_admin_state"]),
                op_state=int(row["srv_op_state"]),
            )
            for row in rows
        ]
    except KeyError as error:
        raise ValueError(f"the state of servers has no column {error}") from None


def server_counts(text: str) -> list[ServerCount]:
    """The answer to `show stat BACKEND 4 -1`. Raises ValueError for another format."""
    if not text.startswith("# "):
        raise ValueError(f"no statistics: {text[:_WORDS_MAX]!r}")
    found: list[ServerCount] = []
    for row in csv.DictReader(text[2:].strip().splitlines()):
        if None in row.values():
            raise ValueError(
                f"a row of the statistics ends early: {','.join(filter(None, row.values()))[:_WORDS_MAX]!r}"
            )
        try:
            last = int(row["lastsess"] or -1)
            port = (row.get("addr") or "").rpartition(":")[2]
            found.append(
                ServerCount(
                    name=row["svname"],
                    is_backup=row["bck"] == "1",
                    current=int(row["scur"]),
                    queued=int(row["qcur"] or 0),
                    total=int(row["stot"] or 0),
                    last_seconds_ago=None if last < 0 else float(last),
                    port=int(port) if port.isdecimal() else None,
                )
            )
        except KeyError as error:
            raise ValueError(f"the statistics have no column {error}") from None
    return found


def uptime_seconds(text: str) -> float:
    """Of the process that answers, from `show info`. Raises ValueError."""
    for line in text.splitlines():
        name, _, value = line.partition(":")
        if name == "Uptime_sec":
            return float(value)
    raise ValueError(f"no uptime: {text[:_WORDS_MAX]!r}")


class RuntimeSocket:
    """The runtime API behind one address: the path of a socket, or HOST:PORT."""

    def __init__(self, address: str, seconds_max: float) -> None:
        self.address = address
        self._seconds_max = seconds_max

    async def ask(self, command: str) -> str:
        """GateUnreachable without a whole answer: whether the command was done is unknown then."""
        try:
            async with asyncio.timeout(self._seconds_max):
                return await self._ask(command)
        except TimeoutError as error:
            text = f"HAProxy at {self.address}: no answer within {self._seconds_max:g} s"
            raise GateUnreachable(text) from error
        except (OSError, EOFError) as error:
            raise GateUnreachable(f"HAProxy at {self.address}: {error or type(error).__name__}") from error

    async def _ask(self, command: str) -> str:
        if self.address.startswith("/"):
            reader, writer = await asyncio.open_unix_connection(self.address)
        else:
            host, _, port = self.address.rpartition(":")
            reader, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        try:
            writer.write(command.encode() + b"\n")
            await writer.drain()
            answer = bytearray()
            while chunk := await reader.read(_CHUNK_BYTES):
                answer += chunk
                if len(answer) > _ANSWER_BYTES_MAX:
                    raise GateUnreachable(f"HAProxy at {self.address}: more than {_ANSWER_BYTES_MAX} bytes")
        finally:
            writer.close()
        # Every answer ends with an empty line, and an empty one is that line alone: else its process ended in between.
        if not (b"\n" + answer).endswith(b"\n\n"):
            raise EOFError("the answer was cut off" if answer else "the connection was closed without an answer")
        return answer.decode(errors="replace")

    async def do(self, command: str) -> None:
        """A command that answers nothing when it is done. GateRefused with its words where it is not."""
        said = (await self.ask(command)).strip()
        if said:
            raise GateRefused(f"HAProxy at {self.address}: {command}: {_first_words(said)}")

    async def states(self, backend: str) -> list[ServerState]:
        return await self._read(f"show servers state {backend}", server_states)

    async def counts(self, backend: str) -> list[ServerCount]:
        return await self._read(f"show stat {backend} 4 -1", server_counts)

    async def uptime_seconds(self) -> float:
        return await self._read("show info", uptime_seconds)

    async def _read(self, command: str, read: Callable[[str], T]) -> T:
        said = await self.ask(command)
        try:
            return read(said)
        except ValueError as error:
            if len(said.splitlines()) <= _SENTENCE_LINES_MAX:  # words instead of a table: it says why not
                raise GateRefused(f"HAProxy at {self.address}: {command}: {_first_words(said)}") from error
            raise GateUnreachable(f"HAProxy at {self.address}: {command}: {error}") from error


def _first_words(said: str) -> str:
    return (said.strip().splitlines() or [""])[0][:_WORDS_MAX]
