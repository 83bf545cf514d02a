"""Where a vLLM worker puts its memory: from the environment, and from --additional-config, which wins.

--additional-config '{"lull": {"device": "/run/lull/device0", "restore_modes": {"model_weights": "PINNED"}}}'
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, cast

from ..host_device import ENVIRONMENT_NAME as DEVICE_NAME
from ..tags import KEEPS_CONTENTS, RestoreMode, require_mode
from .levels import DRAFT_MODEL, DRAFT_WEIGHTS, KV_CACHE, MODEL, MODEL_WEIGHTS

MODES_NAME: Final = "LULL_RESTORE_MODES"
IMMUTABLE_NAME: Final = "LULL_IMMUTABLE_WEIGHTS"
SECTION: Final = "lull"

_TAGS: Final = (MODEL_WEIGHTS, MODEL, DRAFT_WEIGHTS, DRAFT_MODEL, KV_CACHE)
_FIELDS: Final = ("device", "restore_modes", "immutable_weights")


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """``devices``: directories of host devices, one for all ranks of the node or one for each. ``restore_modes``: only
    what was said. ``immutable_weights``: a further park copies nothing, and nothing may write them in between."""

    devices: tuple[Path, ...] = ()
    restore_modes: Mapping[str, RestoreMode] = field(default_factory=dict[str, RestoreMode])
    immutable_weights: bool = False

    def device_of(self, local_rank: int) -> Path:
        """Raises ValueError where there is none."""
        if not self.devices:
            raise ValueError(f"{DEVICE_NAME} is not set: name the directory of the host-memory device")
        if len(self.devices) == 1:
            return self.devices[0]
        if local_rank >= len(self.devices):
            raise ValueError(
                f"{DEVICE_NAME} names {len(self.devices)} devices and this is rank {local_rank} of the node: name one"
                " device for all ranks, or one for each"
            )
        return self.devices[local_rank]


def settings_of(environment: Mapping[str, str], additional_config: object) -> WorkerSettings:
    """Raises ValueError that names the field."""
    devices = environment.get(DEVICE_NAME, "")
    modes: dict[str, object] = _modes_of(environment.get(MODES_NAME, ""))
    immutable: object = _flag(environment.get(IMMUTABLE_NAME, ""))
    section = _section(additional_config)
    if "device" in section:
        devices = section["device"]
        if not isinstance(devices, str) or not devices:
            raise ValueError(f"{SECTION}.device is {devices!r}; it must be the path of a host device's directory")
    if "restore_modes" in section:
        given: Any = section["restore_modes"]
        if not isinstance(given, dict):
            raise ValueError(f"{SECTION}.restore_modes is {given!r}; it must be an object of tag: mode")
        modes |= cast("dict[str, object]", given)
    if "immutable_weights" in section:
        immutable = section["immutable_weights"]
        if not isinstance(immutable, bool):
            raise ValueError(f"{SECTION}.immutable_weights is {immutable!r}; it must be true or false")
    checked = {tag: _checked(tag, mode) for tag, mode in modes.items()}
    if immutable and checked.get(MODEL_WEIGHTS, RestoreMode.CPU) not in KEEPS_CONTENTS:
        raise ValueError(f"{IMMUTABLE_NAME}: weights with mode {checked[MODEL_WEIGHTS]} have no backup to be kept")
    return WorkerSettings(tuple(Path(part) for part in devices.split(":") if part), checked, bool(immutable))


def _section(additional_config: object) -> dict[str, Any]:
    if not isinstance(additional_config, dict):
        return {}
    section: Any = cast("dict[str, Any]", additional_config).get(SECTION, {})
    if not isinstance(section, dict):
        raise ValueError(f"{SECTION} is {section!r}; it must be an object")
    fields = cast("dict[str, Any]", section)
    for name in fields:
        if name not in _FIELDS:
            raise ValueError(f"{SECTION}.{name}: no such field; expected one of {', '.join(_FIELDS)}")
    return fields


def _modes_of(text: str) -> dict[str, object]:
    modes: dict[str, object] = {}
    for part in text.split(","):
        if not part.strip():
            continue
        tag, equals, mode = part.strip().partition("=")
        if not equals:
            raise ValueError(f"{MODES_NAME} has {part!r}; expected TAG=MODE, several with commas between them")
        modes[tag] = mode
    return modes


def _flag(text: str) -> bool:
    if text not in ("", "0", "1"):
        raise ValueError(f"{IMMUTABLE_NAME} is {text!r}; it must be 1 or 0")
    return text == "1"


def _checked(tag: str, mode: object) -> RestoreMode:
    if tag not in _TAGS:
        raise ValueError(f"restore_modes.{tag}: no such tag; expected one of {', '.join(_TAGS)}")
    checked = require_mode(mode, f"restore_modes.{tag}")
    if tag == KV_CACHE and checked in KEEPS_CONTENTS:
        raise ValueError(
            f"restore_modes.{tag} is {checked}: vLLM forgets what lies in its KV cache whenever it sleeps, so a copy"
            " would serve nobody; use NONE or MEMSET"
        )
    return checked
