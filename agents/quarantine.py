"""Devices that are not lent until a person has looked: kept in a file that outlives the agent.

The person looks for running jobs, deletes the file and restarts the agent.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from pydantic import ValidationError

from .node_files import read_json, replace_json
from .protocol.wire import Reason


def quarantine_path(data_dir: Path) -> Path:
    return data_dir / "quarantine.json"


def read_quarantine(data_dir: Path, device_ids: Iterable[str]) -> dict[str, Reason]:
    """Reasons by device. A file that cannot be read lends nothing: all of ``device_ids`` are in it."""
    path = quarantine_path(data_dir)
    if not path.exists():
        return {}
    try:
        return {str(key): Reason.model_validate(value) for key, value in read_json(path)["devices"].items()}
    except (KeyError, AttributeError, ValidationError):
        sentence = f"{path} cannot be read: look for running jobs, then delete it and restart the agent"
        return dict.fromkeys(device_ids, Reason(code="QuarantineUnreadable", sentence=sentence))


def write_quarantine(data_dir: Path, device_ids: Iterable[str], reason: Reason) -> None:
    """Adds the devices; on disk when it returns. Raises OSError."""
    kept = read_quarantine(data_dir, ())
    kept.update(dict.fromkeys(device_ids, reason))
    replace_json(quarantine_path(data_dir), {"devices": {key: value.model_dump() for key, value in kept.items()}})
