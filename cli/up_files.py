"""What `lull up` keeps in its data directory: where everything is, and which processes it has started."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from ..agents.protocol.wire import ProcessIdentity
from .exits import ExitCode, fail

DEVICE_SHARE_OF_MEMORY: Final = 4  # a quarter of what is available, where nobody says what to lend
DEVICE_BYTES_MIN: Final = 256 << 20
AGENT_FLAGS: Final = {"server_url": "--server", "token_file": "--token-file", "data_dir": "--data-dir"}


class UpRecord(BaseModel):
    """Written whole whenever a child is started, and kept when `lull up` ends without its engines: for `--stop`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    server_url: str
    mark: str  # in the environment of all that was started
    agent_argv: list[str]
    up: ProcessIdentity
    children: dict[str, ProcessIdentity] = Field(default_factory=dict[str, ProcessIdentity])


@dataclass(frozen=True, slots=True)
class UpPaths:
    data_dir: Path

    @property
    def record(self) -> Path:
        return self.data_dir / "up.json"

    @property
    def stopping(self) -> Path:
        """Exists while `lull up --stop` is at work: whoever ends then is not started again."""
        return self.data_dir / "up.stopping"

    @property
    def server_dir(self) -> Path:
        return self.data_dir / "server"

    @property
    def token_file(self) -> Path:
        return self.server_dir / "token"

    @property
    def agent_dir(self) -> Path:
        return self.data_dir / "agent"

    @property
    def agent_toml(self) -> Path:
        return self.data_dir / "agent.toml"

    def log(self, name: str) -> Path:
        return self.data_dir / "logs" / f"{name}.log"

    def make(self) -> None:
        try:
            self.data_dir.mkdir(parents=True, exist_ok=True, mode=0o700)
            self.log("x").parent.mkdir(exist_ok=True, mode=0o700)
        except OSError as error:
            fail(f"--data-dir: {self.data_dir}: {error.strerror}", ExitCode.USAGE)


def read_record(paths: UpPaths) -> UpRecord | None:
    try:
        return UpRecord.model_validate_json(paths.record.read_bytes())
    except FileNotFoundError:
        return None
    except ValidationError:
        fail(f"{paths.record}: is damaged; see what runs with `ps`, then remove it")


def write_record(paths: UpPaths, record: UpRecord) -> None:
    draft = paths.record.with_suffix(".draft")
    with open(draft, "w") as file:
        file.write(record.model_dump_json(indent=1))
        file.flush()
        os.fsync(file.fileno())
    draft.rename(paths.record)


def put_back(paths: UpPaths, earlier: UpRecord | None) -> None:
    """What an earlier `lull up` wrote, or nothing."""
    if earlier is None:
        paths.record.unlink(missing_ok=True)
    else:
        write_record(paths, earlier)


def default_agent_toml(paths: UpPaths, server_url: str) -> str:
    """Settings for a machine about which nobody has said anything: one host-memory device, no engine."""
    capacity_bytes = max(DEVICE_BYTES_MIN, _available_bytes() // DEVICE_SHARE_OF_MEMORY >> 28 << 28)
    return "\n".join(
        [
            "# Written by `lull up`. Add [[engines]] and change what you like.",
            f"server_url = {json.dumps(server_url)}",
            f"token_file = {json.dumps(str(paths.token_file))}",
            f"data_dir = {json.dumps(str(paths.agent_dir))}",
            f"node_name = {json.dumps(_node_name())}",
            "",
            "[[devices]]",
            'kind = "host"',
            f"path = {json.dumps(str(paths.data_dir / 'device0'))}",
            f"capacity_bytes = {capacity_bytes}",
            "",
        ]
    )


def _node_name() -> str:
    name = "".join(letter if letter.isalnum() or letter in "._-" else "-" for letter in os.uname().nodename)[:63]
    return name if name[:1].isalnum() else "this-machine"


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0
