"""Looks that may hang, made by a thread of their own and waited for with a bound.

A driver that is stuck keeps its caller stuck. The thread is given up to it; whoever looks meanwhile is told so at once,
and the devices that were not read are absent until it answers.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Final, TypeVar

import structlog

from .probe import DeviceFacts, Facts
from .protocol.words import Reason

log = structlog.get_logger(__name__)

_WORDS_MAX: Final = 800

T = TypeVar("T")
Read = Callable[[], Iterator[tuple[str, DeviceFacts | Reason]]]


@dataclass(eq=False, slots=True)
class _Request:
    done: threading.Event = field(default_factory=threading.Event)
    seen: dict[str, DeviceFacts | Reason] = field(default_factory=dict[str, "DeviceFacts | Reason"])


class BoundedProbe:
    """``read`` yields each of ``device_ids`` as it is read. Thread-safe."""

    def __init__(self, read: Read, device_ids: Sequence[str], seconds_max: float) -> None:
        self._read = read
        self._device_ids = tuple(device_ids)
        self._seconds_max = seconds_max
        self._requests: queue.SimpleQueue[_Request] = queue.SimpleQueue()
        self._busy_since: float | None = None
        self._said = ""
        self._thread: threading.Thread | None = None
        self._lock = threading.Lock()

    def look(self) -> Facts:
        """What every device was at some moment after this call began; within the bound, whatever the driver does."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(target=self._serve, name="probe", daemon=True)
                self._thread.start()
        request = _Request()
        busy_since = self._busy_since
        if busy_since is None or time.monotonic() - busy_since < self._seconds_max:
            self._requests.put(request)
            request.done.wait(self._seconds_max)
        return self._facts(dict(request.seen))

    def _facts(self, seen: dict[str, DeviceFacts | Reason]) -> Facts:
        read: dict[str, DeviceFacts] = {}
        absent: dict[str, Reason] = {}
        for device_id in self._device_ids:
            found = seen.get(device_id)
            if isinstance(found, DeviceFacts):
                read[device_id] = found
            else:
                absent[device_id] = found or self._silent(device_id)
        return Facts(read, absent)

    def _silent(self, device_id: str) -> Reason:
        sentence = (
            f"{device_id}: NVML did not answer within {self._seconds_max:g} s: the driver hangs, and"
            " nvidia-smi with it; see dmesg for Xid. It is read again as soon as it answers"
        )
        return Reason(code="DeviceUnreadable", sentence=sentence)

    def _serve(self) -> None:
        while True:
            waiting = [self._requests.get()]
            while not self._requests.empty():
                waiting.append(self._requests.get())
            self._busy_since = time.monotonic()
            try:
                for device_id, found in self._read():
                    for request in waiting:
                        request.seen[device_id] = found
            except Exception as error:  # noqa: BLE001  told as why they were not read: the next look is made all the same
                for request in waiting:
                    request.seen = {
                        **{each: self._went_wrong(each, error) for each in self._device_ids},
                        **request.seen,
                    }
            finally:
                self._busy_since = None
                for request in waiting:
                    request.done.set()

    def _went_wrong(self, device_id: str, error: Exception) -> Reason:
        if repr(error) != self._said:  # once, not at every look
            self._said = repr(error)
            log.error("a look at the devices went wrong", exc_info=error)
        sentence = f"{device_id}: the look at it went wrong: {type(error).__name__}: {error}"
        return Reason(code="DeviceUnreadable", sentence=sentence[:_WORDS_MAX])


def bounded(call: Callable[[], T], seconds_max: float) -> T:
    """What ``call`` returns or raises; TimeoutError if it takes longer, and then it is left alone."""
    outcome: list[T | BaseException] = []

    def run() -> None:
        try:
            outcome.append(call())
        except BaseException as error:  # noqa: BLE001  it is raised where it was asked for
            outcome.append(error)

    thread = threading.Thread(target=run, name="bounded", daemon=True)
    thread.start()
    thread.join(seconds_max)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds_max:g} s")
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]
