"""What `lull engine serve` is told, checked: an EngineSettings that exists is complete and consistent.

Without torch, whose import takes seconds: what is wrong here is said at once.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from ..host_device import HostDevice
from ..tags import KEEPS_CONTENTS, TRTLLM_TAGS, RestoreMode
from .faults import OF_OWN_WEIGHTS, FaultPlan

WEIGHTS_TAG: Final = "model_weights"
KV_CACHE_TAG: Final = "kv_cache"
DEFAULT_MODES: Final[Mapping[str, RestoreMode]] = {WEIGHTS_TAG: RestoreMode.CPU, KV_CACHE_TAG: RestoreMode.NONE}
KV_OFFLOAD_DIR_BYTES: Final = 1 << 30
KEY_ENVIRONMENT_NAME: Final = "LULL_ENGINE_CONTROL_KEY"

_CUDA_UUIDS: Final = ("GPU-", "MIG-")
_SIZE: Final = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?)\s*(|B|KiB|MiB|GiB|TiB)")
_UNITS: Final = {"": 1, "B": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30, "TiB": 1 << 40}


@dataclass(frozen=True, slots=True)
class CudaDevice:
    """A GPU, or a MIG slice of one, by its UUID as nvidia-smi writes it."""

    uuid: str


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    name: str
    host: str
    port: int  # 0: any free one
    device: HostDevice | CudaDevice
    weights_bytes: int
    kv_cache_bytes: int
    control_key: bytes
    seed: int = 0
    restore_modes: Mapping[str, RestoreMode]
    immutable: bool = False
    witness: Path | None = None
    threads: int = 1
    token_delay_seconds: float = 0.0
    memory_service: Path | None = None  # its socket; the weights live there
    kv_offload_host_bytes: int = 0  # 0: no such tier
    kv_offload_dir: Path | None = None
    kv_offload_dir_bytes_max: int = KV_OFFLOAD_DIR_BYTES
    faults: FaultPlan

    def __post_init__(self) -> None:
        _require(bool(self.name), "--name is empty")
        _require(0 <= self.port <= 65535, f"--port is {self.port}; it must be from 0 to 65535")
        _require(self.kv_cache_bytes > 0, "--kv-cache is 0; one token needs room at least")
        _require(0 <= self.seed < 1 << 63, f"--seed is {self.seed}; it must be from 0 to 2**63 - 1")
        _require(1 <= self.threads <= 1024, f"--threads is {self.threads}; it must be from 1 to 1024")
        _require(0 <= self.token_delay_seconds <= 60, f"--token-delay is {self.token_delay_seconds}; 0 to 60 seconds")
        if self.memory_service is not None:
            unfit = sorted(OF_OWN_WEIGHTS & self.faults.keys())
            _require(not unfit, f"--fault {', '.join(unfit)} does not work on weights in a --memory-service")
        _require(self.kv_offload_host_bytes >= 0, "--kv-offload-host is below 0")
        _require(self.kv_offload_dir_bytes_max > 0, "--kv-offload-dir-size is 0; leave --kv-offload-dir out instead")
        offloads = self.kv_offload_host_bytes > 0 or self.kv_offload_dir is not None
        on_host = isinstance(self.device, HostDevice)
        _require(on_host or not offloads, "--kv-offload-host and --kv-offload-dir are for a host-memory device")
        mode = self.restore_modes[WEIGHTS_TAG]
        _require(
            mode in KEEPS_CONTENTS,
            f"--restore-mode {WEIGHTS_TAG}={mode} would lose the weights, and nothing loads them again; "
            "use CPU or PINNED",
        )


def parse_bytes(text: str, option: str) -> int:
    """``1GiB``, ``1.5MiB`` or a plain number of bytes."""
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{option} is {text!r}; expected a size such as 64MiB, 1.5GiB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]]) if "." in match[1] else int(match[1]) * _UNITS[match[2]]


def parse_restore_modes(texts: Sequence[str]) -> dict[str, RestoreMode]:
    """The defaults, overridden by ``TAG=MODE`` texts."""
    modes = dict(DEFAULT_MODES)
    for text in texts:
        tag, _, mode = text.partition("=")
        if tag not in TRTLLM_TAGS:
            raise ValueError(f"--restore-mode {text!r}: no such tag; expected one of {', '.join(TRTLLM_TAGS)}")
        if mode not in RestoreMode.__members__:
            raise ValueError(f"--restore-mode {text!r}: expected TAG=MODE with one of {', '.join(RestoreMode)}")
        modes[tag] = RestoreMode(mode)
    return modes


def read_control_key(path: Path | None) -> bytes:
    """From the file if one is named, else from the environment; as in TensorRT-LLM there is no engine without a key."""
    source = f"--control-key-file {path}" if path is not None else KEY_ENVIRONMENT_NAME
    key = path.read_bytes().strip() if path is not None else os.environ.get(KEY_ENVIRONMENT_NAME, "").strip().encode()
    _require(bool(key), f"{source} holds no key; control requests are signed with one")
    return key


def open_device(device: str | Path | None) -> HostDevice | CudaDevice:
    """``--device``, a folder or the UUID of a GPU; else the only one in LULL_HOST_DEVICE."""
    if device is not None:
        is_cuda = str(device).startswith(_CUDA_UUIDS)
        return CudaDevice(str(device)) if is_cuda else HostDevice.open(Path(device))
    found = HostDevice.from_environment()
    _require(len(found) == 1, f"--device is not given, and LULL_HOST_DEVICE names {len(found)} devices instead of one")
    return found[0]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ValueError(message)
