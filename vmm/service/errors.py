"""What can go wrong between an engine and the memory service, and the words for it on the wire.

LullMemoryError
└── ServiceError
    ├── ServiceUnavailable   no service answers on the socket, or it did not answer in time; ask again
    ├── ServiceRefused       the service does not take this client or this request; nothing changed
    │   ├── WrongLock            the request needs another lock than the connection holds
    │   └── InvalidRequest       a value of the request is none that the service takes; the lock is kept
    ├── LockTimeout          the lock was not free within the wait; nothing changed
    ├── StaleLayout          the pool does not hold what this engine was built on: build it again
    ├── LayoutInvalid        the layout cannot be committed, or an entry does not fit it; nothing changed
    └── MalformedFrame       the other side broke the protocol; the connection is closed

OutOfDeviceMemory, OutOfHostMemory, DriverError and UnsupportedMode come over the wire as themselves.
"""

from __future__ import annotations

from typing import Any, Final

from ..errors import DriverError, LullMemoryError, OutOfDeviceMemory, OutOfHostMemory, UnsupportedMode


class ServiceError(LullMemoryError):
    """Base of what concerns the memory service."""


class ServiceUnavailable(ServiceError):
    pass


class ServiceRefused(ServiceError):
    pass


class WrongLock(ServiceRefused):
    pass


class InvalidRequest(ServiceRefused):
    """The text names the field."""


class LockTimeout(ServiceError):
    pass


class StaleLayout(ServiceError):
    pass


class LayoutInvalid(ServiceError):
    pass


class MalformedFrame(ServiceError):
    """The text says what was wrong with it."""


_CODES: Final[dict[str, type[ServiceError]]] = {
    "refused": ServiceRefused,
    "wrong_lock": WrongLock,
    "invalid": InvalidRequest,
    "lock_timeout": LockTimeout,
    "stale_layout": StaleLayout,
    "layout_invalid": LayoutInvalid,
    "malformed": MalformedFrame,
}
_NAMES: Final = {kind: code for code, kind in _CODES.items()}


def to_wire(error: LullMemoryError) -> dict[str, Any]:
    """``code``, ``text`` and what the other side needs to raise the same error."""
    wire: dict[str, Any] = {"text": str(error)[:2000]}
    if isinstance(error, OutOfDeviceMemory):
        numbers = [error.requested_bytes, error.free_bytes, error.capacity_bytes]
        return {**wire, "code": "out_of_device_memory", "numbers": numbers}
    if isinstance(error, OutOfHostMemory):
        numbers = [error.requested_bytes, error.available_bytes]
        return {**wire, "code": "out_of_host_memory", "numbers": numbers}
    if isinstance(error, DriverError):
        return {**wire, "code": "driver", "verb": error.verb}
    if isinstance(error, UnsupportedMode):
        return {**wire, "code": "unsupported_mode"}
    return {**wire, "code": _NAMES.get(type(error), "refused") if isinstance(error, ServiceError) else "refused"}


def from_wire(wire: dict[str, Any]) -> LullMemoryError:
    """The error that the service raised. A code that this version does not know becomes ServiceRefused."""
    code, text = str(wire.get("code")), str(wire.get("text"))
    match code:
        case "out_of_device_memory":
            requested, free, capacity = (int(number) for number in wire["numbers"])
            return OutOfDeviceMemory(requested, free, capacity)
        case "out_of_host_memory":
            requested, available = (int(number) for number in wire["numbers"])
            return OutOfHostMemory(requested, available, "the backup in the memory service")
        case "driver":
            return DriverError(str(wire.get("verb")), text)
        case "unsupported_mode":
            return UnsupportedMode(text)
        case _:
            return _CODES.get(code, ServiceRefused)(text)
