"""The process that makes the driver's checkpoint calls for an adapter: ``python -m ... LOCK_FILE...``.

A call of the driver may hang, in the kernel too, and what hangs must not be the agent. One request a line on its
standard input, one answer a line on its output; it ends with its input. What changes another process is done under the
lock files: one for each device, so that two engines are never restored to one at a time, and an agent that starts finds
out that a call of an earlier one is still under way.

It imports little of ours: it has to be quick to start. It has called cuInit, which keeps the driver loaded: a restore
needs that, or persistence mode.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import sys
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any, Final

from ...vmm.cuda_calls import binding

_LOOK_SECONDS: Final = 0.05
_TEXT_MAX: Final = 500
# Verbs that only ask.
ASKING: Final = frozenset({"version", "state", "thread"})


class Busy(Exception):
    """Another process of ours is changing something on one of the devices."""


def driver() -> Any:
    """The driver's calls, with the driver initialized. Raises DriverError and RuntimeError, for the operator."""
    cuda: Any = binding()
    if not hasattr(cuda, "cuCheckpointProcessLock"):
        raise RuntimeError("cuda-python is too old for checkpoints: 12.8 or newer, or 13.0.2 or newer, is needed")
    return cuda


def answer(cuda: Any, verb: str, pid: int, timeout_ms: int) -> tuple[int, int | None]:
    """The driver's code, and a value where the call has one."""
    calls: dict[str, Callable[[], Any]] = {
        "version": lambda: cuda.cuDriverGetVersion(),
        "state": lambda: cuda.cuCheckpointProcessGetState(pid),
        "thread": lambda: cuda.cuCheckpointProcessGetRestoreThreadId(pid),
        "lock": lambda: cuda.cuCheckpointProcessLock(pid, _lock_arguments(cuda, timeout_ms)),
        "checkpoint": lambda: cuda.cuCheckpointProcessCheckpoint(pid, None),
        "restore": lambda: cuda.cuCheckpointProcessRestore(pid, None),  # no pairs: to the same GPUs
        "unlock": lambda: cuda.cuCheckpointProcessUnlock(pid, None),
    }
    code, *values = calls[verb]()
    return int(code), int(values[0]) if values and values[0] is not None else None


def _lock_arguments(cuda: Any, timeout_ms: int) -> Any:
    arguments = cuda.CUcheckpointLockArgs()
    arguments.timeoutMs = timeout_ms
    return arguments


@contextlib.contextmanager
def _locked(paths: Sequence[str], seconds_max: float) -> Generator[None]:
    """Raises Busy; OSError where a lock file cannot be made."""
    deadline, held = time.monotonic() + seconds_max, list[int]()
    try:
        for path in paths:
            held.append(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
            while True:
                try:
                    fcntl.flock(held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() > deadline:
                        raise Busy from None
                    time.sleep(_LOOK_SECONDS)
        yield
    finally:
        for fd in held:
            os.close(fd)


def serve(lock_paths: Sequence[str]) -> None:
    cuda: Any = None
    for line in sys.stdin.buffer:
        asked: dict[str, Any] = json.loads(line)
        told: dict[str, Any] = {"id": asked["id"]}
        try:
            cuda = cuda or driver()
            verb, pid = str(asked["verb"]), int(asked["pid"])
            with _locked([] if verb in ASKING else lock_paths, float(asked["wait_seconds"])):
                code, value = answer(cuda, verb, pid, int(asked["timeout_ms"]))
            told |= {"code": code, "name": cuda.CUresult(code).name, "value": value}
        except Busy:
            told["busy"] = True
        except Exception as error:  # noqa: BLE001  a driver that lacks a call, a library that is not there: all told
            told["missing"] = f"{type(error).__name__}: {error}"[:_TEXT_MAX]
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve(sys.argv[1:])
