"""Tagged device memory that an engine gives back while it is parked and takes again at the same addresses.

Names load their module at first use: importing this package imports neither torch nor anything outside the standard
library, because it lives inside other people's engines.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from .blocks import Allocation
    from .control import CONTROL_PATHS, control_app
    from .control_client import ControlClient, ControlError
    from .cuda_driver import CudaDriver
    from .driver import Access, CopyLane, Driver, Handle
    from .errors import (
        AdmissionClosed,
        AlreadyParked,
        ContentsLost,
        DeviceFailed,
        DrainTimeout,
        DriverError,
        HostMemoryNotPinned,
        ImmutableChanged,
        LayoutChanged,
        LedgerBusy,
        LedgerUnreadable,
        LedgerUnwritable,
        LullMemoryError,
        OutOfDeviceMemory,
        OutOfHostMemory,
        PoolClosed,
        RankRefused,
        RanksFailed,
        RuntimeFailed,
        TransitionInProgress,
        TransitionRefused,
        UnsupportedMode,
    )
    from .host_device import HostDevice, ProcessKey
    from .host_driver import HostDriver
    from .lifecycle import MemoryState
    from .pool import Pool
    from .pool_like import PoolLike
    from .ranks import RankedRuntime, RankFollower, RankLinkError, RankSettings
    from .runtime import MemoryStatus, Runtime
    from .service.data_pool import DataPool
    from .service.pool import Piece, ServicePool
    from .service.state import Lock
    from .signing import ControlAuthError, RequestVerifier, new_headers, sign
    from .sleep_config import InvalidSleepConfig, SleepConfig
    from .statistics import TagStatistics
    from .tags import InvalidTag, RestoreMode
    from .torch_scope import host_tensor, move_module, move_optimizer

_MODULE_OF: Final = {
    "CONTROL_PATHS": "control",
    "Access": "driver",
    "AdmissionClosed": "errors",
    "Allocation": "blocks",
    "AlreadyParked": "errors",
    "ContentsLost": "errors",
    "ControlAuthError": "signing",
    "ControlClient": "control_client",
    "ControlError": "control_client",
    "CopyLane": "driver",
    "CudaDriver": "cuda_driver",
    "DataPool": "service.data_pool",
    "DeviceFailed": "errors",
    "DrainTimeout": "errors",
    "Driver": "driver",
    "DriverError": "errors",
    "Handle": "driver",
    "HostDevice": "host_device",
    "HostDriver": "host_driver",
    "HostMemoryNotPinned": "errors",
    "ImmutableChanged": "errors",
    "InvalidSleepConfig": "sleep_config",
    "InvalidTag": "tags",
    "LayoutChanged": "errors",
    "LedgerBusy": "errors",
    "LedgerUnreadable": "errors",
    "LedgerUnwritable": "errors",
    "Lock": "service.state",
    "LullMemoryError": "errors",
    "MemoryState": "lifecycle",
    "MemoryStatus": "runtime",
    "OutOfDeviceMemory": "errors",
    "OutOfHostMemory": "errors",
    "PoolClosed": "errors",
    "Piece": "service.pool",
    "Pool": "pool",
    "PoolLike": "pool_like",
    "ProcessKey": "host_device",
    "RankFollower": "ranks",
    "RankLinkError": "ranks",
    "RankRefused": "errors",
    "RankSettings": "ranks",
    "RankedRuntime": "ranks",
    "RanksFailed": "errors",
    "RequestVerifier": "signing",
    "RestoreMode": "tags",
    "Runtime": "runtime",
    "RuntimeFailed": "errors",
    "ServicePool": "service.pool",
    "SleepConfig": "sleep_config",
    "TagStatistics": "statistics",
    "TransitionInProgress": "errors",
    "TransitionRefused": "errors",
    "UnsupportedMode": "errors",
    "control_app": "control",
    "host_tensor": "torch_scope",
    "move_module": "torch_scope",
    "move_optimizer": "torch_scope",
    "new_headers": "signing",
    "sign": "signing",
}

__all__ = [
    "CONTROL_PATHS",
    "Access",
    "AdmissionClosed",
    "Allocation",
    "AlreadyParked",
    "ContentsLost",
    "ControlAuthError",
    "ControlClient",
    "ControlError",
    "CopyLane",
    "CudaDriver",
    "DataPool",
    "DeviceFailed",
    "DrainTimeout",
    "Driver",
    "DriverError",
    "Handle",
    "HostDevice",
    "HostDriver",
    "HostMemoryNotPinned",
    "ImmutableChanged",
    "InvalidSleepConfig",
    "InvalidTag",
    "LayoutChanged",
    "LedgerBusy",
    "LedgerUnreadable",
    "LedgerUnwritable",
    "Lock",
    "LullMemoryError",
    "MemoryState",
    "MemoryStatus",
    "OutOfDeviceMemory",
    "OutOfHostMemory",
    "Piece",
    "Pool",
    "PoolClosed",
    "PoolLike",
    "ProcessKey",
    "RankFollower",
    "RankLinkError",
    "RankRefused",
    "RankSettings",
    "RankedRuntime",
    "RanksFailed",
    "RequestVerifier",
    "RestoreMode",
    "Runtime",
    "RuntimeFailed",
    "ServicePool",
    "SleepConfig",
    "TagStatistics",
    "TransitionInProgress",
    "TransitionRefused",
    "UnsupportedMode",
    "control_app",
    "host_tensor",
    "move_module",
    "move_optimizer",
    "new_headers",
    "sign",
]


def __getattr__(name: str) -> object:
    try:
        module = _MODULE_OF[name]
    except KeyError:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}") from None
    return getattr(import_module(f".{module}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
